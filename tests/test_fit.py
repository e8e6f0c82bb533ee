"""From traces back to the profile that made them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipespec_model.acceptance import IID, Markov
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.errors import InputError
from pipespec_model.fit import fit
from pipespec_model.latency import Affine, Constant
from pipespec_model.profile import Contention, Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import StepRecord, Trace
from pipespec_model.yardstick import probed_slowness
from simulate.run import simulate

STAGES = [{"name": "s0", "model": "a"}, {"name": "s1", "model": "b"}]
CHAIN = PipelineSpec.from_dict({
    "strategy": "speculative", "stages": STAGES, "links": [{"lookahead": 3, "buffer_tokens": 3, "max_window": 3}]})
ALONE = [PipelineSpec.from_dict({"strategy": "autoregressive", "stages": [stage]}) for stage in STAGES]
KEYS = [stage.time_key for stage in CHAIN.stages]
TIGHT = 1e-6


def traces(profile: Profile, *, rate: float = 0.7) -> list[Trace]:
    """Each stage alone, then the chain, on the same four prompts."""
    names = [stage.choice_key for stage in CHAIN.stages]
    made = [synthetic(names, [IID(rate)], num_tokens=40, seed=1, prompt=i, prompt_length=16) for i in range(4)]
    return [simulate(spec, profile, [a.select([s.choice_key for s in spec.stages]) for a in made])
            for spec in (*ALONE, CHAIN)]


def constants(**more: Any) -> Profile:
    return Profile({"s0": StageLatency(Constant(0.001)), "s1": StageLatency(Constant(0.004), Constant(0.009))}, **more)


def test_step_and_prefill_times_come_back():
    """Constant step and prefill times are recovered to within 1e-6, mean and sampler alike."""
    found = fit(traces(constants()))
    for i, (step_s, prefill_s) in enumerate([(0.001, 0.001), (0.004, 0.009)]):
        latency = found.stage_latency(CHAIN.stages[i])
        assert latency.step.mean_s(1, 30) == pytest.approx(step_s, rel=TIGHT)
        assert latency.step.sample_s(1, 30, 0.4) == pytest.approx(step_s, rel=TIGHT)
        assert latency.prefill is not None
        assert latency.prefill.mean_s(16, 0) == pytest.approx(prefill_s, rel=TIGHT)
    assert found.origin == "fitted"


def test_a_slope_in_context_comes_back():
    """A step that grows with its cache is recovered at short and long caches."""
    truth = Affine(0.004, 0.004, 0.0, per_context_s=2e-6)
    found = fit(traces(Profile({"s0": StageLatency(Constant(0.001)), "s1": StageLatency(truth)})))
    for context in (16, 30, 55):
        assert found.stage_latency(CHAIN.stages[1]).step.mean_s(1, context) == pytest.approx(
            truth.mean_s(1, context), rel=1e-5)


def test_costs_between_steps_come_back():
    """Start, turnaround (from runs alone) and both hand-overs (from the chain) are recovered."""
    costs = {"s0": Costs(start_s=0.0003, handover_s=0.0002), "s1": Costs(start_s=0.0005, handover_s=0.0007)}
    found = fit(traces(constants(costs=costs)))
    for stage in CHAIN.stages:
        truth = costs[stage.name]
        assert found.stage_costs(stage, "speculative").handover_s == pytest.approx(truth.handover_s, rel=TIGHT)
        assert found.stage_costs(stage, "autoregressive").turnaround_s == pytest.approx(0.0, abs=1e-12)
        assert found.stage_costs(stage, "autoregressive").start_s == pytest.approx(truth.start_s, rel=TIGHT)
    # The chain starts with the drafter: of its target it shows no start.
    assert found.stage_costs(CHAIN.stages[1], "speculative").start_s == pytest.approx(0.0003, rel=TIGHT)


@pytest.mark.parametrize("seed", range(4))
def test_a_pipelines_costs_come_back_from_a_pipelined_run(seed: int):
    """Turnaround of stages that rarely wait and hand-over to those that do, from one run of three stages."""
    costs = {"s0": Costs(turnaround_s=0.0003, handover_s=0.0011), "s1": Costs(turnaround_s=0.0005, handover_s=0.0007),
             "s2": Costs(turnaround_s=0.0004, handover_s=0.0009)}
    spec = PipelineSpec.from_dict({
        "stages": [{"name": name, "model": name} for name in costs],
        "links": [{"lookahead": 2, "buffer_tokens": 4, "max_window": 4}] * 2})
    truth = Profile({"s0": StageLatency(Constant(0.012)), "s1": StageLatency(Constant(0.022)),
                     "s2": StageLatency(Constant(0.12))}, costs=costs)
    names = [stage.choice_key for stage in spec.stages]
    made = [synthetic(names, [IID(0.7)] * 2, num_tokens=60, seed=seed, prompt=i, prompt_length=16) for i in range(4)]
    run = simulate(spec, truth, made)
    found = fit([run, *(simulate(PipelineSpec.alone(stage), truth, [a.select([stage.choice_key]) for a in made])
                        for stage in spec.stages)])
    for stage in spec.stages:
        mine = found.stage_costs(stage, "pipelined")
        assert mine.turnaround_s == pytest.approx(costs[stage.name].turnaround_s, rel=0.01)
        if stage.name != "s0":
            assert mine.handover_s == pytest.approx(costs[stage.name].handover_s, rel=0.01)


def test_turnaround_comes_back():
    """The gap between two steps of one stage is its turnaround."""
    costs = {"s0": Costs(turnaround_s=0.0001), "s1": Costs(turnaround_s=0.0006)}
    found = fit(traces(constants(costs=costs)))
    for stage in CHAIN.stages:
        truth = costs[stage.name].turnaround_s
        assert found.stage_costs(stage, "autoregressive").turnaround_s == pytest.approx(truth, rel=TIGHT)


def test_hand_over_is_the_whole_gap_between_two_stages():
    """With a turnaround too, the gap from the end of the sender's step to the receiver's is the hand-over."""
    costs = {"s0": Costs(turnaround_s=0.0001), "s1": Costs(handover_s=0.0007)}
    found = fit(traces(constants(costs=costs)))
    assert found.stage_costs(CHAIN.stages[1], "speculative").handover_s == pytest.approx(0.0007, rel=TIGHT)


def test_a_fitted_profile_predicts_the_run_it_was_fitted_to():
    """Replaying a trace from its own fit gives its makespan within 1%."""
    costs = {"s0": Costs(start_s=0.0003, handover_s=0.0002), "s1": Costs(start_s=0.0005, handover_s=0.0007)}
    before = traces(constants(costs=costs))
    after = traces(fit(before))
    for a, b in zip(before, after, strict=True):
        assert sum(p.total_s for p in b.prompts) == pytest.approx(sum(p.total_s for p in a.prompts), rel=0.01)


def together(*durations: float) -> Trace:
    """Stages that were timed while the others computed: ten steps of width 1 each."""
    steps = [StepRecord(-1, stage, "measure", None, seconds, 0, 30, 1, 0, 0, 0, 0)
             for stage, seconds in enumerate(durations) for _ in range(10)]
    return Trace("measured", {**CHAIN.to_dict(), "strategy": "pipelined"}, options={"together": True}, steps=steps)


def test_contention_is_the_time_alone_over_the_time_together():
    """1 ms alone and 2 ms together is a rate of 0.5; 4 and 5 ms one of 0.8; other traces give none."""
    found = fit([*traces(constants()), together(0.002, 0.005)])
    (rates,) = found.contention
    assert rates.rates == pytest.approx({KEYS[0]: 0.5, KEYS[1]: 0.8}, rel=TIGHT)
    assert found.rates(frozenset(KEYS)) == rates.rates
    assert fit(traces(constants())).contention == ()


def test_contention_is_judged_by_the_time_alone_beside_it():
    """With the machine 1.4x slow throughout, alone 1.4 ms and together 2.8 ms is a rate of 0.5 all the
    same; one trace in three that was disturbed half-way does not count."""
    def beside(alone: float, both: float) -> Trace:
        made = together(both, 0.004)
        extra = [replace(s, kind="alone", duration_s=alone) for s in made.steps if s.stage == 0]
        return replace(made, steps=[*made.steps, *extra])

    (rates,) = fit([*traces(constants()), beside(0.0014, 0.0028), beside(0.001, 0.002),
                    beside(0.0014, 0.002)]).contention
    assert rates.rates[KEYS[0]] == pytest.approx(0.5, rel=TIGHT)


def test_stages_never_speed_each_other_up():
    """A step that was faster together than alone counts as undisturbed."""
    (rates,) = fit([*traces(constants()), together(0.0009, 0.005)]).contention
    assert rates.rates[KEYS[0]] == 1.0


def test_a_model_that_drafts_for_itself_is_undisturbed_when_alone():
    """Two stages with one time key, 1 ms alone and 2 ms together: a step alone still takes 1 ms."""
    twins = [{"name": "x", "model": "a"}, {"name": "y", "model": "a"}]
    both = replace(together(0.002, 0.002), pipeline=PipelineSpec.from_dict({"stages": twins}).to_dict())
    found = fit([*traces(constants()), both])
    assert found.rates(frozenset(KEYS[:1])) == {KEYS[0]: 1.0}


def test_rates_of_taking_turns_come_back():
    """A chain whose first step after the other stage's goes at 0.5 and 0.8 of its speed alone gives those rates,
    though most drafts follow one of their own stage."""
    rates = {KEYS[0]: 0.5, KEYS[1]: 0.8}
    # Prefill counts as no step here, so a verification of any width is compared with width 1.
    (turns,) = fit(traces(constants(turns=(Contention(rates),)))).turns
    assert turns.rates == pytest.approx(rates, rel=TIGHT)


def test_a_stage_is_slow_only_after_another_ones_turn():
    """Drafts at half speed after the target's turn: 2 ms, then 1 and 1; the target, always after a draft, 5 ms."""
    made = traces(constants(turns=(Contention({KEYS[0]: 0.5, KEYS[1]: 0.8}),)), rate=1.0)[-1]
    steps = sorted((s for s in made.steps if s.prompt == 0 and s.kind != "prefill"), key=lambda s: s.start_s)
    assert [round(1e3 * s.duration_s, 6) for s in steps[2:10]] == [2.0, 1.0, 1.0, 5.0] * 2


