"""The event loop of the compiled engine: ``simulate.engine.PromptRun`` with SimPy's order of events.

SimPy runs events by time, then priority, then the order in which they were scheduled.  A stage's process waits for one
thing at a time, so its next event is a field of its record; messages to one stage arrive in the order in which they
were sent, so only the first of each direction counts; and one that takes no time arrives before anything else happens.
"""

from __future__ import annotations

import numpy as np

from .twin_layout import (
    ARRIVE,
    COMPUTED,
    COMPUTING,
    DRAFTS,
    END,
    ENDED,
    EXCLUDED,
    NEVER,
    PREFILL,
    READY,
    SEND_DOWN,
    SEND_UP,
    VERDICTS,
    WAIT,
    WOKEN,
    World,
    message_at,
    queue_at,
    spec_at,
    stage_at,
)
from .twin_memory import compiled, number_at, put_integer
from .twin_messages import receive, reconcile, slot_of, tell_upstream
from .twin_stage import finish, next_step, propose_ahead
from .twin_time import is_constant, step_seconds, to_ns
from .twin_tokens import STEP_TIME, drawn, unit

ON_ARRIVAL, ON_RESUME = 0, 1  # priorities; a step's end has ON_RESUME + its stage


@compiled
def run_prompt(w: World, logging: bool) -> None:
    """From the request to the end of the target's process."""
    target = w.num_stages - 1
    while w.problem == 0:
        best, due, priority, order = -1, NEVER, 0, 0
        for i in range(target + 1):
            s = stage_at(w.stages, i)
            if s.due < due or (s.due == due and (s.priority, s.order) < (priority, order)):
                best, due, priority, order = i, s.due, s.priority, s.order
        sender = -1
        if w.in_flight:
            best, sender, due = first_arrival(w, best, due, priority)
        if due == NEVER:
            w.problem = EXCLUDED  # nothing can happen any more
            break
        w.now = due
        if sender >= 0:
            arrive(w, best, sender, logging)
            continue
        mode = stage_at(w.stages, best).mode
        if mode == ENDED:
            break
        if mode == COMPUTING:
            ring(w, best)
            if not goes_first(w, best):
                continue
        resume(w, best, logging)


@compiled
def goes_first(w: World, i: int) -> bool:
    """Whether nothing stands between a step's end and what its process does then."""
    first = True
    for j in range(w.num_stages):
        s = stage_at(w.stages, j)
        first = first and (j == i or s.due != w.now or s.priority != ON_RESUME)
    return first


@compiled
def first_arrival(w: World, best: int, due: int, priority: int) -> tuple[int, int, int]:
    """The message that arrives before the processes' first event, if any: receiver, direction or -1, time."""
    found, order = -1, 0
    for i in range(w.num_stages):
        for direction in range(2):
            q = queue_at(w.queues, direction * w.num_stages + i)
            if q.arrived < q.sent:
                m = message_at(w.messages, slot_of(w, direction, i, q.arrived))
                earlier = m.due < due or (m.due == due and (found < 0 or m.order < order))
                if earlier:
                    best, found, due, order = i, direction, m.due, m.order
    return best, found, due


@compiled
def schedule(w: World, i: int, delay: int, priority: int) -> None:
    s = stage_at(w.stages, i)
    s.due = w.now + delay
    s.priority = priority
    s.order = w.order
    w.order += 1


@compiled
def note(w: World, logging: bool, i: int, what: int, position: int) -> None:
    if logging and w.num_events < w.log_size:
        row = w.log + 32 * w.num_events
        put_integer(row, 0, w.now)
        put_integer(row, 1, i)
        put_integer(row, 2, what)
        put_integer(row, 3, position)
    w.num_events += 1


# -- the stage loop -----------------------------------------------------------------------------


@compiled
def resume(w: World, i: int, logging: bool) -> None:
    """One turn of a stage's process: what came of its step, its messages, its next step."""
    s = stage_at(w.stages, i)
    if s.mode == COMPUTED:
        note(w, logging, i, END, s.position)
        finish(w, i)
        s.busy_ns += w.now - s.started_ns
        if i == w.num_stages - 1 and w.first_token_ns < 0:
            w.first_token_ns = w.now
        s.ready = w.now + spec_at(w.specs, i).turnaround_ns
    if s.done:
        s.mode = ENDED
        send(w, i, logging)
        if i == w.num_stages - 1:
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
    elif w.now < s.ready:
        s.mode = READY
        schedule(w, i, s.ready - w.now, ON_RESUME)
    else:
        propose_ahead(w, i)
        note(w, logging, i, s.kind, s.position)
        s.mode, s.started_ns = COMPUTING, w.now
        compute(w, i, work_ns(w, i))
    deliver(w, i, logging)


