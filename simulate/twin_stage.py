"""The rules of one stage, compiled: ``protocol.Stage``, method by method and under the same names.

Whoever changes a rule there changes it here; the tests compare every event of random pipelines.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from pipespec_model.agreement import NO_PROPOSAL

from .twin_layout import (
    DECODE,
    DRAFT,
    DRAFTS,
    EXCLUDED,
    PREFILL,
    RING,
    VERDICTS,
    VERIFY,
    World,
)
from .twin_tokens import (
    append,
    append_path,
    draft_at,
    is_end,
    keep_drafts_beyond,
    own_choice,
    propose,
    stray_choice,
    target_token,
    token_at,
    truncate,
)

# -- what to do next ----------------------------------------------------------------------------


@njit
def next_step(w: World, i: int) -> bool:
    """Fill in the step to run now; False: wait for a message."""
    s = w.stage[i]
    if w.plan.blocking and not w.plan.chain and not handshake(w, i):
        return False
    if s.done or not s.has_turn or cannot_go_on(w, i):
        announce_if_stuck(w, i)
        return False
    most = room(w, i)
    if most < 1 or (i > 0 and not enough_drafts(w, i)):
        return False
    block = w.spec[i].block
    alone = decodes_plainly(w, i) or (w.plan.blocking and not s.started)
    s.window = 0 if i == 0 or alone else min(s.num_drafts, most - 1, w.spec[i].max_window)
    held = w.prompt.prompt_length + s.length
    if block:
        s.kind = DRAFT
    elif not s.started:
        s.kind = PREFILL
    elif i == 0 and w.plan.num_stages > 1:
        s.kind = DRAFT
    else:
        s.kind = VERIFY if s.window else DECODE
    s.position = s.length
    s.context = s.cached
    s.width = 0 if block else held - s.cached + s.window
    s.limit = most if block else 1
    s.step_rolled_back = s.rolled_back
    return True


@njit
def handshake(w: World, i: int) -> bool:
    s = w.stage[i]
    if s.done or s.answered < s.sent_verdicts:
        return s.done != 0
    if not s.has_request:
        return True
    s.has_request = 0
    reconcile(w, i, w.message.shape[2] - 1)
    offer(w, i, 0)
    if i > 0:
        tell_upstream(w, i, 1, -1)
    return i == 0


@njit
def room(w: World, i: int) -> int:
    s = w.stage[i]
    left = w.prompt.budget - s.length
    if i == w.plan.num_stages - 1:
        return left
    allowed = w.spec[i].buffer_tokens
    if w.plan.chain and (i == 0 or decodes_plainly(w, i)):
        prefill_round = w.plan.blocking and s.seen_verdict == 0
        allowed = 1 if prefill_round else w.spec[i].lookahead_down
    return min(left - 1, allowed - (s.length - s.length_down))


@njit
def enough_drafts(w: World, i: int) -> bool:
    s = w.stage[i]
    if w.plan.chain:
        return batch_waits(w, i) or decodes_plainly(w, i)
    if not s.started or batch_waits(w, i):
        return True
    wanted = min(w.spec[i].lookahead_up, max(w.prompt.budget - 1 - s.length, 0))
    ahead = s.upstream_length - s.length if w.plan.blocking else s.num_drafts
    return ahead >= wanted


@njit
def batch_waits(w: World, i: int) -> bool:
    s = w.stage[i]
    return s.upstream_final != 0 and (w.plan.blocking != 0 or s.acknowledged == s.length)


@njit
def decodes_plainly(w: World, i: int) -> bool:
    s = w.stage[i]
    return w.plan.chain != 0 and i > 0 and s.has_turn != 0 and s.upstream_final == 0


@njit
def heeds_end(w: World, i: int) -> bool:
    """Whether an end-of-sequence token ends what this stage does; of the published ones, only the target's."""
    return w.prompt.num_eos > 0 and (w.plan.blocking == 0 or i == w.plan.num_stages - 1)


@njit
def cannot_go_on(w: World, i: int) -> bool:
    s = w.stage[i]
    if i == w.plan.num_stages - 1:
        return False
    if heeds_end(w, i) and s.length and is_end(w, token_at(w, i, s.length - 1)):
        return True
    full = s.length >= w.prompt.budget - 1
    return full or s.exhausted != 0 or (w.plan.chain != 0 and room(w, i) < 1)


