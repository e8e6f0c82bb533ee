"""The layer-by-layer decoders and the optimiser, against independent references on tiny models."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_layers import FAMILIES, make

from execute.clasp.layerwise import LayerwiseDecoder, layered
from execute.clasp.optimise import Token, cosine_of, optimise, token_at
from execute.skips import SkipSet, random_skips, read_skips, uniform_skips, write_skips
from pipespec_model.errors import InputError

IDS = list(range(5, 17))
LAYERS = 6


def last_token(decoder: Any, ids: list[int] = IDS) -> Token:
    """The last of ``ids`` after two passes, as after a verification."""
    cache, states = decoder.new_cache(), []
    with torch.inference_mode():
        decoder.forward(ids[:8], 0, 1, cache)
        decoder.forward(ids[8:], 8, 1, cache, states=states)
    return token_at(decoder, cache, states, start=8, position=len(ids) - 1)


def reference(token: Token, count: int, kept: tuple[int, ...] = ()) -> tuple[tuple[int, ...], float]:
    """The recurrence as it is printed: one state at a time, its skip set carried along."""
    best: dict[tuple[int, int], tuple[Any, tuple[int, ...], float]] = {(0, 0): (token.states[0], (), 1.0)}
    for i in range(1, token.decoder.num_layers + 1):
        for j in range(min(i, count) + 1):
            found = []
            if (i - 1, j) in best:
                state, skipped, _ = best[i - 1, j]
                found.append((token.after(i - 1, state[None])[0], skipped))
            if (i - 1, j - 1) in best and i - 1 not in kept:
                state, skipped, _ = best[i - 1, j - 1]
                found.append((state, (*skipped, i - 1)))
            scored = [(state, skipped, float(torch.cosine_similarity(state, token.states[i], dim=0)))
                      for state, skipped in found]
            if scored:
                best[i, j] = max(scored, key=lambda entry: entry[2])  # the first of equals: the layer runs
    return best[token.decoder.num_layers, count][1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_in_turn_are_the_model(family: str) -> None:
    """One pass, and two passes over a cache, give transformers' own logits."""
    model = make(family)
    decoder, cache = layered(model), layered(model).new_cache()
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
        parts = [decoder.forward(IDS[:5], 0, 5, cache), decoder.forward(IDS[5:], 5, 7, cache)]
    assert torch.allclose(torch.cat(parts), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [(), (0, 5)])
def test_batched_rows_equal_the_recurrence_one_state_at_a_time(family: str, kept: tuple[int, ...]) -> None:
    """Same set, same similarity, for every number of layers, with and without layers that must stay."""
    with torch.inference_mode():
        token = last_token(layered(make(family)))
        for count in range(LAYERS - len(kept) + bool(kept)):
            choice = optimise(token, count, kept)
            skipped, similarity = reference(token, count, kept)
            assert choice.skips.whole == skipped
            assert choice.cosine == pytest.approx(similarity, abs=1e-5)
            assert not set(kept) & choice.skips.attention
            assert choice.cosine == pytest.approx(cosine_of(token, choice.skips), abs=1e-5)


def test_both_decoders_of_llama_choose_alike() -> None:
    """The fused Llama decoder and transformers' layers give one set."""
    model = make("Llama")
    own, theirs = last_token(layered(model)), last_token(LayerwiseDecoder(model))
    for count in range(LAYERS):
        assert optimise(own, count).skips == optimise(theirs, count).skips


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_never_above_brute_force_and_mostly_near_it(family: str) -> None:
    """No set beats the best of all; the programme finds it for one layer and beats the mean set for each."""
    token = last_token(layered(make(family)))
    for count in range(1, LAYERS):
        every = [cosine_of(token, SkipSet.layers(c)) for c in combinations(range(LAYERS), count)]
        found = optimise(token, count).cosine
        assert np.mean(every) <= found + 1e-5 or count == LAYERS - 1
        assert found <= max(every) + 1e-5
        if count == 1:
            assert found == pytest.approx(max(every), abs=1e-5)


