"""What layer skipping does to a model's next token, measured along texts that the full model has written.

Everything here is teacher-forced: each position attends to entries that the full model computed, and is
asked for its next token and for how near its last state comes to the full model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from execute.decoders import InPlaceCache, LayeredDecoder
from execute.skips import SkipSet

from .optimise import Token, cosine, optimise


@dataclass(frozen=True)
class Text:
    """A prompt and the answer that the full model gave, with its cache and states.

    states : ``[length, hidden]`` before the first and after each layer; first : where the answer begins
    """

    decoder: LayeredDecoder
    cache: InPlaceCache
    states: list[Tensor]
    tokens: list[int]
    first: int

    def token(self, position: int) -> Token:
        return Token(self.decoder, self.cache, [x[position] for x in self.states], position, len(self.tokens))


@torch.inference_mode()
def read(decoder: LayeredDecoder, prompt: Sequence[int], answer: Sequence[int]) -> Text:
    tokens = [*prompt, *answer]
    cache: Any = decoder.new_cache()
    states: list[Tensor] = []
    decoder.forward(tokens, 0, 1, cache, states=states)
    return Text(decoder, cache, states, tokens, len(prompt))


@torch.inference_mode()
def next_tokens(text: Text, positions: Sequence[int], skips: SkipSet) -> tuple[list[bool], list[float]]:
    """Per position: whether the skipping model's next token is the text's, and the cosine of its last state."""
    decoder, at = text.decoder, len(text.tokens)
    text.cache.make_room(at + len(positions))
    rows = decoder.rivals(positions, at)
    x = text.states[0][list(positions)]
    for index in range(decoder.num_layers):
        if index not in skips.attention:
            x = decoder.layer(index, x, rows, text.cache)
    right = [choice == text.tokens[position + 1]
             for choice, position in zip(decoder.head(x).argmax(-1).tolist(), positions, strict=True)]
    near = torch.cosine_similarity(x.float(), text.states[-1][list(positions)].float(), dim=-1)
    return right, near.tolist()


CACHES = ("verifier", "prompt", "own")
"""Who computed the entries that a skipping model attends to: the full model all of them, or those of the prompt, or
none."""


@torch.inference_mode()
def by_cache(text: Text, skips: SkipSet) -> dict[str, list[bool]]:
    """Whether the skipping model's choice at each position of the answer but the first is the text's, for each of
    CACHES."""
    decoder, first, last = text.decoder, text.first, len(text.tokens) - 1
    answer = text.tokens[first:last]
    out = {"verifier": next_tokens(text, range(first, last), skips)[0]}
    for kind in CACHES[1:]:
        cache: Any = decoder.new_cache()
        if kind == "prompt":
            decoder.forward(text.tokens[:first], 0, 1, cache)
            logits = decoder.forward(answer, first, len(answer), cache, skip=skips)
        else:
            logits = decoder.forward(text.tokens[:last], 0, len(answer), cache, skip=skips)
        out[kind] = [a == b for a, b in zip(logits.argmax(-1).tolist(), text.tokens[first + 1 :], strict=True)]
    return out


def chosen(text: Text, position: int, count: int, *, hindsight: bool = False) -> SkipSet:
    """What the programme chooses before the token at ``position`` is drafted from: the newest whose entries the
    verifier holds is the one before it.

    hindsight : by the states of that token itself, which nobody knows before the full model has run on it
    """
    return optimise(text.token(position - (not hindsight)), count).skips


@torch.inference_mode()
def every_set(token: Token, free: Sequence[int], counts: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The cosine of every set of so many of the ``free`` layers: all partial sets go through a layer at once."""
    sets: list[tuple[int, ...]] = [()]
    states = token.states[0][None]
    for index in range(token.decoder.num_layers):
        ran = token.after(index, states)
        if index not in free:
            states = ran
            continue
        left = sum(layer > index for layer in free)
        grown = [(*s, index) for s in sets]
        keep = [[i for i, s in enumerate(found) if len(s) <= max(counts) and len(s) + left >= min(counts)]
                for found in (sets, grown)]
        states = torch.cat([ran[keep[0]], states[keep[1]]])
        sets = [sets[i] for i in keep[0]] + [grown[i] for i in keep[1]]
    near = cosine(states, token.states[-1]).tolist()
    found = dict(zip(sets, near, strict=True))
    assert all(sum(len(s) == count for s in found) == comb(len(free), count) for count in counts)
    return {s: value for s, value in found.items() if len(s) in counts}


def against_all(token: Token, free: Sequence[int], counts: Sequence[int]) -> list[dict[str, float]]:
    """The programme beside the best set and the mean one, by number of layers skipped.

    ``gap_closed``: share of the way from the mean set's cosine to the best one's.
    """
    every = every_set(token, free, counts)
    kept = [index for index in range(token.decoder.num_layers) if index not in free]
    out = []
    for count in counts:
        values = np.array([every[s] for s in combinations(sorted(free), count)])
        found = every[optimise(token, count, kept).skips.whole]
        best, mean = float(values.max()), float(values.mean())
        out.append({"skipped": count, "cosine": found, "best": best, "mean": mean,
                    "rank": 1 + int((values > found + 1e-7).sum()), "num_sets": len(values),
                    "gap_closed": (found - mean) / (best - mean)})
    return out
