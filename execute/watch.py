"""Notices a stage that hangs, and a pipeline in which every stage waits.

While a prompt runs the parent asks every stage for a sign of life, five times within its patience; a stage
answers between two steps.  One that owes an answer for three of these rounds hangs in a step or is stopped.
Stages that all answer, and for three rounds did nothing, wait for a message that will not come: what the two
ends of each link have counted says which one was lost.  Either way the fault is named within the patience.

Assumes that no honest step takes three fifths of it.  Holds no processes and no pipes: execute/fleet.py asks and
hands over the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipespec_model.errors import InputError

PATIENCE_S = 300.0
"""Longer than a prefill of many thousand tokens by a large model on a CPU."""
LEAST_PATIENCE_S = 0.1
ROUNDS = 5  # of questions within the patience
ALLOWED_ROUNDS = 3  # without an answer, or without a deed


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a stage has done for this prompt so far.

    steps : that have ended; to_* and from_* : messages sent to and taken from its neighbours
    """

    steps: int = 0
    to_up: int = 0
    from_up: int = 0
    to_down: int = 0
    from_down: int = 0


@dataclass
class Watch:
    """Over one prompt.  ``now`` is always ``time.monotonic()``.

    names : of the stages, drafter first
    """

    names: Sequence[str]
    patience_s: float
    now: float
    _asked_at: float = 0.0
    _owes_since: dict[str, float] = field(default_factory=dict)
    _pulses: dict[str, Pulse] = field(default_factory=dict)
    _idle_since: float | None = None

    def __post_init__(self) -> None:
        self._asked_at = self.now

    def due_s(self, now: float) -> float:
        """Seconds until the next question."""
        return max(0.0, self._asked_at + self.patience_s / ROUNDS - now)

    def ask(self, now: float) -> list[str]:
        """Whom to ask now; nobody before the time, and nobody who still owes an answer."""
        if self.due_s(now) > 0:
            return []
        self._asked_at = now
        free = [name for name in self.names if name not in self._owes_since]
        self._owes_since |= dict.fromkeys(free, now)
        return free

    def hear(self, name: str, pulse: Pulse) -> None:
        """Take an answer."""
        self._owes_since.pop(name, None)
        if self._pulses.get(name) != pulse:
            self._idle_since = None
        self._pulses[name] = pulse

    def fault(self, now: float) -> str | None:
        """What is wrong, naming the stage; None while nothing is."""
        allowed_s = self.patience_s * ALLOWED_ROUNDS / ROUNDS
        for name, since in self._owes_since.items():
            if now - since >= allowed_s:
                return f"stage {name!r} hangs: no sign of it for {now - since:.3g} s"
        if self._owes_since or len(self._pulses) < len(self.names):
            return None
        if self._idle_since is None:
            self._idle_since = now
        waited = now - self._idle_since
        return f"{self._lost()}: every stage has waited for {waited:.3g} s" if waited >= allowed_s else None

    def _lost(self) -> str:
        for above, below in pairwise(self.names):
            a, b = self._pulses[above], self._pulses[below]
            if a.to_down != b.from_up:
                return f"stage {below!r} lacks a message from stage {above!r}"
            if b.to_up != a.from_down:
                return f"stage {above!r} lacks a message from stage {below!r}"
        return f"stage {self.names[-1]!r} has nothing to do"


def check_patience(patience_s: float) -> float:
    """Raises InputError for a patience that is too short for any step."""
    if not patience_s >= LEAST_PATIENCE_S:
        raise InputError("patience", f"must be >= {LEAST_PATIENCE_S} seconds", patience_s)
    return patience_s
