"""The rules of one stage, compiled: ``protocol.Stage``, method by method and under the same names.

Whoever changes a rule there changes it here; the tests compare every event of random pipelines.
"""

from __future__ import annotations

from pipespec_model.agreement import NO_PROPOSAL

from .twin_layout import DECODE, DRAFT, PREFILL, VERDICTS, VERIFY, World, spec_at, stage_at
from .twin_memory import compiled, integer_at, put_integer
from .twin_messages import offer, reconcile, slot_of, tell_upstream
from .twin_tokens import (
    append,
    append_draft,
    append_path,
    draft_at,
    is_end,
    keep_drafts_beyond,
    own_choice,
    propose,
    stray_choice,
    token_at,
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


@compiled
def propose_ahead(w: World, i: int) -> None:
    """A lookup's tokens are known when its step begins, for its time depends on their number."""
    s = stage_at(w.stages, i)
    s.num_proposed = propose(w, i, s.limit) if spec_at(w.specs, i).block else 1


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
        if not has_draft or choice != draft:
            append(w, i, choice)
            return False
        append_draft(w, i)
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