def test_steps_that_include_a_wait_are_not_step_times():
    """An import's step that waited does not count, nor does a stage of a pipeline as one alone."""
    before = traces(constants())
    slow = [replace(s, duration_s=1.0, includes_wait=True) for s in before[0].steps if s.kind != "prefill"]
    before[0].steps.extend(slow)
    assert fit(before).stage_latency(CHAIN.stages[0]).step.mean_s(1, 30) == pytest.approx(0.001, rel=TIGHT)
    with pytest.raises(InputError, match="must hold the steps of at least one stage"):
        fit(before[2:])


def test_acceptance_is_fitted_per_pair_as_a_markov_model():
    """Bits 1 1 0 0 1 0 of one pair: after an acceptance 1 of 3, after a rejection (and at the start) 2 of 3."""
    tokens = np.array([[1, 2, 9, 9, 5, 9], [1, 2, 3, 4, 5, 6]])
    entry = Agreement("p", 3, ("a", "b"), tokens)
    found = fit(traces(constants()), [entry])
    assert found.acceptance == {"a>b": Markov(1 / 3, 2 / 3)}
    assert found.agreement == (entry,)


def test_acceptance_of_a_long_record_is_its_models():
    """A synthetic record of 20,000 positions gives its Markov rates back within four standard errors."""
    entry = synthetic(["a", "b"], [Markov(0.9, 0.3)], num_tokens=20_000, seed=2)
    found = fit(traces(constants()), [entry]).acceptance["a>b"]
    assert isinstance(found, Markov)
    assert abs(found.after_accept_rate - 0.9) < 4 * math.sqrt(0.9 * 0.1 / 15_000)
    assert abs(found.after_reject_rate - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 5_000)