@njit
def announce_if_stuck(w: World, i: int) -> None:
    s = w.stage[i]
    if s.done or i == w.plan.num_stages - 1 or not s.has_turn or s.announced or not cannot_go_on(w, i):
        return
    s.announced = 1
    offer(w, i, 1)
    if w.plan.chain:
        s.has_turn = 0


# -- what came of a step ------------------------------------------------------------------------


@njit
def finish(w: World, i: int) -> None:
    """Book the step that ended, with the tokens that it gives."""
    s = w.stage[i]
    first = not s.started
    s.started = 1
    s.rolled_back = 0
    s.steps += 1
    if i == 0 and w.plan.num_stages > 1:
        finish_draft(w, i)
    else:
        finish_verification(w, i, first)


@njit
def finish_verification(w: World, i: int, first: bool) -> None:
    s = w.stage[i]
    before = s.length
    is_target = i == w.plan.num_stages - 1
    ended = judge(w, i)
    accepted = s.length - before - (0 if ended else 1)
    rejected = not ended and accepted < s.window
    s.cached = w.prompt.prompt_length + before + accepted
    s.proposed += accepted if ended else s.window
    s.accepted += accepted
    s.rejected += rejected
    s.emitted += s.length - before
    s.drafted += 0 if is_target else s.length - before
    s.announced = 0
    if i > 0:
        if rejected:
            s.num_drafts = 0
        else:
            keep_drafts_beyond(w, i, before)
        s.epoch_up += rejected
        if w.plan.chain:
            s.upstream_final = 0
    if is_target:
        s.done = s.length >= w.prompt.budget or (heeds_end(w, i) and is_end(w, token_at(w, i, s.length - 1)))
    if i > 0:
        silent = w.plan.blocking != 0 and (not is_target if w.plan.chain else first)
        if not silent:
            tell_upstream(w, i, is_target or not w.plan.chain, -1)
        if is_target and w.plan.chain:
            s.has_turn = 0
    if not is_target and not w.plan.chain:
        offer(w, i, 0)


@njit
def judge(w: World, i: int) -> bool:
    """Append the accepted drafts and the stage's own token; returns whether a draft ended the sequence."""
    s = w.stage[i]
    known = w.prompt.num_tokens
    end = s.length + s.window
    last_stage = w.plan.num_stages - 1
    heeds = heeds_end(w, i)
    if i == last_stage and not heeds and s.path == s.length:
        append_path(w, i, min(end, s.draft_path))  # the target agrees with itself
    last = token_at(w, i, s.length - 1) if s.length else 0
    while True:
        position, has_draft = s.length, s.length < end
        draft = draft_at(w, i, position) if has_draft else 0
        if s.path == position and position < known:
            choice = own_choice(w, i, position)
        else:
            choice = stray_choice(w, i, position, last, draft, has_draft)
        append(w, i, choice)
        if not has_draft or choice != draft:
            return False
        if heeds and is_end(w, draft):
            return True
        last = draft


@njit
def finish_draft(w: World, i: int) -> None:
    s = w.stage[i]
    before = s.length
    found = 1
    if w.spec[i].block:
        found = s.num_proposed
    else:
        w.proposal[0] = drafted_token(w, i)
        if s.kind == DRAFT and w.proposal[0] == NO_PROPOSAL:
            found = 0
    ended = False
    for j in range(min(found, s.limit)):
        append(w, i, w.proposal[j])
        if heeds_end(w, i) and is_end(w, w.proposal[j]):
            ended = True
            break
    kept = s.length - before
    if s.width:
        s.cached = w.prompt.prompt_length + before
    s.exhausted = kept < s.limit and not ended
    s.announced = 0
    s.drafted += kept
    s.emitted += kept
    if kept and not w.plan.chain:
        offer(w, i, 0)


@njit
def drafted_token(w: World, i: int) -> int:
    s = w.stage[i]
    if s.path == s.length and s.length < w.prompt.num_tokens:
        return own_choice(w, i, s.length)
    return stray_choice(w, i, s.length, token_at(w, i, s.length - 1) if s.length else 0, 0, False)


