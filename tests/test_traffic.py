"""Many prompts in one pipeline: logs by hand, queueing theory where it has an answer, and the single-prompt engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from drawn_cases import Drawn, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.latency import Constant
from pipespec_model.profile import Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from simulate.arrivals import poisson_s
from simulate.engine import PromptRun
from simulate.machine import to_ns
from simulate.traffic import Policy, Served, Traffic

ONE = PipelineSpec.from_dict({"strategy": "autoregressive", "stages": [{"name": "t", "model": "t"}]})
CHAIN = PipelineSpec.from_dict({"strategy": "speculative", "links": [{"lookahead": 2}],
                                "stages": [{"name": "d", "model": "d"}, {"name": "t", "model": "t"}]})
DISCIPLINES = ("oldest", "rotation")


def timed(**milliseconds: float) -> Profile:
    return Profile({name: StageLatency(Constant(ms / 1e3)) for name, ms in milliseconds.items()}, neighbour_rate=0.0)


def right(spec: PipelineSpec, num_tokens: int, number: int = 0) -> Agreement:
    """A prompt whose drafts are all accepted."""
    names = [stage.choice_key for stage in spec.stages]
    return synthetic(names, [IID(1.0)] * len(spec.links), num_tokens=num_tokens, seed=0, prompt=number)


def log_of(served: Sequence[Served]) -> list[str]:
    """Computing alone, of all prompts in one log: ``milliseconds prompt stage what position``."""
    lines = sorted((ns, event.startswith("start"), stage, number, event, position)
                   for number, item in enumerate(served) for ns, stage, event, position in item.log or []
                   if event.startswith(("start", "end")))
    return [f"{ns / 1e6:g} {number} {stage} {event} {position}" for ns, _, stage, number, event, position in lines]


def expected(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split(";")]


# -- by hand -----------------------------------------------------------------------------------------


def test_the_oldest_prompt_goes_first():
    """One stage of 4 ms: the second prompt, there from 1 ms on, begins when the first has all its tokens."""
    served = Traffic([right(ONE, 2), right(ONE, 2)], [0.0, 0.001]).run(ONE, timed(t=4), logged=True)
    assert log_of(served) == expected("""
        0 0 0 start prefill 0; 4 0 0 end 0; 4 0 0 start decode 1; 8 0 0 end 1;
        8 1 0 start prefill 0; 12 1 0 end 0; 12 1 0 start decode 1; 16 1 0 end 1""")
    assert [item.record.total_s for item in served] == pytest.approx([0.008, 0.015])
    assert [item.record.ttft_s for item in served] == pytest.approx([0.004, 0.011])


def test_in_rotation_prompts_take_turns():
    """The same two prompts, a step each in turn."""
    served = Traffic([right(ONE, 2), right(ONE, 2)], [0.0, 0.001]).run(
        ONE, timed(t=4), Policy(discipline="rotation"), logged=True)
    assert log_of(served) == expected("""
        0 0 0 start prefill 0; 4 0 0 end 0; 4 1 0 start prefill 0; 8 1 0 end 0;
        8 0 0 start decode 1; 12 0 0 end 1; 12 1 0 start decode 1; 16 1 0 end 1""")


def test_a_chain_fills_its_gaps_with_another_prompt():
    """Two drafts of 1 ms and a verification of 4 ms: alone the drafter waits four milliseconds of six; with two
    prompts it drafts for one while the other is verified, and the target never waits after 2 ms."""
    served = Traffic([right(CHAIN, 6), right(CHAIN, 6)], [0.0, 0.0]).run(CHAIN, timed(d=1, t=4), logged=True)
    assert log_of(served) == expected("""
        0 0 0 start prefill 0; 1 0 0 end 0; 1 0 0 start draft 1; 2 0 0 end 1;
        2 1 0 start prefill 0; 2 0 1 start prefill 0; 3 1 0 end 0; 3 1 0 start draft 1; 4 1 0 end 1;
        6 0 1 end 0; 6 0 0 start draft 3; 6 1 1 start prefill 0; 7 0 0 end 3; 7 0 0 start draft 4; 8 0 0 end 4;
        10 1 1 end 0; 10 1 0 start draft 3; 10 0 1 start verify 3; 11 1 0 end 3; 11 1 0 start draft 4; 12 1 0 end 4;
        14 0 1 end 3; 14 1 1 start verify 3; 18 1 1 end 3""")


def test_a_place_is_free_when_nothing_is_done_for_its_prompt():
    """With one in flight the second prompt waits for the first one's finish of 5 ms, and for nothing else."""
    profile = replace(timed(t=4), costs={"*": Costs(finish_s=0.005)})
    served = Traffic([right(ONE, 2)] * 2, [0.0, 0.0]).run(ONE, profile, Policy(in_flight=1))
    assert [item.admitted_ns for item in served] == [0, 13_000_000]
    assert [item.record.total_s for item in served] == pytest.approx([0.013, 0.026])


