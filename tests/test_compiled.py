"""The compiled engine is the SimPy model: same events, same figures, for everything that it covers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from drawn_cases import Drawn, cases, short_cases
from hypothesis import given, settings

from pipespec_model.acceptance import IID
from pipespec_model.latency import Affine, Constant, LatencyModel
from pipespec_model.profile import Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from simulate import compiled, twin_run
from simulate.compiled import covers, encode, event_log, run_cases, run_totals
from simulate.engine import PromptRun
from simulate.run import agreements_for
from simulate.totals import Totals

EXAMPLES = int(os.environ.get("PIPESPEC_TWIN_EXAMPLES", "250"))


def assert_same(found: Totals, expected: Totals) -> None:
    for item in fields(Totals):
        np.testing.assert_array_equal(getattr(found, item.name), getattr(expected, item.name), err_msg=item.name)


def two(**link: Any) -> PipelineSpec:
    return PipelineSpec.from_dict({"stages": [{"name": "a", "model": "a"}, {"name": "b", "model": "b"}],
                                   "links": [link]})


def timed(draft: LatencyModel, verify: LatencyModel, rate: float = 0.8, **more: Any) -> Profile:
    return Profile({"a": StageLatency(draft), "b": StageLatency(verify)}, {"a>b": IID(rate)}, **more)


def by_simpy(spec: PipelineSpec, profile: Profile, *, num_prompts: int, num_tokens: int,
             seeds: Sequence[int]) -> Totals:
    runs = [PromptRun(spec, profile, prompt, seed=seed, prompt=number).run() for seed in seeds
            for number, prompt in enumerate(agreements_for(spec, profile, num_prompts=num_prompts,
                                                           num_tokens=num_tokens, seed=seed))]
    return Totals.of_runs(runs)


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
def test_every_event_is_the_simpy_models(drawn: Drawn):
    """Of a random pipeline, profile and prompt, both engines have the same log, line by line, and the same totals."""
    assert covers(drawn.pipeline, drawn.profile, [drawn.recorded] if drawn.recorded else []) is None
    run = PromptRun(drawn.pipeline, drawn.profile, drawn.agreement, seed=drawn.seed, prompt=drawn.number,
                    spread=drawn.spread, log=[])
    expected = Totals.of_runs([run.run()])
    events, totals = event_log(drawn.pipeline, drawn.profile, drawn.recorded or drawn.num_tokens, seed=drawn.seed,
                               prompt=drawn.number, spread=drawn.spread)
    assert events == run.log
    assert_same(totals, expected)


@settings(max_examples=EXAMPLES, deadline=None)
@given(short_cases())
def test_short_ways_give_the_event_loops_figures(drawn: Drawn):
    """Where times are constant and drafts independent, the loops without events give the same totals and count as
    many events, over ten prompts."""
    cases_ = encode(drawn.pipeline, drawn.profile, num_prompts=10, num_tokens=drawn.num_tokens, seeds=(drawn.seed,))
    tables = cases_.encoder.tables()
    short, long = (compiled._outcome(tables, shortcuts=shortcuts)[0] for shortcuts in (True, False))
    for name, found, expected in zip(short._fields, short, long, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("strategy", ["pipelined", "speculative"])
def test_short_ways_give_simpys_totals(strategy: str):
    """Two seeds of three prompts of 200 tokens, by the loop without events and by SimPy."""
    spec = two(lookahead=4).model_copy(update={"strategy": strategy})
    wanted: dict[str, Any] = {"num_prompts": 3, "num_tokens": 200, "seeds": (1, 2)}
    profile = timed(Constant(0.003), Constant(0.02), costs={"*": Costs(finish_s=0.001)})
    assert_same(run_cases(encode(spec, profile, **wanted)), by_simpy(spec, profile, **wanted))


def test_many_cases_are_one_after_the_other():
    """Cases of several pipelines, depths and times in one call, one of them left to SimPy, give the rows of each
    alone; columns past a pipeline's target hold zeros."""
    three = PipelineSpec.from_dict({"stages": [{"name": name, "model": name} for name in "abc"]})
    slow = {"b": (1.0, 1.5)}
    profile = replace(timed(Constant(0.001), Affine(0.004, 0.003, 0.001), slowness=slow),
                      latency={name: StageLatency(Affine(0.001, 0.002, 0.0005)) for name in "abc"},
                      acceptance={"a>b": IID(0.7), "b>c": IID(0.9)})
    unknown = replace(profile, latency={**profile.latency, "a": StageLatency(Unknown())})
    parts = [(spec, known) for spec in (two(), three, PipelineSpec.alone(three.target)) for known in (profile, unknown)]
    wanted: dict[str, Any] = {"num_prompts": 2, "num_tokens": 30, "seeds": (0, 5)}
    made = [encode(spec, known, **wanted) for spec, known in parts]
    assert [bool(item.runs) for item in made] == [False, True, False, True, False, False]
    together = run_cases(made)
    assert_same(together, Totals.joined([by_simpy(spec, known, **wanted) for spec, known in parts]))
    assert not together.busy_s[together.num_stages == 1, 1:].any()
    assert_same(run_cases(made[2]), together[8:12])