# -- messages -----------------------------------------------------------------------------------


@njit
def on_drafts(w: World, i: int, slot: int) -> None:
    s, m = w.stage[i], w.message[DRAFTS, i, slot]
    if m.epoch < s.epoch_up or m.serial <= s.seen_drafts:
        s.stale += 1
        return
    s.seen_drafts = m.serial
    s.acknowledged = m.start
    s.upstream_length = m.end
    s.answered = m.extra
    if m.start > s.length:
        w.clock.problem = EXCLUDED
    fits = m.end >= s.length and agree_until(w, i, DRAFTS, slot) >= s.length
    s.num_drafts = m.end - s.length if fits else 0
    s.draft_path = m.path
    if fits:
        ring = w.draft_tail.shape[1] - 1
        for position in range(max(s.length, m.path), m.end):
            w.draft_tail[i, position & ring] = w.message_tail[DRAFTS, i, slot, position & ring]
    s.upstream_final = m.flag
    if w.plan.chain and m.flag:
        s.has_turn = 1


@njit
def on_verdict(w: World, i: int, slot: int) -> None:
    s, m = w.stage[i], w.message[VERDICTS, i, slot]
    request = w.message.shape[2] - 1
    known = s.seen_verdict
    if s.has_request:
        known = max(known, w.message[VERDICTS, i, request].serial)
    if m.serial <= known:
        s.stale += 1
    elif w.plan.blocking and not w.plan.chain:
        if s.has_request:
            reconcile(w, i, request)
        s.has_request = 1
        copy_message(w, i, slot, request)
    else:
        reconcile(w, i, slot)


@njit
def copy_message(w: World, i: int, slot: int, to: int) -> None:
    m, out = w.message[VERDICTS, i, slot], w.message[VERDICTS, i, to]
    out.epoch, out.serial, out.start, out.end, out.path = m.epoch, m.serial, m.start, m.end, m.path
    out.flag, out.extra = m.flag, m.extra
    ring = w.message_tail.shape[3] - 1
    for position in range(max(m.start, m.path), m.end):
        w.message_tail[VERDICTS, i, to, position & ring] = w.message_tail[VERDICTS, i, slot, position & ring]


@njit
def said_at(w: World, i: int, direction: int, slot: int, position: int) -> int:
    """A message's token."""
    if position < w.message[direction, i, slot].path:
        return target_token(w, position)
    return w.message_tail[direction, i, slot, position & (w.message_tail.shape[3] - 1)]


@njit
def agree_until(w: World, i: int, direction: int, slot: int) -> int:
    """First position, from the message's start, at which it and the stage's sequence differ or one of them ends."""
    s, m = w.stage[i], w.message[direction, i, slot]
    end = min(s.length, m.end)
    position = max(m.start, min(s.path, m.path, end))
    while position < end and token_at(w, i, position) == said_at(w, i, direction, slot, position):
        position += 1
    return position


@njit
def reconcile(w: World, i: int, slot: int) -> None:
    s, m = w.stage[i], w.message[VERDICTS, i, slot]
    s.seen_verdict = m.serial
    s.epoch_down = m.epoch
    end = m.end
    if m.start > s.length:
        w.clock.problem = EXCLUDED
    first = agree_until(w, i, VERDICTS, slot)
    known = s.booked_down
    s.length_down = end if m.extra < 0 else m.extra
    if w.plan.blocking and first == s.length and not s.exhausted:
        end = first
    s.booked_down = end if first < end else max(end, known)
    s.known_down = min(end, s.length_down)
    if first < end:
        adopt(w, i, slot, first, known)
    else:
        s.kept += max(0, end - known)
    if w.plan.chain and m.flag:
        if i > 0:
            tell_upstream(w, i, 1, slot if w.plan.blocking else -1)
        else:
            s.has_turn = 1
    s.announced = 0


