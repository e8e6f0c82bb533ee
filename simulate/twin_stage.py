"""The rules of one stage, compiled: ``protocol.Stage``, method by method and under the same names.

Whoever changes a rule there changes it here; the tests compare every event of random pipelines.
"""

from __future__ import annotations

from typing import Any

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
    message_at,
    queue_at,
    spec_at,
    stage_at,
)
from .twin_memory import compiled, integer_at, put_integer
from .twin_tokens import (
    append,
    append_path,
    draft_at,
    is_end,
    keep_drafts_beyond,
    own_choice,
    propose,
    put_draft,
    stray_choice,
    target_token,
    token_at,
    truncate,
)

# -- what to do next ----------------------------------------------------------------------------


@compiled
def next_step(w: World, i: int) -> bool:
    """Fill in the step to run now; False: wait for a message."""
    s = stage_at(w.stages, i)
    if w.blocking and not w.chain and not handshake(w, i):
        return False
    if s.done or not s.has_turn or cannot_go_on(w, i):
        announce_if_stuck(w, i)
        return False
    most = room(w, i)
    if most < 1 or (i > 0 and not enough_drafts(w, i)):
        return False
    block = spec_at(w.specs, i).block
    alone = decodes_plainly(w, i) or (w.blocking and not s.started)
    s.window = 0 if i == 0 or alone else min(s.num_drafts, most - 1, spec_at(w.specs, i).max_window)
    held = w.prompt_length + s.length
    if block:
        s.kind = DRAFT
    elif not s.started:
        s.kind = PREFILL
    elif i == 0 and w.num_stages > 1:
        s.kind = DRAFT
    else:
        s.kind = VERIFY if s.window else DECODE
    s.position = s.length
    s.context = s.cached
    s.width = 0 if block else held - s.cached + s.window
    s.limit = most if block else 1
    s.step_rolled_back = s.rolled_back
    return True


@compiled
def handshake(w: World, i: int) -> bool:
    s = stage_at(w.stages, i)
    if s.done or s.answered < s.sent_verdicts:
        return s.done != 0
    if not s.has_request:
        return True
    s.has_request = 0
    reconcile(w, i, slot_of(w, VERDICTS, i, -1))
    offer(w, i, 0)
    if i > 0:
        tell_upstream(w, i, 1, -1)
    return i == 0


@compiled
def room(w: World, i: int) -> int:
    s = stage_at(w.stages, i)
    left = w.budget - s.length
    if i == w.num_stages - 1:
        return left
    allowed = spec_at(w.specs, i).buffer_tokens
    if w.chain and (i == 0 or decodes_plainly(w, i)):
        prefill_round = w.blocking and s.seen_verdict == 0
        allowed = 1 if prefill_round else spec_at(w.specs, i).lookahead_down
    return min(left - 1, allowed - (s.length - s.length_down))


@compiled
def enough_drafts(w: World, i: int) -> bool:
    s = stage_at(w.stages, i)
    if w.chain:
        return batch_waits(w, i) or decodes_plainly(w, i)
    if not s.started or batch_waits(w, i):
        return True
    wanted = min(spec_at(w.specs, i).lookahead_up, max(w.budget - 1 - s.length, 0))
    ahead = s.upstream_length - s.length if w.blocking else s.num_drafts
    return ahead >= wanted


@compiled
def batch_waits(w: World, i: int) -> bool:
    s = stage_at(w.stages, i)
    return s.upstream_final != 0 and (w.blocking != 0 or s.acknowledged == s.length)


@compiled
def decodes_plainly(w: World, i: int) -> bool:
    s = stage_at(w.stages, i)
    return w.chain != 0 and i > 0 and s.has_turn != 0 and s.upstream_final == 0


@compiled
def heeds_end(w: World, i: int) -> bool:
    """Whether an end-of-sequence token ends what this stage does; of the published ones, only the target's."""
    return w.num_eos > 0 and (w.blocking == 0 or i == w.num_stages - 1)


