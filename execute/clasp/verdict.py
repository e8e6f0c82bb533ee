"""Would layer skipping pay elsewhere?  A pair by formula, from measured inputs: in turn, and beside each other.

With α the chance that a draft is accepted, γ drafts a round, E = (1 − α^(γ+1)) / (1 − α) tokens a round,
and seconds in units of one full step: a draft costs ``h + (1 − h)(1 − M/L)`` where ``h`` is the share
of a step that is never skipped (head and embedding), a verification ``v``, a choice of layers ``o``,
due every LOI tokens:

    speed-up = E / (γ · draft + v + o · E / LOI)

Beside its model, on a device of its own, the drafter takes none of the verifier's time, so what counts is how many
tokens a step of the verifier emits, and how long it waits: the renewal model (pipespec_model.renewal) of the same
costs, and the choice of layers on top.

Both assume that drafts are accepted independently; the measured runs stand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipespec_model.acceptance import IID
from pipespec_model.closed_form import tokens_per_verification
from pipespec_model.latency import Constant, Table
from pipespec_model.predict import predict
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec


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


def beside(alpha: float, draft: float, steps: Sequence[float], *, optimise: float = 0.0, interval: int = 64,
           ) -> tuple[int, float]:
    """The lookahead that pays most in a pipeline, and its speed-up over plain decoding by the verifier alone.

    steps : of the verifier, 1, 2, 3, … tokens wide, in full steps; its windows are no wider
    """
    stages = tuple(StageSpec(name=name, model=name) for name in ("draft", "full"))
    verifier = Table(tuple(range(1, len(steps) + 1)), tuple(steps))
    latency = {"draft": StageLatency(Constant(draft)), "full": StageLatency(verifier)}
    profile = Profile(latency, acceptance={"draft>full": IID(alpha)})
    found = []
    for lookahead in range(len(steps)):
        link = LinkSpec(lookahead=lookahead, max_window=len(steps) - 1)
        rate = predict(PipelineSpec(stages=stages, links=(link,)), profile).tokens_per_s
        found.append((lookahead, steps[0] / (1 / rate + optimise / interval)))
    return max(found, key=lambda entry: entry[1])
