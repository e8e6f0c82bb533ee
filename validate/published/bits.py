"""Agreement bits from synchronous runs: whether a drafter's greedy choice is the target's, a position each.

The files record how many tokens each verification emitted.  With γ drafts a round, ``n`` emitted from
position v on means that the bits v … v+n−2 are 1 and, where n ≤ γ, that bit v+n−1 is 0.  After a window that
was accepted whole the drafter decodes the bonus position b = v−1 itself, uncorrected (both stages' own first
tokens form such a position too): n ≥ 2 proves bit b, n = 1 says that b and v are not both 1.  Other files of
the pair settle that, or the step's time where a plain one-token step is much shorter than a wider one.
(The newest published chain replaces the drafter's first token after prefill, and then no file tells of
position 0; it counts as agreed to, which in a pipeline decides one step at most.)

What several files say of a position is put to the vote; positions where they differ are contradictory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .files import PublishedFile, PublishedPrompt

UNKNOWN_BIT = -1
TELLING_RATIO = 2.0
"""A wider step must take this many times a plain one for its time to tell them apart."""


@dataclass(frozen=True)
class Round:
    """One verification of a synchronous run of two stages.

    position : of the first token that it emitted, v
    at_bonus : whether v−1 is a position that the drafter decoded uncorrected
    """

    position: int
    emitted: int
    at_bonus: bool
    target_s: float


def rounds(prompt: PublishedPrompt, window: int) -> Iterator[Round]:
    """A prompt's verifications in turn; ``window`` is γ."""
    position, at_bonus = 1, True
    for emitted, seconds in zip(prompt.emitted[0], prompt.step_s[1], strict=True):
        yield Round(position, emitted, at_bonus, seconds)
        position += emitted
        at_bonus = emitted == window + 1


@dataclass
class PromptBits:
    """One prompt's bits, merged.

    bits : int8 ``[num_tokens]``: 1, 0 or -1 where no file tells
    contradictory : positions on which files differ
    other_output : files whose output has another length, left out
    """

    num_tokens: int
    bits: NDArray[np.int8]
    contradictory: tuple[int, ...] = ()
    other_output: tuple[str, ...] = ()

    @property
    def num_unknown(self) -> int:
        return int((self.bits == UNKNOWN_BIT).sum())

    @property
    def clean(self) -> bool:
        return not self.contradictory and not self.other_output


@dataclass
class _Votes:
    """What the files say of one prompt: votes by position, and pairs that are not both 1."""

    votes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    not_both: set[tuple[int, int]] = field(default_factory=set)

    def hear(self, found: Iterable[Round], window: int, plain_below_s: float) -> None:
        for item in found:
            v, n = item.position, item.emitted
            if n > 1:
                agreed = range(v - item.at_bonus, v + n - 1)
                for position in agreed:
                    self.votes[position][1] += 1
                if n <= window:
                    self.votes[v + n - 1][0] += 1
            elif not item.at_bonus:
                self.votes[v][0] += 1
            elif not plain_below_s:
                self.not_both.add((v - 1, v))
            elif item.target_s < plain_below_s:
                self.votes[v - 1][0] += 1
            else:
                self.votes[v - 1][1] += 1
                self.votes[v][0] += 1

    def value(self, position: int) -> int:
        """The majority's; of a tie, 1: a bit that was seen as 1 did let drafts pass."""
        zeros, ones = self.votes.get(position, (0, 0))
        return UNKNOWN_BIT if zeros + ones == 0 else int(ones >= zeros)

    def settle(self) -> None:
        """Where one of a pair is known to be 1, the other is 0; until nothing more follows."""
        contradicted: set[tuple[int, int]] = set()
        changed = True
        while changed:
            changed = False
            for pair in sorted(self.not_both - contradicted):
                values = [self.value(position) for position in pair]
                if values == [1, 1]:
                    contradicted.add(pair)
                    self.votes[pair[1]][0] += 1  # counted as a file that says otherwise
                elif 1 in values and UNKNOWN_BIT in values:
                    self.votes[pair[values.index(UNKNOWN_BIT)]][0] += 1
                    changed = True

    def merged(self, num_tokens: int, other_output: tuple[str, ...]) -> PromptBits:
        self.settle()
        bits = np.array([self.value(position) for position in range(num_tokens)], dtype=np.int8)
        contradictory = tuple(p for p in sorted(self.votes) if p < num_tokens and min(self.votes[p]) > 0)
        return PromptBits(num_tokens, bits, contradictory, other_output)


def merge(files: Sequence[PublishedFile], plain_s: float, wide_s: float) -> dict[int, PromptBits]:
    """By prompt index, what all synchronous files of one pair tell together.

    plain_s, wide_s : the target's step of one token and of more; used where they tell steps apart
    """
    plain_below_s = (plain_s * wide_s) ** 0.5 if wide_s > TELLING_RATIO * plain_s else 0.0
    by_index: dict[int, list[tuple[PublishedFile, PublishedPrompt]]] = defaultdict(list)
    for file in files:
        for prompt in file.prompts:
            by_index[prompt.index].append((file, prompt))
    return {index: _merge_prompt(found, plain_below_s) for index, found in sorted(by_index.items())}


def _merge_prompt(found: Sequence[tuple[PublishedFile, PublishedPrompt]], plain_below_s: float) -> PromptBits:
    lengths = [prompt.num_tokens for _, prompt in found]
    usual = max(sorted(set(lengths)), key=lengths.count)
    votes = _Votes()
    for file, prompt in found:
        window = file.label - 1
        if prompt.num_tokens == usual and window > 0:
            votes.hear(rounds(prompt, window), window, plain_below_s)
    return votes.merged(usual, tuple(file.name for file, prompt in found if prompt.num_tokens != usual))


def rate_after_rejection(merged: Iterable[PromptBits]) -> float:
    """Share of ones right after a zero: with what unknown positions are drawn."""
    return agreement_rates(merged)[2]


def agreement_rates(merged: Iterable[PromptBits]) -> tuple[float, float, float]:
    """Share of ones: overall, after a one, after a zero."""
    pairs = [(int(a), int(b)) for item in merged for a, b in zip(item.bits, item.bits[1:], strict=False)
             if UNKNOWN_BIT not in (a, b)]
    if not pairs:
        return 0.5, 0.5, 0.5
    overall = float(np.mean([b for _, b in pairs]))
    after = [[b for a, b in pairs if a == last] for last in (1, 0)]
    after_one, after_zero = (float(np.mean(found)) if found else overall for found in after)
    return overall, after_one, after_zero