def probed(trace: Trace, slow: dict[tuple[int, int], float], *, round_: int = 0) -> Trace:
    """The trace with two probes a prompt and stage, of one token and so many times slower than 1 ms or 4 ms."""
    probes = [StepRecord(prompt, stage, "probe", 0.0, at * value * {"s0": 0.001, "s1": 0.004}[stages["name"]], 0, 9, 1,
                         0, 0, 0, 0)
              for (prompt, stage), value in slow.items() for at in (0.9, 1.1)
              for stages in [trace.pipeline["stages"][stage]]]
    return replace(trace, probes=probes, options={"round": round_})


def test_slowness_is_read_from_the_probes():
    """Beside one stage's runs steps took 1 and 1.5 times their time, beside the other's as long as always:
    both come back, by core and over all cores, and the spread is over rounds."""
    placed = [spec.model_copy(update={"stages": (spec.target.model_copy(update={"cores": (1,)}),)}) for spec in ALONE]
    found = [replace(trace, pipeline=spec.to_dict()) for trace, spec in zip(traces(constants()), placed, strict=False)]
    made = fit([probed(found[0], {(0, 0): 1.0, (1, 0): 1.5}), probed(found[1], {(0, 0): 1.0}, round_=1)])
    first, second = (spec.target for spec in placed)
    assert made.slowness_of(first) == pytest.approx((1.0, 1.5))
    assert made.slowness[first.time_key] == pytest.approx((1.0, 1.5))
    assert made.slowness_of(second) == pytest.approx((1.0,))
    assert [made.slowness_at(first, draw) for draw in (0.0, 0.5, 1.0, None)] == pytest.approx([1.0, 1.25, 1.5, 1.25])
    # Means of log slowness ½ log 1.5 and 0; two rounds count as one.
    assert made.timing_spread == pytest.approx(math.log(1.5) / 2 / math.sqrt(2))
    assert fit(found).timing_spread == 0.0


