"""Planning: every candidate can be built, the best is found, and how sure that is follows from the worlds."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from sweeps import PROFILE as CHAIN_PROFILE

from pipespec_model.__main__ import main
from pipespec_model.acceptance import IID, Hazard, Markov, Recorded
from pipespec_model.agreement import synthetic
from pipespec_model.devices import device, runtime
from pipespec_model.errors import InputError
from pipespec_model.latency import Affine, Constant
from pipespec_model.profile import Profile, StageLatency, save_profile
from pipespec_model.roofline import Estimate, with_estimate
from pipespec_model.shape import ModelShape
from pipespec_model.spec import StageSpec, load_pipeline
from simulate import plan as planning
from simulate.candidates import Catalogue, Limits
from simulate.doubt import Doubt, Unknown, regrets, shares_best, worth_knowing
from simulate.models import model_names, stages_of
from simulate.plan import Aim, Effort, Plan, plan
from simulate.plan_command import answer, verdict

QUICK = Effort(num_texts=2, num_tokens=60, worlds=20)
INT8 = StageSpec(name="int8", model="org/m", quantize="int8")
FULL = StageSpec(name="m", model="org/m")


def pair(rate: float, *, wide_s: float = 0.1) -> Profile:
    return Profile({"small": StageLatency(Constant(0.01)), "large": StageLatency(Affine(0.1, wide_s, 0.0))},
                   {"small>large": IID(rate)})


def planned(profile: Profile, devices: int = 2, aim: Aim | None = None, **limits: float) -> Plan:
    return plan(Catalogue(profile, Limits(devices, **limits)), aim, effort=QUICK)


# -- candidates ------------------------------------------------------------------------------------


def test_candidates_can_be_built_and_keep_within_the_devices():
    """Every candidate holds what its strategy needs and no more than there is, none comes twice, and the target alone
    and a synchronous chain are always among them."""
    catalogue = Catalogue(CHAIN_PROFILE, Limits(4))
    found = list(catalogue.candidates())
    seen = {json.dumps(c.pipeline.to_dict()) + str(c.shards) for c in found}
    assert len(seen) == len(found) > 200
    for c in found:
        assert c.pipeline.stages[-1].name == "large"
        assert c.devices == (sum if c.pipeline.strategy == "pipelined" else max)(c.shards) <= 4
        for stage in c.pipeline.stages:
            catalogue.profile.stage_latency(stage)
    for devices in (1, 2, 4):
        assert {c.pipeline.strategy for c in found if c.devices == devices} >= {"autoregressive", "speculative"}
    assert {len(c.pipeline.stages) for c in found if c.pipeline.strategy == "pipelined"} == {2, 3}


def test_a_shard_is_as_fast_as_the_stated_law():
    """On two devices with a serial share of one half a step takes 3/4 of its time."""
    catalogue = Catalogue(pair(0.5), Limits(2, serial_share=0.5))
    times = {c.shards: catalogue.profile.stage_latency(c.pipeline.target).step.mean_s(1, 0)
             for c in catalogue.candidates() if not c.pipeline.links}
    assert times == pytest.approx({(1,): 0.1, (2,): 0.075})


def test_memory_decides_what_shares_a_device():
    """6 and 60 GB: on 64 GB each has a device of its own, on 70 GB the chain shares one, on 40 GB the target needs
    two; where no number of devices suffices, that is said."""
    profile = Profile(pair(0.5).latency, pair(0.5).acceptance, memory_bytes={"small": 6e9, "large": 60e9})

    def devices(gb: float, strategy: str, number: int = 3) -> int:
        return min(c.devices for c in Catalogue(profile, Limits(number, gb * 1e9)).candidates()
                   if c.pipeline.strategy == strategy)

    assert [devices(64, s) for s in ("autoregressive", "speculative", "pipelined")] == [1, 2, 2]
    assert devices(70, "speculative") == 1
    assert [devices(40, s) for s in ("autoregressive", "speculative", "pipelined")] == [2, 2, 3]
    with pytest.raises(InputError, match="must suffice for the target alone"):
        Catalogue(profile, Limits(1, 40e9))
    with pytest.raises(InputError, match=r"profile.memory_bytes\[large\] must be there"):
        Catalogue(pair(0.5), Limits(1, 40e9))


@pytest.mark.parametrize("stage", [
    INT8, FULL, INT8.model_copy(update={"threads": 2}),
    FULL.model_copy(update={"drafter": "hybrid", "max_ngram": 4, "name": "m+lookup"}),
    StageSpec(name="lookup", model="org/m", drafter="prompt-lookup"),
    StageSpec(name="other", model="other", dtype="bfloat16", device="cuda:0"),
], ids=lambda stage: stage.time_key)
def test_a_profiles_keys_are_read_back(stage: StageSpec):
    """What a calibration has written names the stage it was: same choices, same step times."""
    profile = Profile({stage.time_key: StageLatency(Constant(0.1)), FULL.time_key: StageLatency(Constant(0.2))})
    found = stages_of(stage.choice_key, profile, {}, FULL.choice_key)
    assert (stage.choice_key, stage.time_key) in [(item.choice_key, item.time_key) for item in found]


def test_cores_are_devices():
    """Calibrated with one thread and two, on two cores: both cores for each stage in turn, or one each at once; a
    lookup holds none, and the recorded agreement is used."""
    stages = [s.model_copy(update={"threads": n}) for s in (INT8, FULL) for n in (1, 2)]
    lookup = StageSpec(name="lookup", model="org/m", drafter="prompt-lookup")
    names = [lookup.choice_key, INT8.choice_key, FULL.choice_key]
    profile = Profile({s.time_key: StageLatency(Constant(0.01 / s.threads)) for s in [*stages, lookup]},
                      agreement=(synthetic(names, [IID(0.3), IID(0.8)], num_tokens=30, seed=1),))
    catalogue = Catalogue(profile, Limits(2))
    assert catalogue.key == FULL.choice_key
    labels = {(c.pipeline.strategy, c.label, c.devices) for c in catalogue.candidates()}
    assert labels >= {("autoregressive", "{m×2}", 2), ("speculative", "{int8×2,m×2}", 2), ("pipelined", "{int8,m}", 2),
                      ("pipelined", "{lookup,int8,m}", 2), ("pipelined", "{lookup,m×2}", 2),
                      ("speculative", "{lookup,m}", 1)}
    assert all(c.executable for c in catalogue.candidates())
    found = plan(catalogue, effort=QUICK)
    assert any("texts" in name for name, _ in found.worth)


def test_which_model_must_answer():
    """The one that drafts for nobody; if there are two, it must be said; a model alone plans itself."""
    assert Catalogue(pair(0.5), Limits(1)).key == "large"
    two = Profile({**pair(0.5).latency, "other": StageLatency(Constant(0.2))},
                  {"small>large": IID(0.5), "small>other": IID(0.5)})
    with pytest.raises(InputError, match="--target must be given"):
        Catalogue(two, Limits(1))
    assert Catalogue(two, Limits(1), target="other").key == "other"
    with pytest.raises(InputError, match="--target must be one of small, large, other"):
        Catalogue(two, Limits(1), target="huge")
    alone = Profile({"only": StageLatency(Constant(0.2))})
    assert model_names(alone) == ["only"]
    assert [c.pipeline.strategy for c in Catalogue(alone, Limits(1)).candidates()] == ["autoregressive"]


# -- plans -----------------------------------------------------------------------------------------


def test_a_perfect_drafter_wins_and_a_useless_one_does_not():
    """Sharding gains nothing here: with a drafter ten times as fast and always right a pipeline wins, with one that is
    always wrong the target alone does, and the sentence says so."""
    good, bad = (planned(pair(rate), serial_share=1.0) for rate in (1.0, 0.0))
    assert good.choices[0].candidate.pipeline.strategy == "pipelined"
    assert good.choices[0].tokens_per_s.mean() > 50
    assert verdict(good).startswith("Pipelined {small,large} is best in ")
    assert bad.choices[0].tokens_per_s.mean() == pytest.approx(10, rel=0.05)
    assert bad.choices[0].candidate.pipeline.strategy == "autoregressive"
    assert verdict(bad).startswith("No pipeline pays here: autoregressive {large} is best in ")


def test_the_objective_decides():
    """A pipeline with two devices is faster, the target alone makes more of each, costs less and takes less energy."""
    profile = pair(0.7)
    prices = {"idle_w": 100.0, "busy_w": 400.0, "price_per_hour": 3.6}
    fast = planned(profile, aim=Aim("latency", **prices), serial_share=1.0)
    assert fast.choices[0].candidate.devices == 2
    for objective, figure in (("per-device", "tokens_per_s_per_device"), ("energy", "joules_per_token"),
                              ("cost", "cost_per_million_tokens")):
        found = planned(profile, aim=Aim(objective, **prices), serial_share=1.0)
        assert found.choices[0].candidate.devices == 1, objective
        rows = answer(found)["ranking"]
        ends = sorted(rows, key=lambda row: row[figure], reverse=objective == "per-device")
        assert ends[0]["rank"] == 1
    alone = next(row for row in rows if row["strategy"] == "autoregressive" and row["devices"] == 1)
    assert alone["joules_per_token"] == pytest.approx(400 / alone["tokens_per_s"])
    assert alone["cost_per_million_tokens"] == pytest.approx(3.6 / 3600 / alone["tokens_per_s"] * 1e6)


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_bounds_rule_out_no_winner(monkeypatch: pytest.MonkeyPatch, rate: float):
    """With and without the bound: the same best design; and the bound does rule some out."""
    profile = pair(rate, wide_s=0.4)
    pruned = planned(profile, 4)
    monkeypatch.setattr(planning._Planner, "_ceiling", lambda *_: np.inf)
    whole = planned(profile, 4)
    assert pruned.choices[0].candidate == whole.choices[0].candidate
    assert whole.num_pruned == 0 < pruned.num_pruned


def test_a_plan_is_a_function_of_its_seed():
    """The same figures again, others with another seed."""
    one, again = (answer(planned(pair(0.6))) for _ in range(2))
    assert one == again
    other = answer(plan(Catalogue(pair(0.6), Limits(2)), effort=Effort(num_texts=2, num_tokens=60, worlds=20, seed=1)))
    assert other["ranking"] != one["ranking"]


def test_break_even_is_where_the_target_alone_is_passed():
    """At the answered rate the best pipeline is faster than the target alone on as many devices, two hundredths
    below it is not; without sharding gain, as a sharded target is another rival."""
    found = planned(pair(0.9, wide_s=0.25), serial_share=1.0)
    best = found.choices[0].candidate
    assert found.break_even is not None
    assert best.pipeline.links
    speeds = {}
    for rate in (found.break_even + 0.02, found.break_even - 0.02):
        totals = planning._run(best.pipeline, Catalogue(pair(rate, wide_s=0.25), Limits(2)).profile, QUICK)
        speeds[rate] = totals.num_tokens.sum() / totals.total_s.sum()
    over, under = speeds.values()
    assert over > 10 > under


# -- what is uncertain -----------------------------------------------------------------------------


def test_what_is_worth_knowing_by_hand():
    """A choice between 10 + θ and 10 with θ standard normal: knowing θ gains E max(θ, 0) = 0.3989, a share of 0.0399
    (4,000 draws: standard error 0.001; quadratic fits are exact here); knowing noise gains nothing."""
    rng = np.random.default_rng(1)
    theta, noise = rng.standard_normal((2, 4000))
    values = np.column_stack([10 + theta - theta.mean(), np.full(4000, 10.0)])
    assert worth_knowing(values, theta, rng) == pytest.approx(0.0399, abs=0.004)
    assert worth_knowing(values, noise, rng) < 0.002


def test_chances_and_regrets_are_those_of_the_table():
    """Ties are shared, chances sum to 1, and regret is what the best of each world has over the choice."""
    values = np.array([[1.0, 1.0, 0.5], [2.0, 3.0, 4.0]])
    assert shares_best(values).tolist() == [0.25, 0.25, 0.5]
    assert regrets(values).tolist() == pytest.approx([1 / 2.25, 0.5 / 2.25, 0.25 / 2.25])


def test_a_shifted_profile_is_the_same_but_for_that():
    """Step times of a model scale wherever it runs; rates move on the logit scale, keep 0 and 1, and a record stays."""
    profile = Profile({"a|float32|none|cpu|1t": StageLatency(Constant(0.1), Constant(0.3)),
                       "a|float32|none|cpu|2t": StageLatency(Constant(0.2)), "b": StageLatency(Constant(1.0))},
                      {"i": IID(0.5), "m": Markov(1.0, 0.5), "h": Hazard((0.5, 0.0)), "r": Recorded((True,))})
    made = Unknown("time", "a|float32|none").shifted(profile, np.log(2.0))
    assert [made.latency[key].step.mean_s(1, 0) for key in profile.latency] == pytest.approx([0.2, 0.4, 1.0])
    assert made.latency["a|float32|none|cpu|1t"].prefill.mean_s(1, 0) == pytest.approx(0.6)
    for key, expected in (("i", IID(0.75)), ("m", Markov(1.0, 0.75)), ("h", Hazard((0.75, 0.0)))):
        shifted = Unknown("acceptance", key).shifted(profile, np.log(3.0)).acceptance
        assert np.allclose([*_numbers(shifted[key])], [*_numbers(expected)])
        assert {name: shifted[name] for name in "imhr" if name != key} == {
            name: profile.acceptance[name] for name in "imhr" if name != key}
    assert Unknown("acceptance", "r").shifted(profile, 1.0) == profile


def _numbers(model: object) -> itertools.chain[float]:
    return itertools.chain(*(value if isinstance(value, tuple) else (value,) for value in vars(model).values()))


def test_without_doubt_every_world_is_the_same():
    """No spread, nothing worth measuring, one design best throughout."""
    found = plan(Catalogue(pair(0.7), Limits(2)), doubt=Doubt(0.0, 0.0), effort=QUICK)
    assert all(np.ptp(choice.values) == 0 for choice in found.choices)
    assert found.best_share[0] == 1
    assert found.worth == ()


# -- the command -----------------------------------------------------------------------------------


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["simulate", "plan", *args])
    return int(end.value.code or 0)


def test_the_command_writes_a_pipeline_that_can_be_read(tmp_path, capsys):
    """JSON on stdout and on disk alike; pipeline.yaml is the best that can be executed."""
    save_profile(pair(0.9), tmp_path / "p.json")
    assert run(str(tmp_path / "p.json"), "--devices", "2", "--num-tokens", "40", "--json", "--out",
               str(tmp_path / "out")) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "out" / "plan.json").read_text())
    assert [row["rank"] for row in said["ranking"]] == list(range(1, len(said["ranking"]) + 1))
    best = next(row for row in said["ranking"] if row["executable"])
    spec = load_pipeline(tmp_path / "out" / "pipeline.yaml")
    assert (spec.strategy, spec.label) == (best["strategy"], best["pipeline"])
    assert {"autoregressive", "speculative"} <= {row["strategy"] for row in said["ranking"]}


def test_the_table_names_the_best_and_what_to_measure(tmp_path, capsys):
    """For people: the verdict's sentence and what to measure next stand below the table."""
    save_profile(pair(0.75), tmp_path / "p.json")
    assert run(str(tmp_path / "p.json"), "--devices", "2", "--num-tokens", "40") == 0
    out = capsys.readouterr().out
    assert "candidates" in out
    assert "is best in" in out
    assert "Measure next: " in out or "Nothing that is uncertain" in out


