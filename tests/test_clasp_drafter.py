"""The layer-skipping drafter beside its model, in real processes: text, cache, threshold, shared prompt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONTEXT
from tiny_layers import GENTLE_LAYERS as LAYERS
from tiny_layers import clasp, save_gentle

from execute.clasp.agreement import own_choices
from execute.clasp.runner import ClaspRunner, FullRunner
from execute.fleet import Fleet
from execute.prompts import Prompt
from execute.skips import SkipSet
from pipespec_model import metrics
from pipespec_model.errors import InputError
from pipespec_model.messages import Entries, Step
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import StepRecord

PROMPT = Prompt("p", "", tokens=(5, 6, 7, 8, 5, 6, 7))
SETTINGS = [(0, 64, 0.0), (1, 1, 0.0), (2, 8, 0.0), (2, 8, 0.5), (4, 3, 0.9), (5, 64, 0.0)]  # M, LOI, DET


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gentle(tmp_path_factory.mktemp("clasp") / "model")


def chain(stages: list[StageSpec], lookahead: int = 4) -> PipelineSpec:
    return PipelineSpec(strategy="speculative", stages=tuple(stages),
                        links=(LinkSpec(lookahead=lookahead),) * (len(stages) - 1))


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    full = StageSpec(name="full", model=str(folder))
    drafters = [clasp(folder, *setting) for setting in SETTINGS] + [clasp(folder, 2, quantize="int8")]
    lookup = StageSpec(name="lookup", model=str(folder), drafter="prompt-lookup")
    with Fleet([*drafters, full, lookup]) as running:
        yield running


@pytest.fixture(scope="module")
def greedy(fleet: Fleet) -> list[int]:
    return fleet.run_prompt(PipelineSpec.alone(fleet.stages["full"]), PROMPT, max_new_tokens=48)[0].tokens


def run(fleet: Fleet, *names: str, lookahead: int = 4) -> tuple[Any, list[StepRecord]]:
    stages = [fleet.stages[name] for name in names]
    return fleet.run_prompt(chain(stages, lookahead), PROMPT, max_new_tokens=48)


def test_one_process_holds_the_model_and_its_drafters(fleet: Fleet) -> None:
    """Weights are there once: the drafters have no process of their own."""
    pids = {fleet.processes[name].pid for name in fleet.stages if name != "lookup"}
    assert len(pids) == 1
    assert fleet.processes["lookup"].pid not in pids


@pytest.mark.parametrize(("setting", "lookahead"), list(product(SETTINGS, (1, 4))))
def test_text_is_that_of_plain_decoding(fleet: Fleet, greedy: list[int], setting: tuple[int, int, float],
                                        lookahead: int) -> None:
    """Token for token in float32, for every M, LOI, DET and lookahead."""
    record, _ = run(fleet, clasp(Path(), *setting).name, "full", lookahead=lookahead)
    assert record.tokens == greedy
    drafter, verifier = record.counters
    assert metrics.LinkFigures.of(drafter, verifier).conserved


def test_empty_skip_set_is_always_right(fleet: Fleet, greedy: list[int]) -> None:
    """With nothing skipped every draft of every round is accepted."""
    record, steps = run(fleet, "clasp-0-64-0", "full")
    rounds = [step for step in steps if step.stage == 1 and step.drafts]
    assert len(rounds) > 5
    assert all(step.accepted == step.drafts for step in rounds)
    assert record.tokens == greedy


def test_skipping_is_sometimes_right_and_sometimes_wrong(fleet: Fleet) -> None:
    """Guard: blocks of three and more are accepted, and drafts refused, so that the laws above were tried."""
    _, steps = run(fleet, "clasp-2-8-0", "full")
    rounds = [step for step in steps if step.stage == 1 and step.drafts]
    assert max(step.accepted for step in rounds) >= 3
    assert any(step.accepted < step.drafts for step in rounds)


def test_layers_are_chosen_every_interval(fleet: Fleet) -> None:
    """The first choice comes with the second round; the next once the text has grown by LOI tokens."""
    _, steps = run(fleet, "clasp-2-8-0", "full")
    at = [step.position for step in steps if step.kind == "optimise"]
    assert len(at) >= 4
    assert at[0] <= 5
    assert all(8 <= after - before < 8 + 5 for before, after in pairwise(at))


def test_threshold_shortens_rounds(fleet: Fleet) -> None:
    """A higher draft exit threshold submits fewer drafts, and a larger share of them is accepted."""
    free, careful = (run(fleet, name, "full")[0].counters[1] for name in ("clasp-2-8-0", "clasp-2-8-0.5"))
    assert careful["proposed"] < free["proposed"]
    assert careful["accepted"] / careful["proposed"] > free["accepted"] / free["proposed"]


def test_int8_drafter_skips_too(fleet: Fleet, greedy: list[int]) -> None:
    """Skipped layers of a quantised copy: the text stays, and drafts are accepted."""
    record, _ = run(fleet, "clasp-2-8-0int8", "full")
    assert record.tokens == greedy
    assert record.counters[1]["accepted"] > 3


def test_lookup_before_it(fleet: Fleet, greedy: list[int]) -> None:
    """{lookup, clasp, full}: the skipping stage verifies, the text stays."""
    record, steps = run(fleet, "lookup", "clasp-2-8-0", "full")
    assert record.tokens == greedy
    assert any(step.drafts for step in steps if step.stage == 1)


def test_the_prompt_is_read_once(fleet: Fleet) -> None:
    """A run of the pair does not leave its prompt behind: the model alone reads it anew, and says the same."""
    record, _ = run(fleet, "clasp-0-64-0", "full")
    alone, _ = fleet.run_prompt(PipelineSpec.alone(fleet.stages["full"]), PROMPT, max_new_tokens=48)
    other = Prompt("q", "", tokens=(9, 3, 1))
    assert fleet.run_prompt(chain([fleet.stages["clasp-0-64-0"], fleet.stages["full"]]), other,
                            max_new_tokens=8)[0].tokens != record.tokens[:8]
    assert alone.tokens == record.tokens


def test_recorded_choices_are_those_of_a_run(fleet: Fleet, greedy: list[int]) -> None:
    """Along the answer, the walk's choices tell the accepted drafts of a run with its lookahead."""
    choices = fleet.teacher_force("clasp-2-8-0", PROMPT.tokens, greedy).choices
    assert fleet.probe(chain([fleet.stages[name] for name in ("clasp-2-8-0", "full")]), 0)
    _, steps = run(fleet, "clasp-2-8-0", "full", lookahead=4)
    for step in (s for s in steps if s.stage == 1 and s.drafts):
        right = [choices[i] == greedy[i] for i in range(step.position, min(step.position + step.drafts, len(greedy)))]
        assert step.accepted == (right.index(False) if False in right else len(right))


