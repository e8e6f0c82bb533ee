"""Runs over prompts, the forecast's interval, the drawn timeline and the Chrome trace."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant, Empirical
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import PromptRecord, Trace, load_trace, save_trace
from simulate.run import agreements_for, forecast, simulate
from simulate.timeline import chrome_trace, save_chrome_trace, save_timeline, span_s

SPEC = PipelineSpec.from_dict({"stages": [
    {"name": "s0", "model": "a", "device": "gpu:1"}, {"name": "s1", "model": "b", "device": "gpu:0"}]})
NAMES = [stage.choice_key for stage in SPEC.stages]
TIMES = {"s0": StageLatency(Constant(0.001)), "s1": StageLatency(Constant(0.004))}
PROFILE = Profile(TIMES, acceptance={"s0>s1": IID(0.7)}, source="by hand", neighbour_rate=0.6)


def record(number: int, num_tokens: int, total_s: float) -> PromptRecord:
    return PromptRecord(number, f"p{number}", 1, list(range(num_tokens)), total_s, 0.1, [{}, {}])


def of_prompts(*pairs: tuple[int, float]) -> Trace:
    return Trace("simulated", SPEC.to_dict(), prompts=[record(i, *pair) for i, pair in enumerate(pairs)])


def test_the_header_echoes_what_was_used():
    """Origin, pipeline, seed and effective options are in the trace, which survives its file."""
    made = agreements_for(SPEC, PROFILE, num_prompts=3, num_tokens=12, seed=5)
    trace = simulate(SPEC, PROFILE, made, seed=5, spread=False)
    assert (trace.origin, trace.seed, trace.pipeline) == ("simulated", 5, SPEC.to_dict())
    assert trace.options == {"spread": False, "profile": "by hand", "neighbour_rate": 0.6}
    assert [p.prompt for p in trace.prompts] == [0, 1, 2]
    assert all(len(p.tokens) == 12 for p in trace.prompts)


def test_a_simulated_trace_survives_its_file(tmp_path):
    """What was simulated is read back record by record."""
    trace = simulate(SPEC, PROFILE, agreements_for(SPEC, PROFILE, num_prompts=2, num_tokens=9, seed=5))
    save_trace(trace, tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl") == (trace, None)


def test_spread_draws_times_and_its_absence_takes_means():
    """Without spread every step takes the mean, 2 ms; with it times are the observed ones."""
    times = {"s0": StageLatency(Constant(0.001)), "s1": StageLatency(Empirical((0.001, 0.003)))}
    made = [synthetic(NAMES, [IID(0.0)], num_tokens=30, seed=1)]
    flat = simulate(SPEC, Profile(times), made, spread=False)
    assert {s.duration_s for s in flat.steps if s.stage == 1} == {0.002}
    drawn = {s.duration_s for s in simulate(SPEC, Profile(times), made).steps if s.stage == 1}
    assert len(drawn) > 20
    assert min(drawn) >= 0.001
    assert max(drawn) <= 0.003


def test_recorded_prompts_come_before_synthetic_ones():
    """A profile with rows for every stage replays them; a stage without a row makes it fall back on
    the acceptance models."""
    entry = Agreement("kept", 3, (*NAMES, "c"), np.array([[1, 9], [1, 2], [7, 7]]))
    (found,) = agreements_for(SPEC, Profile(TIMES, agreement=(entry,)), num_prompts=5, num_tokens=9, seed=1)
    assert found.prompt == "kept"
    assert found.tokens.tolist() == [[1, 9], [1, 2]]
    half = Agreement("half", 3, (NAMES[1],), np.array([[1, 2]]))
    partly = Profile(TIMES, PROFILE.acceptance, agreement=(half,))
    made = agreements_for(SPEC, partly, num_prompts=5, num_tokens=9, seed=1)
    assert [a.num_tokens for a in made] == [9] * 5
    assert len({str(a.tokens[0].tolist()) for a in made}) == 5
    with pytest.raises(InputError, match=r"acceptance\[s0>s1\]"):
        agreements_for(SPEC, Profile(TIMES), num_prompts=5, num_tokens=9, seed=1)
    with pytest.raises(InputError, match="prompts and tokens must be >= 1"):
        agreements_for(SPEC, PROFILE, num_prompts=0, num_tokens=9, seed=1)


def test_a_forecast_is_the_ratio_of_totals():
    """20 tokens in 5 s are 4 a second; one prompt gives no interval; none is an error."""
    assert forecast(of_prompts((10, 1.0), (10, 4.0)), PROFILE, num_prompts=3).tokens_per_s == 4.0
    one = forecast(of_prompts((10, 2.0)), PROFILE, num_prompts=3)
    assert (one.tokens_per_s, one.interval, one.num_prompts) == (5.0, None, 3)
    with pytest.raises(InputError, match="trace must hold at least one prompt"):
        forecast(of_prompts(), PROFILE, num_prompts=3)


def test_the_interval_by_hand():
    """Equal tokens, times 1 and 3 s (mean 2): influences ±½, variance ½; for one new prompt the
    standard error is sqrt(½ (½ + 1)), times Student's t at 95% with one degree of freedom."""
    low, high = forecast(of_prompts((10, 1.0), (10, 3.0)), PROFILE, num_prompts=1).interval or (0, 0)
    half = math.tan(math.pi * 0.45) * math.sqrt(0.5 * 1.5)  # the t quantile with 1 degree is Cauchy's
    assert math.log(high / 5.0) == pytest.approx(half)
    assert math.log(5.0 / low) == pytest.approx(half)