def test_the_turnaround_lies_between_steps_of_different_prompts_too():
    """A stage with 1 ms between its steps starts one every 5 ms, whosever it is."""
    profile = replace(timed(t=4), costs={"*": Costs(turnaround_s=0.001)})
    for discipline in DISCIPLINES:
        served = Traffic([right(ONE, 2)] * 3, [0.0, 0.0, 0.0021]).run(
            ONE, profile, Policy(discipline=discipline), logged=True)  # type: ignore[arg-type]
        starts = [float(line.split()[0]) for line in log_of(served) if "start" in line]
        assert starts == [0, 5, 10, 15, 20, 25]


def test_copies_share_the_traffic():
    """Three prompts at once on two copies: two are served alone, the third after the first of them."""
    served = Traffic([right(ONE, 2)] * 3, [0.0] * 3).run(ONE, timed(t=4), Policy(copies=2))
    assert [item.record.total_s for item in served] == pytest.approx([0.008, 0.008, 0.016])


# -- against the single-prompt engine -----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(cases())
def test_one_in_flight_is_the_single_prompt_engine(drawn: Drawn):
    """Of a random pipeline, each of three prompts that pass one at a time has the events of ``PromptRun`` alone, to
    the nanosecond and in order, later by its admission; then only a drafter's last step follows.

    Turns are left out: the target's last step for one prompt slows the first one for the next.
    """
    profile = replace(drawn.profile, turns=())
    served = Traffic([drawn.agreement] * 3, [0.0, 0.0, 0.4]).run(
        drawn.pipeline, profile, Policy(in_flight=1), seed=drawn.seed, spread=drawn.spread, logged=True)
    for number, item in enumerate(served):
        alone = PromptRun(drawn.pipeline, profile, drawn.agreement, seed=drawn.seed, prompt=number,
                          spread=drawn.spread, log=[])
        record, _ = alone.run()
        assert alone.log is not None
        assert item.log is not None
        shifted = [(ns + item.admitted_ns, stage, what, position) for ns, stage, what, position in alone.log]
        assert item.log[: len(shifted)] == shifted
        assert not any(what.startswith("start") for _, _, what, _ in item.log[len(shifted) :])
        assert item.record.tokens == record.tokens
        assert item.record.total_s == pytest.approx(
            record.total_s + (item.admitted_ns - item.arrived_ns) / 1e9, abs=2e-9)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([None, 2, 3]), st.sampled_from(DISCIPLINES), st.integers(0, 99))
