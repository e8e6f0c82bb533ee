"""Hybrid drafters (lookup where it matches, a model elsewhere) and lookaheads left ``auto``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml
from conftest import CONTEXT, chain, drive, stage

from execute.fleet import Fleet
from execute.prompts import Prompt
from execute.scripted import Script
from pipespec_model import metrics
from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency, save_profile
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec, dump_pipeline, load_pipeline
from simulate.__main__ import app
from simulate.choose import choose_lookaheads
from simulate.run import simulate

COPIED = (1, 2, 3, 4, 5, 6, 7, 8, 9)
ANSWER = [11, 3, 4, 5, 6, 7, 12, 13, 1, 2, 3, 4, 9, 14, 4, 5, 6, 7, 8, 15]
STAGES = (StageSpec(name="h", model="a", drafter="hybrid"), StageSpec(name="t", model="b"))


def agreement(bits: str = "1101") -> Agreement:
    drafter = [t if bits[i % len(bits)] == "1" else 99 for i, t in enumerate(ANSWER)]
    return Agreement("p", len(COPIED), tuple(s.choice_key for s in STAGES), np.array([drafter, ANSWER]),
                     prompt_tokens=COPIED)


@pytest.mark.parametrize("handshake", ["overlapped", "blocking"])
@pytest.mark.parametrize("strategy", ["speculative", "pipelined"])
def test_a_hybrid_runs_in_the_executor_as_in_the_simulator(strategy: str, handshake: str) -> None:
    """The text is the target's, some drafts are looked up and some are the model's; a chain's steps are
    the same ones, in number, kind and outcome."""
    spec = PipelineSpec(strategy=strategy, handshake=handshake, stages=STAGES,
                        links=(LinkSpec(lookahead=2, max_window=6, buffer_tokens=6),))
    scripts = {"h": Script(Constant(0.001)), "t": Script(Constant(0.003))}
    with Fleet(STAGES, scripts=scripts) as fleet:
        record, steps = fleet.run_prompt(spec, Prompt("p", "", tokens=COPIED), max_new_tokens=len(ANSWER),
                                         agreement=agreement())
    profile = Profile({"h": StageLatency(Constant(0.001)), "t": StageLatency(Constant(0.003))})
    replayed = simulate(spec, profile, [agreement()])
    assert record.tokens == replayed.prompts[0].tokens == ANSWER
    assert {step.kind for step in steps if step.stage == 0} == {"prefill", "draft", "lookup"}
    if strategy == "speculative":
        for index in (0, 1):
            taken = [(s.kind, s.position, s.width, s.accepted) for s in steps if s.stage == index]
            assert taken == [(s.kind, s.position, s.width, s.accepted) for s in replayed.steps if s.stage == index]


def test_what_was_looked_up_is_fed_to_the_model_later() -> None:
    """A model step after a lookup is as wide as what the model has not seen."""
    spec = PipelineSpec(strategy="speculative", stages=STAGES, links=(LinkSpec(lookahead=6),))
    profile = Profile({"h": StageLatency(Constant(0.001)), "t": StageLatency(Constant(0.003))})
    steps = [s for s in simulate(spec, profile, [agreement("1")]).steps if s.stage == 0]
    seen = COPIED.__len__()
    for step in steps:
        if step.kind != "lookup":
            assert step.context <= len(COPIED) + step.position
            assert step.width == len(COPIED) + step.position - step.context
    assert any(step.width > 2 for step in steps if step.kind == "draft"), seen


@pytest.mark.parametrize("strategy", ["speculative", "pipelined", "speculative blocking", "pipelined blocking"])
def test_a_hybrid_of_real_models_gives_plain_decodings_text(runners, plain_greedy, strategy: str) -> None:
    """With tiny models and a prompt that repeats itself, every strategy's text is the target's own."""
    prompt = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6)
    spec = chain(strategy, [stage("near", drafter="hybrid"), stage("target")], window=5)
    for name in ("near", "target"):
        runners[name].begin(prompt)
    done = drive(spec, [runners["near"], runners["target"]], prompt, 60)
    assert done.tokens == plain_greedy(prompt, 60)
    assert len(prompt) + 60 < CONTEXT
    assert any(step.kind == "lookup" for step, _ in done.steps[0])


def test_only_a_first_drafter_may_be_hybrid() -> None:
    """A middle stage or a target that looks up is bad input."""
    with pytest.raises(InputError, match=r"stages\.1\.drafter must be 'model'"):
        PipelineSpec.from_dict({"stages": [{"name": "a", "model": "a"},
                                           {"name": "b", "model": "b", "drafter": "hybrid"}]})


def auto(k: int = 2, strategy: str = "pipelined") -> PipelineSpec:
    stages = [{"name": f"s{i}", "model": f"m{i}"} for i in range(k)]
    return PipelineSpec.from_dict({"strategy": strategy, "stages": stages, "links": [{"lookahead": "auto"}] * (k - 1)})


def timed(*seconds: float) -> Profile:
    return Profile({f"s{i}": StageLatency(Constant(s)) for i, s in enumerate(seconds)})


@pytest.mark.parametrize(("strategy", "rate", "seconds"), [
    ("speculative", 0.9, (0.001, 0.02)), ("speculative", 0.5, (0.01, 0.02)), ("pipelined", 0.9, (0.005, 0.02)),
    ("pipelined", 0.3, (0.015, 0.02)),
])
def test_the_chosen_lookahead_is_the_fastest_of_all(strategy: str, rate: float, seconds: tuple[float, ...]) -> None:
    """Every number is tried by hand: none is faster than the one that was chosen."""
    spec, profile = auto(strategy=strategy), timed(*seconds)
    names = [s.choice_key for s in spec.stages]
    prompts = [synthetic(names, [IID(rate)], num_tokens=40, seed=1, prompt=i) for i in range(6)]
    chosen = choose_lookaheads(spec, profile, prompts)

    def speed(number: int) -> float:
        trace = simulate(spec.with_lookaheads([number]), profile, prompts, spread=False)
        return metrics.tokens_per_s(trace.prompts) or 0.0

    least = 1 if strategy == "speculative" else 0
    assert speed(chosen.links[0].lookahead) == max(speed(number) for number in range(least, 13))


def test_a_cheap_sure_drafter_looks_further_ahead_than_a_dear_unsure_one() -> None:
    """In a chain the window grows with acceptance and shrinks with the drafter's cost."""
    names = [s.choice_key for s in auto().stages]
    found = []
    for rate, seconds in ((0.95, (0.001, 0.02)), (0.5, (0.01, 0.02))):
        prompts = [synthetic(names, [IID(rate)], num_tokens=60, seed=1, prompt=i) for i in range(6)]
        found.append(choose_lookaheads(auto(strategy="speculative"), timed(*seconds), prompts).links[0].lookahead)
    assert found[0] > found[1]


