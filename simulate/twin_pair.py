"""Short ways through the compiled engine for what large sweeps are made of: constant times and independent drafts.

Each gives the figures of the event loop to the nanosecond and to the message, without its events.  They rest on this:
a made-up token of a drafter's is nobody else's, so a sequence is two numbers, its length and how far it is on the
target's path; and between two steps of the target, the drafter of an overlapped pipeline does the same thing over
and over, so that division says how often.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .twin_layout import EXCLUDED, World, spec_at, stage_at
from .twin_memory import compiled, number_at, word_at
from .twin_time import is_constant, step_seconds, to_ns
from .twin_tokens import ON_PATH, mix

BY_EVENTS, ALONE, CHAIN, PAIR = range(4)


@compiled
def way_of(w: World) -> int:
    """Which way a case may take."""
    for i in range(w.num_stages):
        spec = spec_at(w.specs, i)
        if not (is_constant(w.numbers, spec.step) and is_constant(w.numbers, spec.prefill)):
            return BY_EVENTS
    if w.num_eos or w.budget < 2 or w.num_stages > 2 or w.blocking:
        return BY_EVENTS
    if w.num_stages == 1:
        return ALONE
    independent = w.made_up and number_at(w.numbers, w.acceptance) == 1
    if not independent or spec_at(w.specs, 0).block:
        return BY_EVENTS
    if w.chain:
        return CHAIN
    return BY_EVENTS if w.num_rates or takes_time_between(w) else PAIR


@compiled
def takes_time_between(w: World) -> bool:
    """Whether there are seconds between steps; so there are, for what follows, where a step takes none."""
    found = False
    for i in range(2):
        spec = spec_at(w.specs, i)
        between = spec.start_ns + spec.turnaround_ns + spec.handover_ns > 0 or spec.rollback_s > 0
        shortest = min(constant_ns(w, i, False, False), constant_ns(w, i, True, False))
        found = found or between or shortest < 1
    return found


@compiled
def run_short(w: World, way: int) -> None:
    """Run the case and book its figures and counters, as the event loop and ``settle`` would."""
    if way == ALONE:
        run_alone(w)
    elif way == CHAIN:
        run_chain(w)
    else:
        run_pair(w)


@compiled
def constant_ns(w: World, i: int, prefill: bool, rolled_back: bool, after_another: bool = False) -> int:
    """A step's time; ``after_another``: another stage has computed since this one's last."""
    spec = spec_at(w.specs, i)
    seconds = step_seconds(w.numbers, spec.prefill if prefill else spec.step, 1, 0, 0.0)
    seconds *= number_at(w.slowness, i) / (spec.turn_rate if after_another else 1.0)
    return to_ns(seconds + (spec.rollback_s if rolled_back else 0.0))


@compiled
def threshold(w: World) -> Any:
    """A draft is agreed to where 53 random bits are below this: ``draw < rate`` without the division."""
    return np.uint64(np.ceil(number_at(w.numbers, w.acceptance + 1) * (1 << 53)))


@compiled
def agreed_until(state: Any, below: Any, start: int, end: int) -> int:
    """First position in [start, end) whose draft the target refuses, else ``end``."""
    position = start
    while position < end and mix(state, np.uint64(position)) >> np.uint64(11) < below:
        position += 1
    return position


# -- the target alone ---------------------------------------------------------------------------


@compiled
def run_alone(w: World) -> None:
    spec, s, n = spec_at(w.specs, 0), stage_at(w.stages, 0), w.budget
    prefill, step = constant_ns(w, 0, True, False), constant_ns(w, 0, False, False)
    w.first_token_ns = spec.start_ns + prefill
    w.now = w.first_token_ns + (n - 1) * (spec.turnaround_ns + step)
    s.busy_ns = prefill + (n - 1) * step
    s.length = s.steps = s.emitted = n
    w.num_events = 2 * n


# -- a chain of two -----------------------------------------------------------------------------


@compiled
def run_chain(w: World) -> None:
    """Rounds: the drafter drafts ``lookahead`` tokens, the target verifies them, and both hold the same again."""
    drafter, target = spec_at(w.specs, 0), spec_at(w.specs, 1)
    a, b = stage_at(w.stages, 0), stage_at(w.stages, 1)
    state, below = word_at(w.words, ON_PATH), threshold(w)
    step, budget, length = constant_ns(w, 0, False, False), w.budget, 0
    first_of_round = constant_ns(w, 0, False, False, True)
    first_after_cut = constant_ns(w, 0, False, True, True)
    verify, decode = constant_ns(w, 1, False, False, True), constant_ns(w, 1, False, False)
    next_draft, next_verify, turn = drafter.start_ns, target.start_ns, 0
    rolled_back = False
    while True:
        window = min(drafter.lookahead_down, budget - 1 - length)
        end = turn
        if window:
            first = first_after_cut if rolled_back else first_of_round
            if length == 0:
                first = constant_ns(w, 0, True, False)
            end = max(turn, next_draft) + first + (window - 1) * (step + drafter.turnaround_ns)
            next_draft = end + drafter.turnaround_ns
            rolled_back = False
            a.busy_ns += first + (window - 1) * step
        begin = max(end + target.handover_ns, next_verify)
        took = verify if window else decode
        if length == 0:
            took = constant_ns(w, 1, True, False, True)
        w.now = begin + took
        next_verify = w.now + target.turnaround_ns
        if length == 0:
            w.first_token_ns = w.now
        accepted = agreed_until(state, below, length, length + window) - length
        cut = window - accepted
        rolled_back = rolled_back or cut > 1
        length += accepted + 1
        a.steps += window
        a.cut += cut
        a.kept += accepted
        b.busy_ns += took
        b.proposed += window
        b.accepted += accepted
        b.rejected += cut > 0
        b.steps += 1
        if length >= budget:
            break
        turn = w.now + drafter.handover_ns
    a.drafted = a.emitted = a.steps
    b.length = b.emitted = budget
    # The last verdict is on its way when all is over, unless that takes no time.
    w.num_events = 2 * (a.steps + 3 * b.steps) - (drafter.handover_ns > 0)


# -- a pipeline of two --------------------------------------------------------------------------


@compiled
def run_pair(w: World) -> None:
    """An overlapped pipeline of two without seconds between steps.

    Each turn of the loop goes on to the end of the target's step, or, while that waits, of the drafter's: what the
    drafter did, what came of the target's step, what the target hears, whether it must wait.  Where both end a step
    at one instant, the drafter is first.  Of messages that wait the newest counts, and only the oldest can be stale.
    """
    a, b, drafter, target = stage_at(w.stages, 0), stage_at(w.stages, 1), spec_at(w.specs, 0), spec_at(w.specs, 1)
    state, below, budget = word_at(w.words, ON_PATH), threshold(w), w.budget
    draft_ns, verify_ns = constant_ns(w, 0, False, False), constant_ns(w, 1, False, False)
    prefill_ns, first_ns = constant_ns(w, 0, True, False), constant_ns(w, 1, True, False)
    # The drafter: tokens held, how many of them on the target's path, when its step ends; what it has heard of.
    held, path, ends, known, heard, drafting = 0, 0, prefill_ns, 0, 0, True
    # The target: its tokens and refusals; drafts that wait, how far they are right, what was said of them.
    now, length, refusals, busy, computing, window = 0, 0, 0, first_ns, True, 0
    waiting, right, final, acknowledged = 0, 0, False, 0
    # The newest message on its way to it.
    queued, end, end_path, start, is_final = 0, 0, 0, 0, False
    steps = messages = verdicts = kept = cut = stale = proposed = accepted = rejected = 0
    while True:
        now = now + busy if computing else ends if drafting else now
        came, old = queued, 0
        queued = 0
        if drafting and ends <= now:
            # The step under way; its message is made before a verdict that waits is heard.
            steps += 1
            path += path == held and agreed_until(state, below, held, held + 1) > held
            held += 1
            came, old = 1, int(heard < refusals)
            end, end_path, start, is_final = held, path, known, False
            if known < length:
                kept += max(0, min(path, length) - known)
                if path < length:
                    cut += held - path
                    held = path = length
                known, heard = length, refusals
            # The steps after it, all alike.
            room = min(budget - 1 - held, drafter.buffer_tokens - (held - known))
            more = min((now - ends) // draft_ns, room)
            if more > 0:
                if path == held:
                    path = agreed_until(state, below, held, held + more)
                held += more
                steps += more
                came += more
                end, end_path, start = held, path, known
            ends += (more + 1) * draft_ns
            drafting = more < room
            if held >= budget - 1:
                # Its last message says so, and replaces the one of its last step.
                end, end_path, start, is_final = held, path, known, True
            messages += came
        refused = False
        if computing:
            verdicts += 1
            good = max(0, min(window, right - length))
            refused = good < window
            proposed += window
            accepted += good
            rejected += refused
            refusals += refused
            waiting -= good + 1
            length += good + 1
            if length >= budget:
                break
            if refused or waiting < 0 or right < length:
                waiting = 0
        if refused:
            stale += came
        else:
            stale += old
            if came > old:
                waiting = end - length if end_path >= length else 0
                right, final, acknowledged = end_path, is_final, start
        if computing and not drafting:
            # A drafter that waits hears the verdict at once.
            kept += max(0, min(path, length) - known)
            if path < length:
                cut += held - path
                held = path = length
            known, heard = length, refusals
            drafting, ends = held < budget - 1, now + draft_ns
            if not drafting:
                queued, end, end_path, start, is_final = 1, held, path, known, True
                messages += 1
        wanted = min(target.lookahead_up, max(budget - 1 - length, 0))
        computing = waiting >= wanted or (final and acknowledged == length)
        window, busy = min(waiting, budget - length - 1, target.max_window), verify_ns
        if not (computing or drafting or queued):
            w.problem = EXCLUDED
            break
    a.steps = a.drafted = a.emitted = steps
    # The last verdict, which the drafter hears of after the end.
    a.kept = kept + max(0, min(path, length) - known)
    a.cut = cut + held - path
    a.busy_ns = prefill_ns + (steps - 1) * draft_ns if steps else 0
    b.steps, b.proposed, b.accepted, b.rejected, b.stale = verdicts, proposed, accepted, rejected, stale
    b.length = b.emitted = length
    b.busy_ns = first_ns + (verdicts - 1) * verify_ns
    w.now, w.first_token_ns = now, first_ns
    w.num_events = 2 * (steps + messages + 2 * verdicts) + drafting