def test_nothing_skipped_is_the_model_itself() -> None:
    """M = 0 gives the empty set and similarity 1."""
    choice = optimise(last_token(layered(make("Qwen2"))), 0)
    assert choice.skips == SkipSet()
    assert choice.cosine == pytest.approx(1.0, abs=1e-6)


def test_the_optimiser_leaves_the_committed_cache_as_it_is() -> None:
    """Rows of the committed text are bit-identical before and after."""
    token = last_token(layered(make("Llama")))
    before = token.cache.keys[:, : len(IDS)].clone(), token.cache.values[:, : len(IDS)].clone()
    optimise(token, 3)
    assert torch.equal(token.cache.keys[:, : len(IDS)], before[0])
    assert torch.equal(token.cache.values[:, : len(IDS)], before[1])


@pytest.mark.parametrize("count", [-1, 6, 7])
def test_too_many_layers_are_refused(count: int) -> None:
    """All layers, more than there are and fewer than none are errors that name the limit."""
    with pytest.raises(InputError, match=r"num_skipped_layers must be in 0\.\.5"):
        uniform_skips(LAYERS, count)


def test_layers_that_must_stay_count() -> None:
    """Of what may not be skipped nothing is, and what is outside the model is refused."""
    rng = np.random.default_rng(0)
    for count in range(5):
        for skips in (uniform_skips(LAYERS, count, (0, 5)), random_skips(LAYERS, count, (0, 5), rng=rng)):
            assert len(skips.whole) == count
            assert not {0, 5} & skips.attention
    with pytest.raises(InputError, match=r"in 0\.\.4"):
        uniform_skips(LAYERS, 5, (0, 5))
    with pytest.raises(InputError, match=r"kept_layers must be in 0\.\.5, got 6"):
        uniform_skips(LAYERS, 1, (6,))


@pytest.mark.parametrize(("kind", "options", "reason"), [
    ("Mistral", {"sliding_window": 8}, "sliding_attention"),
    ("Gemma2", {}, "sliding_attention"),
    ("Mamba", {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2}, "linear_attention"),
    ("GPTNeoX", {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "intermediate_size": 96}, "layers are not a list"),
    ("Cohere", {"logit_scale": 0.5}, "logits are not those of its layers"),
])
def test_other_models_are_refused_by_name(kind: str, options: dict[str, Any], reason: str) -> None:
    """A cache that cannot roll back, another build and a model that does more than its layers are named."""
    import transformers

    base = {} if "vocab_size" in options else {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**base, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with pytest.raises(InputError, match=f"{kind}ForCausalLM.*{reason}"):
        layered(model)


def test_swift_file_is_read_back_as_written(tmp_path: Path) -> None:
    """Attention and MLP lists survive the round trip."""
    skips = SkipSet(frozenset({1, 3}), frozenset({2, 3}))
    write_skips(skips, tmp_path / "skip_layers.json")
    assert read_skips(tmp_path / "skip_layers.json") == skips
    assert skips.whole == (3,)


@pytest.mark.parametrize("text", ["[]", '{"attention": [1]}', '{"attention": [1, 1], "mlp": []}',
                                  '{"attention": [-1], "mlp": []}', '{"attention": [true], "mlp": []}',
                                  '{"attention": "1", "mlp": []}', '{"attention": [], "mlp": [], "x": 1}'])
def test_a_wrong_swift_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    """Each fault names the file."""
    path = tmp_path / "skip_layers.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"skip_layers\.json"):
        read_skips(path)


@pytest.mark.parametrize("skips", [SkipSet(frozenset({0}), frozenset()), SkipSet(frozenset({2}), frozenset({3}))])
def test_attention_and_mlp_apart(skips: SkipSet) -> None:
    """Skipping one half of a layer is the model with that half's output projection at zero."""
    model = make("Llama")
    with torch.inference_mode():
        decoder = layered(model)
        found = decoder.forward(IDS, 0, 3, decoder.new_cache(), skip=skips)
        for index in skips.attention:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
        for index in skips.mlp:
            model.model.layers[index].mlp.down_proj.weight.zero_()
        expected = model(torch.tensor([IDS])).logits[0, -3:]
    assert torch.allclose(found, expected, atol=2e-5, rtol=1e-4)