def test_a_number_that_is_given_stays() -> None:
    """Only what is ``auto`` is chosen."""
    spec = auto(3).with_lookaheads([3, -1])
    names = [s.choice_key for s in spec.stages]
    prompts = [synthetic(names, [IID(0.8)] * 2, num_tokens=30, seed=1)]
    chosen = choose_lookaheads(spec, timed(0.002, 0.006, 0.02), prompts)
    assert chosen.links[0].lookahead == 3
    assert chosen.links[1].lookahead >= 0


def test_auto_survives_a_file_and_is_refused_where_a_number_is_needed(tmp_path, capsys) -> None:
    """YAML says ``auto``; simulator and executor want a number, and ``simulate resolve`` makes one."""
    dump_pipeline(auto(), tmp_path / "p.yaml")
    assert yaml.safe_load((tmp_path / "p.yaml").read_text(encoding="utf-8"))["links"][0]["lookahead"] == "auto"
    assert load_pipeline(tmp_path / "p.yaml") == auto()
    profile = replace(timed(0.001, 0.02), acceptance={"s0>s1": IID(0.8)})
    save_profile(profile, tmp_path / "profile.json")
    with pytest.raises(InputError, match=r"links\.0\.lookahead must be a number here, got 'auto': choose it with"):
        simulate(auto(), profile, [synthetic(["a", "b"], [IID(0.8)], num_tokens=5, seed=0)])
    app(["resolve", str(tmp_path / "p.yaml"), "--profile", str(tmp_path / "profile.json"), "--out",
         str(tmp_path / "r.yaml")], standalone_mode=False)
    assert load_pipeline(tmp_path / "r.yaml").links[0].lookahead > 0
    assert "lookahead: " in capsys.readouterr().err


@pytest.mark.parametrize("value", [-1, -5, "often", 1.5])
def test_other_lookaheads_are_refused(value: object) -> None:
    """A negative number, a word and a fraction are bad input that names the field."""
    with pytest.raises(InputError, match=r"links\.0\.lookahead"):
        PipelineSpec.from_dict({"stages": [{"name": "a", "model": "a"}, {"name": "b", "model": "b"}],
                                "links": [{"lookahead": value}]})
