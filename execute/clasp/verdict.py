"""Would layer skipping pay elsewhere?  A synchronous pair by formula, from measured inputs.

With α the chance that a draft is accepted, γ drafts a round, E = (1 − α^(γ+1)) / (1 − α) tokens a round,
and seconds in units of one full step: a draft costs ``h + (1 − h)(1 − M/L)`` where ``h`` is the share
of a step that is never skipped (head and embedding), a verification ``v``, a choice of layers ``o``,
due every LOI tokens:

    speed-up = E / (γ · draft + v + o · E / LOI)

It assumes that drafts are accepted independently; the measured runs stand beside it.
"""

from __future__ import annotations

from pipespec_model.closed_form import tokens_per_verification


def draft_cost(share_skipped: float, head_share: float) -> float:
    """Of one skipping step, in full steps."""
    return head_share + (1 - head_share) * (1 - share_skipped)


def speed_up(alpha: float, lookahead: int, draft: float, *, verify: float = 1.0, optimise: float = 0.0,
             interval: int = 64) -> float:
    """Over plain decoding.

    alpha : acceptance rate in [0, 1]; draft, verify, optimise : seconds of each, in full steps
    """
    tokens = tokens_per_verification(alpha, lookahead)
    return tokens / (lookahead * draft + verify + optimise * tokens / interval)


def best_lookahead(alpha: float, draft: float, *, most: int = 8, **costs: float) -> tuple[int, float]:
    """The lookahead that pays most, and its speed-up."""
    return max(((n, speed_up(alpha, n, draft, **costs)) for n in range(1, most + 1)),  # type: ignore[arg-type]
               key=lambda found: found[1])


def break_even(draft: float, *, most: int = 8, **costs: float) -> float | None:
    """The acceptance rate from which on some lookahead pays; None where none does."""
    low, high = 0.0, 1.0
    if best_lookahead(high, draft, most=most, **costs)[1] <= 1:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if best_lookahead(middle, draft, most=most, **costs)[1] > 1 else (middle, high)
    return high
