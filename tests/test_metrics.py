"""Figures of merit on cases small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipespec_model import metrics
from pipespec_model.agreement import Agreement
from pipespec_model.latency import Constant
from pipespec_model.metrics import LinkFigures
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import PromptRecord, StepRecord, Trace
from simulate.run import simulate

STAGES = [{"name": "s0", "model": "a"}, {"name": "s1", "model": "b"}]


def prompt(number: int, num_tokens: int, total_s: float, ttft_s: float = 0.0) -> PromptRecord:
    return PromptRecord(number, f"p{number}", 3, list(range(num_tokens)), total_s, ttft_s, [])


def chain(window: int) -> PipelineSpec:
    return PipelineSpec.from_dict({
        "strategy": "speculative", "stages": STAGES,
        "links": [{"lookahead": window, "buffer_tokens": window, "max_window": window}]})


def run(spec: PipelineSpec, rows: list[list[int]], times: tuple[float, ...], eos: tuple[int, ...] = ()) -> Trace:
    profile = Profile({f"s{i}": StageLatency(Constant(t)) for i, t in enumerate(times)})
    names = tuple(stage.choice_key for stage in spec.stages)
    return simulate(spec, profile, [Agreement("by hand", 3, names, np.array(rows), eos=eos)])


def three_rounds() -> Trace:
    """Windows of 4 of which 4, 0 and 2 drafts are accepted; the third correction ends the sequence."""
    answer = list(range(1, 21))
    drafter = [99 if i in (5, 8) else token for i, token in enumerate(answer)]
    return run(chain(4), [drafter, answer], (0.001, 0.004), eos=(answer[8],))


def test_repeats_of_a_prompt_count_as_one_with_their_mean():
    """Two runs of 1 s and 3 s are one prompt of 2 s, in its first place; the other stays as it is."""
    runs = [prompt(0, 4, 1.0, 0.5), prompt(1, 6, 5.0), replace(prompt(2, 4, 3.0, 0.7), name="p0", repeat=1)]
    merged = metrics.mean_of_repeats(runs)
    assert [(p.name, p.total_s, p.ttft_s) for p in merged] == [("p0", 2.0, pytest.approx(0.6)), ("p1", 5.0, 0.0)]


def test_three_rounds_of_four_zero_and_two():
    """Submitted 12, accepted 6, rejected 2, emitted 9: fraction 0.5, rate 0.75, length 3.0."""
    trace = three_rounds()
    figures = metrics.link_figures(trace, 0)
    assert (figures.proposed, figures.accepted, figures.rejected, figures.unjudged) == (12, 6, 2, 4)
    assert len(trace.prompts[0].tokens) == 9
    assert metrics.accepted_fraction(figures) == 0.5
    assert metrics.acceptance_rate(figures) == 0.75
    assert metrics.mean_acceptance_length(trace) == 3.0
    assert metrics.acceptance_histogram(trace) == [1, 0, 1, 0, 1]
    assert metrics.acceptance_at_position(trace) == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    assert (figures.drafted, figures.wasted, figures.overtaken, figures.undecided) == (12, 0, 0, 0)
    assert figures.conserved


def test_throughput_of_three_full_rounds():
    """Drafts of 1 ms, verifications of 4 ms, window 4, all accepted: 15 tokens in 24 ms; twice the
    horizon takes twice the time."""
    for rounds in (3, 6):
        answer = list(range(1, 5 * rounds + 1))
        trace = run(chain(4), [answer, answer], (0.001, 0.004))
        assert trace.prompts[0].total_s == pytest.approx(0.008 * rounds, abs=1e-12)
        assert metrics.tokens_per_s(trace.prompts) == pytest.approx(625.0)
        assert metrics.stage_use(trace) == [
            {"busy": pytest.approx(0.5), "waiting": pytest.approx(0.5), "wasted": 0.0},
            {"busy": pytest.approx(0.5), "waiting": pytest.approx(0.5), "wasted": None}]


def test_pipelined_throughput_approaches_its_period():
    """Pipelined at lookahead 4: one token in the first 4 ms, then five every 5 ms (the fourth draft
    is ready 1 ms after the verdict), so 1 + 5n tokens take 4 + 5n ms; doubling n changes less than
    the stated 10%."""
    spec = PipelineSpec.from_dict({"stages": STAGES, "links": [{"lookahead": 4, "max_window": 4}]})
    rates = []
    for n in (3, 6, 12):
        answer = list(range(1, 5 * n + 2))
        trace = run(spec, [answer, answer], (0.001, 0.004))
        assert trace.prompts[0].total_s == pytest.approx((4 + 5 * n) / 1e3, abs=1e-12)
        assert trace.prompts[0].ttft_s == pytest.approx(0.004)
        rates.append(metrics.tokens_per_s(trace.prompts))
    assert rates[1] / rates[0] - 1 < 0.1
    assert rates[2] / rates[1] - 1 < 0.05


def test_no_data_gives_no_value():
    """Without drafts, steps or prompts a figure is None, never 0 or 1."""
    nothing = dict.fromkeys(("drafted", "kept", "cut", "undecided", "proposed", "accepted", "rejected", "stale"), 0)
    figures = LinkFigures.of(nothing, nothing)
    assert metrics.acceptance_rate(figures) is None
    assert metrics.accepted_fraction(figures) is None
    empty = Trace("measured", {"stages": STAGES})
    assert metrics.mean_acceptance_length(empty) is None
    assert metrics.acceptance_histogram(empty) == []
    assert metrics.acceptance_at_position(empty) == []
    assert [metrics.tokens_per_s([]), metrics.mean_tokens_per_s([]), metrics.tpot_s([])] == [None] * 3
    assert metrics.tpot_s([prompt(0, 1, 2.0, 1.0)]) is None
    assert metrics.stage_use(empty) == [{"busy": None, "waiting": None, "wasted": None}] * 2
    assert metrics.bootstrap_interval([prompt(0, 1, 1.0)], metrics.throughput, rng=np.random.default_rng(0)) is None


def test_an_always_wrong_drafter_has_acceptance_zero():
    """Zero accepted of some rejected is 0, and length 1: not None."""
    trace = run(chain(2), [[99] * 5, [1, 2, 3, 4, 5]], (0.001, 0.004))
    assert metrics.acceptance_rate(metrics.link_figures(trace, 0)) == 0.0
    assert metrics.mean_acceptance_length(trace) == 1.0


def test_autoregressive_emits_one_token_a_step():
    """Mean acceptance length is 1.00 without drafts, and there is no acceptance at any position."""
    spec = PipelineSpec.from_dict({"strategy": "autoregressive", "stages": STAGES[:1]})
    trace = run(spec, [[1, 2, 3]], (0.004,))
    assert metrics.mean_acceptance_length(trace) == 1.0
    assert metrics.acceptance_histogram(trace) == [3]
    assert metrics.acceptance_at_position(trace) == []
    assert metrics.tpot_s(trace.prompts) == pytest.approx(0.004)


def test_both_aggregates_of_throughput():
    """10 tokens in 1 s and 10 in 4 s: 4 a second in total, 6.25 as a mean over prompts."""
    prompts = [prompt(0, 10, 1.0, 0.1), prompt(1, 10, 4.0, 0.4)]
    assert metrics.tokens_per_s(prompts) == 4.0
    assert metrics.mean_tokens_per_s(prompts) == 6.25
    assert metrics.tpot_s(prompts) == pytest.approx(4.5 / 18)


@pytest.mark.parametrize(("changed", "value"), [("drafted", 13), ("kept", 7), ("cut", 7), ("undecided", 1)])
def test_conservation_notices_a_lost_or_doubled_draft(changed: str, value: int):
    """A counter that is off by one breaks conservation."""
    drafter = {"drafted": 12, "kept": 6, "cut": 6, "undecided": 0}
    verifier = {"proposed": 12, "accepted": 6, "rejected": 2, "stale": 0}
    assert LinkFigures.of(drafter, verifier).conserved
    assert not LinkFigures.of({**drafter, changed: value}, verifier).conserved


def test_unverified_discards_have_their_own_counter():
    """Of 10 drafts 4 were submitted and 3 accepted; 5 cut, 1 of them after judgement: 4 wasted."""
    drafter: dict[str, Any] = {"drafted": 10, "kept": 4, "cut": 5, "undecided": 1}
    figures = LinkFigures.of(drafter, {"proposed": 4, "accepted": 3, "rejected": 1, "stale": 2})
    assert (figures.wasted, figures.overtaken, figures.unjudged, figures.stale_messages) == (4, 1, 0, 2)
    assert figures.conserved


def test_a_bootstrap_interval_holds_its_estimate_and_shrinks_to_a_point():
    """The interval of unequal prompts holds the estimate; equal prompts leave no doubt."""
    low, high = metrics.bootstrap_interval(
        [prompt(i, 10, 1.0 + i / 10) for i in range(8)], metrics.throughput, rng=np.random.default_rng(1)) or (0, 0)
    assert low < 80 / 10.8 < high
    same = metrics.bootstrap_interval([prompt(i, 10, 2.0) for i in range(4)], metrics.throughput,
                                      rng=np.random.default_rng(1))
    assert same == pytest.approx((5.0, 5.0))


def test_busy_is_a_share_of_the_wall_time():
    """A stage that computed 1 of 4 seconds was busy for a quarter and waited three."""
    counters = [{"drafted": 8, "cut": 2}, {"drafted": 0, "cut": 0}]
    step = StepRecord(0, 0, "draft", 0.0, 1.0, 0, 3, 1, 0, 0, 1, 0)
    record = PromptRecord(0, "p", 3, [1], 4.0, 1.0, counters)
    use = metrics.stage_use(Trace("measured", {"stages": STAGES}, steps=[step], prompts=[record]))
    assert use == [{"busy": 0.25, "waiting": 0.75, "wasted": 0.25}, {"busy": 0.0, "waiting": 1.0, "wasted": None}]
