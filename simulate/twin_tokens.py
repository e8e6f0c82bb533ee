"""Sequences and choices of the compiled engine: what ``agreement.Replay`` and the lists of ``protocol.Stage`` do.

A choice is asked for one position at a time, where it is needed; the uniforms are ``uniforms.mix``, the very function
that Python runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from pipespec_model import uniforms
from pipespec_model.agreement import MADE_UP, NO_PROPOSAL

from .twin_layout import EXCLUDED, RING, World

mix = njit(uniforms.mix)
PURPOSES = (uniforms.STEP_TIME, uniforms.ON_PATH, uniforms.OFF_PATH, uniforms.TOKEN)
STEP_TIME, ON_PATH, OFF_PATH, TOKEN = range(4)  # columns of World.words


@njit
def unit(word: Any) -> float:
    """A word as a number in [0, 1), as uniforms.uniform makes it."""
    return (word >> np.uint64(11)) * (1.0 / (1 << 53))


@njit
def drawn(w: World, stage: int, purpose: int, index: int) -> Any:
    return mix(w.words[stage, purpose], np.uint64(index))


@njit
def fill_words(words: Any, seed: int, number: int) -> None:
    """The generator's states for a prompt: one a stage and purpose."""
    prompt = mix(mix(np.uint64(0), np.uint64(seed)), np.uint64(number))
    for stage in range(len(words)):
        state = mix(prompt, np.uint64(stage))
        for column, purpose in enumerate(PURPOSES):
            words[stage, column] = mix(state, np.uint64(purpose))


# -- choices along the target's path ------------------------------------------------------------


@njit
def target_token(w: World, position: int) -> int:
    """The target's own token; made-up prompts count (agreement.synthetic)."""
    if w.prompt.rows < 0:
        return position + 1
    return w.rows[w.base + (w.plan.num_stages - 1) * w.stride + position]


@njit
def own_choice(w: World, stage: int, position: int) -> int:
    """What the stage chooses after the target's prefix of that length."""
    if w.prompt.rows < 0:
        if stage == w.plan.num_stages - 1:
            return position + 1
        while w.clock.frontier <= position:
            make_up_row(w)
        if position <= w.clock.frontier - 1 - w.stride:
            w.clock.problem = RING
    return w.rows[w.base + stage * w.stride + (position & w.mask)]


@njit
def make_up_row(w: World) -> None:
    """agreement.synthetic for one more position: from the target down, a stage's token is its downstream's with the
    link's probability, which may depend on the agreements before."""
    position = w.clock.frontier
    w.clock.frontier += 1
    token, place = position + 1, w.plan.acceptance
    slot = w.base + (position & w.mask)
    for stage in range(w.plan.num_stages - 2, -1, -1):
        size = int(w.numbers[place])
        if size > 0:
            draw = unit(drawn(w, stage, ON_PATH, position))
            bit = draw < w.numbers[place + 1 + min(w.run[stage], size - 1)]
        else:  # recorded bits, which repeat
            size = -size
            bit = w.numbers[place + 1 + position % size] > 0
        place += size + 1
        w.run[stage] = w.run[stage] + 1 if bit else 0
        if not bit:
            token = made_up(w, stage, position, 0)
        w.rows[slot + stage * w.stride] = token


@njit
def made_up(w: World, stage: int, position: int, last: int) -> int:
    word = mix(drawn(w, stage, TOKEN, position), np.uint64(last))
    return MADE_UP + np.int64(word >> np.uint64(12))


@njit
def stray_choice(w: World, stage: int, position: int, last: int, draft: int, has_draft: bool) -> int:
    """A choice that is not recorded: its upstream's at the neighbour rate, else a token of its own."""
    while stage > 0 and (
            unit(mix(drawn(w, stage, OFF_PATH, position), np.uint64(last))) < w.plan.neighbour_rate):
        if has_draft:
            return draft
        stage -= 1
    return made_up(w, stage, position, last)


@njit
def is_end(w: World, token: int) -> bool:
    for i in range(w.prompt.eos, w.prompt.eos + w.prompt.num_eos):
        if w.eos[i] == token:
            return True
    return False


# -- sequences ----------------------------------------------------------------------------------


@njit
def token_at(w: World, stage: int, position: int) -> int:
    if position < w.stage[stage].path:
        return target_token(w, position)
    return w.tail[stage, position & (w.tail.shape[1] - 1)]


@njit
def draft_at(w: World, stage: int, position: int) -> int:
    if position < w.stage[stage].draft_path:
        return target_token(w, position)
    return w.draft_tail[stage, position & (w.draft_tail.shape[1] - 1)]


@njit
def append(w: World, stage: int, token: int) -> None:
    s = w.stage[stage]
    if s.path == s.length and s.length < w.prompt.num_tokens and token == target_token(w, s.length):
        s.path += 1
    else:
        if s.length - s.path >= w.tail.shape[1]:
            w.clock.problem = RING
        w.tail[stage, s.length & (w.tail.shape[1] - 1)] = token
    s.length += 1


@njit
def append_path(w: World, stage: int, end: int) -> None:
    """Append what the target says up to position ``end``, to a sequence that is on its path."""
    s = w.stage[stage]
    if end > s.length:
        if s.path != s.length:
            w.clock.problem = EXCLUDED
        s.path = s.length = end


@njit
def truncate(w: World, stage: int, length: int) -> None:
    s = w.stage[stage]
    s.length = length
    s.path = min(s.path, length)


@njit
def keep_drafts_beyond(w: World, stage: int, start: int) -> None:
    """Of the waiting drafts, which continued the sequence when it ended at ``start``, keep those beyond it, provided
    that what was appended since is what they say."""
    s = w.stage[stage]
    fits = start + s.num_drafts >= s.length
    position = max(start, min(s.path, s.draft_path))
    while fits and position < s.length:
        fits = token_at(w, stage, position) == draft_at(w, stage, position)
        position += 1
    s.num_drafts = start + s.num_drafts - s.length if fits else 0


# -- a lookup's proposals -----------------------------------------------------------------------


@njit
def propose(w: World, stage: int, limit: int) -> int:
    """Replay.propose: fills ``w.proposal``; returns how many tokens."""
    s = w.stage[stage]
    position, on_path = s.length, s.path == s.length
    last = token_at(w, stage, position - 1) if position else 0
    found = 0
    while found < limit:
        recorded = on_path and position < w.prompt.num_tokens
        token = own_choice(w, stage, position) if recorded else stray_choice(w, stage, position, last, 0, False)
        if token == NO_PROPOSAL or not (
                on_path or unit(mix(drawn(w, stage, ON_PATH, position), np.uint64(last))) < w.prompt.goes_on_rate):
            break
        on_path = recorded and token == target_token(w, position)
        if found >= len(w.proposal):
            w.clock.problem = RING
            break
        w.proposal[found] = token
        last = token
        position += 1
        found += 1
    return found
