"""The renewal model against the event simulator, and its limits."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import drawn_pipelines
import numpy as np
import pytest

from pipespec_model import renewal as renewal_module
from pipespec_model.acceptance import IID, Hazard, Markov, Recorded
from pipespec_model.errors import InputError
from pipespec_model.profile import Costs
from pipespec_model.renewal import factors, renewal, two_stages


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return drawn_pipelines.script("renewal_errors")


def made(rate: float = 0.8, *, draft_s: float = 0.012, wide: float = 1.0, window: int = 8, **options: Any) -> Any:
    verify = np.array([0.1] + [0.1 * wide] * window)
    return two_stages(draft_s=draft_s, verify_s=verify, acceptance=IID(rate), **options)


def test_renewal_is_the_simulation_on_a_grid(script: ModuleType) -> None:
    """A share of the grid of docs/theory.md: within 0.5% or four standard errors of the simulator."""
    rows = [script.compare(point, 3000) for point in list(script.points(320))[::32]]
    assert len(rows) == 10
    assert {row["blocking"] for row in rows} == {True, False}
    assert [row for row in rows if not row["passes"]] == []


def test_random_times_are_the_simulations_on_a_grid(script: ModuleType) -> None:
    """Step times with a coefficient of variation of 0.4: within 0.5% or four standard errors of the simulator.
    Negative control: mean times alone are further off where a slow drafter must answer."""
    slow = script.Point(0.18, 0.83, 0, 1, 32, 2.6, blocking=True, kind="markov", costs=True)
    rows = [script.compare(replace(point, spread=0.4), 3000) for point in [slow, *list(script.points(320))[::64]]]
    assert [row for row in rows if not row["passes"]] == []
    assert abs(rows[0]["percent_of_means"]) > 2 * rows[0]["bound"]


def test_more_scenarios_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quadrature's own error: eight times the scenarios and twice the phases move the result by less than 0.6%."""
    spread = tuple(np.linspace(0.4, 1.6, 5))
    options = {"draft_s": 0.023, "wide": 1.5, "draft_spread": spread, "verify_spread": spread}
    few = [made(rate, blocking=blocking, **options).tokens_per_s for rate in (0.5, 0.9) for blocking in (False, True)]
    monkeypatch.setattr(renewal_module, "NUM_SCENARIOS", 256)
    many = [made(rate, blocking=blocking, num_phases=48, **options).tokens_per_s
            for rate in (0.5, 0.9) for blocking in (False, True)]
    assert few == pytest.approx(many, rel=6e-3)


def test_no_spread_is_constant_times() -> None:
    """Factors of one everywhere give what no factors do."""
    flat = made(draft_spread=(1.0, 1.0), verify_spread=(1.0, 1.0), num_phases=96)
    assert flat.tokens_per_s == pytest.approx(made().tokens_per_s, rel=1e-7)
    assert (factors((), ()) == 1).all()


def test_factors_follow_the_distribution_they_are_of() -> None:
    """Each step's factors over scenarios have mean 1 and the spread's quantiles; steps differ in their order."""
    spread = np.linspace(0.5, 1.5, 9)
    made_of = factors(spread, ())
    assert (made_of[:, 1] == 1).all()
    assert made_of[:, 0].mean(axis=0) == pytest.approx(np.ones(made_of.shape[2]))
    levels = (np.arange(len(made_of)) + 0.5) / len(made_of)
    assert np.sort(made_of[:, 0], axis=0) == pytest.approx(np.tile(0.5 + levels, (made_of.shape[2], 1)).T)
    assert abs(np.corrcoef(made_of[:, 0].T)[0, 1:]).mean() < 0.4


@pytest.mark.parametrize("blocking", [False, True])
def test_figures_beside_throughput_are_the_simulators(script: ModuleType, blocking: bool) -> None:
    """Accepted lengths, drafts waiting, busy and wasted shares are those of a long simulation."""
    point = script.Point(0.8, 0.2, 1, 8, 6, 1.5, blocking, "markov", costs=True)
    spec, profile = point.made()
    said = renewal(spec, profile)
    agreement = script.synthetic([s.choice_key for s in spec.stages], [point.acceptance], num_tokens=8000, seed=2)
    record, steps = script.PromptRun(spec, profile, agreement, seed=2, spread=False).run()
    target = [step for step in steps if step.stage == 1]
    lengths = np.bincount([step.emitted for step in target], minlength=8)[1:] / len(target)
    windows = np.bincount([step.drafts for step in target], minlength=7) / len(target)
    assert said.emitted == pytest.approx(lengths, abs=0.02)
    assert said.waiting_drafts == pytest.approx(windows, abs=0.02)
    assert said.starved_probability == pytest.approx(1 - windows[-1], abs=0.02)
    assert said.mean_acceptance_length == pytest.approx(len(record.tokens) / len(target), rel=0.02)
    for stage in (0, 1):
        busy = sum(step.duration_s for step in steps if step.stage == stage) / record.total_s
        assert said.busy[stage] == pytest.approx(busy, abs=0.02)
    drafted = sum(step.emitted for step in steps if step.stage == 0)
    accepted = sum(step.accepted for step in target)
    assert said.wasted == pytest.approx(1 - accepted / drafted, abs=0.03)