@pytest.mark.parametrize(("options", "said"), [
    (["--devices", "0"], "--devices must be >= 1, got 0"),
    (["--devices", "2", "--objective", "speed"], "--objective must be one of latency, per-device, energy, cost"),
    (["--devices", "2", "--objective", "energy"], "--objective energy must have --idle-watts and --busy-watts"),
    (["--devices", "2", "--objective", "cost"], "--objective cost must have --price-per-hour"),
    (["--devices", "2", "--target", "huge"], "--target must be one of small, large, got 'huge'"),
    (["--devices", "2", "--memory", "80"], "profile.memory_bytes[large] must be there"),
    (["--devices", "2", "--memory", "-1"], "--memory must be > 0"),
    (["--devices", "2", "--serial-share", "2"], "serial_share must be in [0, 1]"),
    (["--devices", "2", "--time-sd", "-1"], "--time-sd must be in [0, 1)"),
    (["--devices", "2", "--num-tokens", "0"], "--num-tokens must be >= 1"),
])
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, options: list[str], said: str):
    """What was wrong is named before anything is simulated."""
    save_profile(pair(0.5), tmp_path / "p.json")
    assert run(str(tmp_path / "p.json"), *options) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_alone_is_where_the_same_devices_are_measured_from():
    """The target alone on one device has a speed-up of 1 and is its own best use."""
    rows = answer(planned(pair(0.0), serial_share=1.0))["ranking"]
    alone = next(row for row in rows if row["strategy"] == "autoregressive" and row["devices"] == 1)
    assert alone["speedup"] == alone["speedup_same_devices"] == 1.0


def test_from_data_sheets_to_a_plan(tmp_path, capsys):
    """Two estimated models and an assumed rate make a plan that minds memory, and every command says what nobody has
    measured."""
    shape = ModelShape(80, 8192, 28672, 64, 8, 128, 128256), ModelShape(16, 2048, 8192, 32, 8, 64, 128256, True)
    profile = None
    for name, size in zip(("large", "small"), shape, strict=True):
        profile = with_estimate(profile, name, Estimate(size, device("a100-80gb"), runtime("compiled"), 8.5))
    save_profile(replace(profile, acceptance={"small>large": IID(0.8)}), tmp_path / "p.json")
    assert run(str(tmp_path / "p.json"), "--devices", "3", "--memory", "80", "--num-tokens", "40", "--json") == 0
    out, err = capsys.readouterr()
    assert "step times of large, small are ESTIMATES from data sheets, not measured" in err
    # 75 GB of weights and a cache: one device holds them, and the small model beside them does not fit.
    ways = {(row["strategy"], row["devices"]) for row in json.loads(out)["ranking"]}
    assert ("autoregressive", 1) in ways
    assert min(devices for strategy, devices in ways if strategy == "speculative") == 2