@compiled
def cannot_go_on(w: World, i: int) -> bool:
    s = stage_at(w.stages, i)
    if i == w.num_stages - 1:
        return False
    if heeds_end(w, i) and s.length and is_end(w, token_at(w, i, s.length - 1)):
        return True
    full = s.length >= w.budget - 1
    return full or s.exhausted != 0 or (w.chain != 0 and room(w, i) < 1)


@compiled
def announce_if_stuck(w: World, i: int) -> None:
    s = stage_at(w.stages, i)
    if s.done or i == w.num_stages - 1 or not s.has_turn or s.announced or not cannot_go_on(w, i):
        return
    s.announced = 1
    offer(w, i, 1)
    if w.chain:
        s.has_turn = 0


# -- what came of a step ------------------------------------------------------------------------


@compiled
def finish(w: World, i: int) -> None:
    """Book the step that ended, with the tokens that it gives."""
    s = stage_at(w.stages, i)
    first = not s.started
    s.started = 1
    s.rolled_back = 0
    s.steps += 1
    if i == 0 and w.num_stages > 1:
        finish_draft(w, i)
    else:
        finish_verification(w, i, first)


@compiled
def finish_verification(w: World, i: int, first: bool) -> None:
    s = stage_at(w.stages, i)
    before = s.length
    is_target = i == w.num_stages - 1
    ended = judge(w, i)
    accepted = s.length - before - (0 if ended else 1)
    rejected = not ended and accepted < s.window
    s.cached = w.prompt_length + before + accepted
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
        if w.chain:
            s.upstream_final = 0
    if is_target:
        s.done = s.length >= w.budget or (heeds_end(w, i) and is_end(w, token_at(w, i, s.length - 1)))
    if i > 0:
        silent = w.blocking != 0 and (not is_target if w.chain else first)
        if not silent:
            tell_upstream(w, i, is_target or not w.chain, -1)
        if is_target and w.chain:
            s.has_turn = 0
    if not is_target and not w.chain:
        offer(w, i, 0)


@compiled
def judge(w: World, i: int) -> bool:
    """Append the accepted drafts and the stage's own token; returns whether a draft ended the sequence."""
    s = stage_at(w.stages, i)
    known = w.num_tokens
    end = s.length + s.window
    last_stage = w.num_stages - 1
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


@compiled
def finish_draft(w: World, i: int) -> None:
    s = stage_at(w.stages, i)
    before = s.length
    found = 1
    if spec_at(w.specs, i).block:
        found = s.num_proposed
    else:
        token = drafted_token(w, i)
        put_integer(w.proposal, 0, token)
        if s.kind == DRAFT and token == NO_PROPOSAL:
            found = 0
    ended = False
    for j in range(min(found, s.limit)):
        token = integer_at(w.proposal, j)
        append(w, i, token)
        if heeds_end(w, i) and is_end(w, token):
            ended = True
            break
    kept = s.length - before
    if s.width:
        s.cached = w.prompt_length + before
    s.exhausted = kept < s.limit and not ended
    s.announced = 0
    s.drafted += kept
    s.emitted += kept
    if kept and not w.chain:
        offer(w, i, 0)


@compiled
def drafted_token(w: World, i: int) -> int:
    s = stage_at(w.stages, i)
    if s.path == s.length and s.length < w.num_tokens:
        return own_choice(w, i, s.length)
    return stray_choice(w, i, s.length, token_at(w, i, s.length - 1) if s.length else 0, 0, False)


# -- messages -----------------------------------------------------------------------------------


@compiled
def slot_of(w: World, direction: int, receiver: int, number: int) -> int:
    """Where in ``w.messages`` a queue's message is; -1: the receiver's request."""
    first = (direction * w.num_stages + receiver) * (w.slot_mask + 2)
    return first + (w.slot_mask + 1 if number < 0 else number & w.slot_mask)


