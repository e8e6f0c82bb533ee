"""Two stages in seconds: a renewal-reward model of the pipelined strategy, both handshakes.

A refused draft throws everything after it away, so what happens next depends on one number alone: the
*phase*, the time from when the drafter can hear of the refusal until it may begin its next step.  From a
phase, and as long as drafts agree, all that follows is certain: step times are constants here.  So the
walk from one refusal to the next is a fixed sequence of verifications; at which of them it ends is a
matter of acceptance.  That gives, by phase, the mean tokens and seconds of a walk and the distribution of
the next phase: a Markov chain of walks, and long-run tokens over long-run seconds (the renewal-reward
theorem; Ross 1996, Stochastic Processes, 3.6 and 4.8).

Assumes: constant step times (a mean hides what spread does to waiting), contention as constant times of
stages that always compute together, acceptance along the target's path that is i.i.d., Markov or by hazard.
Includes: lookahead, finite buffer and window, time of a verification by its width, hand-over in both
directions, turnarounds, the cost of a rollback, the residual of the drafter's step, the bonus token under
both handshakes (pipespec_model.protocol has the rules).

Phases lie on a grid; one between two points is shared among them.  The error of that against the event
simulator is in docs/theory.md, and falls with ``num_phases``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .acceptance import IID, AcceptanceModel, Hazard, Markov
from .errors import InputError
from .profile import Costs, Profile, pairs
from .spec import PipelineSpec, StageSpec

NUM_PHASES = 96
MOST_TOKENS = 4096  # of a walk without a refusal; then it is taken for ended
NEGLIGIBLE = 1e-9  # probability that a walk is still going on
NS = 1_000_000_000

_NEVER = 2**62  # nanoseconds


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


def two_stages(*, draft_s: float, verify_s: NDArray[np.float64], acceptance: AcceptanceModel, lookahead: int = 0,
               buffer_tokens: int = 16, blocking: bool = False, drafter_costs: Costs | None = None,
               target_costs: Costs | None = None, num_phases: int = NUM_PHASES) -> Renewal:
    """Long-run throughput of a drafter and a target that run at once.

    Parameters
    ----------
    draft_s : seconds of a drafter's step
    verify_s : seconds of a target's step with 0, 1, 2, … drafts; as many as ``max_window`` + 1
    num_phases : points of the grid; more are slower and closer

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
    found = _stationary(
        blocking, np.rint(times * NS).astype(np.int64), np.rint(np.asarray(verify_s) * NS).astype(np.int64), lookahead,
        buffer_tokens, survival_rates(acceptance), num_phases)
    tokens, ns, square, drafter_ns, target_ns, drafts, emitted, waiting = found
    steps = emitted.sum()
    return Renewal(
        tokens_per_s=tokens / ns * NS, mean_acceptance_length=float(tokens / steps),
        emitted=emitted / steps, waiting_drafts=waiting / steps,
        starved_probability=float(1 - waiting[-1] / steps),
        busy=(drafter_ns / ns, target_ns / ns),
        wasted=max(0.0, float(1 - (tokens - steps) / drafts)) if drafts else 0.0,
        seconds_sd=float(np.sqrt(max(square, 0.0) / tokens)) / NS)


# -- compiled: integer nanoseconds, so that ties are exact -----------------------------------------------
# Kinds of walk: 0 after a plain refusal, 1 after one that costs a rollback; 2 and 3 the same two after a
# plain step of a published pipeline, at whose position no draft was compared.


@njit(cache=True)
def _draft(start, drafted, first_extra, before, seen_by, room, times, arrive):
    """Run the drafter's steps that begin before one instant and are seen by the target by another, ``room`` at
    most; returns where it then stands."""
    draft, turn, _, _, _, to_target = times
    steps = 0
    while start < before and steps < room and drafted < len(arrive):
        end = start + draft + first_extra
        if end + to_target > seen_by:
            break
        first_extra = 0
        arrive[drafted] = end + to_target
        drafted += 1
        steps += 1
        start = end + turn
    return start, drafted, first_extra, steps


