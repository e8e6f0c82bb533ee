"""When a layer-skipping drafter's layers are chosen anew: executor and simulator keep one calendar."""

from __future__ import annotations

from dataclasses import dataclass

from .protocol import Stage


@dataclass(slots=True)
class LayerCalendar:
    """At the start of a round, once the text has grown by ``interval`` tokens since the last choice; the first
    round drafts with layers that are evenly spread, for nothing has been verified yet."""

    interval: int
    _seen_verdict: int = 0
    _next: int = 0

    def due(self, stage: Stage) -> bool:
        """To be asked before each step; a yes counts as done."""
        new_round = stage.num_verdicts != self._seen_verdict
        self._seen_verdict = stage.num_verdicts
        if not new_round or len(stage.sequence) < self._next:
            return False
        self._next = len(stage.sequence) + self.interval
        return True