def test_the_spread_over_prompts_is_the_simulators(script: ModuleType) -> None:
    """The time of n tokens varies over prompts as stated."""
    point = script.Point(0.7, 0.15, 0, 16, 8, 1.0, False)
    spec, profile = point.made()
    names = [s.choice_key for s in spec.stages]
    seconds = [script.PromptRun(spec, profile, script.synthetic(names, [point.acceptance], num_tokens=300, seed=3,
                                                               prompt=i), spread=False).run()[0].total_s
               for i in range(60)]
    assert renewal(spec, profile).seconds_sd * np.sqrt(300) == pytest.approx(np.std(seconds, ddof=1), rel=0.3)


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_without_agreement_overlapped_is_autoregressive(rate: float) -> None:
    """α → 0, γ = 0: the target never waits, so every step is a plain one (with lookahead it does wait)."""
    assert made(rate).tokens_per_s == pytest.approx(10.0, rel=1e-6)
    assert made(rate, lookahead=2).tokens_per_s < 9
    assert made(rate, blocking=True).tokens_per_s < 10


def test_with_full_agreement_the_slower_stage_decides() -> None:
    """α → 1: a slow drafter gives one token per step of its own; a fast one fills every window, if the
    buffer holds two of them and their bonus tokens."""
    fast = made(1.0, draft_s=0.001, buffer_tokens=32)
    assert fast.tokens_per_s == pytest.approx(90.0, rel=3e-3)
    assert made(1.0, draft_s=0.001, buffer_tokens=16).tokens_per_s < 86
    assert fast.starved_probability == pytest.approx(0.0, abs=1e-2)
    assert fast.wasted == pytest.approx(1 / 9, abs=1e-2)  # the bonus position was drafted too
    slow = made(1.0, draft_s=0.05)
    assert slow.tokens_per_s == pytest.approx(20.0, rel=0.02)


@pytest.mark.parametrize("blocking", [False, True])
def test_more_agreement_is_never_slower(blocking: bool) -> None:
    """Throughput rises with α where a wide verification costs no more than a narrow one."""
    found = [made(rate, blocking=blocking).tokens_per_s for rate in np.linspace(0.02, 0.98, 25)]
    assert (np.diff(found) > -1e-6 * np.array(found[1:])).all()


def test_theorem_1_does_not_say_seconds() -> None:
    """α = 0.05 with a lookahead: more tokens a step than one, and slower than plain decoding."""
    found = made(0.05, lookahead=4, draft_s=0.03)
    assert found.mean_acceptance_length > 1
    assert found.tokens_per_s < 10


def test_special_cases_agree() -> None:
    """Markov with equal rates and a flat hazard are i.i.d."""
    verify = np.full(9, 0.1)
    speeds = [two_stages(draft_s=0.03, verify_s=verify, acceptance=model).tokens_per_s
              for model in (IID(0.7), Markov(0.7, 0.7), Hazard((0.7, 0.7, 0.7)))]
    assert speeds[1:] == pytest.approx(speeds[:1] * 2, rel=1e-9)


def test_a_finer_grid_changes_little() -> None:
    """Twice the phases move the result by less than a tenth of a percent."""
    costs = Costs(turnaround_s=0.0007, handover_s=0.0011, rollback_s=0.002)
    coarse, fine = (made(0.8, draft_s=0.0137, drafter_costs=costs, target_costs=costs, num_phases=n).tokens_per_s
                    for n in (96, 192))
    assert coarse == pytest.approx(fine, rel=1e-3)


@pytest.mark.parametrize(("options", "field"), [
    ({"lookahead": 9}, "lookahead"), ({"buffer_tokens": 0}, "buffer_tokens"), ({"draft_s": 0.0}, "draft_s"),
])
def test_what_is_out_of_range_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        made(**options)
    with pytest.raises(InputError, match="acceptance"):
        two_stages(draft_s=0.01, verify_s=np.full(3, 0.1), acceptance=Recorded((True, False)))
