"""CLaSp's optimiser: the layers that a token can best do without, by dynamic programming.

``h[i]`` is the full model's hidden state after ``i`` layers at the last accepted token, and ``g[i, j]``
the best state after ``i`` layers of which ``j`` are skipped: that of ``g[i-1, j-1]`` (layer i skipped)
and ``layer_i(g[i-1, j])`` (layer i run) which is nearer to ``h[i]`` by cosine similarity.  The decision
of each ``(i, j)`` is kept, and the walk back from ``(L, M)`` gives the set.

A state is a vector and its score a number, so the best set need not pass through best states: the
result is near-optimal, and how near is a matter of measurement (docs/clasp.md).

References: Chen et al., CLaSp, arXiv 2505.24196, section 3.4 and algorithm 1.  Published code compares
state vectors on the way back; keeping the decisions gives the same set without doubt about ties (here a
tie runs the layer).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from execute.decoders import InPlaceCache, LayeredDecoder
from execute.skips import SkipSet, free_layers


@dataclass(frozen=True)
class Choice:
    """A skip set, and the cosine similarity of its last state to the full model's."""

    skips: SkipSet
    cosine: float


@dataclass(frozen=True)
class Token:
    """A token of the committed text, as the optimiser needs it.

    states : hidden states before the first and after each layer, ``[hidden]`` each
    position : of the token; its past are the rows of ``cache`` before it
    scratch : from this row on ``cache`` holds nothing that is needed
    """

    decoder: LayeredDecoder
    cache: InPlaceCache
    states: Sequence[Tensor]
    position: int
    scratch: int

    def after(self, index: int, candidates: Tensor) -> Tensor:
        """Layer ``index`` on several states for this token at once, ``[count, hidden]``."""
        count = len(candidates)
        self.cache.make_room(self.scratch + count)
        rows = self.decoder.rivals([self.position] * count, self.scratch)
        return self.decoder.layer(index, candidates, rows, self.cache)


def cosine(states: Tensor, towards: Tensor) -> Tensor:
    """``[count]``, in float32 whatever the states are in."""
    return torch.cosine_similarity(states.float(), towards.float()[None], dim=-1)


@torch.inference_mode()
def optimise(token: Token, count: int, kept: Collection[int] = ()) -> Choice:
    """The best ``count`` layers to skip for ``token``: one layer call a layer.

    kept : layers that must not be skipped
    """
    num_layers = token.decoder.num_layers
    free = set(free_layers(num_layers, count, kept))
    states = token.states[0][None]  # row k is the best state with low + k skipped
    decisions: list[Tensor] = []
    lows = []
    for index, ((low, high), (new_low, new_high)) in enumerate(pairwise(_ranges(num_layers, count, free))):
        kinds = new_high - new_low + 1
        run = skip = states.new_full((kinds, states.shape[1]), torch.nan)  # nan: cannot be
        first, last = max(new_low, low), min(new_high, high)
        if first <= last:
            run = _placed(token.after(index, states[first - low : last + 1 - low]), first - new_low, kinds)
        first, last = max(new_low - 1, low), min(new_high - 1, high)
        if index in free and first <= last:
            skip = _placed(states[first - low : last + 1 - low], first + 1 - new_low, kinds)
        scores = torch.stack([cosine(x, token.states[index + 1]) for x in (run, skip)]).nan_to_num(-2.0)
        decisions.append(scores[1] > scores[0])
        lows.append(new_low)
        states = torch.where(decisions[-1][:, None], skip, run)
    found, left = [], count
    for index in reversed(range(num_layers)):
        if decisions[index][left - lows[index]]:
            found.append(index)
            left -= 1
    return Choice(SkipSet.layers(found), float(scores.amax()))


def _ranges(num_layers: int, count: int, free: Collection[int]) -> list[tuple[int, int]]:
    """After 0, 1, … layers: the fewest and the most skipped from which ``count`` can still be reached."""
    out, before, after = [], 0, len(free)
    for index in range(num_layers + 1):
        out.append((max(0, count - after), min(count, before)))
        before, after = before + (index in free), after - (index in free)
    return out


def _placed(states: Tensor, at: int, kinds: int) -> Tensor:
    """``states`` from row ``at`` of ``[kinds, hidden]``; the other rows are impossible."""
    out = states.new_full((kinds, states.shape[1]), torch.nan)
    out[at : at + len(states)] = states
    return out


@torch.inference_mode()
def cosine_of(token: Token, skips: SkipSet) -> float:
    """How near the state that skips ``skips`` comes to the full model's."""
    x = token.states[0][None]
    for index in range(token.decoder.num_layers):
        if index not in skips.attention:
            x = token.after(index, x)
    return float(cosine(x, token.states[-1])[0])


def token_at(decoder: Any, cache: InPlaceCache, recorded: Sequence[Tensor], *, start: int, position: int) -> Token:
    """A committed token of the last pass.

    recorded : states of that pass, ``[width, hidden]`` each; its first token's position is ``start``
    """
    return Token(decoder, cache, [x[position - start] for x in recorded], position, position + 1)
