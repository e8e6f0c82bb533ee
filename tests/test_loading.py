"""Which models are loaded and which are refused before the first token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from conftest import chain, drive, stage

from execute.loading import check_can_roll_back, end_of_sequence, load_model, load_tokenizer
from execute.torch_runner import TorchRunner
from execute.vocabulary import check_same, common_vocabulary
from pipespec_model.errors import InputError

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
         "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3}
PROMPT = (5, 6, 7, 8)


@pytest.mark.parametrize(("config", "kind"), [
    (transformers.MistralConfig(sliding_window=32), "sliding_attention"),
    (transformers.Qwen2Config(use_sliding_window=True, sliding_window=32, max_window_layers=0), "sliding_attention"),
    (transformers.Gemma2Config(), "sliding_attention"),
    (transformers.MambaConfig(), "linear_attention|recurrent"),
    (transformers.Qwen3NextConfig(), "linear_attention"),
    (transformers.JambaConfig(), "linear_attention|recurrent"),
    (transformers.T5Config(), "encoder-decoder"),
    (transformers.RwkvConfig(), "recurrent"),
    (transformers.xLSTMConfig(), "recurrent"),
], ids=lambda value: type(value).__name__ if not isinstance(value, str) else "")
def test_cache_that_cannot_roll_back_is_refused(config, kind: str) -> None:
    """Sliding, recurrent, hybrid and encoder-decoder models are refused, naming the layer type."""
    with pytest.raises(InputError, match=f"model 'm' must have a cache that can roll back.*({kind})"):
        check_can_roll_back(config, "m")


@pytest.mark.parametrize("config", [
    transformers.LlamaConfig(), transformers.Qwen2Config(), transformers.Qwen2Config(sliding_window=32),
    transformers.MistralConfig(sliding_window=None), transformers.GPT2Config(),
], ids=lambda config: type(config).__name__)
def test_full_attention_is_accepted(config) -> None:
    """A model whose layers all attend to everything is accepted, also with a window that is switched off."""
    check_can_roll_back(config, "m")


def test_refusal_comes_before_the_weights(tmp_path: Path) -> None:
    """A folder with a sliding-window config and no weights at all is refused for its layers."""
    transformers.MistralConfig(**SIZES, sliding_window=16).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="sliding_attention"):
        load_model(stage("s", tmp_path))


@pytest.mark.parametrize("make", [
    lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True)),
    lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, mlp_bias=True, head_dim=16)),
    lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})),
    lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None,
        initializer_range=0.3)),
], ids=["bias", "tied", "mlp-bias", "linear-rope", "qwen2", "gpt2"])
def test_every_architecture_decodes_as_transformers_does(make, tmp_path: Path) -> None:
    """Whichever way a model is run, drafted by its int8 copy or alone, the text is transformers' own."""
    torch.manual_seed(3)
    model = make().eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0)
    answer = out[0, len(PROMPT) :].tolist()
    full = TorchRunner(stage("full", tmp_path))
    int8 = TorchRunner(stage("int8", tmp_path, quantize="int8"))
    for runner in (full, int8):
        runner.begin(PROMPT)
    assert drive(chain("autoregressive", [stage("full")]), [full], PROMPT, 40).tokens == answer
    full.begin(PROMPT)
    done = drive(chain("speculative", [stage("int8"), stage("full")]), [int8, full], PROMPT, 40)
    assert done.tokens == answer
    assert done.counters[1]["accepted"] > 10


def test_no_deprecated_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prefill, steps and a rollback through transformers' own forward and cache log no warning; Python's
    warnings are errors everywhere in these tests."""
    torch.manual_seed(3)
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)).save_pretrained(tmp_path)
    runner = TorchRunner(stage("s", tmp_path))
    transformers.logging.enable_propagation()
    try:
        runner.begin(PROMPT)
        drive(chain("autoregressive", [stage("s")]), [runner], PROMPT, 5)
        runner.forget(6)
    finally:
        transformers.logging.disable_propagation()
    assert caplog.records == []
    assert runner.cache.get_seq_length() == 6


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cpu:7", "cuda:x"])
def test_device_that_does_not_exist(tiny, device: str) -> None:
    """A device that is not here is an error naming the field, the choice and the value."""
    with pytest.raises(InputError, match=rf"stages\[s\]\.device must be one of cpu.*, got '{device}'"):
        load_model(stage("s", tiny["target"], device=device))


@pytest.mark.parametrize("what", ["nowhere", "empty", "torn config", "text"])
def test_model_that_cannot_be_loaded(tmp_path: Path, what: str) -> None:
    """A missing, empty or damaged model is an error naming it, whatever transformers raises."""
    path = tmp_path / "m"
    if what != "nowhere":
        path.mkdir()
    if what == "torn config":
        (path / "config.json").write_text('{"model_type": "llam', encoding="utf-8")
    if what == "text":
        (path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        (path / "model.safetensors").write_text("not weights", encoding="utf-8")
    with pytest.raises(InputError, match=r"model '.*m' cannot be loaded \("):
        load_model(stage("s", path))


def test_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A folder without a tokenizer is an error naming it."""
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_vocabulary_is_compared_by_meaning() -> None:
    """Padding is cut off; two swapped ids and another tokenizer are refused, naming what differs."""
    words = {i: f"w{i}" for i in range(100)}
    check_same("t", words, "d", words | {100: "pad", 101: "pad2"})
    swapped = words | {3: "w4", 4: "w3"}
    with pytest.raises(InputError, match="model 'd' must read token ids as 't' does; id 3 is 'w4'"):
        check_same("t", words, "d", swapped)
    with pytest.raises(InputError, match="model 'd' must share the vocabulary of 't'"):
        check_same("t", words, "d", {i: f"w{i}" for i in range(50)})


def test_common_vocabulary_of_models(tiny) -> None:
    """One model alone has no bound; two with one tokenizer have its size."""
    pair = [stage("near", tiny["near"]), stage("target", tiny["target"])]
    assert common_vocabulary([chain("autoregressive", pair[1:])]) is None
    assert common_vocabulary([chain("pipelined", pair)]) == 96


def test_generation_config_says_where_to_stop(tmp_path: Path) -> None:
    """A model that names several end-of-sequence ids stops at each; one that names none, at the tokenizer's."""
    class Tokenizer:
        eos_token_id = 9

    assert end_of_sequence(str(tmp_path), Tokenizer()) == (9,)
    transformers.GenerationConfig(eos_token_id=[3, 5]).save_pretrained(tmp_path)
    assert end_of_sequence(str(tmp_path), Tokenizer()) == (3, 5)
