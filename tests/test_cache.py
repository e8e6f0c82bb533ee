"""Cutting the key-value cache, and what a stage may rely on after a rollback."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from conftest import STRATEGIES, chain, drive, stage
from transformers import DynamicCache

from execute.torch_runner import crop_to
from pipespec_model.messages import Step

PROMPT = (5, 6, 7, 8)


def filled(length: int, layers: int = 3) -> DynamicCache:
    """Every entry is its own position."""
    cache = DynamicCache()
    entries = torch.arange(length, dtype=torch.float32).reshape(1, 1, length, 1).expand(1, 2, length, 4)
    if length:
        for layer in range(layers):
            cache.update(entries.clone(), entries.clone() + 0.5, layer)
    return cache


@pytest.mark.parametrize("length", [0, 1, 3, 10])
@pytest.mark.parametrize("where", ["0", "1", "n-1", "n"])
def test_crop_leaves_the_target_length_in_every_layer(length: int, where: str) -> None:
    """After a crop every layer holds exactly the target length, and its oldest entries."""
    target = {"0": 0, "1": min(1, length), "n-1": max(0, length - 1), "n": length}[where]
    cache = filled(length)
    crop_to(cache, target)
    assert cache.get_seq_length() == target
    for layer in cache.layers:
        assert layer.keys.shape[-2] == layer.values.shape[-2] == target
        assert layer.keys[0, 0, :, 0].tolist() == list(range(target))
        assert layer.values[0, 1, :, 3].tolist() == [i + 0.5 for i in range(target)]


@pytest.mark.parametrize("length", [0, 1, 3, 10])
@pytest.mark.parametrize("beyond", [-1, +1])
def test_crop_outside_the_cache_is_refused(length: int, beyond: int) -> None:
    """A length below 0 or above what is held raises and changes nothing."""
    cache = filled(length)
    with pytest.raises(ValueError, match=rf"must be in \[0, {length}\]"):
        crop_to(cache, -1 if beyond < 0 else length + 1)
    assert cache.get_seq_length() == length


@pytest.mark.parametrize("length", [1, 3, 10])
def test_crop_of_the_cache_that_is_written_in_place(runners, length: int) -> None:
    """After a crop and other text, the logits are those of a cache that never held what was cut."""
    decoder = runners["target"].step
    text, other = list(range(1, length + 1)), [40, 41, 42]
    with torch.inference_mode():
        for target in {0, 1, length - 1, length}:
            used, fresh_cache = decoder.new_cache(), decoder.new_cache()
            decoder.forward(text, 0, 1, used)
            crop_to(used, target)
            assert used.get_seq_length() == target
            if target:
                decoder.forward(text[:target], 0, 1, fresh_cache)
            expected = decoder.forward(other, target, 3, fresh_cache)
            assert torch.allclose(decoder.forward(other, target, 3, used), expected, atol=1e-4)
            with pytest.raises(ValueError, match="cache length must be in"):
                crop_to(used, target + 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("window", [1, 2, 5])
def test_target_as_its_own_drafter_is_always_right(runners, plain_greedy, strategy: str, window: int) -> None:
    """A drafter that is the target has every draft accepted in every round of 100 tokens."""
    pair = [copy.copy(runners["target"]), runners["target"]]
    for runner in pair:
        runner.begin(PROMPT)
    pipeline = chain(strategy, [stage("draft"), stage("full")], window=window, lookahead=window)
    done = drive(pipeline, pair, PROMPT, 100)
    rounds = done.verifications()
    assert rounds
    assert all(accepted == drafts for drafts, accepted in rounds)
    assert max(drafts for drafts, _ in rounds) == window
    assert done.counters[-1]["rejected"] == 0
    assert done.tokens == plain_greedy(PROMPT, 100)


def test_forced_rejections_leave_positions_right(runners, plain_greedy) -> None:
    """After a round with none accepted a round can be accepted whole: the cache was cut to what is
    committed, also with a prompt of one token."""
    answer = plain_greedy((9,), 60)

    class Sometimes:
        """Drafts rightly except from every sixth position on, until it is corrected."""

        def run(self, sequence: list[int], step: Step) -> list[int]:
            place = len(sequence)
            wrong = place % 6 == 1 and sequence == answer[:place]
            return [(answer[place] + wrong) % 96]

    target = runners["target"]
    target.begin((9,))

    def committed(stage_: object, runner: object) -> None:
        if runner is target:
            assert target.cache.get_seq_length() >= stage_.cached
            assert stage_.cached == 1 + len(stage_.sequence) - 1  # all but the newest token

    pipeline = chain("speculative", [stage("s"), stage("t")], window=4)
    done = drive(pipeline, [Sometimes(), target], (9,), 60, check=committed)
    rounds = itertools.pairwise(done.verifications())
    assert any(first[1] == 0 and second[1] == second[0] >= 3 for first, second in rounds)
    assert done.tokens == answer
    for (step, right), (after, _) in itertools.pairwise(done.steps[-1]):
        assert after.position == step.position + right + 1
        assert after.cached == 1 + after.position - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafter_cache_follows_what_is_committed(runners, plain_greedy, strategy: str) -> None:
    """A drafter that is often wrong is cut back to the committed text and never holds more than that."""
    pair = [runners["mid"], runners["target"]]
    for runner in pair:
        runner.begin(PROMPT)
    cut = []

    def within(stage_: object, runner: object) -> None:
        held = runner.cache.get_seq_length()
        assert stage_.cached <= held
        assert stage_.cached <= len(PROMPT) + len(stage_.sequence)
        cut.append(held - stage_.cached)

    done = drive(chain(strategy, [stage("d"), stage("t")], window=4), pair, PROMPT, 80, check=within)
    assert done.counters[1]["rejected"] > 3
    assert done.counters[1]["accepted"] > 3
    assert any(cut), "no rollback was exercised"
    assert done.tokens == plain_greedy(PROMPT, 80)
