"""One configuration as one row of figures: simulated, with intervals, and by formula where there is one.

:data:`COLUMNS` says what each column means.  Rows are plain dictionaries, so that they go through JSON unchanged.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from pipespec_model.errors import InputError
from pipespec_model.profile import Profile
from pipespec_model.spec import PipelineSpec

from .figures import figures
from .run import replication_prompts, simulate

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


def row(spec: PipelineSpec, profile: Profile, effort: Effort) -> Row:
    """All columns of a configuration but ``point`` and the varied fields."""
    out: Row = {
        "pipeline": spec.label, "strategy": spec.strategy, "handshake": spec.handshake if spec.links else "",
        "num_stages": len(spec.stages), "num_devices": len({stage.device for stage in spec.stages})}
    said = _predicted(spec, profile, effort) if effort.predicted or effort.engine == "analytic" else {}
    if effort.engine == "events":
        out |= _simulated(spec, profile, effort)
    elif said["predicted_tokens_per_s"] is not None:
        alone = _predicted(PipelineSpec.alone(spec.target), profile, effort)["predicted_tokens_per_s"]
        out |= {"tokens_per_s": said["predicted_tokens_per_s"], "speedup": said["predicted_tokens_per_s"] / alone,
                "mean_acceptance_length": said["mean_acceptance_length"]}
    else:
        raise InputError(spec.label, "must be in a formula's range for --engine analytic", mend=said["why"])
    return out | {key: value for key, value in said.items() if key in COLUMNS and key not in out}


def _simulated(spec: PipelineSpec, profile: Profile, effort: Effort) -> Row:
    traces: list[Any] = []
    plain: list[Any] = []
    target = PipelineSpec.alone(spec.target)
    wanted = max(effort.replications, 2) if effort.half_width else effort.replications
    while True:
        for number in range(effort.seed + len(traces), effort.seed + wanted):
            prompts = replication_prompts(spec, profile, num_prompts=effort.num_prompts, num_tokens=effort.num_tokens,
                                          seed=number)
            traces.append(simulate(spec, profile, prompts, seed=number))
            texts = [agreement.select([spec.target.choice_key]) for agreement in prompts]
            plain.append(traces[-1] if spec == target else simulate(target, profile, texts, seed=number))
        result = figures(spec, traces, plain)
        if effort.half_width is None or wanted >= effort.max_replications or (
                _relative_half(result["tokens_per_s"]) <= effort.half_width):
            return _flat(result)
        wanted = min(effort.max_replications, math.ceil(1.5 * wanted))


def _relative_half(figure: dict[str, Any]) -> float:
    low, high = figure["interval"]
    return (high - low) / 2 / figure["value"]


def _flat(result: dict[str, Any]) -> Row:
    out: Row = {"num_replications": result["replications"], "num_tokens": result["num_tokens"]}
    for name in ("tokens_per_s", "speedup"):
        low, high = result[name]["interval"] or (None, None)
        out |= {name: result[name]["value"], f"{name}_low": low, f"{name}_high": high}
    for name in ("mean_acceptance_length", "ttft_s"):
        out[name] = result[name]["value"]
    for i, stage in enumerate(result["stages"]):
        for name in ("busy", "waiting", "wasted"):
            out[f"stage_{i}_{name}"] = stage[name]["value"]
    return out


def _predicted(spec: PipelineSpec, profile: Profile, effort: Effort) -> Row:
    from pipespec_model.predict import predict  # compiles

    try:
        said = predict(spec, profile, context=effort.num_tokens // 2)
    except InputError as error:
        return {"predicted_tokens_per_s": None, "predicted_by": None, "why": str(error)}
    return {"predicted_tokens_per_s": said.tokens_per_s, "predicted_by": said.model,
            "mean_acceptance_length": said.mean_acceptance_length}
