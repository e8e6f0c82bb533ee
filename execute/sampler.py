"""How a stage chooses a token when text is sampled: the best of its scores plus noise that all stages share.

Assumes logits of a causal model and the text before each row.  A token drawn as ``argmax(score + noise)`` with
standard Gumbel noise has exactly the softmax of the scores as its distribution.  The noise of a token is a pure
function of seed, prompt, position and token id, so stages that score alike draw the same token, and a verification
remains what it is for greedy decoding: a comparison with the verifier's own choice.  Text is then, token for token,
what the target alone would have drawn with that seed.

References: Daliri, Musco and Suresh (2024), "Coupling without Communication and Drafter-Invariant Speculative
Decoding", arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipespec_model.sampling import Sampling
from pipespec_model.uniforms import GOLDEN, SAMPLE, word


def _signed(number: int) -> int:
    """A 64-bit word as torch's signed integers have it."""
    return number - (1 << 64) if number >> 63 else number


GAMMA = _signed(GOLDEN)
FACTORS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """``x >> bits`` of unsigned words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def words(state: int, ids: Tensor) -> Tensor:
    """``uniforms.mix(state, id)`` for each id, as signed 64-bit integers; the same on every device."""
    x = (ids ^ _signed(state)) + GAMMA
    for bits, factor in FACTORS:
        x = (x ^ _shifted(x, bits)) * factor
    return x ^ _shifted(x, 31)


def gumbel(state: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each token id, in double precision.

    Made of 52 random bits, never of exactly 0 or 1: every value is finite, in −3.6 … 36.8.
    """
    uniform = (_shifted(words(state, ids), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def check_finite(best: Tensor, position: int) -> None:
    """Raise ValueError naming the first position at which no token has a score: NaN among the logits, say.

    best : ``[rows]``, the highest score of each; position : of the first
    """
    for row, top in enumerate(best.tolist()):
        if not -float("inf") < top < float("inf"):
            raise ValueError(f"the scores at position {position + row} must have a finite maximum, got {top}")


class Sampler:
    """Chooses for one stage and one prompt.

    number : of the prompt, in the trace; prompts of one run draw independently
    eos : what ``min_new_tokens`` forbids
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], *, number: int, eos: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self._prompt = list(prompt)
        self._number = number
        self._by_row = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._by_row.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.min_new_tokens and eos:
            self._by_row.append(MinNewTokensLengthLogitsProcessor(
                len(prompt), sampling.min_new_tokens, torch.tensor(sorted(eos))))
        self._warp = _warpers(sampling)

    def scores(self, logits: Tensor, sequence: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """``[rows, vocab]``: logarithms, up to a constant a row, of the probabilities that row is drawn with.

        logits : of the rows after ``sequence`` and after each of ``drafts``
        sequence : generated tokens, without the prompt
        """
        scores = logits.float()
        if self._by_row:
            text = torch.tensor([[*self._prompt, *sequence, *drafts]], device=logits.device)
            held = text.shape[1] - len(drafts)
            scores = torch.cat([self._by_row(text[:, : held + row], scores[row : row + 1])
                                for row in range(len(scores))])
        # Warpers look at scores alone.
        return self._warp(None, scores)

    def choose(self, logits: Tensor, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """The token after ``sequence`` and after each of ``drafts``; parameters as of :meth:`scores`.

        Raises ValueError naming the position where no token has a score.
        """
        scores = self.scores(logits, sequence, drafts)
        best = scores.max(-1)
        check_finite(best.values, len(sequence))
        if not self.sampling.temperature:
            return [int(x) for x in best.indices.tolist()]
        return [self.draw(row, len(sequence) + i) for i, row in enumerate(scores)]

    def draw(self, scores: Tensor, position: int) -> int:
        """The token at ``position`` of the generated text, drawn from the softmax of ``scores`` ``[vocab]``."""
        ids, noisy = self.noisy(scores, position)
        return int(ids[noisy.argmax()])

    def noisy(self, scores: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Ids of what may be drawn, and their scores with noise; the best one is drawn."""
        state = word(self.sampling.seed, self._number, 0, SAMPLE, position)
        # Only what may be drawn needs noise: little is left behind top-k or top-p.
        ids = (scores > -float("inf")).nonzero()[:, 0]
        return ids, scores[ids].double() + gumbel(state, ids)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """In the order of transformers' ``generate``."""
    found = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


def sampler_of(sampling: Sampling | None, prompt: Sequence[int], *, number: int,
               eos: Sequence[int]) -> Sampler | None:
    """None for plain greedy decoding, which needs no scores."""
    if sampling is None or sampling.plain:
        return None
    return Sampler(sampling, prompt, number=number, eos=eos)