@njit(cache=True)
def _hear(start, drafted, first_extra, known, heard, buffer, times, arrive):
    """Up to the instant at which the drafter can hear of the target's step.

    Returns where it then stands, steps taken, and when it answers (published handshake)."""
    turn, to_drafter = times[1], times[4]
    # Without a delay, a drafter that decides at that very instant decides first.
    before = heard + (to_drafter == 0)
    start, drafted, first_extra, steps = _draft(start, drafted, first_extra, before, _NEVER,
                                                buffer - (drafted - known), times, arrive)
    start = max(start, heard)  # without room it waits
    return start, drafted, first_extra, steps, (start - turn if start - heard >= turn else start)


@njit(cache=True)
def _book(probability, tokens, ns, phase, kind, drafter_ns, target_ns, drafts, row, period, num_phases, kernel, sums):
    """One way for a walk to end."""
    at = phase / period * (num_phases - 1)
    low = min(int(at), num_phases - 2)
    share = at - low
    kernel[row, kind * num_phases + low] += probability * (1.0 - share)
    kernel[row, kind * num_phases + low + 1] += probability * share
    sums[row, 0] += probability * tokens
    sums[row, 1] += probability * ns
    sums[row, 2] += probability * tokens * tokens
    sums[row, 3] += probability * tokens * ns
    sums[row, 4] += probability * ns * ns
    sums[row, 5] += probability * drafter_ns
    sums[row, 6] += probability * target_ns
    sums[row, 7] += probability * drafts


@njit(cache=True)
def _walk(blocking, phase, kind, times, verify, lookahead, buffer, rates, row, num_phases, kernel, sums, emitted,
          waiting, arrive):
    """From one refusal, at time 0 with nothing drafted, to every way in which the next one can come."""
    draft, turn, rollback, target_turn, to_drafter, to_target = times
    period = draft + turn
    last = len(rates) - 1
    mass = np.zeros(last + 1)
    if kind >= 2:  # one position lies between the refusal and here that no draft was compared at
        mass[0] = 1.0 - rates[0]
        mass[min(1, last)] += rates[0]
    else:
        mass[0] = 1.0
    extra = rollback if kind % 2 else 0
    rollback_ns = extra
    start = to_drafter + phase
    answer = start - turn if turn <= phase else start
    ready = max(target_turn, answer + to_target) if blocking else target_turn
    held = known = drafted = steps = 0
    target_ns = 0
    missing = False  # published: the drafter has still to draft the bonus position itself
    while True:
        alive = mass.sum()
        # When the target begins, and with how many drafts.
        begin = ready
        if lookahead or missing:
            # What must be there; room for it there is, as lookahead <= buffer.
            needed = held + lookahead
            start, drafted, extra, more = _draft(start, drafted, extra, _NEVER, _NEVER, needed - drafted, times, arrive)
            steps += more
            begin = max(begin, arrive[needed - 1])
        start, drafted, extra, more = _draft(start, drafted, extra, _NEVER, begin, buffer - (drafted - known), times,
                                             arrive)
        steps += more
        window = 0
        while window < len(verify) - 1 and held + window < drafted and arrive[held + window] <= begin:
            window += 1
        if missing:
            # Had the drafter been wrong there, the target would now take a plain step.
            dying = 0.0
            survivors = np.zeros(last + 1)
            for i in range(last + 1):
                dying += mass[i] * (1.0 - rates[i])
                survivors[min(i + 1, last)] += mass[i] * rates[i]
            mass = survivors
            if dying > 0.0:
                end = begin + verify[0]
                heard = end + to_drafter
                # What this writes, the main line writes again.
                later, ahead, _, extra_steps, _ = _hear(start, drafted, extra, known, heard, buffer, times, arrive)
                emitted[row, 0] += dying
                waiting[row, 0] += dying
                _book(dying, held + 1, end, later - heard, 2 + (ahead - held >= 1), (steps + extra_steps) * draft
                      + rollback_ns, target_ns + verify[0], steps + extra_steps, row, period, num_phases, kernel, sums)
            alive -= dying
            missing = False
        end = begin + verify[window]
        target_ns += verify[window]
        heard = end + to_drafter
        start, drafted, extra, more, answer = _hear(start, drafted, extra, known, heard, buffer, times, arrive)
        steps += more
        drafter_ns = steps * draft + rollback_ns
        waiting[row, window] += alive
        for i in range(window + 1):
            position = held + i
            if i == window:
                emitted[row, window] += mass.sum()
                if drafted <= position:
                    break  # the bonus position was not drafted
            survivors = np.zeros(last + 1)
            dying = 0.0
            for j in range(last + 1):
                dying += mass[j] * (1.0 - rates[j])
                survivors[min(j + 1, last)] += mass[j] * rates[j]
            mass = survivors
            if i < window:
                emitted[row, i] += dying
            if dying > 0.0:
                _book(dying, position + 1, end, start - heard, int(drafted - position >= 2), drafter_ns, target_ns,
                      steps, row, period, num_phases, kernel, sums)
        held += window + 1
        if drafted < held:
            if blocking:
                missing = True
            else:  # given the bonus token; nobody compared it
                survivors = np.zeros(last + 1)
                for j in range(last + 1):
                    survivors[min(j + 1, last)] += mass[j] * rates[j]
                    survivors[0] += mass[j] * (1.0 - rates[j])
                mass = survivors
                drafted = held
        known = held
        ready = end + target_turn
        if blocking:
            ready = max(ready, answer + to_target)
        if mass.sum() < NEGLIGIBLE or held + buffer + len(verify) >= len(arrive):
            _book(mass.sum(), held, end, start - heard, 0, drafter_ns, target_ns, steps, row, period, num_phases,
                  kernel, sums)
            return


