"""A layer-skipping drafter in the simulator: its calendar, its early exit, one reading of the prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pipespec_model.agreement import NO_PROPOSAL, Agreement
from pipespec_model.between import OPTION
from pipespec_model.fit import fit_costs
from pipespec_model.latency import Constant
from pipespec_model.layer_choice import LayerCalendar
from pipespec_model.profile import Costs, Profile, StageLatency, costs_key
from pipespec_model.protocol import Stage
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import PromptRecord, Trace
from simulate.engine import PromptRun

DRAFT_S, VERIFY_S, PREFILL_S, OPTIMISE_S, GIVE_S, TAKE_S = 0.002, 0.005, 0.050, 0.003, 0.001, 0.001


def pipeline(interval: int, lookahead: int = 2, strategy: str = "speculative") -> PipelineSpec:
    stages = (StageSpec(name="clasp", model="m", drafter="clasp", num_skipped_layers=2, layer_opt_interval=interval),
              StageSpec(name="full", model="m"))
    return PipelineSpec(strategy=strategy, stages=stages, links=(LinkSpec(lookahead=lookahead),))


def profile() -> Profile:
    prefill = Constant(PREFILL_S)
    steps = {"clasp": DRAFT_S, "full": VERIFY_S}
    latency = {name: StageLatency(Constant(step_s), prefill) for name, step_s in steps.items()}
    return Profile(latency, costs={"clasp": Costs(optimise_s=OPTIMISE_S, take_s=TAKE_S),
                                   "full": Costs(optimise_s=OPTIMISE_S, give_s=GIVE_S)})


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


def test_event_log_of_a_pipeline() -> None:
    """By hand: both read the prompt (50 ms each, at once).  The target has no draft yet and takes a plain step (5); its
    entries are handed over (1) before its verdict leaves, then it chooses layers (3).  The drafter drafts (2) and takes
    what was handed over (1) once the draft that it is at has ended."""
    answer = list(range(1, 30))
    made = run(pipeline(interval=64, lookahead=0, strategy="pipelined"), answer, answer)
    by_stage = [[(s.kind, round(s.start_s * 1e3)) for s in made.steps if s.stage == i] for i in (0, 1)]
    assert by_stage[1][:6] == [("prefill", 0), ("decode", 50), ("give", 55), ("optimise", 56), ("verify", 59),
                               ("give", 64)]
    assert by_stage[0][:8] == [("prefill", 0), ("draft", 50), ("take", 52), ("draft", 53), ("draft", 55), ("take", 57),
                               ("draft", 58), ("draft", 60)]


def test_layers_are_chosen_by_the_growth_of_the_verifiers_text() -> None:
    """In a pipeline: after the second step, then after the first that ends LOI tokens on, never after the last."""
    answer = list(range(1, 30))
    steps = run(pipeline(interval=5, lookahead=0, strategy="pipelined"), answer, answer).steps
    own = [s for s in steps if s.stage == 1]
    held = [next(t.position + t.emitted for t in own if t.kind != "give" and t.position == s.position)
            for s in own if s.kind == "optimise"]
    assert held[0] == 2
    assert all(5 <= after - before < 5 + 5 for before, after in pairwise(held))
    assert own[-1].kind in ("verify", "decode")


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


def test_costs_between_steps_come_back_from_a_trace() -> None:
    """What the simulator spends on giving, taking and choosing is what the fit reads from its records, bytes by rows;
    and none of it is taken for a turnaround or a hand-over of messages."""
    answer = list(range(1, 30))
    spec = pipeline(interval=5, lookahead=0, strategy="pipelined")
    made = run(spec, answer, answer)
    record = PromptRecord(0, "p", 10, answer, 1.0, 1.0, [])
    steps = [replace(step, width=3) if step.kind == "give" else step for step in made.steps]
    trace = Trace("simulated", spec.to_dict(), options={OPTION: {"full": 100}}, steps=steps, prompts=[record])
    drafter, verifier = (fit_costs([trace])[costs_key("pipelined", stage.time_key)] for stage in spec.stages)
    assert drafter.take_s == pytest.approx(TAKE_S)
    assert (verifier.give_s, verifier.optimise_s) == (pytest.approx(GIVE_S), pytest.approx(OPTIMISE_S))
    assert verifier.give_bytes == 300
    assert (drafter.turnaround_s, drafter.handover_s, verifier.turnaround_s) == (0, 0, 0)
