"""When does a pipeline pay?  Break-even points, the best lookahead, sensitivities, and one guarantee in seconds.

All of it is asked of the renewal model (renewal.py), so its assumptions hold here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from .acceptance import IID
from .closed_form import tokens_per_verification
from .errors import InputError
from .renewal import Renewal, two_stages

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Pair:
    """A drafter and a target that run at once, overlapped unless ``blocking``.

    verify_s : seconds of the target's step with 0, 1, 2, … drafts
    """

    draft_s: float
    verify_s: tuple[float, ...]
    acceptance_rate: float
    lookahead: int = 0
    buffer_tokens: int = 16
    blocking: bool = False

    def solve(self) -> Renewal:
        return two_stages(
            draft_s=self.draft_s, verify_s=np.array(self.verify_s), acceptance=IID(self.acceptance_rate),
            lookahead=self.lookahead, buffer_tokens=self.buffer_tokens, blocking=self.blocking)

    @property
    def speedup(self) -> float:
        """Over autoregressive decoding by the target alone."""
        return self.solve().tokens_per_s * self.verify_s[0]


def never_slower(acceptance_rate: float, verify_s: NDArray[np.float64] | tuple[float, ...]) -> bool:
    """Whether overlapped with lookahead 0 is proved not to be slower than autoregressive decoding in the long run.

    Condition: for every window w that can occur, N(w) >= t(w) / t(0), where N(w) is the mean of tokens that a
    verification of w drafts emits.  Proof: with lookahead 0 the target's next step begins when the last one
    ends, so time is the sum of t(w_m).  Which drafts wait depends on positions that are decided already; those
    that wait are independent of them (i.i.d.).  So given the past a step emits N(w_m) >= t(w_m) / t(0) tokens
    on average, and summing over steps, E[tokens] >= E[seconds] / t(0) (Wald's identity): at least one token
    per t(0).  Costs between steps are the same in both.

    >>> never_slower(0.05, (0.1, 0.1, 0.1)), never_slower(0.05, (0.1, 0.2, 0.2))
    (True, False)
    """
    return all(tokens_per_verification(acceptance_rate, w) >= verify_s[w] / verify_s[0] - 1e-12
               for w in range(len(verify_s)))


def break_even_rate(pair: Pair, *, at_least: float = 1.0) -> float | None:
    """The acceptance rate from which on the pair is ``at_least`` times as fast as its target alone; None
    where it is not even at 1.

    Not the smallest: overlapped with lookahead 0, a drafter that is never right costs nothing, as its first
    draft is found wrong by a plain step, and one that is right now and then leads into dear verifications.

    >>> pair = Pair(0.02, (0.1,) + (0.3,) * 8, 0.0)
    >>> round(break_even_rate(pair), 2)
    0.73
    """
    return _last_rise(lambda rate: replace(pair, acceptance_rate=rate).speedup - at_least, 0.0, 1.0)


def largest_cost_ratio(pair: Pair, *, at_least: float = 1.0) -> float | None:
    """The slowest useful drafter, as a share of the target's one-token step; None where none is useful.

    At most 1: a slower drafter is no drafter.

    >>> pair = Pair(0.02, (0.1,) * 9, 0.8)
    >>> largest_cost_ratio(pair), largest_cost_ratio(pair, at_least=20.0)
    (1.0, None)
    """
    one_s = pair.verify_s[0]
    found = _last_rise(lambda x: replace(pair, draft_s=(1 - x) * one_s).speedup - at_least, 0.0, 1 - 1e-3, first=True)
    return None if found is None else 1 - found


def best_lookahead(pair: Pair) -> int:
    """The lookahead of highest throughput that the buffer and the window allow.

    >>> best_lookahead(Pair(0.02, (0.1,) * 9, 0.8))
    0
    """
    most = min(pair.buffer_tokens, len(pair.verify_s) - 1)
    speeds = [replace(pair, lookahead=number).speedup for number in range(most + 1)]
    # Of equals the smallest.
    return next(i for i, speed in enumerate(speeds) if speed >= (1 - 1e-9) * max(speeds))


def elasticities(pair: Pair, *, step: float = 0.01) -> dict[str, float]:
    """Percent of throughput per percent of the acceptance rate, of the drafter's step, of a verification.

    Central differences, as throughput has steps in a time; smaller steps would show those.

    >>> found = elasticities(Pair(0.02, (0.1,) * 9, 0.8))
    >>> found["acceptance_rate"] > 1 > found["draft_s"] + found["verify_s"] + 1.9
    True
    """
    if not 0 < pair.acceptance_rate * (1 + step) <= 1:
        raise InputError("acceptance_rate", f"must be in (0, {1 / (1 + step):.3f}]", pair.acceptance_rate)

    def change(scaled: Callable[[float], Pair]) -> float:
        more, less = (scaled(1 + sign * step).solve().tokens_per_s for sign in (1, -1))
        return float(np.log(more / less) / np.log((1 + step) / (1 - step)))

    return {
        "acceptance_rate": change(lambda x: replace(pair, acceptance_rate=x * pair.acceptance_rate)),
        "draft_s": change(lambda x: replace(pair, draft_s=x * pair.draft_s)),
        "verify_s": change(lambda x: replace(pair, verify_s=tuple(x * seconds for seconds in pair.verify_s))),
    }


def _last_rise(excess: Callable[[float], float], low: float, high: float, *, first: bool = False) -> float | None:
    """Where ``excess`` last (or first) rises through 0; ``low`` where it never lies below, None where it always
    does, or at last lies below it.  Looked for between points 1/40 of the way apart."""
    at = np.linspace(low, high, 41)
    enough = [excess(x) >= -TOLERANCE for x in at]
    if first:
        if not any(enough):
            return None
        i = enough.index(True)
    else:
        if not enough[-1]:
            return None
        i = len(at) - enough[::-1].index(False) if False in enough else 0
    if i == 0:
        return low
    return float(brentq(lambda x: excess(x) + TOLERANCE, at[i - 1], at[i], xtol=TOLERANCE))
