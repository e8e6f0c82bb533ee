"""Two stages in seconds: a renewal-reward model of the pipelined strategy, both handshakes.

A refused draft throws everything after it away, so what happens next depends on one number alone: the
*phase*, the time from when the drafter can hear of the refusal until it may begin its next step.  From a
phase, and as long as drafts agree, all that follows is certain: step times are constants here.  So the
walk from one refusal to the next is a fixed sequence of verifications; at which of them it ends is a
matter of acceptance.  That gives, by phase, the mean tokens and seconds of a walk and the distribution of
the next phase: a Markov chain of walks, and long-run tokens over long-run seconds (the renewal-reward
theorem; Ross 1996, Stochastic Processes, 3.6 and 4.8).

Assumes: contention as constant times of stages that always compute together, acceptance along the target's path
that is i.i.d., Markov or by hazard; step times that are constant, or independent of each other.  Random times are
integrated over by quadrature: a walk is taken over scenarios of step times that form a Latin hypercube.
Includes: lookahead, finite buffer and window, time of a verification by its width, hand-over in both
directions, turnarounds, the cost of a rollback, the residual of the drafter's step, the bonus token under
both handshakes (pipespec_model.protocol has the rules).

Phases lie on a grid; one between two points is shared among them.  The error of that against the event
simulator is in docs/theory.md, and falls with ``num_phases``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .acceptance import IID, AcceptanceModel, Hazard, Markov
from .errors import InputError
from .latency import LatencyModel
from .phases import long_run
from .profile import Costs, Profile, pairs
from .spec import PipelineSpec, StageSpec

NUM_PHASES = 96
NUM_PHASES_RANDOM = 24  # random times smooth what depends on the phase
NUM_SCENARIOS = 32  # of random step times
NUM_FACTORS = 64  # different factors in one; then they repeat
NS = 1_000_000_000


@dataclass(frozen=True)
class Renewal:
    """Long-run figures of two stages.

    tokens_per_s : of the target
    mean_acceptance_length : tokens emitted per target step
    emitted : probability of a target step to emit 1, 2, 3, … tokens
    waiting_drafts : probability of 0, 1, 2, … drafts in the window of a target step
    starved_probability : of a target step to begin with less than a full window (Theorem 1 needs 0)
    busy : share of time that drafter and target compute
    wasted : share of the drafter's steps whose token was not accepted, those at a bonus position included
    seconds_sd : standard deviation of the time of n tokens is ``seconds_sd * sqrt(n)``
    """

    tokens_per_s: float
    mean_acceptance_length: float
    emitted: NDArray[np.float64]
    waiting_drafts: NDArray[np.float64]
    starved_probability: float
    busy: tuple[float, float]
    wasted: float
    seconds_sd: float

    def seconds(self, num_tokens: int) -> float:
        """Mean time to emit ``num_tokens``, the whole step in which the last of them comes included.

        That step emits more than is asked for by the mean excess of a renewal process (Ross 1996, 3.4).
        """
        sizes = np.arange(1, len(self.emitted) + 1)
        excess = float((sizes**2 @ self.emitted / (sizes @ self.emitted) - 1) / 2)
        return (num_tokens + excess) / self.tokens_per_s


def survival_rates(model: AcceptanceModel) -> NDArray[np.float64]:
    """Probability of an agreement after 0, 1, 2, … agreements in a row; the last one repeats.

    Raises InputError for recorded bits, which are no process.
    """
    if isinstance(model, IID):
        return np.array([model.acceptance_rate])
    if isinstance(model, Markov):
        return np.array([model.after_reject_rate, model.after_accept_rate])
    if isinstance(model, Hazard):
        return np.array(model.rates)
    raise InputError("acceptance", "must be iid, markov or hazard for the renewal model", type(model).__name__)


def factors(draft_spread: Sequence[float], verify_spread: Sequence[float]) -> NDArray[np.float64]:
    """Factors on step times, ``[scenario, drafter or target, step]``: over scenarios those of each step follow its
    distribution, with mean 1, and steps are independent (Latin hypercube, fixed seed).

    Both spreads as in ``two_stages``; without any there is one scenario, of ones.
    """
    if not len(draft_spread) and not len(verify_spread):
        return np.ones((1, 2, 1))
    rng = np.random.default_rng(0)
    out = np.ones((NUM_SCENARIOS, 2, NUM_FACTORS))
    for i, spread in enumerate((draft_spread, verify_spread)):
        if len(spread):
            ranks = np.argsort(rng.random((NUM_SCENARIOS, NUM_FACTORS)), axis=0)
            levels = (ranks + 0.5) / NUM_SCENARIOS
            drawn = np.interp(levels * (len(spread) - 1), np.arange(len(spread)), spread)
            out[:, i] = drawn / drawn.mean(axis=0)
    return out


def two_stages(*, draft_s: float, verify_s: NDArray[np.float64], acceptance: AcceptanceModel, lookahead: int = 0,
               buffer_tokens: int = 16, blocking: bool = False, drafter_costs: Costs | None = None,
               target_costs: Costs | None = None, draft_spread: Sequence[float] = (),
               verify_spread: Sequence[float] = (), num_phases: int | None = None) -> Renewal:
    """Long-run throughput of a drafter and a target that run at once.

    Parameters
    ----------
    draft_s : mean seconds of a drafter's step
    verify_s : of a target's step with 0, 1, 2, … drafts; as many as ``max_window`` + 1
    draft_spread, verify_spread : step time / its mean at evenly spaced probabilities (0 … 1); empty = constant
    num_phases : points of the grid; more are slower and closer; None = 96, with random times 24

    >>> from pipespec_model.acceptance import IID
    >>> never = two_stages(draft_s=0.01, verify_s=np.full(5, 0.05), acceptance=IID(0.0))
    >>> round(never.tokens_per_s, 6), never.mean_acceptance_length  # the target never waits
    (20.0, 1.0)
    """
    max_window = len(verify_s) - 1
    for name, value, rule in (("draft_s", draft_s, draft_s > 0), ("verify_s", verify_s, max_window >= 1),
                              ("lookahead", lookahead, 0 <= lookahead <= min(max_window, buffer_tokens)),
                              ("buffer_tokens", buffer_tokens, buffer_tokens >= 1)):
        if not rule:
            raise InputError(name, "is out of range", value)
    a, b = drafter_costs or Costs(), target_costs or Costs()
    times = np.array([draft_s, a.turnaround_s, a.rollback_s, b.turnaround_s, a.handover_s, b.handover_s])
    scaled = factors(draft_spread, verify_spread)
    points = num_phases or (NUM_PHASES_RANDOM if len(scaled) > 1 else NUM_PHASES)
    found = long_run(
        blocking, np.rint(times * NS).astype(np.int64), np.rint(np.asarray(verify_s) * NS).astype(np.int64), lookahead,
        buffer_tokens, survival_rates(acceptance), scaled, points)
    tokens, ns, square, drafter_ns, target_ns, drafts, emitted, waiting = found
    steps = emitted.sum()
    return Renewal(
        tokens_per_s=tokens / ns * NS, mean_acceptance_length=float(tokens / steps),
        emitted=emitted / steps, waiting_drafts=waiting / steps,
        starved_probability=float(1 - waiting[-1] / steps),
        busy=(drafter_ns / ns, target_ns / ns),
        wasted=max(0.0, float(1 - (tokens - steps) / drafts)) if drafts else 0.0,
        seconds_sd=float(np.sqrt(max(square, 0.0) / tokens)) / NS)


def renewal(pipeline: PipelineSpec, profile: Profile, *, context: int = 0, spread: bool = False) -> Renewal:
    """The model for a pipelined pair; raises InputError naming what is outside its range.

    context : cache length at which step times are taken
    spread : integrate over their distributions; False = their means
    """
    if pipeline.strategy != "pipelined" or len(pipeline.stages) != 2 or pipeline.stages[0].drafter != "model":
        raise InputError(pipeline.label, "must be two stages, pipelined, with a model as drafter")
    pipeline.require_lookaheads()
    (drafter, target, link), = pairs(pipeline)
    return two_stages(
        draft_s=seconds_of(pipeline, profile, drafter, 1, context),
        verify_s=times_of(pipeline, profile, target, range(1, link.max_window + 2), context),
        acceptance=profile.pair(drafter, target), lookahead=link.lookahead, buffer_tokens=link.buffer_tokens,
        blocking=pipeline.handshake == "blocking", drafter_costs=profile.stage_costs(drafter, "pipelined"),
        target_costs=profile.stage_costs(target, "pipelined"),
        draft_spread=spread_of(profile.stage_latency(drafter).step, 1, context) if spread else (),
        verify_spread=spread_of(profile.stage_latency(target).step, 2, context) if spread else ())


def spread_of(model: LatencyModel, width: int, context: int) -> tuple[float, ...]:
    """Quantiles of a step's time over its mean at evenly spaced probabilities; empty where it is constant."""
    times = np.array([model.sample_s(width, context, level) for level in np.linspace(0, 1, 33)])
    return () if np.ptp(times) == 0 else tuple(times / model.mean_s(width, context))


def seconds_of(pipeline: PipelineSpec, profile: Profile, stage: StageSpec, width: int, context: int) -> float:
    """Mean time of a stage's step in a pipeline: disturbed as in calibration, beside or after the others."""
    return float(times_of(pipeline, profile, stage, (width,), context)[0])


def times_of(pipeline: PipelineSpec, profile: Profile, stage: StageSpec, widths: Sequence[int],
             context: int) -> NDArray[np.float64]:
    """``seconds_of`` for several widths."""
    key = profile.rate_key(stage)
    rate = 1.0
    if pipeline.strategy == "pipelined":
        rate = profile.rates(frozenset(profile.rate_key(other) for other in pipeline.stages))[key]
    elif pipeline.strategy == "speculative":
        rate = profile.turn_rate(pipeline.stages, stage)
    model, slower = profile.stage_latency(stage).step, profile.slowness_at(stage, None) / rate
    return np.array([model.mean_s(width, context) for width in widths]) * slower
