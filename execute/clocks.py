"""Clocks of other hosts: how far each is from the first rank's, and how sure that is.

The first rank asks a stage for its clock and notes when it asked and when it was answered.  Of several such rounds
the one with the shortest way there and back counts: its middle is taken as the moment at which the stage read its
clock, which is wrong by at most half the round.  This is done before and after every prompt; between the two the
clocks are taken to drift evenly.

Assumes that both clocks go evenly over a prompt, as ``time.perf_counter`` of two machines does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipespec_model.trace import StepRecord

from .worker import Outcome

LEAST_ROUNDS = 4
MOST_ROUNDS = 16
ENOUGH_S = 0.03  # for the rounds beyond the least


@dataclass(frozen=True)
class Reading:
    """A stage's clock seen from here.

    at_s : by this clock
    offset_s : what must be added to the stage's clock to give this one
    uncertainty_s : the true offset is within this of it
    """

    at_s: float
    offset_s: float
    uncertainty_s: float


def read(ask: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> Reading:
    """Compare clocks.

    ask : returns the other clock's seconds
    """
    begun = clock()
    best: Reading | None = None
    for rounds in range(MOST_ROUNDS):
        if rounds >= LEAST_ROUNDS and clock() - begun > ENOUGH_S:
            break
        before = clock()
        there = ask()
        after = clock()
        if best is None or after - before < 2 * best.uncertainty_s:
            middle = (before + after) / 2
            best = Reading(middle, middle - there, (after - before) / 2)
    assert best is not None
    return best


@dataclass(frozen=True)
class Alignment:
    """Two readings of one clock, with events between them."""

    before: Reading
    after: Reading

    def offset_s(self, at_s: float) -> float:
        """At a moment by this clock."""
        span = self.after.at_s - self.before.at_s
        part = (at_s - self.before.at_s) / span if span > 0 else 0.0
        return self.before.offset_s + part * (self.after.offset_s - self.before.offset_s)

    def outcome(self, outcome: Outcome, asked_s: float) -> Outcome:
        """A stage's records by this clock; as told they count from ``asked_s`` less the offset before.

        asked_s : of the request, by this clock
        """
        def moved(step: StepRecord) -> StepRecord:
            assert step.start_s is not None
            drift_s = self.offset_s(asked_s + step.start_s) - self.before.offset_s
            return replace(step, start_s=step.start_s + drift_s)

        steps = [moved(step) for step in outcome.steps]
        ended_s = (steps[-1].start_s or 0.0) + steps[-1].duration_s if steps else 0.0
        return replace(outcome, steps=steps, ended_s=ended_s)

    def to_dict(self, stage: int) -> dict[str, float]:
        return {"stage": stage, "before_s": self.before.offset_s, "after_s": self.after.offset_s,
                "uncertainty_s": max(self.before.uncertainty_s, self.after.uncertainty_s)}