@compiled
def work_ns(w: World, i: int) -> int:
    s, spec = stage_at(w.stages, i), spec_at(w.specs, i)
    after_another = w.computed_last >= 0 and w.computed_last != i
    if not spec.block:
        w.computed_last = i
    usual = s.kind != PREFILL and not (s.step_rolled_back and spec.rollback_s > 0)
    if usual and s.usual_ns >= 0 and not (w.chain and after_another):
        s.num_steps += 1
        return s.usual_ns
    width = s.num_proposed if spec.block else s.width
    place = spec.prefill if s.kind == PREFILL else spec.step
    draw = 0.0
    if w.spread and not is_constant(w.numbers, place):
        draw = unit(drawn(w, i, STEP_TIME, s.num_steps))
    s.num_steps += 1
    seconds = step_seconds(w.numbers, place, width, s.context, draw)
    seconds *= number_at(w.slowness, i) / (spec.turn_rate if after_another else 1.0)
    return to_ns(seconds + (spec.rollback_s if s.step_rolled_back else 0.0))


# -- steps that run at once ---------------------------------------------------------------------


@compiled
def compute(w: World, i: int, work: int) -> None:
    """Begin a step: alone, it takes its work; in company, each at the rate that the set allows."""
    if w.num_rates == 0:
        schedule(w, i, max(0, work), ON_RESUME + i)
        return
    advance(w)
    s = stage_at(w.stages, i)
    s.work_left, s.rate = work, -1.0
    w.computing |= 1 << i
    reschedule(w)


@compiled
def ring(w: World, i: int) -> None:
    """A step's work is done: the others go on at their new rates, its process resumes."""
    s = stage_at(w.stages, i)
    if w.num_rates:
        advance(w)
        w.computing &= ~(1 << i)
        reschedule(w)
    s.mode = COMPUTED
    schedule(w, i, 0, ON_RESUME)


@compiled
def rate_of(w: World, i: int) -> float:
    return number_at(w.numbers, w.rates + w.computing * w.num_stages + i)


@compiled
def advance(w: World) -> None:
    elapsed = w.now - w.since
    if elapsed:
        for i in range(w.num_stages):
            if w.computing >> i & 1:
                stage_at(w.stages, i).work_left -= elapsed * rate_of(w, i)
    w.since = w.now


@compiled
def reschedule(w: World) -> None:
    for i in range(w.num_stages):
        s = stage_at(w.stages, i)
        if w.computing >> i & 1 and s.rate != rate_of(w, i):
            s.rate = rate_of(w, i)
            schedule(w, i, max(0, int(np.rint(s.work_left / s.rate))), ON_RESUME + i)


# -- messages -----------------------------------------------------------------------------------


@compiled
def send(w: World, i: int, logging: bool) -> None:
    """Put what the stage has to say on its way: verdicts first."""
    if i > 0:
        post(w, VERDICTS, i - 1, i, logging)
    if i < w.num_stages - 1:
        post(w, DRAFTS, i + 1, i, logging)


@compiled
def post(w: World, direction: int, receiver: int, sender: int, logging: bool) -> None:
    q = queue_at(w.queues, direction * w.num_stages + receiver)
    while q.sent < q.tail:
        note(w, logging, sender, SEND_UP if direction == VERDICTS else SEND_DOWN, stage_at(w.stages, sender).length)
        m = message_at(w.messages, slot_of(w, direction, receiver, q.sent))
        m.due = w.now + spec_at(w.specs, receiver).handover_ns
        m.order = w.order
        w.order += 1
        w.in_flight += 1
        q.sent += 1


@compiled
def deliver(w: World, i: int, logging: bool) -> None:
    """What a stage has just sent and takes no time arrives before anything else happens."""
    if i > 0 and spec_at(w.specs, i - 1).handover_ns == 0:
        q = queue_at(w.queues, VERDICTS * w.num_stages + i - 1)
        while q.arrived < q.sent:
            arrive(w, i - 1, VERDICTS, logging)
    if i < w.num_stages - 1 and spec_at(w.specs, i + 1).handover_ns == 0:
        q = queue_at(w.queues, DRAFTS * w.num_stages + i + 1)
        while q.arrived < q.sent:
            arrive(w, i + 1, DRAFTS, logging)


@compiled
def arrive(w: World, receiver: int, direction: int, logging: bool) -> None:
    s = stage_at(w.stages, receiver)
    queue_at(w.queues, direction * w.num_stages + receiver).arrived += 1
    w.in_flight -= 1
    note(w, logging, receiver, ARRIVE, s.length)
    if s.mode == WAIT:
        s.mode = WOKEN
        schedule(w, receiver, 0, ON_RESUME)


@compiled
def settle(w: World) -> None:
    """After the end: every message arrives, target first, and the counters are closed."""
    for i in range(w.num_stages - 1, -1, -1):
        s = stage_at(w.stages, i)
        receive(w, i, True)
        if s.has_request:
            s.has_request = 0
            reconcile(w, i, slot_of(w, VERDICTS, i, -1))
            if i > 0:
                tell_upstream(w, i, 1, -1)
        if i > 0:
            q = queue_at(w.queues, VERDICTS * w.num_stages + i - 1)
            while q.sent < q.tail:
                message_at(w.messages, slot_of(w, VERDICTS, i - 1, q.sent)).order = w.order
                w.order += 1
                q.sent += 1
        if i < w.num_stages - 1:
            s.undecided = max(0, s.length - s.booked_down)
