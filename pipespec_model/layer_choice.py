"""When a layer-skipping drafter's layers are chosen anew: executor and simulator keep one calendar."""

from __future__ import annotations

from dataclasses import dataclass

from .protocol import Stage


@dataclass(slots=True)
class LayerCalendar:
    """Once the text has grown by ``interval`` tokens since the last choice: in a chain at the start of a round, so
    that the first drafts with layers that are evenly spread, for nothing has been verified yet; in a pipeline after a
    step of the verifier.  Never by the last token of the prompt: the layers that it can do without are others than a
    token of the answer's (a chat template ends with a mark of its own)."""

    interval: int
    _seen_verdict: int = 0
    _next: int = 0

    def due(self, stage: Stage) -> bool:
        """In a chain; to be asked before each step of the drafter.  A yes counts as done."""
        new_round = stage.num_verdicts != self._seen_verdict
        self._seen_verdict = stage.num_verdicts
        return new_round and self.grown(len(stage.sequence))

    def grown(self, length: int) -> bool:
        """In a pipeline; to be asked after each step of the verifier but its first, when it holds ``length`` tokens."""
        if length < self._next:
            return False
        self._next = length + self.interval
        return True
