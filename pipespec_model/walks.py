"""The compiled part of decomposition.py: a verifier's walks over the paths of a drafter, from refusal to refusal.

Times are float nanoseconds, counted from the refusal.  A drafter is a tuple of arrays ``[path, token]``: end_ns,
step_ns and refused of its paths, end_ns and step_ns of those that are astray (decomposition._Paths).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .survival import compare, pass_by

NUM_PHASES = 6
PATHS_A_PHASE = 8  # each phase takes others: together they are all
NEGLIGIBLE = 1e-3  # probability that a walk is still going on; then it is taken for ended
MOST_TOKENS = 1024  # of a walk without a refusal; then likewise


@njit(cache=True)
def _next(paths, number, made, wrong):
    """Time from the drafter's token before to number ``made``, and of its step; astray after token ``wrong``."""
    line, steps, refused, astray, astray_steps = paths
    most = line.shape[1]
    # Astray after a refusal of its own it begins anew; else its next token comes as it would have.
    if made > wrong + 1 or (made > wrong and wrong < most and refused[number, wrong]):
        made -= wrong + 1
        number %= len(astray)
        line, steps = astray, astray_steps
    if made >= most:
        return line[number, most - 1] / most, steps[number, most - 1]
    return line[number, made] - (line[number, made - 1] if made else 0.0), steps[number, made]


@njit(cache=True)
def _coming(paths, number, state, wrong):
    """The drafter's next token: when it is made, when it would be had there always been room, its step's duration.

    number : of its path; state : as in _verification
    """
    made_at, paced, made, _, full = state
    refused = paths[2]
    gap, step = _next(paths, number, made, wrong)
    if made > wrong or (0 < made <= refused.shape[1] and refused[number, made - 1]):
        paced = max(paced, made_at)  # what was there when it had no room went into one step
    return max(paced + gap, made_at + step * full), paced + gap, step


@njit(cache=True)
def _verification(paths, number, wrong, state, ready, held, known, costs, verify, lookahead, buffer, arrive):
    """One step of the verifier and what the drafter does until it hears of it.

    state : when the drafter's last token was made, and would have been had there been room; tokens made since it
        began; position of its next; whether it waits for room
    costs : hand-over to the drafter and to the verifier, the drafter's rollback and turnaround
    """
    to_drafter, to_verifier = costs[0], costs[1]
    made_at, paced, made, drafted, full = state
    begin = ready
    if 0 < lookahead <= drafted - held:  # made, perhaps on its way
        begin = max(begin, arrive[held + lookahead - 1])
    while drafted - known < buffer:
        at, ahead, _ = _coming(paths, number, (made_at, paced, made, drafted, full), wrong)
        if at + to_verifier > begin and drafted - held >= lookahead:
            break
        made_at, paced, full = at, ahead, False
        arrive[drafted] = at + to_verifier
        made += 1
        drafted += 1
        if drafted - held <= lookahead:
            begin = max(begin, at + to_verifier)
    window = 0
    while window < len(verify) - 1 and held + window < drafted and arrive[held + window] <= begin:
        window += 1
    end = begin + verify[window]
    heard = end + to_drafter
    left = 0.0  # of the step in which the drafter is when it can hear
    while drafted - known < buffer and made_at < heard:
        at, ahead, step = _coming(paths, number, (made_at, paced, made, drafted, full), wrong)
        if at - step * 1.000001 > heard:
            break  # it waits, and hears at once
        made_at, paced, full = at, ahead, False
        arrive[drafted] = at + to_verifier
        made += 1
        drafted += 1
        if at >= heard:
            left = at - heard + costs[3]
    if drafted - known >= buffer and made_at <= heard:
        made_at, full = heard, True
        if len(paths[0]) == 1:
            paced = heard  # those before it, if there are any, went on
    return window, end, left, (made_at, paced, made, drafted, full)


@njit(cache=True)
def _adopt(paths, number, state, held, heard, agrees):
    """Let a drafter take a bonus token that it had not drafted; returns its path and state.

    Where the stages before it do not hold the same token there, ``agrees`` or the path says, they begin anew.
    """
    made_at, paced, made, _, full = state
    if len(paths[0]) == 1 or full:
        return number, (made_at, paced, made, held, full)
    if agrees and made < paths[0].shape[1] and not paths[2][number, made]:
        # It has this token already, in what it is about to verify.
        gap, _ = _next(paths, number, made, 1 << 30)
        return number, (max(made_at, paced + gap), paced + gap, made + 1, held, False)
    begins = max(heard, made_at)
    return (number + 1) % len(paths[0]), (begins, begins, 0, held, False)


@njit(cache=True)
def _run_length(rates, draw):
    """Agreements before the next disagreement."""
    reach, length, last = 1.0, 0, len(rates) - 1
    while length < MOST_TOKENS:
        reach *= rates[min(length, last)]
        if draw >= reach:
            return length
        length += 1
    return length


