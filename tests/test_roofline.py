"""Estimates before measurement: counts, laws, what is refused, and the command."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import numpy as np
import pytest
from drawn_pipelines import script

from pipespec_model import devices, roofline, shape
from pipespec_model.devices import Device, device, runtime
from pipespec_model.errors import InputError
from pipespec_model.profile import Profile, load_profile
from pipespec_model.roofline import Estimate, with_estimate
from pipespec_model.shape import ModelShape, read_shape
from pipespec_model.spec import StageSpec
from simulate.__main__ import main

LLAMA_1B = ModelShape(16, 2048, 8192, 32, 8, 64, 128256, tied_head=True)
LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = ModelShape(80, 8192, 28672, 64, 8, 128, 128256)
CONFIG = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}


def made(model: ModelShape = LLAMA_8B, on: str = "a100-80gb", by: str = "ideal", bits: float = 16.0) -> Estimate:
    return Estimate(model, device(on), runtime(by), bits)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "llama-8b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


@pytest.mark.parametrize("module", [devices, roofline, shape])
def test_doctests_run(module) -> None:
    """The examples in the documentation are true, and there are some."""
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": True}, {"head_dim": 32, "num_key_value_heads": 1},
                                  {"num_hidden_layers": 3, "vocab_size": 101}])
def test_weights_are_those_that_transformers_makes(more: dict, tmp_path: Path) -> None:
    """Counted from the file, and counted in the module that is built from it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    small = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6,
             "num_key_value_heads": 2, "vocab_size": 77, "tie_word_embeddings": False}
    built = LlamaConfig(**{**small, **more})
    built.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    found = read_shape(tmp_path)
    assert found.weights == sum(value.numel() for value in model.parameters())
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert found.flops_per_token == 2 * sum(layer.weight.numel() for layer in linear)
    keys_and_values = [layer for name, layer in model.named_modules() if name.endswith(("k_proj", "v_proj"))]
    assert found.cache_values == sum(layer.out_features for layer in keys_and_values)


def test_known_models_have_their_known_sizes() -> None:
    """Parameters as the makers' weight files hold them."""
    assert LLAMA_1B.weights == 1_235_814_400
    assert LLAMA_70B.weights == 70_553_706_496


def test_a_step_is_the_largest_of_its_three_times() -> None:
    """Reading binds a narrow step, arithmetic a wide one, the launches a small model; overhead comes on top."""
    ideal = made().latency
    assert ideal.mean_s(1, 0) == pytest.approx(2 * (LLAMA_8B.weights - 4096 * (128256 + 65)) / 2.039e12)
    assert ideal.mean_s(1, 0) == ideal.mean_s(64, 0) < ideal.mean_s(512, 0)
    assert ideal.mean_s(4096, 0) == pytest.approx(4096 * LLAMA_8B.flops_per_token / 3.12e14)
    assert ideal.mean_s(1, 8192) - ideal.mean_s(1, 0) == pytest.approx(8192 * 131072 / 2.039e12)
    eager, compiled = made(LLAMA_1B, by="eager").latency, made(LLAMA_1B, by="compiled").latency
    assert eager.mean_s(1, 0) == eager.mean_s(16, 1000) == pytest.approx(16 * 7.26e-4)
    assert compiled.mean_s(1, 0) == pytest.approx(made(LLAMA_1B).latency.mean_s(1, 0) / 0.83 + 16 * 5.4e-5)


def test_estimates_order_as_what_they_are_made_of() -> None:
    """More bandwidth, fewer bits, fewer weights: never slower; more context or width: never faster."""
    def seconds(**options) -> float:
        return made(**options).latency.mean_s(1, 512)

    assert seconds(on="h200") < seconds(on="h100") < seconds(on="a100-80gb") < seconds(on="l40s")
    assert seconds(bits=4) < seconds(bits=8) < seconds(bits=16) < seconds(bits=32)
    assert seconds(model=LLAMA_1B) < seconds(model=LLAMA_8B) < seconds(model=LLAMA_70B)
    for by in ("ideal", "eager", "compiled"):
        grid = np.array([[made(by=by).latency.mean_s(width, context) for width in (1, 8, 400)]
                         for context in (0, 10_000)])
        assert (np.diff(grid, axis=0) >= 0).all()
        assert (np.diff(grid, axis=1) >= 0).all()


def test_errors_are_those_that_are_stated() -> None:
    """docs/estimates.md: a measured compiled step is never shorter than the ideal one; one constant carries from 7B
    to 8B in 16 bits within 1%; fewer bits take 8 to 35% longer than estimated."""
    for name, model, bits, speed in script("estimate_errors").GPT_FAST:
        assert made(model, bits=bits).latency.mean_s(1, 100) < 1 / speed
        ratio = made(model, by="compiled", bits=bits).latency.mean_s(1, 100) * speed
        if bits == 16:
            assert ratio == pytest.approx(1, abs=0.01), name
        else:
            assert 0.74 < ratio < 0.93, name


def test_fewer_bits_leave_head_and_embedding_alone() -> None:
    """At 4 bits the layers shrink fourfold; head, embedding and norms do not."""
    full, quarter = made(LLAMA_70B), made(LLAMA_70B, bits=4)
    assert full.weight_bytes - quarter.weight_bytes == pytest.approx(LLAMA_70B.layer_weights * 1.5)
    assert full.weight_bytes == pytest.approx(2 * LLAMA_70B.weights)


