"""One configuration as one row of figures: simulated, with intervals, and by formula where there is one.

:data:`COLUMNS` says what each column means.  Rows are plain dictionaries, so that they go through JSON unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipespec_model.errors import InputError
from pipespec_model.profile import Profile
from pipespec_model.spec import PipelineSpec

from .batch import Point, Runs, simulate_all

Row = dict[str, Any]

COLUMNS = {
    "point": "number of the configuration in the design",
    "pipeline": "stages, drafter first",
    "strategy": "autoregressive, speculative or pipelined",
    "handshake": "overlapped or blocking; empty where there is one stage",
    "num_stages": "stages, the target included",
    "num_devices": "different devices that the stages name",
    "num_replications": "runs of independent texts behind the means",
    "num_tokens": "tokens of the target in one replication",
    "tokens_per_s": "tokens of the target over time, prefill included; mean over replications",
    "tokens_per_s_low": "lower end of its 90% interval over replications",
    "tokens_per_s_high": "upper end",
    "speedup": "over autoregressive decoding of the same texts by the target alone, replication by replication",
    "speedup_low": "lower end of its 90% interval over replications",
    "speedup_high": "upper end",
    "mean_acceptance_length": "tokens emitted per target step",
    "ttft_s": "seconds to the target's first token",
    "stage_*_busy": "share of the time in which stage * (0: drafter) computes",
    "stage_*_waiting": "the rest of the time",
    "stage_*_wasted": "share of its tokens that a rollback took away",
    "predicted_tokens_per_s": "by formula, in the long run and without prefill; empty where no formula applies",
    "predicted_by": "which formula: autoregressive, synchronous rounds, renewal, decomposition",
    "problem": "why this combination of values is no pipeline; its figures are empty",
}
"""Columns of a sweep's table; beside them one for each varied field."""


def is_documented(column: str) -> bool:
    return re.sub(r"^stage_\d+_", "stage_*_", column) in COLUMNS


@dataclass(frozen=True)
class Effort:
    """How hard to look at one configuration.

    engine : ``events`` simulates; ``analytic`` only asks the formula, and has no intervals
    replications : at least so many, of ``num_prompts`` texts of ``num_tokens`` tokens each
    half_width : go on until the 90% interval of the throughput is that narrow, as a share of it;
        None = do not.  At most ``max_replications``
    predicted : ask the formula too
    """

    engine: str = "events"
    num_prompts: int = 1
    num_tokens: int = 1000
    replications: int = 5
    half_width: float | None = None
    max_replications: int = 200
    seed: int = 0
    predicted: bool = True

    def __post_init__(self) -> None:
        if self.engine not in ("events", "analytic"):
            raise InputError("--engine", "must be events or analytic", self.engine)
        for name in ("num_prompts", "num_tokens", "replications"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')}", "must be >= 1", getattr(self, name))
        if self.half_width is not None and not 0 < self.half_width < 1:
            raise InputError("--half-width", "must be in (0, 1)", self.half_width)
        if self.half_width is not None and not max(2, self.replications) <= self.max_replications:
            raise InputError("--max-replications", "must be >= 2 and >= --replications", self.max_replications)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows(points: Sequence[Point], effort: Effort) -> list[Row]:
    """All columns but ``point`` and the varied fields, one row a configuration."""
    out: list[Row] = [{
        "pipeline": spec.label, "strategy": spec.strategy, "handshake": spec.handshake if spec.links else "",
        "num_stages": len(spec.stages), "num_devices": len({stage.device for stage in spec.stages})}
        for spec, _ in points]
    if effort.engine == "events":
        runs = Runs(effort.num_prompts, effort.num_tokens, effort.seed)
        simulated = simulate_all(points, runs, effort.replications, narrow=effort.half_width,
                                 most=effort.max_replications)
        out = [a | b for a, b in zip(out, simulated, strict=True)]
    if effort.predicted or effort.engine == "analytic":
        for found, (spec, profile) in zip(out, points, strict=True):
            said = _predicted(spec, profile, effort)
            if effort.engine == "analytic":
                found |= _by_formula(said, spec, profile, effort)
            found |= {key: value for key, value in said.items() if key in COLUMNS and key not in found}
    return out


def _by_formula(said: Row, spec: PipelineSpec, profile: Profile, effort: Effort) -> Row:
    """The figures of a row whose only source is a formula; where there is none it says so."""
    if said["predicted_tokens_per_s"] is None:
        return {"problem": f"{spec.label} must be in a formula's range for --engine analytic: {said['why']}"}
    alone = _predicted(PipelineSpec.alone(spec.target), profile, effort)["predicted_tokens_per_s"]
    return {"tokens_per_s": said["predicted_tokens_per_s"], "speedup": said["predicted_tokens_per_s"] / alone,
            "mean_acceptance_length": said["mean_acceptance_length"]}


def _predicted(spec: PipelineSpec, profile: Profile, effort: Effort) -> Row:
    from pipespec_model.predict import predict  # compiles

    try:
        said = predict(spec, profile, context=effort.num_tokens // 2)
    except InputError as error:
        return {"predicted_tokens_per_s": None, "predicted_by": None, "why": str(error)}
    return {"predicted_tokens_per_s": said.tokens_per_s, "predicted_by": said.model,
            "mean_acceptance_length": said.mean_acceptance_length}