def test_timing_spread_widens_and_more_prompts_narrow_the_interval():
    """Equal prompts leave sqrt(2) times the timing spread; unequal ones shrink as prompts are added."""
    same = of_prompts(*[(10, 2.0)] * 5)
    assert forecast(same, PROFILE, num_prompts=5).interval == pytest.approx((5.0, 5.0))
    low, high = forecast(same, Profile(TIMES, timing_spread=0.02), num_prompts=5).interval or (0, 0)
    assert math.log(high / low) == pytest.approx(2 * float(stats.t.ppf(0.95, 4)) * math.sqrt(2) * 0.02)
    spans = []
    for m in (1, 4, 400):
        low, high = forecast(of_prompts((10, 1.0), (10, 2.0), (10, 3.0)), PROFILE, num_prompts=m).interval or (0, 0)
        spans.append(high / low)
    assert spans == sorted(spans, reverse=True)


def test_a_slow_machine_is_simulated_slow():
    """Given slowness scales every step of its stage; the profile's is drawn once a prompt, and its mean
    taken without spread; what varies widens the forecast."""
    alone = PipelineSpec.alone(SPEC.target)
    made = [synthetic(NAMES[1:], [], num_tokens=10, seed=1, prompt=i) for i in range(8)]
    total = [p.total_s for p in simulate(alone, PROFILE, made[:2], slowness=[[1.0], [2.5]]).prompts]
    assert total == pytest.approx([0.04, 0.1])
    slow = Profile(TIMES, slowness={"s1": (1.0, 2.0)})
    drawn = simulate(alone, slow, made)
    assert len({p.total_s for p in drawn.prompts}) == 8
    assert all(0.04 <= p.total_s <= 0.08 for p in drawn.prompts)
    assert all(len({s.duration_s for s in drawn.steps if s.prompt == n}) == 1 for n in range(8))
    assert {p.total_s for p in simulate(alone, slow, made, spread=False).prompts} == {0.06}
    same = of_prompts(*[(10, 2.0)] * 5)
    low, high = forecast(same, slow, num_prompts=5, repeats=2).interval or (0, 0)
    half = float(stats.t.ppf(0.95, 4)) * math.log(2) / 2 * math.sqrt(1 / 2 + 1 / 10)
    assert math.log(high / low) == pytest.approx(2 * half)


def test_a_forecast_counts_prompts_not_runs():
    """Each prompt simulated four times: the interval is as wide as with each once."""
    once, four = of_prompts((10, 1.0), (10, 3.0)), of_prompts(*[(10, 1.0), (10, 3.0)] * 4)
    four.prompts = [replace(p, name=f"p{p.prompt % 2}") for p in four.prompts]
    assert forecast(four, PROFILE, num_prompts=3) == forecast(once, PROFILE, num_prompts=3)