@njit(cache=True)
def _stationary(blocking, times, verify, lookahead, buffer, rates, num_phases):
    """Walk from every phase, then weigh them by how often a walk begins there."""
    size = (4 if blocking else 2) * num_phases
    kernel = np.zeros((size, size))
    sums = np.zeros((size, 8))
    emitted = np.zeros((size, len(verify)))
    waiting = np.zeros((size, len(verify)))
    arrive = np.zeros(MOST_TOKENS + 2 * (buffer + len(verify)), dtype=np.int64)
    known = np.zeros(size, dtype=np.bool_)
    weight = np.zeros(size)
    weight[0] = 1.0
    period = times[0] + times[1]
    for _ in range(500):
        for row in range(size):
            if weight[row] > 1e-12 and not known[row]:
                known[row] = True
                phase = np.int64(round(period * (row % num_phases) / (num_phases - 1)))
                _walk(blocking, phase, row // num_phases, times, verify, lookahead, buffer, rates, row, num_phases,
                      kernel, sums, emitted, waiting, arrive)
        after = 0.5 * (weight + weight @ kernel)  # half a step: a chain that turns in a circle settles too
        change = np.abs(after - weight).sum()
        weight = after / after.sum()
        if change < 1e-9:
            break
    total = weight @ sums
    tokens, ns = total[0], total[1]
    pace = ns / tokens
    square = total[4] - 2 * pace * total[3] + pace * pace * total[2]
    return tokens, ns, square, total[5], total[6], total[7], weight @ emitted, weight @ waiting


# -- from a spec and a profile ----------------------------------------------------------------------------


def renewal(pipeline: PipelineSpec, profile: Profile, *, context: int = 0) -> Renewal:
    """The model for a pipelined pair; raises InputError naming what is outside its range.

    context : cache length at which step times are taken
    """
    if pipeline.strategy != "pipelined" or len(pipeline.stages) != 2 or pipeline.stages[0].drafter != "model":
        raise InputError(pipeline.label, "must be two stages, pipelined, with a model as drafter")
    pipeline.require_lookaheads()
    (drafter, target, link), = pairs(pipeline)
    return two_stages(
        draft_s=seconds_of(pipeline, profile, drafter, 1, context),
        verify_s=np.array([seconds_of(pipeline, profile, target, w + 1, context) for w in range(link.max_window + 1)]),
        acceptance=profile.pair(drafter, target), lookahead=link.lookahead, buffer_tokens=link.buffer_tokens,
        blocking=pipeline.handshake == "blocking", drafter_costs=profile.stage_costs(drafter, "pipelined"),
        target_costs=profile.stage_costs(target, "pipelined"))


def seconds_of(pipeline: PipelineSpec, profile: Profile, stage: StageSpec, width: int, context: int) -> float:
    """Mean time of a stage's step in a pipeline: disturbed as in calibration, beside the others or, in a chain, the
    first after another one's."""
    key = profile.rate_key(stage)
    rate = 1.0
    if pipeline.strategy == "pipelined":
        rate = profile.rates(frozenset(profile.rate_key(other) for other in pipeline.stages))[key]
    elif pipeline.strategy == "speculative":
        rate = profile.turn_rate(pipeline.stages, stage)
    return profile.stage_latency(stage).step.mean_s(width, context) * profile.slowness_at(stage, None) / rate