@compiled
def said_at(w: World, slot: int, position: int) -> int:
    """A message's token."""
    if position < message_at(w.messages, slot).path:
        return target_token(w, position)
    return integer_at(w.message_tails, slot * (w.ring_mask + 1) + (position & w.ring_mask))


@compiled
def say(w: World, slot: int, position: int, token: int) -> None:
    put_integer(w.message_tails, slot * (w.ring_mask + 1) + (position & w.ring_mask), token)


@compiled
def receive(w: World, i: int, until_sent: bool) -> None:
    """Book what has arrived, in the order in which it was sent; ``until_sent``: also what is on its way."""
    s = stage_at(w.stages, i)
    down, up = queue_at(w.queues, i), queue_at(w.queues, w.num_stages + i)
    while True:
        has_drafts = down.head < (down.sent if until_sent else down.arrived)
        has_verdict = up.head < (up.sent if until_sent else up.arrived)
        if not has_drafts and not has_verdict:
            return
        drafts, verdict = slot_of(w, DRAFTS, i, down.head), slot_of(w, VERDICTS, i, up.head)
        if has_drafts and has_verdict:
            has_drafts = message_at(w.messages, drafts).order < message_at(w.messages, verdict).order
        if has_drafts:
            if not s.done:
                on_drafts(w, i, drafts)
            down.head += 1
        else:
            if not s.done:
                on_verdict(w, i, verdict)
            up.head += 1


@compiled
def on_drafts(w: World, i: int, slot: int) -> None:
    s, m = stage_at(w.stages, i), message_at(w.messages, slot)
    if m.epoch < s.epoch_up or m.serial <= s.seen_drafts:
        s.stale += 1
        return
    s.seen_drafts = m.serial
    s.acknowledged = m.start
    s.upstream_length = m.end
    s.answered = m.extra
    if m.start > s.length:
        w.problem = EXCLUDED
    fits = m.end >= s.length and agree_until(w, i, slot) >= s.length
    s.num_drafts = m.end - s.length if fits else 0
    s.draft_path = m.path
    if fits:
        for position in range(max(s.length, m.path), m.end):
            put_draft(w, i, position, said_at(w, slot, position))
    s.upstream_final = m.flag
    if w.chain and m.flag:
        s.has_turn = 1


@compiled
def on_verdict(w: World, i: int, slot: int) -> None:
    s, m = stage_at(w.stages, i), message_at(w.messages, slot)
    request = slot_of(w, VERDICTS, i, -1)
    known = s.seen_verdict
    if s.has_request:
        known = max(known, message_at(w.messages, request).serial)
    if m.serial <= known:
        s.stale += 1
    elif w.blocking and not w.chain:
        if s.has_request:
            reconcile(w, i, request)
        s.has_request = 1
        copy_message(w, slot, request)
    else:
        reconcile(w, i, slot)


@compiled
def copy_message(w: World, slot: int, to: int) -> None:
    m, out = message_at(w.messages, slot), message_at(w.messages, to)
    out.epoch, out.serial, out.start, out.end, out.path = m.epoch, m.serial, m.start, m.end, m.path
    out.flag, out.extra = m.flag, m.extra
    for position in range(max(m.start, m.path), m.end):
        say(w, to, position, said_at(w, slot, position))


@compiled
def agree_until(w: World, i: int, slot: int) -> int:
    """First position, from the message's start, at which it and the stage's sequence differ or one of them ends."""
    s, m = stage_at(w.stages, i), message_at(w.messages, slot)
    end = min(s.length, m.end)
    position = max(m.start, min(s.path, m.path, end))
    while position < end and token_at(w, i, position) == said_at(w, slot, position):
        position += 1
    return position


