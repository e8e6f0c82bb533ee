"""More than two stages in seconds: stages 0 … i taken for one drafter of stage i + 1.

Seen from downstream, the first stages of a pipeline are a drafter whose tokens come at uneven times: several
at once where its last stage accepts several, late where that stage refuses.  What matters of it after a
rollback is when its j-th token comes.  So each such drafter is described by a set of *paths*: arrival times
counted from when it may begin again, drawn from the link before (its paths, its acceptance) by Latin hypercube
with a fixed seed.  A pipeline is solved link by link from the drafter down; at the last link acceptance is
not drawn but summed over, as in renewal.py, by path and by *phase* (what is left of the drafter's step when it
can hear of a refusal).

What is left out (errors against the event simulator: docs/theory.md): a path is drawn anew at every refusal
and remembers only the phase; a middle stage without room downstream takes the windows that it would with room;
beyond a wrong token acceptance is the profile's ``neighbour_rate``, and a draft already under way there is
forgotten.  Assumes constant step times, the overlapped handshake, acceptance that is i.i.d., Markov or by hazard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .profile import Profile, pairs
from .renewal import NS, seconds_of, survival_rates, times_of
from .spec import PipelineSpec
from .walks import MOST_TOKENS, draw, throughput

NUM_PATHS = 20
NUM_ASTRAY = 6  # of those beyond a wrong token
NUM_TOKENS = 64  # of a path; beyond them its mean pace


@dataclass(frozen=True)
class Decomposed:
    """Long-run figures of a pipeline.

    mean_acceptance_length : tokens emitted per target step
    """

    tokens_per_s: float
    mean_acceptance_length: float


@dataclass(frozen=True)
class _Paths:
    """Ways in which a drafter's tokens come, ``[path, token]``.

    end_ns : of the step that made the token, counted from when the drafter may begin again
    step_ns : duration of that step
    refused : whether the step refused a draft, so that this token is its last
    """

    end_ns: NDArray[np.float64]
    step_ns: NDArray[np.float64]
    refused: NDArray[np.bool_]


@dataclass(frozen=True)
class _Link:
    """A link in nanoseconds.

    costs : hand-over to the drafter and to the verifier, the drafter's rollback and turnaround
    verify : of a step with 0, 1, 2, … drafts, turnaround included
    rates : as renewal.survival_rates
    """

    costs: NDArray[np.float64]
    turnaround: float
    verify: NDArray[np.float64]
    lookahead: int
    room: int
    rates: NDArray[np.float64]


def decomposed(pipeline: PipelineSpec, profile: Profile, *, context: int = 0) -> Decomposed:
    """Throughput of a pipelined chain of models; raises InputError naming what is outside the range.

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
    >>> 30 < decomposed(spec, known).tokens_per_s < 50  # 10 by the target alone
    True
    """
    if pipeline.strategy != "pipelined" or any(stage.drafter != "model" for stage in pipeline.stages):
        raise InputError(pipeline.label, "must be pipelined models")
    if pipeline.handshake == "blocking":
        raise InputError(f"{pipeline.label}: handshake", "must be overlapped for a formula of more than two stages",
                         "blocking", "simulate it")
    pipeline.require_lookaheads()
    turn = NS * profile.stage_costs(pipeline.stages[0], "pipelined").turnaround_s
    step = NS * seconds_of(pipeline, profile, pipeline.stages[0], 1, context)
    ends = step * np.arange(1, NUM_TOKENS + 1) + turn * np.arange(NUM_TOKENS)
    never = np.zeros((1, NUM_TOKENS), dtype=np.bool_)
    on_path = off_path = _Paths(ends[None, :], np.full((1, NUM_TOKENS), step), never)
    rng = np.random.default_rng(0)
    for i in range(len(pipeline.links) - 1):
        link = _link(pipeline, profile, i, context)
        astray = replace(link, rates=np.array([profile.neighbour_rate]))
        on_path, off_path = (_drawn(on_path, off_path, link, rng.random((NUM_PATHS, 2 * NUM_TOKENS))),
                             _drawn(off_path, off_path, astray, rng.random((NUM_ASTRAY, 2 * NUM_TOKENS))))
    last = _link(pipeline, profile, len(pipeline.links) - 1, context)
    tokens, ns, steps = throughput(_seen(on_path, off_path), last.costs, last.verify, last.lookahead, last.room,
                                   last.rates)
    return Decomposed(float(tokens / ns * NS), float(tokens / steps))


def _link(pipeline: PipelineSpec, profile: Profile, i: int, context: int) -> _Link:
    a, b, link = list(pairs(pipeline))[i]
    before, after = (profile.stage_costs(stage, "pipelined") for stage in (a, b))
    room = min(link.buffer_tokens, MOST_TOKENS)
    window = min(link.max_window, room)
    if b is not pipeline.target:
        window = min(window, pipeline.links[i + 1].buffer_tokens - 1)
    seconds = times_of(pipeline, profile, b, range(1, window + 2), context)
    return _Link(
        costs=NS * np.array([before.handover_s, after.handover_s, before.rollback_s, before.turnaround_s]),
        turnaround=NS * after.turnaround_s, verify=NS * (after.turnaround_s + seconds),
        lookahead=link.lookahead, room=room, rates=survival_rates(profile.pair(a, b)))


def _seen(drafter: _Paths, off_path: _Paths) -> tuple[NDArray, ...]:
    return drafter.end_ns, drafter.step_ns, drafter.refused, off_path.end_ns, off_path.step_ns


def _drawn(drafter: _Paths, off_path: _Paths, link: _Link, numbers: NDArray[np.float64]) -> _Paths:
    """Paths of drafter and verifier together, as many as rows of random ``numbers``."""
    size = (len(numbers), NUM_TOKENS)
    made = _Paths(np.zeros(size), np.zeros(size), np.zeros(size, dtype=np.bool_))
    draws = (np.argsort(numbers, axis=0) + 0.5) / len(numbers)
    draw(_seen(drafter, off_path), link.costs, link.turnaround, link.verify, link.lookahead, link.room, link.rates,
         draws, made.end_ns, made.step_ns, made.refused)
    return replace(made, end_ns=made.end_ns - link.turnaround)
