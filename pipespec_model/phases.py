"""The compiled part of renewal.py: two stages' walks from refusal to refusal, and the chain of their phases.

Integer nanoseconds, so that ties are exact.  A drafter is a tuple: when it may begin its next step, tokens drafted
since the refusal, what its next step takes more (a rollback), steps taken, and nanoseconds spent in them.

Step times may be random: then each walk is taken over several *scenarios*, sequences of factors on the step times
(renewal.factors), and every way to end counts with its share.

Kinds of walk: 0 after a plain refusal, 1 after one that costs a rollback; 2 and 3 the same two after a plain step
of a published pipeline, at whose position no draft was compared.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .survival import compare, pass_by

MOST_TOKENS = 4096  # of a walk without a refusal; then it is taken for ended
NEGLIGIBLE = 1e-9  # probability that a walk is still going on
RESTART = 1e-9  # keeps the chain's equations regular where it has several closed classes
NEVER = 2**62  # nanoseconds


@njit(cache=True)
def _draft(drafter, before, seen_by, room, link, factors, arrive):
    """Take the drafter's steps that begin before one instant and are seen by the target by another, ``room`` at
    most."""
    draft, turn, to_target = link[0], link[1], link[5]
    start, drafted, extra, steps, spent = drafter
    most = min(drafted + room, len(arrive))
    while start < before and drafted < most:
        step = np.int64(round(draft * factors[drafted % len(factors)])) + extra
        end = start + step
        if end + to_target > seen_by:
            break
        extra = 0
        arrive[drafted] = end + to_target
        drafted += 1
        steps += 1
        spent += step
        start = end + turn
    return start, drafted, extra, steps, spent


@njit(cache=True)
def _hear(drafter, known, heard, buffer, link, factors, arrive):
    """Up to the instant at which the drafter can hear of the target's step; and when it answers (published
    handshake)."""
    turn, to_drafter = link[1], link[4]
    # Without a delay, a drafter that decides at that very instant decides first.
    before = heard + (to_drafter == 0)
    start, drafted, extra, steps, spent = _draft(drafter, before, NEVER, buffer - (drafter[1] - known), link, factors,
                                                 arrive)
    start = max(start, heard)  # without room it waits
    return (start, drafted, extra, steps, spent), (start - turn if start - heard >= turn else start)


@njit(cache=True)
def _book(probability, tokens, ns, after, use, row, tables):
    """One way for a walk to end.

    after : phase and kind of the next walk; use : nanoseconds of drafter and target, drafts
    """
    phase, kind = after
    kernel, sums, _, _, span, num_phases = tables
    at = phase / span * (num_phases - 1)
    low = min(int(at), num_phases - 2)
    share = at - low
    kernel[row, kind * num_phases + low] += probability * (1.0 - share)
    kernel[row, kind * num_phases + low + 1] += probability * share
    sums[row, 0] += probability * tokens
    sums[row, 1] += probability * ns
    sums[row, 2] += probability * tokens * tokens
    sums[row, 3] += probability * tokens * ns
    sums[row, 4] += probability * ns * ns
    for i in range(3):
        sums[row, 5 + i] += probability * use[i]


@njit(cache=True)
def _walk(blocking, phase, kind, link, verify, lookahead, buffer, rates, mass, factors, row, tables, arrive):
    """From one refusal, at time 0 with nothing drafted, to every way in which the next one can come.

    mass : probability of this walk, by agreements in a row before it (survival.py); used up
    factors : on the drafter's and the target's step times, ``[2, step]``
    """
    _, turn, rollback, target_turn, to_drafter, to_target = link
    emitted, waiting = tables[2], tables[3]
    draft_factors, verify_factors = factors
    if kind >= 2:  # one position lies between the refusal and here that no draft was compared at
        pass_by(mass, rates)
    start = to_drafter + phase
    answer = start - turn if turn <= phase else start
    drafter = (start, 0, rollback if kind % 2 else 0, 0, 0)
    ready = max(target_turn, answer + to_target) if blocking else target_turn
    held = known = number = 0
    target_ns = np.int64(0)
    missing = False  # published: the drafter has still to draft the bonus position itself
    while True:
        # When the target begins, and with how many drafts.
        begin = ready
        if lookahead or missing:
            # What must be there; room for it there is, as lookahead <= buffer.
            needed = held + lookahead
            drafter = _draft(drafter, NEVER, NEVER, needed - drafter[1], link, draft_factors, arrive)
            begin = max(begin, arrive[needed - 1])
        drafter = _draft(drafter, NEVER, begin, buffer - (drafter[1] - known), link, draft_factors, arrive)
        window = 0
        while window < len(verify) - 1 and held + window < drafter[1] and arrive[held + window] <= begin:
            window += 1
        factor = verify_factors[number % len(verify_factors)]
        number += 1
        if missing:
            # Had the drafter been wrong there, the target would now take a plain step.
            dying = compare(mass, rates)
            if dying > 0.0:
                plain = np.int64(round(verify[0] * factor))
                heard = begin + plain + to_drafter
                # What this writes, the main line writes again.
                later, _ = _hear(drafter, known, heard, buffer, link, draft_factors, arrive)
                emitted[row, 0] += dying
                waiting[row, 0] += dying
                _book(dying, held + 1, begin + plain, (later[0] - heard, 2 + (later[1] - held >= 1)),
                      (later[4], target_ns + plain, later[3]), row, tables)
            missing = False
        step = np.int64(round(verify[window] * factor))
        end = begin + step
        target_ns += step
        heard = end + to_drafter
        drafter, answer = _hear(drafter, known, heard, buffer, link, draft_factors, arrive)
        left, drafted = drafter[0] - heard, drafter[1]
        use = (drafter[4], target_ns, drafter[3])
        waiting[row, window] += mass.sum()
        for i in range(window + 1):
            position = held + i
            if i == window:
                emitted[row, window] += mass.sum()
                if drafted <= position:
                    break  # the bonus position was not drafted
            dying = compare(mass, rates)
            if i < window:
                emitted[row, i] += dying
            if dying > 0.0:
                _book(dying, position + 1, end, (left, int(drafted - position >= 2)), use, row, tables)
        held += window + 1
        if drafted < held:
            if blocking:
                missing = True
            else:  # given the bonus token; nobody compared it
                pass_by(mass, rates)
                drafter = (drafter[0], held, drafter[2], drafter[3], drafter[4])
        known = held
        ready = end + target_turn
        if blocking:
            ready = max(ready, answer + to_target)
        if mass.sum() < NEGLIGIBLE or held + buffer + len(verify) >= len(arrive):
            _book(mass.sum(), held, end, (left, 0), use, row, tables)
            return


@njit(cache=True)
def long_run(blocking, link, verify, lookahead, buffer, rates, factors, num_phases):
    """Walk from every phase that can occur, then weigh them by how often a walk begins there.

    link : nanoseconds of a draft step, the drafter's turnaround and rollback, the target's turnaround, hand-over to
        drafter and target
    verify : nanoseconds with 0, 1, 2, … drafts
    factors : on step times, ``[scenario, drafter or target, step]``

    Returns
    -------
    Of the mean walk: tokens, ns, (ns - pace tokens)², drafter's ns, target's ns, drafts, and its target steps by
    tokens emitted and by drafts waiting.
    """
    size = (4 if blocking else 2) * num_phases
    kernel = np.zeros((size, size))
    sums = np.zeros((size, 8))
    emitted, waiting = np.zeros((size, len(verify))), np.zeros((size, len(verify)))
    arrive = np.zeros(MOST_TOKENS + 2 * (buffer + len(verify)), dtype=np.int64)
    span = link[0] * factors[:, 0].max() + link[1]
    tables = (kernel, sums, emitted, waiting, span, num_phases)
    mass = np.zeros(len(rates))
    len_factors = factors.shape[2]
    turned = np.empty((2, len_factors))
    rows = np.zeros(size, dtype=np.int64)  # in the order in which they were reached
    place = np.full(size, -1)
    place[0], found, done = 0, 1, 0
    while done < found:
        row = rows[done]
        phase = np.int64(round(span * (row % num_phases) / (num_phases - 1)))
        for scenario in range(len(factors)):
            # Other combinations of the same factors for other phases: their errors cancel.
            for i in range(len_factors):
                turned[:, i] = factors[scenario, :, (i + 5 * done) % len_factors]
            mass[:] = 0.0
            mass[0] = 1.0 / len(factors)
            _walk(blocking, phase, row // num_phases, link, verify, lookahead, buffer, rates, mass, turned, row, tables,
                  arrive)
        for column in range(size):
            if kernel[row, column] > 0.0 and place[column] < 0:
                place[column] = found
                rows[found] = column
                found += 1
        done += 1
    rows = rows[:found]
    equations = np.eye(found)
    for i in range(found):
        for j in range(found):
            equations[j, i] -= (1.0 - RESTART) * kernel[rows[i], rows[j]]
    begins = np.zeros(found)
    begins[0] = RESTART
    weight = np.linalg.solve(equations, begins)
    weight /= weight.sum()
    total = weight @ sums[rows]
    pace = total[1] / total[0]
    square = total[4] - 2 * pace * total[3] + pace * pace * total[2]
    return (total[0], total[1], square, total[5], total[6], total[7], weight @ emitted[rows], weight @ waiting[rows])