@njit(cache=True)
def draw(paths, costs, turnaround, verify, lookahead, buffer, rates, draws, out, out_steps, out_refused):
    """Fill paths of drafter and verifier together, one after the other so that the phase carries over."""
    num_paths, most = out.shape
    arrive = np.zeros(2 * MOST_TOKENS + 2 * buffer + len(verify))
    phase = 0.0
    for row in range(num_paths):
        base, written, ready, used = 0.0, 0, 0.0, 0
        while written < most:
            number = min(int(draws[row, used % draws.shape[1]] * len(paths[0])), len(paths[0]) - 1)
            wrong_at = _run_length(rates, draws[row, (used + 1) % draws.shape[1]])
            used += 2
            begins = costs[0] + phase + costs[2]
            state = (begins, begins, 0, 0, False)
            held = known = 0
            while True:
                window, end, left, state = _verification(
                    paths, number, state[2] + wrong_at - state[3], state, ready, held, known, costs, verify, lookahead,
                    buffer, arrive)
                refused = wrong_at - held < window or (wrong_at - held == window and state[3] > wrong_at)
                emitted = min(wrong_at - held, window) + 1
                for token in range(written, min(written + emitted, most)):
                    out[row, token] = base + end
                    out_steps[row, token] = verify[window] - turnaround
                    out_refused[row, token] = refused and token == written + emitted - 1
                written += emitted
                held += emitted
                known = held
                if refused or held > MOST_TOKENS:
                    break
                if state[3] < held:  # given the bonus token; nobody compared it
                    number, state = _adopt(paths, number, state, held, end + costs[0], wrong_at >= held)
                    if wrong_at < held:
                        wrong_at = held + _run_length(rates, draws[row, used % draws.shape[1]])
                        used += 1
                ready = end
            phase = left
            base += end
            ready = 0.0


@njit(cache=True)
def _book(ended, kernel, phase, span, probability, tokens, ns):
    ended[0] += probability * tokens
    ended[1] += probability * ns
    at = min(phase / span, 1.0) * (len(kernel) - 1)
    low = min(int(at), len(kernel) - 2)
    kernel[low] += probability * (1.0 - (at - low))
    kernel[low + 1] += probability * (at - low)


@njit(cache=True)
def _walk(paths, number, phase, costs, verify, lookahead, buffer, rates, weight, span, ended, kernel):
    """From one refusal of the target, at time 0, to every way in which the next one can come.

    ended : sums of probability times tokens, nanoseconds, steps; kernel : probability of the next phase
    """
    mass = np.zeros(len(rates))
    mass[0] = weight
    arrive = np.zeros(MOST_TOKENS + 2 * buffer + len(verify))
    other = np.zeros(len(arrive))
    begins = costs[0] + phase + costs[2]
    state = (begins, begins, 0, 0, False)
    held = known = 0
    ready = 0.0
    while True:
        window, end, left, after = _verification(paths, number, 1 << 30, state, ready, held, known, costs, verify,
                                                 lookahead, buffer, arrive)
        position = held
        # Where is the first draft that it refuses?  Those after it may have come at another pace.
        while position <= held + max(window, lookahead):
            for i in range(held, state[3]):
                other[i] = arrive[i]
            its_window, its_end, its_left, its_after = _verification(
                paths, number, state[2] + position - state[3], state, ready, held, known, costs, verify, lookahead,
                buffer, other)
            if position - held > its_window or (position - held == its_window and its_after[3] <= position):
                break  # not seen, or nobody drafted the bonus position
            dying = compare(mass, rates)
            _book(ended, kernel, its_left, span, dying, position + 1, its_end)
            ended[2] += dying
            position += 1
        ended[2] += mass.sum()
        held = max(position, held + window + 1)
        state = after
        if state[3] < held:
            agrees = 0.618034 * (number + held) % 1.0 * mass.sum() < (mass * rates).sum()
            pass_by(mass, rates)
            number, state = _adopt(paths, number, state, held, end + costs[0], agrees)
        known = held
        ready = end
        if mass.sum() < weight * NEGLIGIBLE or held >= MOST_TOKENS:
            _book(ended, kernel, left, span, mass.sum(), held, end)
            return


@njit(cache=True)
def throughput(paths, costs, verify, lookahead, buffer, rates):
    """Tokens, nanoseconds and steps of the mean walk, over paths and phases."""
    span = paths[1].max() + costs[3]
    number = len(paths[0])
    kernel = np.zeros((NUM_PHASES, NUM_PHASES))
    ended = np.zeros((NUM_PHASES, 3))
    taken = min(number, PATHS_A_PHASE)
    for i in range(NUM_PHASES):
        for j in range(taken):
            path = (i + j * number // taken) % number
            _walk(paths, path, span * i / (NUM_PHASES - 1), costs, verify, lookahead, buffer, rates, 1.0 / taken, span,
                  ended[i], kernel[i])
    weight = np.full(NUM_PHASES, 1.0 / NUM_PHASES)
    for _ in range(200):
        weight = 0.5 * (weight + weight @ kernel)
    return weight @ ended