def test_laws_of_random_traffic(drawn: Drawn, in_flight: int | None, discipline: Any, seed: int):
    """Whatever the pipeline and the discipline: every prompt gets the target's own tokens, a stage runs one step at
    a time, no more prompts than places are admitted, and a step once begun ends."""
    prompts, times = [drawn.agreement] * 5, poisson_s(40.0, 5, seed=seed)
    served = Traffic(prompts, times).run(drawn.pipeline, drawn.profile, Policy(in_flight, discipline),
                                         seed=drawn.seed, spread=drawn.spread, logged=True)
    for number, item in enumerate(served):
        alone = PromptRun(drawn.pipeline, drawn.profile, drawn.agreement, seed=drawn.seed, prompt=number)
        assert item.record.tokens == alone.run()[0].tokens
    events = [event for item in served for event in item.log or []]
    for stage in range(len(drawn.pipeline.stages)):
        # In whole nanoseconds, as the engine counts: steps of no length sort before what begins at the same instant.
        steps = sorted((item.arrived_ns + to_ns(step.start_s or 0.0), to_ns(step.duration_s))
                       for item in served for step in item.steps if step.stage == stage)
        assert all(start + length <= after for (start, length), (after, _) in pairwise(steps))
        assert sum(event[1] == stage and event[2].startswith("start") for event in events) == sum(
            event[1] == stage and event[2] == "end" for event in events)
    if in_flight is not None:
        ends = sorted(item.arrived_ns / 1e9 + item.record.total_s for item in served)
        for item in served:
            inside = sum(other.admitted_ns <= item.admitted_ns for other in served) - sum(
                end <= item.admitted_ns / 1e9 + 1e-9 for end in ends)
            assert inside <= in_flight


# -- against queueing theory ----------------------------------------------------------------------------

SERVICE_S = 0.008
NUM_TOKENS = 2


def sojourns(utilisation: float, *, discipline: Any, number: int, seed: int, num_tokens: int = NUM_TOKENS) -> Any:
    """Seconds from request to end, without the first tenth, of prompts of ``SERVICE_S`` each."""
    times = poisson_s(utilisation / SERVICE_S, number, seed=seed)
    prompt = right(ONE, num_tokens)
    served = Traffic([prompt] * number, times).run(ONE, timed(t=1e3 * SERVICE_S / num_tokens),
                                                   Policy(discipline=discipline))
    return np.array([item.record.total_s for item in served])[number // 10 :]


@pytest.mark.parametrize("utilisation", [0.5, 0.8])
def test_one_stage_is_an_m_d_1_queue(utilisation: float):
    """The mean wait of Poisson prompts of one length is ρ S / 2 (1 − ρ) (Pollaczek, Khinchine), within four standard
    errors over twelve independent runs (Student's t: false alarms one in 480 a case).

    Negative control: the wait with exponential lengths, ρ S / (1 − ρ), is refused.
    """
    means = np.array([sojourns(utilisation, discipline="oldest", number=1000, seed=seed).mean() - SERVICE_S
                      for seed in range(12)])
    wait = utilisation * SERVICE_S / (2 * (1 - utilisation))
    error = means.std(ddof=1) / np.sqrt(len(means))
    assert abs(means.mean() - wait) < 4 * error
    assert abs(means.mean() - 2 * wait) > 4 * error


def test_rotation_is_near_processor_sharing():
    """With many short steps a prompt, the mean time in an M/D/1 queue served in rotation comes near S / (1 − ρ), that
    of processor sharing whatever the lengths (Kleinrock): within four standard errors and the length of two steps.

    Negative control: first come, first served, which takes S + ρ S / 2 (1 − ρ), is refused.
    """
    means = {discipline: np.array([sojourns(0.6, discipline=discipline, number=500, seed=seed, num_tokens=20).mean()
                                   for seed in range(6)]) for discipline in DISCIPLINES}
    shared = SERVICE_S / (1 - 0.6)
    slack = {name: 4 * found.std(ddof=1) / np.sqrt(len(found)) + 2 * SERVICE_S / 20 for name, found in means.items()}
    assert abs(means["rotation"].mean() - shared) < slack["rotation"]
    assert abs(means["oldest"].mean() - shared) > slack["oldest"]
