"""Prompt lookup proposes what followed the last occurrence of the current n-gram."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pipespec_model.lookup import NO_PROPOSAL, PromptLookup
from pipespec_model.messages import Step


def propose(prompt: Sequence[int], sequence: Sequence[int] = (), limit: int = 3, **options: int) -> list[int]:
    lookup = PromptLookup(**options)
    lookup.begin(prompt)
    return lookup.run(sequence, step(len(sequence), limit))


def step(position: int, limit: int) -> Step:
    return Step("draft", position, 0, 0, (), limit, 0, False)


def by_hand(text: Sequence[int], max_ngram: int = 3, min_ngram: int = 2) -> int:
    """The longest suffix first; of its earlier occurrences the newest one that has a successor."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if list(text[start : start + n]) == list(text[len(text) - n :]):
                return text[start + n]
    return NO_PROPOSAL


def test_proposes_what_followed() -> None:
    """After [5, 6, 7, 8, 9, 5, 6] come 7, 8, 9: not one token behind."""
    assert propose([5, 6, 7, 8, 9, 5, 6]) == [7, 8, 9]
    assert propose([5, 6, 7, 8, 9], [5, 6]) == [7, 8, 9]


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5, 6], [7], [7, 7], [1, 2], [3, 1, 2]])
def test_suffix_that_matches_only_itself_proposes_nothing(prompt: list[int]) -> None:
    """Without an earlier occurrence, or with a text shorter than the n-gram, nothing is proposed."""
    assert propose(prompt) == []


def test_limit_is_kept() -> None:
    """Never more than asked for, and the block is the choice applied to its own output."""
    prompt = [5, 6, 7, 8, 9, 5, 6]
    whole = propose(prompt, limit=40)
    assert len(whole) == 40
    assert [propose(prompt, limit=n) for n in range(10)] == [whole[:n] for n in range(10)]
    one_by_one: list[int] = []
    for _ in range(10):
        one_by_one += propose(prompt, one_by_one, limit=1)
    assert one_by_one == whole[:10]


def test_newest_and_longest_match_wins() -> None:
    """The last occurrence decides, and a longer suffix goes before a newer shorter one."""
    assert propose([1, 2, 3, 1, 2, 4, 1, 2], limit=1) == [4]
    assert propose([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], limit=1) == [3]
    assert propose([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], limit=1, max_ngram=2) == [4]


@pytest.mark.parametrize("max_ngram", [2, 3, 5])
def test_choice_is_a_pure_function_of_the_prefix(max_ngram: int) -> None:
    """Whatever was looked up, drafted and rolled back before, the choice is that of a new object and
    of the definition."""
    rng = np.random.default_rng(max_ngram)
    prompt = [int(x) for x in rng.integers(0, 4, 12)]
    used = PromptLookup(max_ngram=max_ngram)
    used.begin(prompt)
    held: list[int] = []
    proposed = 0
    for _ in range(300):
        limit = int(rng.integers(1, 9))
        block = used.run(held, step(len(held), limit))
        assert block == propose(prompt, held, limit, max_ngram=max_ngram)
        text = [*prompt, *held]
        assert used.choice(text) == (block[0] if block else NO_PROPOSAL) == by_hand(text, max_ngram)
        proposed += bool(block)
        if rng.random() < 0.4:
            del held[int(rng.integers(0, len(held) + 1)) :]
        held += [*block[: int(rng.integers(0, limit + 1))], int(rng.integers(0, 4))]
    assert proposed > 100


def test_begin_forgets_the_prompt_before() -> None:
    """A second prompt is looked up in its own text alone."""
    lookup = PromptLookup()
    lookup.begin([5, 6, 7, 8, 9, 5, 6])
    assert lookup.run([], step(0, 3)) == [7, 8, 9]
    lookup.begin([1, 2, 3, 5, 6])
    assert lookup.run([], step(0, 3)) == []


def test_shortest_ngram_is_bounded_below() -> None:
    """``max_ngram`` 1 still needs two matching tokens: one token alone matches almost anywhere."""
    assert propose([5, 1, 2, 5], max_ngram=1) == []
    assert propose([5, 1, 2, 5, 1], limit=1, max_ngram=1) == [2]