@compiled
def reconcile(w: World, i: int, slot: int) -> None:
    s, m = stage_at(w.stages, i), message_at(w.messages, slot)
    s.seen_verdict = m.serial
    s.epoch_down = m.epoch
    end = m.end
    if m.start > s.length:
        w.problem = EXCLUDED
    first = agree_until(w, i, slot)
    known = s.booked_down
    s.length_down = end if m.extra < 0 else m.extra
    if w.blocking and first == s.length and not s.exhausted:
        end = first
    s.booked_down = end if first < end else max(end, known)
    s.known_down = min(end, s.length_down)
    if first < end:
        adopt(w, i, slot, first, known)
    else:
        s.kept += max(0, end - known)
    if w.chain and m.flag:
        if i > 0:
            tell_upstream(w, i, 1, slot if w.blocking else -1)
        else:
            s.has_turn = 1
    s.announced = 0


@compiled
def adopt(w: World, i: int, slot: int, first: int, known: int) -> None:
    s, m = stage_at(w.stages, i), message_at(w.messages, slot)
    cut = s.length - first
    s.kept += max(0, first - known)
    if cut:
        s.cut += s.length - max(first, known)
        truncate(w, i, first)
        s.rolled_back = s.cached > w.prompt_length + first
        s.cached = min(s.cached, w.prompt_length + first)
    s.exhausted = 0
    if s.path == first:
        append_path(w, i, min(m.path, m.end))
    for position in range(s.length, m.end):
        append(w, i, said_at(w, slot, position))
    if i == 0:
        return
    if cut:
        s.num_drafts = 0
        s.epoch_up += 1
        s.acknowledged = min(s.acknowledged, first)
    else:
        keep_drafts_beyond(w, i, first)
    if not w.blocking:
        tell_upstream(w, i, not w.chain, -1)


@compiled
def tell_upstream(w: World, i: int, turn: Any, decided: int) -> None:
    """``decided``: slot of the verdict whose tokens are passed on, in the place of the stage's own from its start."""
    s = stage_at(w.stages, i)
    s.sent_verdicts += 1
    slot = new_slot(w, VERDICTS, i - 1)
    m = message_at(w.messages, slot)
    m.epoch, m.serial, m.flag = s.epoch_up, s.sent_verdicts, int(turn)
    m.start = min(s.acknowledged, s.length)
    own_until = s.length
    if decided < 0:
        m.extra = -1
        m.end, m.path = max(m.start, s.length), s.path
    else:
        source = message_at(w.messages, decided)
        own_until = source.start
        m.extra = s.length
        m.end = max(m.start, source.end)
        m.path = s.path if s.path < source.start else max(source.start, source.path)
    for position in stored(w, slot):
        say(w, slot, position, token_at(w, i, position) if position < own_until else said_at(w, decided, position))


@compiled
def offer(w: World, i: int, final: int) -> None:
    """Drafts for the downstream, in the place of others that have not left yet."""
    s, q = stage_at(w.stages, i), queue_at(w.queues, i + 1)
    s.sent_drafts += 1
    if q.tail > q.sent:
        q.tail -= 1
    slot = new_slot(w, DRAFTS, i + 1)
    m = message_at(w.messages, slot)
    m.epoch, m.serial, m.start, m.flag, m.extra = s.epoch_down, s.sent_drafts, s.known_down, final, s.seen_verdict
    m.end, m.path = max(s.known_down, s.length), s.path
    for position in stored(w, slot):
        say(w, slot, position, token_at(w, i, position))


@compiled
def stored(w: World, slot: int) -> Any:
    """Positions of a message's tokens that are off the target's path."""
    m = message_at(w.messages, slot)
    first = max(m.start, m.path)
    if m.end - first > w.ring_mask + 1:
        w.problem = RING
    return range(first, m.end)


@compiled
def new_slot(w: World, direction: int, receiver: int) -> int:
    q = queue_at(w.queues, direction * w.num_stages + receiver)
    if q.tail - q.head > w.slot_mask:
        w.problem = RING
    q.tail += 1
    return slot_of(w, direction, receiver, q.tail - 1)


@compiled
def propose_ahead(w: World, i: int) -> None:
    """A lookup's tokens are known when its step begins, for its time depends on their number."""
    s = stage_at(w.stages, i)
    s.num_proposed = propose(w, i, s.limit) if spec_at(w.specs, i).block else 1
