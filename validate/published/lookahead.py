"""Which lookahead a pipelined run really had, from where its verifications ended.

Every candidate is replayed.  Of the verifications that begin at one position in the replay and in the record,
how many end at one position too?  Counts alone mislead: very different lookaheads can give the same number of
verifications.  So do ends alone: two runs of one rule that fall out of step have few in common until a refused
draft brings them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from .calibration import Calibration
from .files import PublishedFile
from .replay import agreements, run

MOST = 24
NUM_PROMPTS = 4
"""A few prompts hold hundreds of verifications, and the right candidate stands far above the others."""


def overlap(replayed: Mapping[int, Sequence[int]], recorded: Mapping[int, Sequence[int]]) -> float:
    """Share of verifications that end alike, of those that begin alike; ends by prompt index.

    >>> overlap({0: [3, 6, 8]}, {0: [3, 5, 6, 8]})
    0.6666666666666666
    """
    alike = begun = 0
    for index in replayed.keys() & recorded.keys():
        mine, theirs = (dict(pairwise([1, *ends[index]])) for ends in (replayed, recorded))
        common = mine.keys() & theirs.keys()
        begun += len(common)
        alike += sum(mine[start] == theirs[start] for start in common)
    return alike / begun if begun else 0.0


def inferred(scores: Mapping[int, float], label: int) -> int:
    """The candidate that overlaps best; of the class {0, 1} the label, if it is one of them."""
    best = max(scores, key=lambda candidate: scores[candidate])
    return label if best == max(label, 1) else best


class Lookaheads:
    """Scores the candidates of pipelined files; each is replayed once a pipeline."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._ends: dict[tuple[tuple[str, ...], int], dict[int, list[int]]] = {}

    def scores(self, file: PublishedFile) -> dict[int, float]:
        """Overlap by candidate L, from 1 on: 0 and 1 are one class."""
        recorded = {prompt.index: prompt.ends() for prompt in file.prompts}
        candidates = range(1, max(MOST, file.label + 4) + 1)
        return {candidate: overlap(self._replayed(file, candidate), recorded) for candidate in candidates}

    def _replayed(self, file: PublishedFile, candidate: int) -> dict[int, list[int]]:
        key = (tuple(stage.choice_key for stage in file.stages), candidate)
        if key not in self._ends:
            pipeline = file.pipeline(candidate)
            indices = self._calibration.known_prompts(pipeline)[:NUM_PROMPTS]
            made = agreements(pipeline, self._calibration, indices)
            self._ends[key] = run(pipeline, self._calibration, made).ends()
        return self._ends[key]
