"""The layer-skipping drafter in a process of its own: text, hand-over of entries and layers, shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import alive
from tiny_layers import clasp, save_gentle

from execute.fleet import Fleet
from execute.prompts import Prompt
from pipespec_model import metrics
from pipespec_model.errors import StageError
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import StepRecord

PROMPT = Prompt("p", "", tokens=(5, 6, 7, 8, 5, 6, 7))
PROMPTS = (PROMPT, Prompt("q", "", tokens=(9, 40, 3)), Prompt("r", "", tokens=(61, 2, 88, 17)))
NUM_TOKENS = 48
SETTINGS = {(0, 64, 0.0): None, (2, 8, 0.0): None, (4, 1, 0.2): "int8"}  # M, LOI, DET
HANDSHAKES = ("overlapped", "blocking")


def pipelined(stages: list[StageSpec], handshake: str = "overlapped", lookahead: int = 0) -> PipelineSpec:
    link = LinkSpec(lookahead=lookahead, max_window=4)
    # Stages may share the cores that are there; what they do does not depend on it.
    shared = tuple(stage.model_copy(update={"device": "cpu:0"}) for stage in stages)
    return PipelineSpec(strategy="pipelined", handshake=handshake, stages=shared, links=(link,) * (len(stages) - 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gentle(tmp_path_factory.mktemp("clasp") / "model")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    full = StageSpec(name="full", model=str(folder))
    small = StageSpec(name="small", model=str(save_gentle(folder.parent / "small", noise=0.03)))
    drafters = [*(clasp(folder, *setting, quantize=kind) for setting, kind in SETTINGS.items()),
                clasp(Path(small.model), 2).model_copy(update={"name": "clasp-small"})]
    lookup = StageSpec(name="lookup", model=str(folder), drafter="prompt-lookup")
    with Fleet([*drafters, full, small, lookup], apart=[drafter.name for drafter in drafters]) as running:
        yield running


@pytest.fixture(scope="module")
def greedy(fleet: Fleet) -> list[int]:
    return fleet.run_prompt(PipelineSpec.alone(fleet.stages["full"]), PROMPT, max_new_tokens=NUM_TOKENS)[0].tokens


def run(fleet: Fleet, *names: str, prompt: Prompt = PROMPT, **options: Any) -> tuple[Any, list[StepRecord]]:
    spec = pipelined([fleet.stages[name] for name in names], **options)
    return fleet.run_prompt(spec, prompt, max_new_tokens=NUM_TOKENS)


def test_every_drafter_has_a_process_of_its_own(fleet: Fleet) -> None:
    """In a pipeline the drafters have weights of their own."""
    assert len({process.pid for process in fleet.processes.values()}) == len(fleet.stages)


@pytest.mark.parametrize(("setting", "handshake", "lookahead"), list(product(SETTINGS, HANDSHAKES, (0, 2))))
def test_text_is_that_of_plain_decoding(fleet: Fleet, greedy: list[int], setting: tuple[int, int, float],
                                        handshake: str, lookahead: int) -> None:
    """Token for token in float32, for every M, LOI and DET, of the weights and of an int8 copy, both handshakes."""
    name = clasp(Path(), *setting, quantize=SETTINGS[setting]).name
    record, _ = run(fleet, name, "full", handshake=handshake, lookahead=lookahead)
    assert record.tokens == greedy
    assert metrics.LinkFigures.of(*record.counters).conserved


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_empty_skip_set_is_always_right(fleet: Fleet, handshake: str) -> None:
    """With nothing skipped no draft is ever refused, whoever computed the entries that it attends to."""
    record, steps = run(fleet, "clasp-0-64-0", "full", handshake=handshake, lookahead=2)
    assert record.counters[1]["rejected"] == 0
    assert sum(step.accepted for step in steps if step.stage == 1) > 20


def test_the_other_drafters_are_right_and_wrong(fleet: Fleet) -> None:
    """Guard: drafts were accepted and refused, so that the laws above were tried."""
    counters = [run(fleet, name, "full", prompt=prompt, lookahead=2, handshake=handshake)[0].counters[1]
                for name, handshake, prompt in product(("clasp-2-8-0", "clasp-4-1-0.2int8"), HANDSHAKES, PROMPTS)]
    assert sum(found["accepted"] for found in counters) > 30
    assert sum(found["rejected"] for found in counters) > 3


def test_every_verification_is_handed_over(fleet: Fleet) -> None:
    """Of each committed token but the prompt's the entries are given once, in order; a drafter takes at least those
    up to its last draft; layers are chosen after the second step and every LOI tokens."""
    record, steps = run(fleet, "clasp-2-8-0", "full", lookahead=2)
    given = [step for step in steps if step.kind == "give"]
    assert {step.stage for step in given} == {1}
    own = [step for step in steps if step.stage == 1 and step.kind in ("prefill", "verify", "decode")]
    # The newest token of each step is in no cache yet, and after the last step nothing is given.
    assert sum(step.width for step in given) == sum(step.emitted for step in own[:-1]) - 1
    assert 0 < sum(step.width for step in steps if step.kind == "take") <= len(record.tokens) + 8 * len(given)
    chosen = [step.position for step in steps if step.kind == "optimise"]
    assert 0 < chosen[0] <= 5
    assert len(chosen) >= NUM_TOKENS // (8 + 5)


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_lookup_before_it(fleet: Fleet, greedy: list[int], handshake: str) -> None:
    """{lookup, clasp, full}: the skipping stage verifies too, and takes entries while it is rolled back."""
    record, steps = run(fleet, "lookup", "clasp-2-8-0", "full", handshake=handshake)
    assert record.tokens == greedy
    assert any(step.kind == "take" and step.stage == 1 for step in steps)


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_of_a_small_model_before_a_large_one(fleet: Fleet, greedy: list[int], handshake: str) -> None:
    """{clasp of small, small, large}: the verifier that hands over is itself rolled back, and hands over again."""
    record, steps = run(fleet, "clasp-small", "small", "full", handshake=handshake, lookahead=2)
    assert record.tokens == greedy
    assert {step.stage for step in steps if step.kind == "give"} == {1}
    assert record.counters[2]["accepted"] > 3
    assert record.counters[2]["rejected"] > 0


def test_shared_memory_ends_with_its_processes(fleet: Fleet) -> None:
    """It is mapped while stages run, is named nowhere, and nobody holds it after a kill (of the fleet that the tests
    above have used)."""
    pids = {name: process.pid for name, process in fleet.processes.items()}
    run(fleet, "clasp-2-8-0", "full")
    for name in ("clasp-2-8-0", "full"):
        mapped = Path(f"/proc/{pids[name]}/maps").read_text(encoding="utf-8")
        assert "memfd:pipespec (deleted)" in mapped
        assert "/dev/shm/" not in mapped
    fleet.processes["full"].kill()
    with pytest.raises(StageError, match="stage 'full' ended with exit code -9"):
        run(fleet, "clasp-2-8-0", "full")
    fleet.close()
    assert not any(alive(pid) for pid in pids.values())