@njit
def adopt(w: World, i: int, slot: int, first: int, known: int) -> None:
    s, m = w.stage[i], w.message[VERDICTS, i, slot]
    cut = s.length - first
    s.kept += max(0, first - known)
    if cut:
        s.cut += s.length - max(first, known)
        truncate(w, i, first)
        s.rolled_back = s.cached > w.prompt.prompt_length + first
        s.cached = min(s.cached, w.prompt.prompt_length + first)
    s.exhausted = 0
    if s.path == first:
        append_path(w, i, min(m.path, m.end))
    for position in range(s.length, m.end):
        append(w, i, said_at(w, i, VERDICTS, slot, position))
    if i == 0:
        return
    if cut:
        s.num_drafts = 0
        s.epoch_up += 1
        s.acknowledged = min(s.acknowledged, first)
    else:
        keep_drafts_beyond(w, i, first)
    if not w.plan.blocking:
        tell_upstream(w, i, not w.plan.chain, -1)


@njit
def tell_upstream(w: World, i: int, turn: Any, decided: int) -> None:
    """``decided``: slot of the verdict whose tokens are passed on, in the place of the stage's own from its start."""
    s = w.stage[i]
    s.sent_verdicts += 1
    slot = new_slot(w, VERDICTS, i - 1)
    m = w.message[VERDICTS, i - 1, slot]
    m.epoch, m.serial, m.flag = s.epoch_up, s.sent_verdicts, int(turn)
    m.start = min(s.acknowledged, s.length)
    if decided < 0:
        m.extra = -1
        m.end, m.path = max(m.start, s.length), s.path
    else:
        source = w.message[VERDICTS, i, decided]
        m.extra = s.length
        m.end = max(m.start, source.end)
        m.path = s.path if s.path < source.start else max(source.start, source.path)
    ring = w.message_tail.shape[3]
    if m.end - max(m.start, m.path) > ring:
        w.clock.problem = RING
    for position in range(max(m.start, m.path), m.end):
        own = decided < 0 or position < w.message[VERDICTS, i, decided].start
        w.message_tail[VERDICTS, i - 1, slot, position & (ring - 1)] = (
            token_at(w, i, position) if own else said_at(w, i, VERDICTS, decided, position))


@njit
def offer(w: World, i: int, final: int) -> None:
    """Drafts for the downstream, in the place of others that have not left yet."""
    s, q = w.stage[i], w.queue[DRAFTS, i + 1]
    s.sent_drafts += 1
    if q.tail > q.sent:
        q.tail -= 1
    slot = new_slot(w, DRAFTS, i + 1)
    m = w.message[DRAFTS, i + 1, slot]
    m.epoch, m.serial, m.start, m.flag, m.extra = s.epoch_down, s.sent_drafts, s.known_down, final, s.seen_verdict
    m.end, m.path = max(s.known_down, s.length), s.path
    ring = w.message_tail.shape[3]
    if m.end - max(m.start, m.path) > ring:
        w.clock.problem = RING
    for position in range(max(m.start, m.path), m.end):
        w.message_tail[DRAFTS, i + 1, slot, position & (ring - 1)] = token_at(w, i, position)


@njit
def new_slot(w: World, direction: int, receiver: int) -> int:
    q = w.queue[direction, receiver]
    slots = w.message.shape[2] - 1
    if q.tail - q.head >= slots:
        w.clock.problem = RING
    q.tail += 1
    return (q.tail - 1) % slots


@njit
def receive(w: World, i: int, until_sent: bool) -> None:
    """Book what has arrived, in the order in which it was sent; ``until_sent``: also what is on its way."""
    s, down, up = w.stage[i], w.queue[DRAFTS, i], w.queue[VERDICTS, i]
    slots = w.message.shape[2] - 1
    while True:
        has_drafts = down.head < (down.sent if until_sent else down.arrived)
        has_verdict = up.head < (up.sent if until_sent else up.arrived)
        if has_drafts and has_verdict:
            drafts_first = (w.message[DRAFTS, i, down.head % slots].order
                            < w.message[VERDICTS, i, up.head % slots].order)
            has_drafts, has_verdict = drafts_first, not drafts_first
        if has_drafts:
            if not s.done:
                on_drafts(w, i, down.head % slots)
            down.head += 1
        elif has_verdict:
            if not s.done:
                on_verdict(w, i, up.head % slots)
            up.head += 1
        else:
            return


@njit
def propose_ahead(w: World, i: int) -> None:
    """A lookup's tokens are known when its step begins, for its time depends on their number."""
    s = w.stage[i]
    s.num_proposed = propose(w, i, s.limit) if w.spec[i].block else 1
