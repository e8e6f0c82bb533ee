"""The built-in model: every strategy gives the text of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import chain, drive

from execute.fleet import Fleet
from execute.loading import load_tokenizer
from execute.prompts import Prompt, built_in, encode
from execute.torch_runner import TorchRunner, teacher_forced
from execute.zoo import BUILT_IN, built_in_folder
from pipespec_model.errors import InputError
from pipespec_model.lookup import PromptLookup
from pipespec_model.spec import PipelineSpec, StageSpec

pytestmark = pytest.mark.real

NUM_TOKENS = 16
FULL = StageSpec(name="full", model=BUILT_IN)
INT8 = StageSpec(name="int8", model=BUILT_IN, quantize="int8")
LOOKUP = StageSpec(name="lookup", model=BUILT_IN, drafter="prompt-lookup")
ROWS = {"speculative-int8": ("speculative", INT8, FULL), "speculative-lookup": ("speculative", LOOKUP, FULL),
        "pipelined-int8": ("pipelined", INT8, FULL), "pipelined-three": ("pipelined", LOOKUP, INT8, FULL)}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    try:
        built_in_folder()
    except InputError as error:
        pytest.skip(str(error))
    chosen = {p.category: p for p in built_in("evaluation")}
    return encode(list(chosen.values())[:3], load_tokenizer(BUILT_IN))


@pytest.fixture(scope="module")
def real(prompts: list[Prompt]) -> dict[str, Any]:
    assert len(prompts) == 3
    return {"full": TorchRunner(FULL), "int8": TorchRunner(INT8), "lookup": PromptLookup()}


@pytest.fixture(scope="module")
def answers(real: dict[str, Any], prompts: list[Prompt]) -> dict[str, list[int]]:
    out = {}
    for prompt in prompts:
        real["full"].begin(prompt.tokens)
        done = drive(chain("autoregressive", [FULL]), [real["full"]], prompt.tokens, NUM_TOKENS, eos=prompt.eos)
        out[prompt.name] = done.tokens
    return out


def pipeline(strategy: str, *stages: StageSpec) -> PipelineSpec:
    return chain(strategy, stages, window=4)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_text_is_that_of_plain_decoding(real, prompts, answers, row) -> None:
    """In float32 on this model, each pipeline's text equals autoregressive decoding token for token."""
    strategy, *stages = row
    for prompt in prompts:
        team = [real[stage.name] for stage in stages]
        for runner in team:
            runner.begin(prompt.tokens)
        done = drive(pipeline(strategy, *stages), team, prompt.tokens, NUM_TOKENS, eos=prompt.eos)
        assert done.tokens == answers[prompt.name]
        assert all(link.conserved for link in done.links())


def test_int8_agrees_mostly(real, prompts, answers) -> None:
    """The int8 copy chooses the target's token at more than 70% of the positions."""
    same = total = 0
    for prompt in prompts:
        choices = teacher_forced(real["int8"], prompt.tokens, answers[prompt.name]).choices
        same += sum(a == b for a, b in zip(choices, answers[prompt.name], strict=True))
        total += len(choices)
    assert same / total > 0.7


@pytest.fixture(scope="module")
def fleet(prompts: list[Prompt]) -> Iterator[Fleet]:
    assert prompts
    with Fleet([INT8, FULL]) as running:
        yield running


def test_processes_give_the_same_text(fleet: Fleet, prompts, answers) -> None:
    """Stage processes with the real model, pipelined, give the text of plain decoding too."""
    prompt = prompts[0]
    record, _ = fleet.run_prompt(pipeline("pipelined", INT8, FULL), prompt, max_new_tokens=NUM_TOKENS)
    assert record.tokens == answers[prompt.name]
    assert record.counters[1]["accepted"] > 0
