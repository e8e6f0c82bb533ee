"""Sequences and choices of the compiled engine: what ``agreement.Replay`` and the lists of ``protocol.Stage`` do.

A choice is asked for one position at a time, where it is needed; the uniforms are ``uniforms.mix``, the very function
that Python runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipespec_model import uniforms
from pipespec_model.agreement import MADE_UP, NO_PROPOSAL

from .twin_layout import EXCLUDED, RING, World, stage_at
from .twin_memory import compiled, integer_at, number_at, put_integer, put_word, word_at

mix: Any = compiled(uniforms.mix)
PURPOSES = (uniforms.STEP_TIME, uniforms.ON_PATH, uniforms.OFF_PATH, uniforms.TOKEN)
STEP_TIME, ON_PATH, OFF_PATH, TOKEN = range(4)  # columns of World.words


@compiled
def unit(word: Any) -> float:
    """A word as a number in [0, 1), as uniforms.uniform makes it."""
    return (word >> np.uint64(11)) * (1.0 / (1 << 53))


@compiled
def drawn(w: World, stage: int, purpose: int, index: int) -> Any:
    return mix(word_at(w.words, stage * len(PURPOSES) + purpose), np.uint64(index))


@compiled
def fill_words(w: World, seed: int, number: int) -> None:
    """The generator's states for a prompt: one a stage and purpose."""
    prompt = mix(mix(np.uint64(0), np.uint64(seed)), np.uint64(number))
    for stage in range(w.num_stages):
        state = mix(prompt, np.uint64(stage))
        for column, purpose in enumerate(PURPOSES):
            put_word(w.words, stage * len(PURPOSES) + column, mix(state, np.uint64(purpose)))


# -- choices along the target's path ------------------------------------------------------------


@compiled
def target_token(w: World, position: int) -> int:
    """The target's own token; made-up prompts count (agreement.synthetic)."""
    if w.made_up:
        return position + 1
    return integer_at(w.rows, (w.num_stages - 1) * w.row_stride + position)


@compiled
def own_choice(w: World, stage: int, position: int) -> int:
    """What the stage chooses after the target's prefix of that length."""
    if w.made_up:
        if stage == w.num_stages - 1:
            return position + 1
        while w.frontier <= position:
            make_up_row(w)
        if position <= w.frontier - 1 - w.row_stride:
            w.problem = RING
    return integer_at(w.rows, stage * w.row_stride + (position & w.row_mask))


@compiled
def make_up_row(w: World) -> None:
    """agreement.synthetic for one more position: from the target down, a stage's token is its downstream's with the
    link's probability, which may depend on the agreements before."""
    position = w.frontier
    w.frontier += 1
    token, place = position + 1, w.acceptance
    slot = position & w.row_mask
    for stage in range(w.num_stages - 2, -1, -1):
        size, run = int(number_at(w.numbers, place)), integer_at(w.runs, stage)
        if size > 0:
            draw = unit(drawn(w, stage, ON_PATH, position))
            bit = draw < number_at(w.numbers, place + 1 + min(run, size - 1))
        else:  # recorded bits, which repeat
            size = -size
            bit = number_at(w.numbers, place + 1 + position % size) > 0
        place += size + 1
        put_integer(w.runs, stage, run + 1 if bit else 0)
        if not bit:
            token = made_up(w, stage, position, 0)
        put_integer(w.rows, slot + stage * w.row_stride, token)


@compiled
def made_up(w: World, stage: int, position: int, last: int) -> int:
    word = mix(drawn(w, stage, TOKEN, position), np.uint64(last))
    return int(MADE_UP + np.int64(word >> np.uint64(12)))


@compiled
def stray_choice(w: World, stage: int, position: int, last: int, draft: int, has_draft: bool) -> int:
    """A choice that is not recorded: its upstream's at the neighbour rate, else a token of its own."""
    while stage > 0 and (
            unit(mix(drawn(w, stage, OFF_PATH, position), np.uint64(last))) < w.neighbour_rate):
        if has_draft:
            return draft
        stage -= 1
    return made_up(w, stage, position, last)


@compiled
def is_end(w: World, token: int) -> bool:
    found = False
    for i in range(w.end_tokens, w.end_tokens + w.num_eos):
        found = found or integer_at(w.eos, i) == token
    return found


# -- branches -----------------------------------------------------------------------------------