def test_memory_says_what_fits() -> None:
    """70B in 16 bits needs two of 80 GB, in 4 bits one; a long cache can be what does not fit."""
    assert not made(LLAMA_70B).fits(context=1024)
    assert made(LLAMA_70B).devices_needed(context=1024) == 2
    assert made(LLAMA_70B, bits=4.5).fits(context=1024)
    assert made(LLAMA_8B, on="rtx-4090").fits(context=8192)
    assert not made(LLAMA_8B, on="rtx-4090").fits(context=131_072)


def test_every_row_of_the_table_has_its_source() -> None:
    """Each device and runtime names where its figures are from; prices and idle power are nobody's constant."""
    table = json.loads((Path(devices.__file__).parent / "devices.json").read_text(encoding="utf-8"))
    assert {"a100-80gb", "h100", "h200", "l40s", "rtx-4090"} <= set(table["devices"])
    for name in table["devices"]:
        assert len(device(name).source) > 20
        assert device(name).idle_w is device(name).price_per_hour is None
    for name in table["runtimes"]:
        assert len(runtime(name).source) > 20


def test_an_estimate_survives_the_profile_and_brings_no_acceptance() -> None:
    """Times come back exactly, the source says ESTIMATE, a second model is added, and pairs stay unknown."""
    one = with_estimate(None, "small", made(LLAMA_1B))
    both = with_estimate(one, "large", made(LLAMA_70B, by="eager", bits=4.5))
    again = Profile.from_dict(json.loads(json.dumps(both.to_dict())))
    small, large = StageSpec(name="small", model="x"), StageSpec(name="large", model="y")
    assert again.stage_latency(small).step == made(LLAMA_1B).latency
    assert again.stage_latency(large).step == made(LLAMA_70B, by="eager", bits=4.5).latency
    assert again.source.count("ESTIMATE") == 2
    assert again.estimated == ["small", "large"]
    assert again.memory_bytes["large"] == made(LLAMA_70B, bits=4.5).memory_bytes(context=8192)
    with pytest.raises(InputError, match="acceptance"):
        again.pair(small, large)
    with pytest.raises(InputError, match="must not be there yet"):
        with_estimate(both, "small", made())


def test_the_command_prints_a_table_or_json_and_writes_a_profile(config: Path, capsys: pytest.CaptureFixture) -> None:
    """All three say that nothing was measured; seconds in JSON, milliseconds in the table."""
    out = config.parent / "profile.json"
    call = ["estimate", str(config), "--device", "h100", "--widths", "1,8", "--contexts", "0,4096"]
    with pytest.raises(SystemExit) as end:
        main([*call, "--json", "--out", str(out), "--runtime", "ideal"])
    assert end.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["estimate"] is True
    assert [(row["width"], row["context"]) for row in result["step_s"]] == [(1, 0), (8, 0), (1, 4096), (8, 4096)]
    assert result["step_s"][0]["seconds"] == pytest.approx(4.48e-3, rel=1e-2)
    assert result["fits"] is True
    assert load_profile(out).latency["llama-8b"].step == made(on="h100").latency
    assert "ESTIMATE" in load_profile(out).source
    with pytest.raises(SystemExit):
        main([*call, "--runtime", "ideal"])
    text = capsys.readouterr().out
    assert "ESTIMATE, not measured" in text
    assert "4.48" in text


def test_a_price_and_a_device_of_ones_own(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A device file with a price gives a cost: devices held for an hour over tokens made in it."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"label": "mine", "bandwidth_bytes_per_s": 1e12, "flops_per_s": 1e14,
                                "memory_bytes": 9e9, "source": "measured", "price_per_hour": 2.0}), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["estimate", str(config.parent), "--device", str(mine), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["devices_needed"] == 2
    assert result["cost_per_million_tokens"] == pytest.approx(
        2 * 2.0 / (3600 * result["autoregressive_tokens_per_s"]) * 1e6)


@pytest.mark.parametrize(("change", "words"), [
    ({"model_type": "gpt2"}, "model_type must be one of"),
    ({"num_hidden_layers": None}, "num_hidden_layers must be there"),
    ({"num_key_value_heads": 5}, "must be a multiple of kv_heads"), ({"vocab_size": "many"}, "model.vocabulary"),
    ({"num_attention_heads": 0}, "num_attention_heads"), ({"hidden_size": -4}, "model.hidden"),
])
def test_a_config_that_is_not_counted_is_refused(change: dict, words: str, config: Path) -> None:
    """One line that names the field."""
    config.write_text(json.dumps({**CONFIG, **change}), encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_shape(config)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: device("gpu"), "--device must be one of a100-80gb"), (lambda: runtime("fast"), "--runtime must be one of"),
    (lambda: made(bits=0.5), "bits must be in"), (lambda: Device("x", 0, 1, 1, ""), "bandwidth_bytes_per_s"),
    (lambda: Device("x", 1, 1, 1, "", price_per_hour=-1), "price_per_hour"),
    (lambda: devices.Runtime(1.2, 0, 0, ""), "bandwidth_share"),
])
def test_arguments_out_of_range_are_refused(call, words: str) -> None:
    """Each error names the field."""
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize(("args", "words"), [
    (["--device", "gpu"], "--device must be one of"), (["--device", "h100", "--widths", "0"], "--widths must be"),
    (["--device", "h100", "--contexts", "x"], "--contexts must be"),
    (["--device", "h100", "--bits", "99"], "bits must"),
])
def test_bad_options_are_one_line(args: list[str], words: str, config: Path, capsys: pytest.CaptureFixture) -> None:
    """Exit status 2 and what must hold."""
    with pytest.raises(SystemExit) as end:
        main(["estimate", str(config), *args])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