@pytest.mark.parametrize("skipped", [(0,), (5,), (3,), (0, 2, 4)])
def test_committed_cache_is_bit_identical_across_a_draft_phase(folder: Path, skipped: tuple[int, ...]) -> None:
    """Every layer's committed entries, of drafter and verifier, whichever layers are skipped."""
    full = FullRunner(StageSpec(name="full", model=str(folder)))
    drafter = ClaspRunner(clasp(folder, 2), full)
    prompt = PROMPT.tokens
    for runner in (full, drafter):
        runner.begin(prompt)
    first = drafter.run([], Step("prefill", 0, 0, len(prompt), (), 1, 0, False))
    full.run([], Step("prefill", 0, 0, len(prompt) + 1, tuple(first), 1, 0, False))
    drafter.take_over(2)
    drafter.skips = SkipSet.layers(skipped)
    rows = drafter.committed
    before = [cache.keys[:, :rows].clone() for cache in (full.cache, drafter.cache)]
    assert torch.equal(*before)
    sequence = [*first, 11]
    for _ in range(5):
        step = Step("draft", len(sequence), len(prompt) + len(sequence) - 1, 1, (), 1, 0, False)
        sequence += drafter.run(sequence, step)
    for cache, kept in zip((full.cache, drafter.cache), before, strict=True):
        assert torch.equal(cache.keys[:, :rows], kept)