def test_a_chain_is_held_against_the_probes_beside_it():
    """Steps that take twice as long in a chain as alone: rate ½ if the probes beside it are as fast as ever,
    rate 1 if they are twice as slow too."""
    *alone, chained = traces(constants())
    slow = replace(chained, steps=[replace(s, duration_s=2 * s.duration_s) if s.kind != "prefill" else s
                                   for s in chained.steps])
    for value, rate in ((1.0, 0.5), (2.0, 1.0)):
        made = fit([*alone, probed(slow, {(prompt, i): value for prompt in range(4) for i in (0, 1)})])
        assert [made.turn_rate(CHAIN.stages, stage) for stage in CHAIN.stages] == pytest.approx([rate, rate])


def test_a_stalled_probe_is_no_slow_machine():
    """One of two probes that took twenty times its time is left out; with a machine in two states half and half, both
    count."""
    trace = probed(Trace("measured", ALONE[0].to_dict()), {(0, 0): 1.0, (1, 0): 1.5})
    stalled = replace(trace.probes[0], duration_s=0.02)
    found = replace(trace, probes=[*trace.probes, *trace.probes[:2], stalled])
    assert probed_slowness(found, constants()) == pytest.approx({(0, 0): 1.0, (1, 0): 1.5})
    fast, slow = (replace(trace.probes[0], duration_s=value) for value in (0.001, 0.0014))
    assert probed_slowness(replace(trace, probes=[fast] * 3 + [slow] * 3), constants()) == pytest.approx({(0, 0): 1.2})


def test_probes_of_a_pipeline_are_taken_at_once():
    """Stages that slow each other to half are probed at half their speed: that is contention, not a slow machine.
    Stages of a chain, or on one core, are probed one after the other."""
    profile = constants(contention=(Contention(dict.fromkeys(KEYS, 0.5)),))
    spec = PipelineSpec.from_dict({"stages": STAGES})
    trace = probed(Trace("measured", spec.to_dict()), {(0, 0): 2.0, (0, 1): 3.0})
    assert probed_slowness(trace, profile) == pytest.approx({(0, 0): 1.0, (0, 1): 1.5})
    shared = spec.model_copy(update={"stages": tuple(s.model_copy(update={"cores": (0,)}) for s in spec.stages)})
    for other in (CHAIN, shared):
        in_turn = probed(Trace("measured", other.to_dict()), {(0, 0): 2.0})
        assert probed_slowness(in_turn, profile) == pytest.approx({(0, 0): 2.0})
