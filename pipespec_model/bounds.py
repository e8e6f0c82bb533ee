"""Throughput that a pipeline of models cannot leave: proved bounds for any number of stages, both handshakes.

Let R be the number of agreements in a row before a disagreement, at the last link.  The target's output falls
into segments of R agreements and one disagreement.  No step of the target goes past the end of its segment: it
emits min(drafts that it has, agreements left) + 1 tokens.  So a segment of n = R + 1 tokens is covered by whole
steps, however the stages before behave, and

    E[R + 1] / E[D(R + 1)]  <=  tokens per second  <=  E[R + 1] / E[C(R + 1)],

where C(n) is the least time in which windows can cover n positions, and D(n) the most that they and the
longest wait before each can take (law of large numbers over segments).  C chooses windows as if it knew
the future, so it holds where the number of waiting drafts depends on what will be refused.

A second upper bound counts tokens: a step emits one of its own and others that the stage before emitted, so
throughput is at most the sum over stages of steps per second at their shortest.

The longest wait, overlapped: none without a lookahead; else until the stage before has heard of a refusal, has
ended the step that it was in, and has taken one step a token.  Blocking: until it has answered, which it does
after its step and its own wait for an answer, and has drafted one more than the lookahead.  Derivation:
docs/theory.md.  Assumes constant step times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .profile import Profile, pairs
from .renewal import seconds_of, survival_rates
from .spec import PipelineSpec

MOST_TOKENS = 1024  # of a segment; longer ones are cut
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class Bounds:
    """Tokens per second in the long run, prefill not counted."""

    lower: float
    upper: float


def bounds(pipeline: PipelineSpec, profile: Profile, *, context: int = 0) -> Bounds:
    """Proved bounds of a pipeline; raises InputError for anything but pipelined models.

    context : cache length at which step times are taken

    >>> from pipespec_model.acceptance import IID
    >>> from pipespec_model.latency import Constant
    >>> from pipespec_model.profile import StageLatency
    >>> names = ("1B", "8B", "70B")
    >>> spec = PipelineSpec.from_dict({"strategy": "pipelined", "links": [{}, {}],
    ...                                "stages": [{"name": name, "model": name} for name in names]})
    >>> times = dict(zip(names, (0.01, 0.02, 0.1)))
    >>> known = Profile({name: StageLatency(Constant(seconds)) for name, seconds in times.items()},
    ...                 acceptance={"1B>8B": IID(0.8), "8B>70B": IID(0.85)})
    >>> said = bounds(spec, known)
    >>> round(said.lower, 1), round(said.upper, 1)
    (10.0, 62.5)
    """
    if pipeline.strategy != "pipelined" or any(stage.drafter != "model" for stage in pipeline.stages):
        raise InputError(pipeline.label, "must be pipelined models for bounds")
    pipeline.require_lookaheads()
    shortest, longest = _step_seconds(pipeline, profile, context)
    (*_, (drafter, target, link)) = pairs(pipeline)
    rates = survival_rates(profile.pair(drafter, target))
    by_tokens = sum(1 / float(seconds.min()) for seconds in shortest)
    wait_s = _longest_wait(pipeline, profile, [float(seconds.max()) for seconds in longest])
    # Overlapped, a verifier never begins with fewer drafts than its lookahead.
    fewest = link.lookahead if pipeline.handshake == "overlapped" else 0
    return Bounds(lower=_segments_per_s(rates, longest[-1] + wait_s, np.maximum, fewest),
                  upper=min(by_tokens, _segments_per_s(rates, shortest[-1], np.minimum, 0)))


def _step_seconds(pipeline: PipelineSpec, profile: Profile, context: int) -> tuple[list[NDArray], list[NDArray]]:
    """By stage and number of drafts: a step undisturbed, and one beside all others after a rollback."""
    shortest, longest = [], []
    together = profile.rates(frozenset(profile.rate_key(stage) for stage in pipeline.stages))
    for i, stage in enumerate(pipeline.stages):
        link = pipeline.links[i - 1] if i else None
        window = min(link.max_window, link.buffer_tokens) if link else 0
        costs = profile.stage_costs(stage, pipeline.strategy)
        slowest = np.array([seconds_of(pipeline, profile, stage, w + 1, context) for w in range(window + 1)])
        shortest.append(slowest * together[profile.rate_key(stage)] + costs.turnaround_s)
        longest.append(slowest + costs.turnaround_s + costs.rollback_s)
    return shortest, longest


def _longest_wait(pipeline: PipelineSpec, profile: Profile, step_s: list[float]) -> float:
    """Seconds that the target waits at most before a step."""
    handover = [profile.stage_costs(stage, pipeline.strategy).handover_s for stage in pipeline.stages]
    wait = answer = 0.0
    for i, link in enumerate(pipeline.links):
        there_and_back = handover[i] + handover[i + 1]
        if pipeline.handshake == "overlapped":
            drafts = link.lookahead * (wait + step_s[i])
            wait = there_and_back + step_s[i] + drafts if link.lookahead else 0.0
        else:
            # ``answer`` before and after its own answer; then drafts, the bonus position's among them.
            a_step = 2 * answer + wait + step_s[i]
            answer = there_and_back + step_s[i] + answer
            wait = answer + (link.lookahead + 1) * a_step + there_and_back
    return wait


def _segments_per_s(rates: NDArray[np.float64], seconds: NDArray[np.float64], choose: np.ufunc, fewest: int) -> float:
    """Mean tokens over mean extreme seconds of a segment; windows of ``fewest`` drafts and more."""
    reach = np.cumprod(np.r_[1.0, rates[np.minimum(np.arange(MOST_TOKENS - 1), len(rates) - 1)]])
    number = int(np.argmax(reach < _NEGLIGIBLE)) or MOST_TOKENS
    chance = -np.diff(np.r_[reach[:number], 0.0])  # of a segment of 1, 2, 3, … tokens
    steps = seconds[fewest:]
    size = np.arange(fewest, len(seconds)) + 1
    extreme = np.zeros(number + 1)
    for n in range(1, number + 1):
        extreme[n] = choose.reduce(steps + extreme[np.maximum(n - size, 0)])
    if choose is np.minimum and number == MOST_TOKENS:
        extreme[number] = number * float((steps / size).min())  # one cut short: no part of it can be faster
    return float(chance @ np.arange(1, number + 1) / (chance @ extreme[1:]))