def test_the_interval_holds_its_level():
    """Of 400 forecasts from 8 prompts for 8 new ones, 90% cover the outcome within four standard
    errors (84 to 96%; false alarm 1 in 15,800, seed fixed); half as wide an interval does not."""
    rng = np.random.default_rng(4)

    def draw() -> list[tuple[int, float]]:
        return [(10, float(2.0 * np.exp(0.2 * rng.standard_normal()))) for _ in range(8)]

    inside = narrow = 0
    for _ in range(400):
        said = forecast(of_prompts(*draw()), PROFILE, num_prompts=8)
        new = draw()
        error = math.log(sum(n for n, _ in new) / sum(s for _, s in new) / said.tokens_per_s)
        assert said.interval is not None
        half = math.log(said.interval[1] / said.tokens_per_s)
        inside += abs(error) < half
        narrow += abs(error) < half / 2
    margin = 4 * math.sqrt(0.9 * 0.1 / 400)
    assert abs(inside / 400 - 0.9) < margin
    assert abs(narrow / 400 - 0.9) > margin


def two_prompts() -> Trace:
    """The first step after a rollback that crops the cache begins at 8 ms."""
    answer = list(range(1, 9))
    rows = np.array([[1, 2, 9, 4, 5, 6, 7, 8], answer])
    return simulate(SPEC, PROFILE, [Agreement(f"p{i}", 3, tuple(NAMES), rows) for i in range(2)])


def test_a_chrome_trace_has_a_span_a_step(tmp_path):
    """Every step is a span of its duration in microseconds on its stage's thread and its device's
    process; the second prompt follows the first; every rollback is an instant."""
    trace = two_prompts()
    save_chrome_trace(trace, tmp_path / "c.json")
    events = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(trace.steps)
    assert sum(e["dur"] for e in spans) == pytest.approx(1e6 * sum(s.duration_s for s in trace.steps))
    assert {(e["tid"], e["pid"]) for e in spans} == {(0, 1), (1, 0)}
    names = {(e["name"], e["pid"], e.get("tid"), e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {("process_name", 0, None, "gpu:0"), ("process_name", 1, None, "gpu:1"),
                     ("thread_name", 0, 1, "s1"), ("thread_name", 1, 0, "s0")}
    second = [e["ts"] for e in spans if e["args"]["prompt"] == "p1"]
    assert min(second) == pytest.approx(1e6 * trace.prompts[0].total_s)
    rollbacks = sum(s.rolled_back for s in trace.steps)
    assert rollbacks > 0
    assert sum(e["ph"] == "i" for e in events) == rollbacks
    assert chrome_trace(trace)["otherData"] == {"origin": "simulated"}


def test_steps_without_a_start_are_not_drawn():
    """An import that has durations only gives no spans, and no error."""
    trace = two_prompts()
    bare = Trace("imported", trace.pipeline, steps=[s for s in trace.steps if s.start_s is None], prompts=trace.prompts)
    assert [e for e in chrome_trace(bare)["traceEvents"] if e["ph"] != "M"] == []


def test_span_is_when_the_target_held_that_many_tokens():
    """Steps of 4 ms: the first token after 4 ms, and more tokens than there are end with the last."""
    trace = two_prompts()
    assert span_s(trace, 0, 1) == pytest.approx(0.004)
    assert span_s(trace, 0, 100) == pytest.approx(trace.prompts[0].total_s)


def test_a_timeline_is_drawn_and_an_absent_prompt_refused(tmp_path):
    """One picture for several traces; a prompt that is not there is bad input."""
    save_timeline([two_prompts(), two_prompts()], tmp_path / "t.svg", prompt=1)
    text = (tmp_path / "t.svg").read_text(encoding="utf-8")
    assert text.rstrip().endswith("</svg>")
    for absent in (2, -1):
        with pytest.raises(InputError, match=r"prompt must be in \[0, 1\]"):
            save_timeline([two_prompts()], tmp_path / "t.svg", prompt=absent)
