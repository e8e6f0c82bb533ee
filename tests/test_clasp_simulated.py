"""A layer-skipping drafter in the simulator: its calendar, its early exit, one reading of the prompt."""

from __future__ import annotations

import numpy as np
import pytest

from pipespec_model.agreement import NO_PROPOSAL, Agreement
from pipespec_model.latency import Constant
from pipespec_model.layer_choice import LayerCalendar
from pipespec_model.profile import Costs, Profile, StageLatency
from pipespec_model.protocol import Stage
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from simulate.engine import PromptRun

DRAFT_S, VERIFY_S, PREFILL_S, OPTIMISE_S = 0.002, 0.005, 0.050, 0.003


def pipeline(interval: int, lookahead: int = 2) -> PipelineSpec:
    stages = (StageSpec(name="clasp", model="m", drafter="clasp", num_skipped_layers=2, layer_opt_interval=interval),
              StageSpec(name="full", model="m"))
    return PipelineSpec(strategy="speculative", stages=stages, links=(LinkSpec(lookahead=lookahead),))


def profile() -> Profile:
    prefill = Constant(PREFILL_S)
    steps = {"clasp": DRAFT_S, "full": VERIFY_S}
    latency = {name: StageLatency(Constant(step_s), prefill) for name, step_s in steps.items()}
    return Profile(latency, costs={"clasp": Costs(optimise_s=OPTIMISE_S)})


def run(spec: PipelineSpec, drafts: list[int], answer: list[int]) -> PromptRun:
    names = tuple(stage.choice_key for stage in spec.stages)
    made = PromptRun(spec, profile(), Agreement("p", 10, names, np.array([drafts, answer])), spread=False)
    made.run()
    return made


def test_event_log_of_two_rounds() -> None:
    """By hand: the drafter reads the prompt (50 ms) and drafts one more (2); the target's first pass takes no
    prefill (5).  Second round: choice of layers (3), two drafts (4), a verification (5)."""
    answer = [1, 2, 3, 4, 5, 6]
    made = run(pipeline(interval=64), answer, answer)
    assert [(s.stage, s.kind, round(s.start_s * 1e3)) for s in made.steps[:6]] == [
        (0, "prefill", 0), (0, "draft", 50), (1, "prefill", 52), (0, "optimise", 57), (0, "draft", 60),
        (0, "draft", 62)]
    assert [round(s.duration_s * 1e3) for s in made.steps[:6]] == [50, 2, 5, 3, 2, 2]
    assert made.steps[6].kind == "verify"
    assert made.steps[6].start_s == pytest.approx(0.064)


@pytest.mark.parametrize(("interval", "expected"), [(1, [3, 6, 9]), (4, [3, 9]), (6, [3, 9]), (64, [3])])
def test_layers_are_chosen_once_the_text_has_grown(interval: int, expected: list[int]) -> None:
    """At rounds of three tokens each (all right), choices fall on the first round that is LOI tokens on."""
    answer = list(range(1, 13))
    steps = run(pipeline(interval), answer, answer).steps
    assert [step.position for step in steps if step.kind == "optimise"] == expected


def test_early_exit_is_no_draft() -> None:
    """Where the drafter's choice is 'none' it stops: fewer drafts are submitted, and the text stays."""
    answer = list(range(1, 13))
    unsure = [NO_PROPOSAL if i % 3 == 1 else token for i, token in enumerate(answer)]
    made = run(pipeline(64), unsure, answer)
    assert made.stages[-1].sequence == answer
    assert [step.drafts for step in made.steps if step.stage == 1][:4] == [1, 2, 2, 2]
    assert all(step.accepted == step.drafts for step in made.steps if step.stage == 1)


def test_calendar_asks_only_at_the_start_of_a_round() -> None:
    """No choice before the first verdict, none twice in a round."""
    stage = Stage(pipeline(1), 0, 3, 20)
    calendar = LayerCalendar(1)
    stage.sequence = [1, 2]
    assert not calendar.due(stage)
    stage._seen_verdict = 1
    assert calendar.due(stage)
    stage.sequence += [3, 4]
    assert not calendar.due(stage)
