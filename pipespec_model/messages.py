"""What stages say to each other, what they do in a step, and what they count.

Positions count generated tokens; the prompt lies before position 0.  The rules are in protocol.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drafts:
    """Downstream: tokens for positions ``start``, ``start + 1``, …  ``final``: no more to come.
    ``answers``: serial of the last verdict that they take into account."""

    epoch: int
    serial: int
    start: int
    tokens: tuple[int, ...]
    final: bool
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Upstream: the verifier's tokens from ``start``.  ``turn``: the receiver may work again
    (a synchronous chain hands its one turn round; in a pipeline every stage always has it).
    ``length``: tokens that the sender holds itself, where it passes on the target's."""

    epoch: int
    serial: int
    start: int
    tokens: tuple[int, ...]
    turn: bool
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Entries:
    """Upstream, to a layer-skipping drafter in a process of its own: the cache entries of tokens ``start`` …
    ``end`` − 1, prompt included, are there to be taken; before ``start`` they are as they were, and from ``end`` on
    nothing is committed.  ``layers``: which to skip from now on; None = as before."""

    start: int
    end: int
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass.

    kind : ``prefill`` (the stage's first), ``draft`` (stage 0), ``verify``, ``decode`` (no drafts),
        ``lookup`` (of a hybrid: what comes out is known, no model runs)
    position : generated tokens held before the step
    cached : of prompt + generated tokens, how many the stage's cache still covers
    width : tokens in the forward: those not cached yet plus the drafts (0 for a lookup)
    drafts : what is verified
    limit : most tokens a draft step may yield
    proposal : what a ``lookup`` yields
    """

    kind: str
    position: int
    cached: int
    width: int
    drafts: tuple[int, ...]
    limit: int
    epoch: int
    rolled_back: bool
    proposal: tuple[int, ...] = ()


@dataclass(slots=True)
class Counters:
    """What became of tokens.  ``drafted = kept + cut + undecided`` counted by the drafter;
    ``proposed >= accepted + rejected`` counted by its verifier (see metrics.py)."""

    drafted: int = 0
    kept: int = 0
    cut: int = 0
    undecided: int = 0
    proposed: int = 0
    accepted: int = 0
    rejected: int = 0
    emitted: int = 0
    steps: int = 0
    stale: int = 0
