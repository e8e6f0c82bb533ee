"""The event loop of the compiled engine: ``simulate.engine.PromptRun`` with SimPy's order of events.

SimPy runs events by time, then priority, then the order in which they were scheduled.  A stage's process waits for one
thing at a time, so its next event is a field of its record; messages to one stage arrive in the order in which they
were sent, so only the first of each direction counts; and one that takes no time arrives before anything else happens.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .twin_layout import (
    ARRIVE,
    COMPUTED,
    COMPUTING,
    DRAFTS,
    END,
    ENDED,
    NEVER,
    PREFILL,
    READY,
    SEND_DOWN,
    SEND_UP,
    VERDICTS,
    WAIT,
    WOKEN,
    World,
)
from .twin_stage import finish, next_step, propose_ahead, receive, reconcile, tell_upstream
from .twin_time import is_constant, step_seconds, to_ns
from .twin_tokens import STEP_TIME, drawn, unit

ON_ARRIVAL, ON_RESUME = 0, 1  # priorities; a step's end has ON_RESUME + its stage


@njit
def run_prompt(w: World, logging: bool) -> None:
    """From the request to the end of the target's process."""
    clock, target = w.clock, w.plan.num_stages - 1
    while clock.problem == 0:
        best, due, priority, order = -1, NEVER, 0, 0
        for i in range(target + 1):
            s = w.stage[i]
            if s.due < due or (s.due == due and (s.priority, s.order) < (priority, order)):
                best, due, priority, order = i, s.due, s.priority, s.order
        sender = -1
        if clock.in_flight:
            best, sender, due = first_arrival(w, best, due, priority)
        if due == NEVER:
            break  # nothing can happen any more; SimPy would say so too
        clock.now = due
        if sender >= 0:
            arrive(w, best, sender, logging)
        elif w.stage[best].mode == COMPUTING:
            ring(w, best)
        elif w.stage[best].mode == ENDED:
            break
        else:
            resume(w, best, logging)


@njit
def first_arrival(w: World, best: int, due: int, priority: int) -> tuple[int, int, int]:
    """The message that arrives before the processes' first event, if any: receiver, direction or -1, time."""
    slots = w.message.shape[2] - 1
    found, order = -1, 0
    for i in range(w.plan.num_stages):
        for direction in range(2):
            q = w.queue[direction, i]
            if q.arrived < q.sent:
                m = w.message[direction, i, q.arrived % slots]
                earlier = m.due < due or (m.due == due and (found < 0 or m.order < order))
                if earlier:
                    best, found, due, order = i, direction, m.due, m.order
    return best, found, due


@njit
def schedule(w: World, i: int, delay: int, priority: int) -> None:
    s = w.stage[i]
    s.due = w.clock.now + delay
    s.priority = priority
    s.order = w.clock.order
    w.clock.order += 1


@njit
def note(w: World, logging: bool, i: int, what: int, position: int) -> None:
    if logging:
        if w.clock.num_events < len(w.log):
            row = w.log[w.clock.num_events]
            row[0], row[1], row[2], row[3] = w.clock.now, i, what, position
    w.clock.num_events += 1


# -- the stage loop -----------------------------------------------------------------------------


@njit
def resume(w: World, i: int, logging: bool) -> None:
    """One turn of a stage's process: what came of its step, its messages, its next step."""
    s = w.stage[i]
    if s.mode == COMPUTED:
        note(w, logging, i, END, s.position)
        finish(w, i)
        s.busy_ns += w.clock.now - s.started_ns
        if i == w.plan.num_stages - 1 and w.clock.first_token_ns < 0:
            w.clock.first_token_ns = w.clock.now
        s.ready = w.clock.now + w.spec[i].turnaround_ns
    if s.done:
        s.mode = ENDED
        send(w, i, logging)
        if i == w.plan.num_stages - 1:
            schedule(w, i, 0, ON_RESUME)
        else:
            s.due = NEVER
        deliver(w, i, logging)
        return
    receive(w, i, False)
    has_step = next_step(w, i)
    send(w, i, logging)
    if not has_step:
        s.mode, s.due = WAIT, NEVER
    elif w.clock.now < s.ready:
        s.mode = READY
        schedule(w, i, s.ready - w.clock.now, ON_RESUME)
    else:
        propose_ahead(w, i)
        note(w, logging, i, s.kind, s.position)
        s.mode, s.started_ns = COMPUTING, w.clock.now
        compute(w, i, work_ns(w, i))
    deliver(w, i, logging)