@compiled
def branched(w: World, branch: int, position: int) -> int:
    """A branch's token."""
    if w.num_branches - branch > w.branch_mask:
        w.problem = RING
    return integer_at(w.branches, (branch & w.branch_mask) * (w.ring_mask + 1) + (position & w.ring_mask))


@compiled
def grown(w: World, branch: int, start: int, end: int, token: int) -> int:
    """The branch in which ``token`` follows what ``branch`` holds from ``start`` to ``end``."""
    if end > start:
        tip = integer_at(w.tips, branch & w.branch_mask)
        if tip > end and branched(w, branch, end) == token:
            return branch
        if tip == end:
            put_branched(w, branch, end, token)
            return branch
    w.num_branches += 1
    for position in range(start, end):
        put_branched(w, w.num_branches, position, branched(w, branch, position))
    put_branched(w, w.num_branches, end, token)
    return w.num_branches


@compiled
def put_branched(w: World, branch: int, position: int, token: int) -> None:
    """Put a branch's next token."""
    if w.num_branches - branch > w.branch_mask:
        w.problem = RING
    slot = branch & w.branch_mask
    put_integer(w.branches, slot * (w.ring_mask + 1) + (position & w.ring_mask), token)
    put_integer(w.tips, slot, position + 1)


# -- sequences ----------------------------------------------------------------------------------


@compiled
def token_at(w: World, stage: int, position: int) -> int:
    s = stage_at(w.stages, stage)
    return target_token(w, position) if position < s.path else branched(w, s.branch, position)


@compiled
def draft_at(w: World, stage: int, position: int) -> int:
    s = stage_at(w.stages, stage)
    return target_token(w, position) if position < s.draft_path else branched(w, s.draft_branch, position)


@compiled
def append(w: World, stage: int, token: int) -> None:
    s = stage_at(w.stages, stage)
    if s.path == s.length and s.length < w.num_tokens and token == target_token(w, s.length):
        s.path += 1
    else:
        if s.length - s.path > w.ring_mask:
            w.problem = RING
        s.branch = grown(w, s.branch, s.path, s.length, token)
    s.length += 1


@compiled
def append_draft(w: World, stage: int) -> None:
    """Append the next of the drafts that continue the sequence."""
    s = stage_at(w.stages, stage)
    if s.length < s.draft_path:
        s.path += 1
    else:
        s.branch = s.draft_branch
    s.length += 1


@compiled
def append_path(w: World, stage: int, end: int) -> None:
    """Append what the target says up to position ``end``, to a sequence that is on its path."""
    s = stage_at(w.stages, stage)
    if end > s.length:
        if s.path != s.length:
            w.problem = EXCLUDED
        s.path = s.length = end


@compiled
def truncate(w: World, stage: int, length: int) -> None:
    s = stage_at(w.stages, stage)
    s.length = length
    s.path = min(s.path, length)


@compiled
def keep_drafts_beyond(w: World, stage: int, start: int) -> None:
    """Of the waiting drafts, which continued the sequence when it ended at ``start``, keep those beyond it, provided
    that what was appended since is what they say."""
    s = stage_at(w.stages, stage)
    fits = start + s.num_drafts >= s.length
    same_branch = s.branch == s.draft_branch and s.path == s.draft_path
    position = s.length if same_branch else max(start, min(s.path, s.draft_path))
    while fits and position < s.length:
        fits = token_at(w, stage, position) == draft_at(w, stage, position)
        position += 1
    s.num_drafts = start + s.num_drafts - s.length if fits else 0


# -- a lookup's proposals -----------------------------------------------------------------------


@compiled
def propose(w: World, stage: int, limit: int) -> int:
    """Replay.propose: fills ``w.proposal``; returns how many tokens."""
    s = stage_at(w.stages, stage)
    position, on_path = s.length, s.path == s.length
    last = token_at(w, stage, position - 1) if position else 0
    found = 0
    while found < limit:
        recorded = on_path and position < w.num_tokens
        token = own_choice(w, stage, position) if recorded else stray_choice(w, stage, position, last, 0, False)
        if token == NO_PROPOSAL or not (
                on_path or unit(mix(drawn(w, stage, ON_PATH, position), np.uint64(last))) < w.goes_on_rate):
            break
        on_path = recorded and token == target_token(w, position)
        if found > w.ring_mask:
            w.problem = RING
            break
        put_integer(w.proposal, found, token)
        last = token
        position += 1
        found += 1
    return found