class Unknown:
    """A latency model that only Python knows."""

    def mean_s(self, width: int, context: int) -> float:
        return 0.001 * width

    def sample_s(self, width: int, context: int, draw: float) -> float:
        return 0.001 * width * (1 + draw)

    def to_dict(self) -> dict[str, Any]:
        return {}


def test_what_is_not_covered_is_named():
    """A reason each for: more stages than sets of rates are kept for, step times of an unknown kind, a layer-skipping
    drafter, a lookup in a text; none for what the compiled rules know."""
    deep = PipelineSpec.from_dict({"stages": [{"name": f"s{i}", "model": "m"} for i in range(9)]})
    profile = Profile({"m|float32|none|cpu|1t": StageLatency(Constant(0.001))})
    assert covers(deep, profile) == "more than 8 stages"
    assert covers(two(), timed(Unknown(), Constant(1.0))) == "step times of kind Unknown"
    assert covers(two(), timed(Constant(1.0), Constant(1.0))) is None
    skipping = PipelineSpec.from_dict({"strategy": "speculative", "stages": [
        {"name": "a", "model": "b", "drafter": "clasp", "num_skipped_layers": 2}, {"name": "b", "model": "b"}],
        "links": [{"lookahead": 1}]})
    assert covers(skipping, timed(Constant(1.0), Constant(1.0))) == (
        "a layer-skipping drafter chooses its layers by a calendar")
    lookup = two().model_dump()
    lookup["stages"][0]["drafter"] = "prompt-lookup"
    spec = PipelineSpec.from_dict(lookup)
    prompts = agreements_for(spec, timed(Constant(1.0), Constant(1.0)), num_prompts=1, num_tokens=3, seed=0)
    assert covers(spec, timed(Constant(1.0), Constant(1.0)), prompts) is None
    with_text = [replace(prompts[0], prompt_tokens=(1, 2))]
    assert covers(spec, timed(Constant(1.0), Constant(1.0)), with_text) == "a lookup in the text itself"


def test_rings_grow_where_they_must(monkeypatch: pytest.MonkeyPatch):
    """A drafter that runs 200 tokens ahead, wrong and unheard, needs longer rings than there are at first: the run is
    repeated with longer ones, and gives SimPy's totals."""
    sizes: list[int] = []
    scratch = compiled.Scratch.of
    monkeypatch.setattr(compiled.Scratch, "of", lambda deep, ring: sizes.append(ring) or scratch(deep, ring))
    spec = two(buffer_tokens=200)
    profile = timed(Affine(0.001, 0.001, 0.0), Constant(0.3), 0.3)
    wanted: dict[str, Any] = {"num_prompts": 1, "num_tokens": 400, "seeds": (0,)}
    assert_same(run_cases(encode(spec, profile, **wanted)), by_simpy(spec, profile, **wanted))
    assert sizes == [64, 256]


def test_memory_is_constant_in_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch):
    """Ten times as many tokens, 30,000, in the same rings: of a pipeline of three whose step times vary."""
    sizes: list[int] = []
    scratch = compiled.Scratch.of
    monkeypatch.setattr(compiled.Scratch, "of", lambda deep, ring: sizes.append(ring) or scratch(deep, ring))
    spec = PipelineSpec.from_dict({"stages": [{"name": name, "model": name} for name in "abc"]})
    latency = {name: StageLatency(Affine(t, t, t / 10)) for name, t in (("a", 0.001), ("b", 0.003), ("c", 0.01))}
    profile = Profile(latency, {"a>b": IID(0.8), "b>c": IID(0.9)})
    for num_tokens in (3000, 30000):
        assert run_totals(spec, profile, num_prompts=1, num_tokens=num_tokens).num_tokens == [num_tokens]
    assert sizes == [64, 64]


def test_a_kept_engine_knows_its_sources(tmp_path: Path):
    """A change in any file that is compiled in, not the entry's alone, makes it another engine."""
    modules = []
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
        modules.append(ModuleType(name))
        modules[-1].__file__ = str(tmp_path / f"{name}.py")
    before = twin_run.digest_of(modules)
    assert twin_run.digest_of(modules) == before
    (tmp_path / "second.py").write_text("x = 2\n")
    assert twin_run.digest_of(modules) != before


def test_threads_do_not_meet():
    """Four threads that run different cases at once give what each gives alone."""
    spec = PipelineSpec.from_dict({"stages": [{"name": name, "model": name} for name in "abc"]})
    profile = Profile({name: StageLatency(Affine(0.001, 0.001, 0.001)) for name in "abc"},
                      {"a>b": IID(0.7), "b>c": IID(0.9)})
    made = [encode(spec, profile, num_prompts=3, num_tokens=300, seeds=(seed,)) for seed in range(8)]
    alone = [run_cases(item) for item in made]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(run_cases, made), alone, strict=True):
            assert_same(found, expected)