@torch.inference_mode()
def test_drafts_of_other_layers_are_computed_anew(folder: Path) -> None:
    """When the layers change behind some drafts, the next is that of a drafter that had the new ones throughout."""
    full = FullRunner(StageSpec(name="full", model=str(folder)))
    prompt, sequence = PROMPT.tokens, [11, 12, 13, 14]

    def logits(runner: ClaspRunner, held: int, cached: int) -> torch.Tensor:
        kind = "draft" if cached else "prefill"
        step = Step(kind, held, cached, len(prompt) + held - cached, (), 1, 0, False)
        return runner.logits(sequence[:held], step)

    changing, fresh = (ClaspRunner(clasp(folder, 2), full) for _ in range(2))
    for runner in (changing, fresh):
        runner.begin(prompt)
        logits(runner, 0, 0)
        runner.receive(Entries(len(prompt), len(prompt), (1, 2)))
    for held in (1, 2, 3):
        logits(changing, held, len(prompt) + held - 1)
    for runner in (changing, fresh):
        runner.cache.keys[1:3, len(prompt) :] = torch.nan  # as memory that nobody has written may be
        runner.receive(Entries(len(prompt), len(prompt), (3, 4)))
    assert torch.equal(logits(changing, 4, len(prompt) + 3), logits(fresh, 4, len(prompt)))


def test_all_layers_are_refused(folder: Path) -> None:
    """M beyond the model is one clear error."""
    full = FullRunner(StageSpec(name="full", model=str(folder)))
    with pytest.raises(InputError, match=r"num_skipped_layers must be in 0\.\.5"):
        ClaspRunner(clasp(folder, LAYERS), full)
    assert len(own_choices(ClaspRunner(clasp(folder, 5), full), PROMPT.tokens, [1, 2, 3])) == 3
    assert full.context_limit == CONTEXT


def test_published_chain_is_refused() -> None:
    """In turn with its model it is told every token that is decided: the published chain's rule is another."""
    data = chain([clasp(Path("m"), 2), StageSpec(name="full", model="m")]).to_dict() | {"handshake": "blocking"}
    with pytest.raises(InputError, match="must have handshake overlapped with strategy speculative"):
        PipelineSpec.from_dict(data)


@pytest.mark.parametrize(("stages", "rule"), [
    ([{"name": "a", "model": "m", "drafter": "clasp"}, {"name": "b", "model": "n"}], r"stages\.0\.model must be that"),
    ([{"name": "a", "model": "m"}, {"name": "b", "model": "m", "drafter": "clasp"}], "the target runs every layer"),
    ([{"name": "a", "model": "m", "num_skipped_layers": 3}, {"name": "b", "model": "m"}],
     "num_skipped_layers must be absent without drafter clasp"),
    ([{"name": "l", "model": "m", "drafter": "prompt-lookup"},
      {"name": "a", "model": "m", "drafter": "clasp", "draft_exit_threshold": 0.5}, {"name": "b", "model": "m"}],
     r"stages\.1\.draft_exit_threshold must be 0"),
])
def test_what_cannot_be_is_one_line(stages: list[dict[str, Any]], rule: str) -> None:
    """Each rule of a layer-skipping stage names the field."""
    with pytest.raises(InputError, match=rule):
        PipelineSpec.from_dict({"strategy": "speculative", "stages": stages,
                                "links": [{"lookahead": 2}] * (len(stages) - 1)})
