"""What an engine without a trace returns: one row a prompt, counted as in pipespec_model.metrics.

Arrays that belong to a stage are ``[prompt, stage]``, drafter first; where prompts of pipelines of different
depth lie in one table, the columns past a pipeline's target hold zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipespec_model.metrics import LinkFigures
from pipespec_model.trace import PromptRecord, StepRecord

from .engine import NS
from .twin_layout import COUNTERS
from .twin_run import Outcome


@dataclass(frozen=True)
class Totals:
    """What became of each prompt's time and tokens.

    total_s, ttft_s : seconds from the request to its end, and to the target's first token ``[prompt]``
    num_tokens : tokens that the target generated ``[prompt]``
    target_steps : target steps behind them, plain ones included ``[prompt]``
    num_stages : of the prompt's pipeline ``[prompt]``
    busy_s : seconds in which the stage computed, steps that ended only ``[prompt, stage]``
    counters : of ``messages.Counters``, in the order of ``COUNTERS`` ``[prompt, stage, counter]``
    """

    total_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    target_steps: NDArray[np.int64]
    num_stages: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    counters: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.total_s)

    def counter(self, name: str) -> NDArray[np.int64]:
        """One counter ``[prompt, stage]``, by its name in ``messages.Counters``."""
        return self.counters[:, :, COUNTERS.index(name)]

    @property
    def drafted(self) -> NDArray[np.int64]:
        """Tokens that the stage proposed to its downstream."""
        return self.counter("drafted")

    @property
    def accepted(self) -> NDArray[np.int64]:
        """Drafts that the stage, as a verifier, accepted."""
        return self.counter("accepted")

    @property
    def rejected(self) -> NDArray[np.int64]:
        """First refused drafts: one a window at most."""
        return self.counter("rejected")

    @property
    def cut(self) -> NDArray[np.int64]:
        """The stage's own tokens that a rollback took away, judged or not: over ``drafted`` it is what
        ``metrics.stage_use`` calls wasted."""
        return self.counter("cut")

    @property
    def wasted(self) -> NDArray[np.int64]:
        """The stage's own tokens that a rollback took away before anybody had verified them."""
        in_vain = self.counter("proposed") - self.accepted
        below = np.zeros_like(in_vain)
        below[:, :-1] = in_vain[:, 1:]
        drafts = np.arange(in_vain.shape[1]) < self.num_stages[:, None] - 1
        return np.where(drafts, self.cut - below, 0)

    def link(self, prompt: int, link: int) -> LinkFigures:
        """What became of the drafts of a link (stage ``link`` → ``link + 1``)."""
        drafter, verifier = (dict(zip(COUNTERS, self.counters[prompt, i].tolist(), strict=True))
                             for i in (link, link + 1))
        return LinkFigures.of(drafter, verifier)

    def __getitem__(self, rows: slice) -> Totals:
        return Totals(*(getattr(self, item.name)[rows] for item in fields(self)))

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[PromptRecord, list[StepRecord]]]) -> Totals:
        """The same figures of runs with a trace."""
        found = list(runs)
        depth = max((len(record.counters) for record, _ in found), default=0)
        busy = np.zeros((len(found), depth))
        counters = np.zeros((len(found), depth, len(COUNTERS)), dtype=np.int64)
        for row, (record, steps) in enumerate(found):
            for i, counts in enumerate(record.counters):
                busy[row, i] = sum(round(step.duration_s * NS) for step in steps if step.stage == i) / NS
                counters[row, i] = [counts[name] for name in COUNTERS]
        deep = np.array([len(record.counters) for record, _ in found], dtype=np.int64)
        return cls(
            np.array([record.total_s for record, _ in found]), np.array([record.ttft_s for record, _ in found]),
            np.array([len(record.tokens) for record, _ in found], dtype=np.int64),
            counters[np.arange(len(found)), deep - 1, COUNTERS.index("steps")], deep, busy, counters)

    @classmethod
    def of_outcome(cls, outcome: Outcome, num_stages: NDArray[np.int64]) -> Totals:
        """The compiled engine's figures, in seconds."""
        end_ns, first_ns, num_tokens = outcome.figures[:, :3].T
        steps = outcome.counters[np.arange(len(end_ns)), num_stages - 1, COUNTERS.index("steps")]
        return cls(end_ns / NS, first_ns / NS, num_tokens.copy(), steps, num_stages, outcome.busy_ns / NS,
                   outcome.counters)

    @classmethod
    def joined(cls, parts: Sequence[Totals]) -> Totals:
        """The rows of several tables, one after the other."""
        if len(parts) == 1:
            return parts[0]
        deep = max((part.busy_s.shape[1] for part in parts), default=1)

        def column(name: str) -> NDArray[Any]:
            found = [getattr(part, name) for part in parts]
            if found and found[0].ndim > 1:
                found = [np.pad(item, [(0, 0), (0, deep - item.shape[1]), *[(0, 0)] * (item.ndim - 2)])
                         for item in found]
            return np.concatenate(found)

        return cls(*(column(item.name) for item in fields(cls)))
