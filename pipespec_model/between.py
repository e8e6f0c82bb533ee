"""What layer skipping does between steps (trace.BETWEEN_STEPS), read from records: its seconds and bytes.

A ``give`` comes between a verification and its verdict, a ``take`` between a message and the step that it lets
begin; so for the gaps of everybody else the one belongs to the step before it, the other to the step after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .profile import Costs, Profile
from .spec import PipelineSpec
from .trace import BETWEEN_STEPS, StepRecord

OPTION = "entry_bytes"
"""Of a trace: bytes of the cache entries of one token, by the name of the stage that hands them over."""


def joined(steps: Iterable[StepRecord], *, pipelined: bool) -> list[StepRecord]:
    """A stage's steps in order of their start, with what belongs to them; in a pipeline the choice of layers
    belongs to none, for it is made after the verdict has gone."""
    out: list[StepRecord] = []
    begun = None
    for step in sorted(steps, key=start_of):
        if step.kind == "give" and out:
            out[-1] = replace(out[-1], duration_s=end_of(step) - start_of(out[-1]))
        elif step.kind == "take":
            begun = start_of(step)
        elif step.kind != "optimise" or not pipelined:
            since = start_of(step) if begun is None else begun
            out.append(replace(step, start_s=since, duration_s=end_of(step) - since))
            begun = None
    return out


def start_of(step: StepRecord) -> float:
    return step.start_s or 0.0


def end_of(step: StepRecord) -> float:
    return start_of(step) + step.duration_s


@dataclass
class Between:
    """Seconds by kind and stage key, and the bytes of each hand-over by stage key."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    num_bytes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, spec: PipelineSpec, steps: Sequence[StepRecord], entry_bytes: Mapping[str, int]) -> None:
        """entry_bytes : see OPTION"""
        for step in steps:
            if step.kind in BETWEEN_STEPS:
                stage = spec.stages[step.stage]
                self.seconds[step.kind, stage.time_key].append(step.duration_s)
                if step.kind == "give" and stage.name in entry_bytes:
                    self.num_bytes[stage.time_key].append(step.width * entry_bytes[stage.name])

    def costs(self, key: str, pooled: Between) -> dict[str, float]:
        """Fields of profile.Costs of stage ``key``: medians, and the mean of the bytes."""
        out = {f"{kind}_s": float(np.median(found)) for kind in sorted(BETWEEN_STEPS)
               if (found := self.seconds.get((kind, key)) or pooled.seconds.get((kind, key)))}
        if self.num_bytes.get(key):
            out["give_bytes"] = float(np.mean(self.num_bytes[key]))
        return out


def undisturbed(costs: Mapping[str, Costs], computing: Profile) -> dict[str, Costs]:
    """What was timed between steps while others computed, or just after they had, as the same takes alone: by the
    measured contention of a pipeline, and rates of taking turns of a chain."""
    out = dict(costs)
    for key, found in costs.items():
        strategy, _, time_key = key.partition(" ")
        entries = {"pipelined": computing.contention, "speculative": computing.turns}.get(strategy, ())
        rates = [entry.rates[time_key] for entry in entries if time_key in entry.rates]
        if rates:
            seconds = {f"{kind}_s": getattr(found, f"{kind}_s") * min(rates) for kind in BETWEEN_STEPS}
            out[key] = replace(found, **seconds)
    return out
