"""The error budget names the assumption that is wrong, and the page says the report's numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import chain, stage

from pipespec_model import metrics
from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.latency import Constant
from pipespec_model.profile import Contention, Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from simulate.run import simulate
from validate.budget import accepted_as_run, budget, latency_of

STAGES = [stage("s0"), stage("s1")]
KEYS = [s.time_key for s in STAGES]
SPECS = [chain("speculative", STAGES, window=3), chain("pipelined", STAGES)]
SHARES = ("step_times", "between_steps", "acceptance", "rest")


def truth(target_s: float = 0.020, handover_s: float = 0.001, rate: float = 0.8) -> Profile:
    return Profile(
        {KEYS[0]: StageLatency(Constant(0.005)), KEYS[1]: StageLatency(Constant(target_s), Constant(0.05))},
        contention=(Contention({KEYS[0]: rate, KEYS[1]: rate}),), costs={"*": Costs(handover_s=handover_s)})


def tokens(seed: int = 1) -> list[Agreement]:
    names = [s.choice_key for s in STAGES]
    return [synthetic(names, [IID(0.7)], num_tokens=60, seed=seed, prompt=i, prompt_length=9) for i in range(4)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.strategy)
@pytest.mark.parametrize(("believed", "drafts", "blamed"), [
    (truth(), tokens(), None), (truth(target_s=0.016), tokens(), "step_times"),
    (truth(handover_s=0.004), tokens(), "between_steps"), (truth(), tokens(seed=9), "acceptance"),
], ids=["nothing", "target step", "hand-over", "drafts"])
def test_the_wrong_assumption_is_blamed(spec: PipelineSpec, believed: Profile, drafts: list[Agreement],
                                        blamed: str | None) -> None:
    """Of a simulated run under another belief: the shares sum to the error, and all but the one that is wrong
    are below half of it or 0.5%.  Of drafts that a pipeline's target overtook nothing is known: their share
    stays in the rest."""
    run = simulate(spec, truth(), tokens())
    even = [[1.0, 1.0]] * 4
    said = metrics.tokens_per_s(simulate(spec, believed, drafts, slowness=even).prompts)
    measured = metrics.tokens_per_s(run.prompts)
    assert said is not None
    assert measured is not None
    error = 100 * (said / measured - 1)
    found = budget(spec, believed, run, drafts, even)
    assert sum(found[name] for name in SHARES) == pytest.approx(error)
    if blamed:
        assert abs(error) > 1
    for name in SHARES:
        unknown = name == "rest" and blamed == "acceptance" and spec.strategy == "pipelined"
        if name != blamed and not unknown:
            assert abs(found[name]) < max(abs(error) / 2, 0.5), found
    assert 0.5 < found["efficiency"] <= 1.001


def test_contention_and_the_machines_speed_have_their_size() -> None:
    """A pipeline whose stages slow each other to 0.8 is predicted faster without that; at a calibrated speed
    of half the right one, at half the throughput."""
    run = simulate(SPECS[1], truth(), tokens())
    slow = replace(truth(), slowness=dict.fromkeys(KEYS, (2.0, 2.0)))
    found = budget(SPECS[1], slow, run, tokens(), [[1.0, 1.0]] * 4)
    assert 15 < found["without_contention"] < 30
    assert found["at_calibrated_speed"] == pytest.approx(-50, abs=2)


def test_step_times_of_a_run_come_back() -> None:
    """Means by width as they ran, contention included; a width that was rare goes by the others' pace."""
    run = simulate(SPECS[0], truth(), tokens())
    made = latency_of(run, truth(target_s=0.010))
    assert made[KEYS[1]].step.mean_s(4, 40) == pytest.approx(0.020)
    prefill = made[KEYS[1]].prefill
    assert prefill is not None
    assert prefill.mean_s(9, 0) == pytest.approx(0.05)


def test_drafts_come_back_from_the_targets_steps() -> None:
    """A replay of the recovered choices takes the run's own steps, whatever was recorded before."""
    run = simulate(SPECS[0], truth(), tokens())
    for prompt, other in zip(run.prompts, tokens(seed=9), strict=True):
        mine = [step for step in metrics.target_steps(run) if step.prompt == prompt.prompt]
        wrong = replace(other, tokens=np.array([other.tokens[0], prompt.tokens]))
        again = simulate(SPECS[0], truth(), [accepted_as_run(wrong, mine)])
        assert [(s.position, s.drafts, s.accepted) for s in metrics.target_steps(again)] == [
            (s.position, s.drafts, s.accepted) for s in mine]


def test_the_page_says_the_reports_numbers(tmp_path: Path) -> None:
    """A section a row with measured, predicted and their difference, and how to write the page again."""
    from test_browser import row

    from validate.page import write_page

    rows = [row("autoregressive", 10.0, lookahead=[]), row("pipelined", 20.0, "emulated")]
    origins = ("measured", "emulated")
    data = {"model": "m", "dtype": "float32", "calibration_prompts": ["a"], "evaluation_prompts": ["b"], "rows": rows,
            "max_new_tokens": 24, "drawn": "greedy", "host": {"cpu": "x", "cores": 2}, "versions": {"torch": "1"},
            "timing_mape_percent": dict.fromkeys(origins, 1.0), "timing_worst_percent": dict.fromkeys(origins, 2.0),
            "noise_floor_percent": 0.7}
    write_page(data, tmp_path / "v.md", "pipespec validate --page v.md")
    text = (tmp_path / "v.md").read_text(encoding="utf-8")
    assert "Written by `pipespec validate --page v.md`" in text
    assert "| metric | measured | predicted | diff % |" in text
    assert "| tokens per second, forecast | 10.0 | 10.5 | +5.0% |" in text
    assert "| tokens per second, replayed | 20.0 | 20.2 | +1.0% |" in text
    assert "| ms of a draft step of s0, replayed | 20.0 | 21.0 | +5.0% |" in text
    assert text.count("(emulated)") == 1