@njit
def work_ns(w: World, i: int) -> int:
    s, spec = w.stage[i], w.spec[i]
    width = s.num_proposed if spec.block else s.width
    place = spec.prefill if s.kind == PREFILL else spec.step
    draw = 0.0
    if w.plan.spread and not is_constant(w.numbers, place):
        draw = unit(drawn(w, i, STEP_TIME, s.num_steps))
    s.num_steps += 1
    seconds = step_seconds(w.numbers, place, width, s.context, draw)
    seconds *= w.slowness[i] / spec.turn_rate
    return to_ns(seconds + (spec.rollback_s if s.step_rolled_back else 0.0))


# -- steps that run at once ---------------------------------------------------------------------


@njit
def compute(w: World, i: int, work: int) -> None:
    """Begin a step: alone, it takes its work; in company, each at the rate that the set allows."""
    if w.plan.num_rates == 0:
        schedule(w, i, max(0, work), ON_RESUME + i)
        return
    advance(w)
    s = w.stage[i]
    s.work_left, s.rate = work, -1.0
    w.clock.computing |= 1 << i
    reschedule(w)


@njit
def ring(w: World, i: int) -> None:
    """A step's work is done: the others go on at their new rates, its process resumes."""
    s = w.stage[i]
    if w.plan.num_rates:
        advance(w)
        w.clock.computing &= ~(1 << i)
        reschedule(w)
    s.mode = COMPUTED
    schedule(w, i, 0, ON_RESUME)


@njit
def rate_of(w: World, i: int) -> float:
    return w.numbers[w.plan.rates + w.clock.computing * w.plan.num_stages + i]


@njit
def advance(w: World) -> None:
    elapsed = w.clock.now - w.clock.since
    if elapsed:
        for i in range(w.plan.num_stages):
            if w.clock.computing >> i & 1:
                w.stage[i].work_left -= elapsed * rate_of(w, i)
    w.clock.since = w.clock.now


@njit
def reschedule(w: World) -> None:
    for i in range(w.plan.num_stages):
        s = w.stage[i]
        if w.clock.computing >> i & 1 and s.rate != rate_of(w, i):
            s.rate = rate_of(w, i)
            schedule(w, i, max(0, int(np.rint(s.work_left / s.rate))), ON_RESUME + i)


# -- messages -----------------------------------------------------------------------------------


@njit
def send(w: World, i: int, logging: bool) -> None:
    """Put what the stage has to say on its way: verdicts first."""
    if i > 0:
        post(w, VERDICTS, i - 1, i, logging)
    if i < w.plan.num_stages - 1:
        post(w, DRAFTS, i + 1, i, logging)


@njit
def post(w: World, direction: int, receiver: int, sender: int, logging: bool) -> None:
    q = w.queue[direction, receiver]
    slots = w.message.shape[2] - 1
    while q.sent < q.tail:
        note(w, logging, sender, SEND_UP if direction == VERDICTS else SEND_DOWN, w.stage[sender].length)
        m = w.message[direction, receiver, q.sent % slots]
        m.due = w.clock.now + w.spec[receiver].handover_ns
        m.order = w.clock.order
        w.clock.order += 1
        w.clock.in_flight += 1
        q.sent += 1


@njit
def deliver(w: World, i: int, logging: bool) -> None:
    """What a stage has just sent and takes no time arrives before anything else happens."""
    if i > 0 and w.spec[i - 1].handover_ns == 0:
        while w.queue[VERDICTS, i - 1].arrived < w.queue[VERDICTS, i - 1].sent:
            arrive(w, i - 1, VERDICTS, logging)
    if i < w.plan.num_stages - 1 and w.spec[i + 1].handover_ns == 0:
        while w.queue[DRAFTS, i + 1].arrived < w.queue[DRAFTS, i + 1].sent:
            arrive(w, i + 1, DRAFTS, logging)


@njit
def arrive(w: World, receiver: int, direction: int, logging: bool) -> None:
    s = w.stage[receiver]
    w.queue[direction, receiver].arrived += 1
    w.clock.in_flight -= 1
    note(w, logging, receiver, ARRIVE, s.length)
    if s.mode == WAIT:
        s.mode = WOKEN
        schedule(w, receiver, 0, ON_RESUME)


@njit
def settle(w: World) -> None:
    """After the end: every message arrives, target first, and the counters are closed."""
    slots = w.message.shape[2] - 1
    for i in range(w.plan.num_stages - 1, -1, -1):
        s = w.stage[i]
        receive(w, i, True)
        if s.has_request:
            s.has_request = 0
            reconcile(w, i, slots)
            if i > 0:
                tell_upstream(w, i, 1, -1)
        if i > 0:
            q = w.queue[VERDICTS, i - 1]
            while q.sent < q.tail:
                w.message[VERDICTS, i - 1, q.sent % slots].order = w.clock.order
                w.clock.order += 1
                q.sent += 1
        if i < w.plan.num_stages - 1:
            s.undecided = max(0, s.length - s.booked_down)
