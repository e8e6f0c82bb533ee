"""What is assumed or fitted: latencies, acceptance, contention and costs.  Never what is configured.

Entries are keyed by what they belong to — a latency by model, dtype, quantisation, device and
threads; an acceptance by a pair of models — so that any pipeline of the profile's models can be
built.  In a profile written by hand a stage's *name* serves as the key too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from .acceptance import IID, AcceptanceModel, acceptance_from_dict
from .agreement import Agreement
from .errors import InputError
from .latency import LatencyModel, Roofline, Scaled, latency_from_dict, non_negative
from .sampling import Sampling
from .spec import LinkSpec, PipelineSpec, StageSpec, Strategy, checked, read_document

PROFILE_VERSION = 2
READABLE_VERSIONS = (1, 2)  # of version 1 is what says nothing of sampling


@dataclass(frozen=True)
class StageLatency:
    """Seconds of a stage's steps.

    step : by width and context; for a lookup, width counts the tokens that it proposes
    prefill : of the first step, by its width; None = as ``step``
    """

    step: LatencyModel
    prefill: LatencyModel | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step.to_dict(), "prefill": self.prefill.to_dict() if self.prefill else None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StageLatency:
        if "kind" in data:  # by hand, one model for everything
            return cls(latency_from_dict(data))
        return cls(latency_from_dict(data["step"]), latency_from_dict(data["prefill"]) if data.get("prefill") else None)


@dataclass(frozen=True)
class Costs:
    """Seconds between steps, and bytes.

    start_s : from the request to the first step of a stage that need not wait
    turnaround_s : from the end of a step to the next one of the same stage
    handover_s : from the end of a sender's step to the start of the step of a receiver that waited
    rollback_s : extra time of the first step after a rollback (cropping the cache)
    finish_s : from the end of the target's last step to the request's end
    optimise_s : each choice of a layer-skipping drafter's layers, by itself in a chain, by its verifier in a pipeline
    give_s, give_bytes : of that verifier, each hand-over of cache entries to a drafter in a process of its own
    take_s : of that drafter, taking them
    """

    start_s: float = 0.0
    turnaround_s: float = 0.0
    handover_s: float = 0.0
    rollback_s: float = 0.0
    finish_s: float = 0.0
    optimise_s: float = 0.0
    give_s: float = 0.0
    give_bytes: float = 0.0
    take_s: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            non_negative(f"costs.{item.name}", getattr(self, item.name))


NO_COSTS = Costs()


@dataclass(frozen=True)
class Contention:
    """Rates of progress of stages that compute at the same time; 1 = as fast as alone."""

    rates: dict[str, float]

    def __post_init__(self) -> None:
        for key, rate in self.rates.items():
            if not 0 < rate <= 1:
                raise InputError(f"contention.{key}", "must be in (0, 1]", rate)


@dataclass(frozen=True)
class Profile:
    """Everything a prediction needs besides the spec.

    latency : by stage key (``StageSpec.time_key``) or stage name
    costs : by strategy and stage key (``costs_key``), stage key, stage name, or ``*`` for all
    acceptance : by pair, ``"drafter>verifier"`` in choice keys or stage names
    agreement : recorded choices of the calibration prompts; where a pipeline's stages all have
        rows here, they are used instead of ``acceptance``
    turns : like contention, but of stages that work in turn, and of a stage's first step after another
        one's: that has evicted its weights from the caches
    timing_spread : relative standard error of the machine's mean speed during calibration
    slowness : by stage key, with the cores and without: how many times slower than undisturbed the machine
        was during calibration, as increasing quantiles; no entry = never disturbed
    memory_bytes : of a model's weights and cache, by choice key or stage name
    sampling : how the recorded tokens were drawn; None = the best ones
    origin : ``assumed`` or ``fitted``; ``source`` says from what
    """

    latency: dict[str, StageLatency]
    acceptance: dict[str, AcceptanceModel] = field(default_factory=dict)
    contention: tuple[Contention, ...] = ()
    turns: tuple[Contention, ...] = ()
    costs: dict[str, Costs] = field(default_factory=dict)
    agreement: tuple[Agreement, ...] = ()
    timing_spread: float = 0.0
    slowness: dict[str, tuple[float, ...]] = field(default_factory=dict)
    memory_bytes: dict[str, float] = field(default_factory=dict)
    neighbour_rate: float = 0.9
    sampling: Sampling | None = None
    origin: str = "assumed"
    source: str = ""

    def stage_latency(self, stage: StageSpec) -> StageLatency:
        for key in (stage.time_key, stage.name):
            if key in self.latency:
                return self.latency[key]
        raise InputError(f"profile.latency[{stage.name}]", "must be there", mend=(
            f"calibrate this pipeline, or add an entry under {stage.name!r} or {stage.time_key!r}"))

    def stage_costs(self, stage: StageSpec, strategy: Strategy) -> Costs:
        """Costs of a stage in a strategy; where it was not measured there, in general."""
        for key in (costs_key(strategy, stage.time_key), stage.time_key, stage.name, "*"):
            if key in self.costs:
                return self.costs[key]
        return NO_COSTS

    def pair(self, drafter: StageSpec, verifier: StageSpec) -> AcceptanceModel:
        if drafter.choice_key == verifier.choice_key:
            return IID(1.0)
        for a, b in ((drafter.choice_key, verifier.choice_key), (drafter.name, verifier.name)):
            if f"{a}>{b}" in self.acceptance:
                return self.acceptance[f"{a}>{b}"]
        raise InputError(f"profile.acceptance[{drafter.name}>{verifier.name}]", "must be there", mend=(
            "calibrate this pair, or add e.g. {kind: iid, acceptance_rate: 0.8}"))

    def rate_key(self, stage: StageSpec) -> str:
        """The key under which rates of this stage are kept: its time key, or by hand its name."""
        known = {key for entry in (*self.contention, *self.turns) for key in entry.rates}
        return stage.name if stage.name in known and stage.time_key not in known else stage.time_key

    def rates(self, computing: frozenset[str]) -> dict[str, float]:
        """Rate of each of the stage keys that compute now.  A set that was not measured gets, per
        stage, the smallest rate of the measured subsets that hold it."""
        out = dict.fromkeys(computing, 1.0)
        for entry in self.contention:
            keys = frozenset(entry.rates)
            if len(keys) < 2:
                continue  # two stages with one key: not told apart, so not known
            if keys == computing:
                return dict(entry.rates)
            if keys < computing:
                for key in keys:
                    out[key] = min(out[key], entry.rates[key])
        return out

    def turn_rate(self, stages: Sequence[StageSpec], stage: StageSpec) -> float:
        """Rate of the first step of ``stage`` after another one's in a chain of ``stages``; 1 where not measured."""
        keys = frozenset(self.rate_key(item) for item in stages if not item.block)
        for entry in self.turns:
            if frozenset(entry.rates) == keys:
                return entry.rates.get(self.rate_key(stage), 1.0)
        return 1.0

    def slowness_of(self, stage: StageSpec) -> tuple[float, ...]:
        """Quantiles of how many times slower than undisturbed a stage's steps are."""
        keys = (stage.place_key, stage.time_key, stage.name)
        return next((self.slowness[key] for key in keys if key in self.slowness), (1.0,))

    def slowness_at(self, stage: StageSpec, draw: float | None) -> float:
        """The ``draw``-quantile; None = the mean."""
        quantiles = self.slowness_of(stage)
        if draw is None:
            return float(np.mean(quantiles))
        return float(np.interp(draw * (len(quantiles) - 1), np.arange(len(quantiles)), quantiles))

    @property
    def estimated(self) -> list[str]:
        """Keys of step times that nobody has measured: from a data sheet."""
        return [key for key, value in self.latency.items() if _is_estimate(value.step)]

    def check(self) -> None:
        """Raise InputError naming a field that is out of range."""
        if not 0 <= self.neighbour_rate <= 1:
            raise InputError("neighbour_rate", "must be in [0, 1]", self.neighbour_rate)
        non_negative("timing_spread", self.timing_spread)
        for key, needed in self.memory_bytes.items():
            non_negative(f"memory_bytes.{key}", needed)
        for key, quantiles in self.slowness.items():
            if not quantiles or list(quantiles) != sorted(quantiles) or not 0 < quantiles[0] <= quantiles[-1] < np.inf:
                raise InputError(f"slowness.{key}", "must be numbers > 0 that increase", list(quantiles))

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": PROFILE_VERSION, "origin": self.origin, "source": self.source,
            "timing_spread": self.timing_spread, "neighbour_rate": self.neighbour_rate,
            "latency": {key: value.to_dict() for key, value in self.latency.items()},
            "acceptance": {key: value.to_dict() for key, value in self.acceptance.items()},
            "contention": [entry.rates for entry in self.contention],
            "turns": [entry.rates for entry in self.turns],
            "slowness": {key: list(value) for key, value in self.slowness.items()},
            "memory_bytes": dict(self.memory_bytes),
            "costs": {key: value.__dict__ for key, value in self.costs.items()},
            "sampling": self.sampling.to_dict() if self.sampling else None,
            "agreement": [entry.to_dict() for entry in self.agreement],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "profile") -> Profile:
        """Validate; raises InputError naming field, rule and value."""
        if not isinstance(data, dict):
            raise InputError(where, "must hold a mapping", type(data).__name__)
        known = {"version", *(item.name for item in fields(cls))}
        unknown = sorted(set(data) - known)
        if unknown:
            raise InputError(f"{where}: {unknown[0]}", f"is not a known key ({', '.join(sorted(known))})")
        version = data.get("version", PROFILE_VERSION)
        if version not in READABLE_VERSIONS or isinstance(version, bool):
            raise InputError(f"{where}: version", f"must be {' or '.join(map(str, READABLE_VERSIONS))}", version)
        if not data.get("latency"):
            raise InputError(f"{where}: latency", "must hold at least one stage")
        try:
            made = cls(
                latency={key: StageLatency.from_dict(value) for key, value in data["latency"].items()},
                acceptance={k: acceptance_from_dict(v) for k, v in (data.get("acceptance") or {}).items()},
                contention=tuple(Contention(dict(rates)) for rates in data.get("contention") or ()),
                turns=tuple(Contention(dict(rates)) for rates in data.get("turns") or ()),
                slowness={key: tuple(value) for key, value in (data.get("slowness") or {}).items()},
                memory_bytes=dict(data.get("memory_bytes") or {}),
                costs={key: Costs(**value) for key, value in (data.get("costs") or {}).items()},
                agreement=tuple(Agreement.from_dict(entry) for entry in data.get("agreement") or ()),
                timing_spread=float(data.get("timing_spread", 0.0)),
                neighbour_rate=float(data.get("neighbour_rate", 0.9)),
                sampling=checked(Sampling, data["sampling"], "sampling:") if data.get("sampling") else None,
                origin=data.get("origin", "assumed"), source=data.get("source", ""),
            )
            made.check()
            return made
        except InputError as error:
            raise InputError(where, str(error)) from None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(where, f"cannot be read ({error!r})") from None


def _is_estimate(model: LatencyModel) -> bool:
    return isinstance(model, Roofline) or (isinstance(model, Scaled) and _is_estimate(model.model))


def costs_key(strategy: Strategy, time_key: str) -> str:
    return f"{strategy} {time_key}"


def load_profile(path: str | Path) -> Profile:
    return Profile.from_dict(read_document(path), str(path))


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write JSON; numbers survive the round trip exactly."""
    Path(path).write_text(json.dumps(profile.to_dict(), indent=1, allow_nan=False), encoding="utf-8")


def recorded(profile: Profile, pipeline: PipelineSpec) -> list[Agreement]:
    """The profile's recorded prompts for a pipeline; empty where a stage has no rows."""
    names = [stage.choice_key for stage in pipeline.stages]
    return [entry.select(names) for entry in profile.agreement if set(names) <= set(entry.names)]


def pairs(pipeline: PipelineSpec) -> Sequence[tuple[StageSpec, StageSpec, LinkSpec]]:
    """Neighbours and the link between them."""
    return list(zip(pipeline.stages, pipeline.stages[1:], pipeline.links, strict=False))
