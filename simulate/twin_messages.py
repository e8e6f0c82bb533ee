"""What stages say to each other and what comes of it, compiled: the messages of ``protocol.Stage``, same names.

A message is a snapshot of the sender's tokens from a position on; ``slot`` says where in ``World.messages`` it lies.
"""

from __future__ import annotations

from typing import Any

from .twin_layout import DRAFTS, EXCLUDED, RING, VERDICTS, World, message_at, queue_at, stage_at
from .twin_memory import compiled
from .twin_tokens import append_path, branched, keep_drafts_beyond, target_token, token_at, truncate


@compiled
def slot_of(w: World, direction: int, receiver: int, number: int) -> int:
    """Where in ``w.messages`` a queue's message is; -1: the receiver's request."""
    first = (direction * w.num_stages + receiver) * (w.slot_mask + 2)
    return first + (w.slot_mask + 1 if number < 0 else number & w.slot_mask)


@compiled
def said_at(w: World, slot: int, position: int) -> int:
    """A message's token."""
    m = message_at(w.messages, slot)
    return target_token(w, position) if position < m.path else branched(w, m.branch, position)


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
    s.draft_path, s.draft_branch = m.path, m.branch
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
    out.epoch, out.serial, out.flag, out.extra = m.epoch, m.serial, m.flag, m.extra
    out.start, out.end, out.path, out.branch = m.start, m.end, m.path, m.branch


@compiled
def agree_until(w: World, i: int, slot: int) -> int:
    """First position, from the message's start, at which it and the stage's sequence differ or one of them ends."""
    s, m = stage_at(w.stages, i), message_at(w.messages, slot)
    end = min(s.length, m.end)
    same_branch = s.branch == m.branch and s.path == m.path
    position = end if same_branch else max(m.start, min(s.path, m.path, end))
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
    if m.end > s.length:
        s.length, s.branch = m.end, m.branch
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
    if decided < 0:
        m.extra = -1
        m.end, m.path, m.branch = max(m.start, s.length), s.path, s.branch
    else:
        source = message_at(w.messages, decided)
        m.extra, m.branch = s.length, source.branch
        m.end = max(m.start, source.end)
        m.path = s.path if s.path < source.start else max(source.start, source.path)

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
    m.end, m.path, m.branch = max(s.known_down, s.length), s.path, s.branch


@compiled
def new_slot(w: World, direction: int, receiver: int) -> int:
    q = queue_at(w.queues, direction * w.num_stages + receiver)
    if q.tail - q.head > w.slot_mask:
        w.problem = RING
    q.tail += 1
    return slot_of(w, direction, receiver, q.tail - 1)
