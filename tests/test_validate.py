"""Predictions beside measurements: the report's figures, and one whole run with tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import chain, rows_of, stage, table, write_tiny_run

from execute.calibrate import calibrate
from execute.fleet import Fleet, new_trace
from execute.host import place
from execute.prompts import Prompt, built_in
from execute.scripted import Script
from pipespec_model import metrics
from pipespec_model.__main__ import main
from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency, load_profile
from pipespec_model.sampling import Sampling
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import PromptRecord, load_trace
from simulate.run import simulate
from validate.__main__ import custom_rows, first_of_each_category, halves, recordable
from validate.compare import identity, noise_percent, replay_set, summarise
from validate.rows import (
    Row,
    emulated_agreements,
    emulated_rows,
    emulated_scripts,
    emulated_stages,
    family_rows,
    real_rows,
)

CONTRACT = {"model", "calibration_prompts", "evaluation_prompts", "host", "rows", "mape_percent", "noise_floor_percent"}
CONTRACT_ROW = {
    "strategy", "stages", "lookahead", "handshake", "devices", "threads", "origin", "num_prompts", "num_tokens",
    "measured_tokens_per_s", "measured_interval", "predicted_tokens_per_s", "error_percent", "timing_error_percent",
    "predicted_interval", "measured_mean_acceptance_length", "predicted_mean_acceptance_length", "speedup",
    "speedup_same_devices", "identical_prompts", "near_tie_prompts"}


def record(name: str, tokens: list[int], *, total_s: float = 1.0, repeat: int = 0) -> PromptRecord:
    return PromptRecord(repeat, name, 3, tokens, total_s, 0.1, [], repeat=repeat)


@pytest.mark.parametrize(("dtype", "margin", "expected"), [
    ("bfloat16", 0.1, (1, 1)), ("bfloat16", 0.6, (1, 0)), ("float16", 0.04, (1, 1)), ("float16", 0.1, (1, 0)),
    ("float32", 0.0005, (1, 1)), ("float32", 0.1, (1, 0)),
])
def test_first_difference_counts_as_a_near_tie_only_below_the_bound(dtype: str, margin: float, expected) -> None:
    """What differs first where the two best tokens are close is a near-tie, elsewhere a fault."""
    answers = {"a": [1, 2, 3], "b": [4, 5, 6]}
    prompts = [record("a", [1, 2, 3]), record("b", [4, 9, 9])]
    assert identity(prompts, answers, {"b": [5.0, margin, 5.0]}, dtype) == expected


@pytest.mark.parametrize(("tokens", "margins"), [
    ([4, 5], [5.0, 5.0, 5.0]), ([4, 5, 6, 7], [0.0, 0.0, 0.0]), ([9, 5, 6], [5.0, 0.0, 0.0]), ([9, 5, 6], []),
], ids=["shorter", "longer", "first decides", "margin unknown"])
def test_other_differences_are_faults(tokens: list[int], margins: list[float]) -> None:
    """A missing or an extra token, and a difference without a recorded margin, are no near-tie."""
    assert identity([record("b", tokens)], {"b": [4, 5, 6]}, {"b": margins}, "bfloat16") == (0, 0)


def test_every_repeat_counts_for_identity() -> None:
    """One repeat that differs spoils its prompt, as a fault or as a near-tie."""
    prompts = [record("a", [1, 2]), record("a", [1, 3], repeat=1), record("b", [1, 2]), record("b", [1, 2], repeat=1)]
    answers = {"a": [1, 2], "b": [1, 2]}
    assert identity(prompts, answers, {"a": [9.0, 9.0]}, "bfloat16") == (1, 0)
    assert identity(prompts, answers, {"a": [9.0, 0.1]}, "bfloat16") == (1, 1)


def test_halves_share_no_prompt_and_have_one_of_each_category() -> None:
    """The halves differ; calibration begins with one prompt of each category; one prompt is too few."""
    calibration, evaluation = halves(built_in())
    assert len(calibration) == len(evaluation) == 12
    assert calibration[:6] == first_of_each_category(calibration)
    assert len({p.category for p in calibration[:6]}) == len(first_of_each_category(evaluation)) == 6
    assert not {p.name for p in calibration} & {p.name for p in evaluation}
    with pytest.raises(InputError, match="prompts must be at least 2"):
        halves([Prompt("a", "b")])


def test_rows_have_their_baseline_first() -> None:
    """A given pipeline is measured beside its target alone; on one core only what fits is run."""
    pair = chain("pipelined", [stage("d"), stage("t", threads=2)])
    assert [row.pipeline.strategy for row in custom_rows(pair)] == ["autoregressive", "pipelined"]
    both = custom_rows(chain("pipelined", [stage("d"), stage("t")]))
    assert [place(row.pipeline).num_cores for row in both] == [1, 2]
    assert custom_rows(pair)[0].pipeline.target.threads == 1
    alone = chain("autoregressive", [stage("t")])
    assert len(custom_rows(alone)) == 1
    assert all(place(row.pipeline).num_cores == 1 for row in real_rows("m", "float32", 1))
    assert {place(row.pipeline).num_cores for row in real_rows("m", "bfloat16", 2)} == {1, 2}
    assert {place(row.pipeline).num_cores for row in family_rows("float32", 2)} == {1, 2}
    assert len({row.name for row in real_rows("m", "float32", 2)}) == 7


def test_speedups_compare_with_the_right_rows() -> None:
    """``speedup``: against one core alone; on the same devices: against the best other use of as many."""
    def row(strategy: str, cores: int, speed: float, origin: str = "measured") -> dict:
        return {"strategy": strategy, "cores": cores, "measured_tokens_per_s": speed, "origin": origin,
                "error_percent": {"closed_form": None, "renewal": None, "simulation": -2.0}, "noise_percent": 1.0,
                "timing_error_percent": 3.0, "predicted_interval": [0.0, 100.0]}

    rows = [row("autoregressive", 1, 10), row("autoregressive", 2, 16), row("speculative", 2, 20),
            row("pipelined", 2, 30), row("pipelined", 4, 50, "emulated")]
    figures = summarise(rows)
    assert [r["speedup"] for r in rows] == [1.0, 1.6, 2.0, 3.0, None]
    assert [r["speedup_same_devices"] for r in rows] == [1.0, 0.8, 1.0, 1.5, None]
    assert figures["mape_percent"]["measured"] == {"closed_form": None, "renewal": None, "simulation": 2.0}
    assert figures["timing_mape_percent"] == {"measured": 3.0, "emulated": 3.0}


def test_whole_run_of_the_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The contract's document on stdout, the same in report.json, predictions and traces on disk; every
    text, three stages' too, is the target's own; an unreachable tolerance gives status 1, and a second
    call measures nothing again."""
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("def first(items):\nclass Point:\n", encoding="utf-8")
    args = ["validate", "--family", "tiny", "--prompts", str(prompts), "--out", str(out), "--json", "--tolerance", "0"]
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 1
    text = capsys.readouterr().out
    data = json.loads(text)
    assert data == json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert set(data) >= CONTRACT
    assert [row["strategy"] for row in data["rows"]][:2] == ["autoregressive", "speculative"]
    for row in data["rows"]:
        assert set(row) >= CONTRACT_ROW
        assert row["identical_prompts"] == row["num_prompts"] == 1
        assert row["num_tokens"] == data["max_new_tokens"]
        assert np.isfinite(row["timing_error_percent"])
        if row["strategy"] == "speculative":
            assert row["replayed_mean_acceptance_length"] == row["measured_mean_acceptance_length"] > 1
    assert not set(data["calibration_prompts"]) & set(data["evaluation_prompts"])
    trace, torn = load_trace(out / "traces" / "speculative-m.jsonl")
    assert torn is None
    assert len(trace.prompts) == data["repeats"]
    # Beside every run, each stage that computes was probed before and after.
    assert {(p.prompt, p.stage) for p in trace.probes} == {(n, i) for n in range(data["repeats"]) for i in range(2)}
    assert load_trace(next((out / "traces").glob("calibration-real-*.jsonl")))[1] is None
    assert noise_percent(trace) == data["rows"][1]["noise_percent"]
    measured = (out / "traces" / "speculative-m.jsonl").read_bytes()
    with pytest.raises(SystemExit):
        main(args)
    assert (out / "traces" / "speculative-m.jsonl").read_bytes() == measured
    assert json.loads(capsys.readouterr().out)["rows"] == data["rows"]


def test_an_auto_lookahead_is_chosen_before_the_run(tiny, tmp_path: Path, capsys) -> None:
    """``lookahead: auto`` becomes one number, in the report and in the trace's header, and a resumed run
    keeps it."""
    args = [*write_tiny_run(tiny, tmp_path), "--json"]
    path = tmp_path / "pipeline.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("lookahead: 3", "lookahead: auto"), encoding="utf-8")
    found = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(args)
        found.append(json.loads(capsys.readouterr().out)["rows"][1]["lookahead"])
    trace, _ = load_trace(tmp_path / "out" / "traces" / "pipeline.jsonl")
    assert found[0] == found[1] == [link["lookahead"] for link in trace.pipeline["links"]]
    assert 1 <= found[0][0] <= 12


def test_a_sampled_run_is_predicted_and_replayed(tiny, tmp_path: Path, capsys) -> None:
    """Every repeat of a prompt draws the text of plain decoding; the profile holds probabilities and how its texts
    were drawn; the replay takes the very steps of the run; another seed is another run."""
    args = [*write_tiny_run(tiny, tmp_path, prompts=4), "--json", "--temperature", "0.9", "--top-p", "0.95"]
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 0
    data, out = json.loads(capsys.readouterr().out), tmp_path / "out"
    assert (data["drawn"], data["sampling"]["top_p"]) == ("temperature 0.9, top-p 0.95", 0.95)
    assert all(row["identical_prompts"] == row["num_prompts"] == 2 for row in data["rows"])
    pair = data["rows"][1]
    assert pair["replayed_mean_acceptance_length"] == pair["measured_mean_acceptance_length"] > 1
    profile = load_profile(out / "profile-real.json")
    assert profile.sampling == Sampling(temperature=0.9, top_p=0.95)
    chances = np.concatenate([entry.same_draw for entry in profile.agreement], axis=1)
    overlaps = np.concatenate([entry.overlap for entry in profile.agreement], axis=1)
    assert len(profile.agreement) == 2
    assert (chances[-1] == 1).all()
    assert 0.3 < chances[0].mean() < 1
    assert chances[0].mean() == pytest.approx(overlaps[0].mean(), abs=0.15)
    assert "temperature 0.9, top-p 0.95" in (out / "report.html").read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main([*args, "--seed", "3"])
    assert end.value.code == 2
    assert "must be empty or hold the same run" in capsys.readouterr().err


def test_layer_skipping_rows_are_left_out_of_a_sampled_run() -> None:
    """Of the built-in rows those are dropped; a given pipeline with such a drafter is refused by name."""
    rows = [Row("a", chain("autoregressive", [stage("t")])),
            Row("b", chain("speculative", [stage("d", "t", drafter="clasp", num_skipped_layers=1), stage("t", "t")]))]
    sampling = Sampling(temperature=0.7)
    assert recordable(rows, None, given=False) == rows
    assert [row.name for row in recordable(rows, sampling, given=False)] == ["a"]
    with pytest.raises(InputError, match=r"temperature must be absent where a drafter skips layers \(stages.0, d\)"):
        recordable(rows, sampling, given=True)


@pytest.mark.parametrize("patterns", [("110",), ("1", "10")])
def test_replay_has_the_run_s_own_counts(patterns: tuple[str, ...]) -> None:
    """A chain that is replayed from its agreement takes the same steps as the processes took."""
    answer = list(range(100, 140))
    stages, agreement = table(rows_of(answer, *patterns))
    pipeline = chain("speculative", stages, window=4)
    with Fleet(stages, scripts={s.name: Script(Constant(0.001)) for s in stages}) as fleet:
        baseline = chain("autoregressive", stages[-1:])
        prompts = [Prompt("table", "", tokens=(1, 2, 3))]
        profile, _ = calibrate(fleet, [baseline, pipeline], prompts, max_new_tokens=8, agreements=[agreement])
        measured = new_trace(fleet.configure(pipeline), emulated=True)
        measured.add(*fleet.run_prompt(pipeline, prompts[0], max_new_tokens=40, agreement=agreement))
    replayed = simulate(pipeline, profile, replay_set(pipeline, [agreement], measured.prompts))
    assert replayed.prompts[0].tokens == measured.prompts[0].tokens == answer
    for index in range(len(stages)):
        taken = [(s.kind, s.position, s.drafts, s.accepted) for s in measured.steps if s.stage == index]
        assert taken == [(s.kind, s.position, s.drafts, s.accepted) for s in replayed.steps if s.stage == index]


@pytest.mark.parametrize("strategy", ["speculative", "pipelined"])
@pytest.mark.parametrize("limit", [2, 8])
def test_a_lookup_is_simulated_as_it_runs(strategy: str, limit: int) -> None:
    """With the prompt's tokens recorded, a simulated lookup proposes what the real one proposes, wrong
    tokens and their number included."""
    prompt, answer = (1, 2, 3, 4, 5, 6, 7, 8, 9), [1, 2, 3, 4, 9, 9, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 3, 4]
    stages = [StageSpec(name="lookup", model="m", drafter="prompt-lookup"), StageSpec(name="s", model="m")]
    link = LinkSpec(lookahead=2 if strategy == "speculative" else 0, max_window=limit, buffer_tokens=limit)
    spec = PipelineSpec(strategy=strategy, stages=stages, links=(link,))
    agreement = Agreement("p", len(prompt), (stages[0].choice_key, stages[1].choice_key),
                          np.array([[-1] * len(answer), answer]), prompt_tokens=prompt)
    with Fleet(stages, scripts={"s": Script(Constant(0.02))}) as fleet:
        _, steps = fleet.run_prompt(spec, Prompt("p", "", tokens=prompt), max_new_tokens=len(answer),
                                    agreement=agreement)
    profile = Profile({"lookup": StageLatency(Constant(1e-5)), "s": StageLatency(Constant(0.02))})
    replayed = simulate(spec, profile, [agreement])
    for index in (0, 1):
        taken = [(s.kind, s.position, s.width, s.drafts, s.accepted) for s in steps if s.stage == index]
        assert taken == [(s.kind, s.position, s.width, s.drafts, s.accepted) for s in replayed.steps
                         if s.stage == index]
    assert any(s.accepted for s in steps)
    assert any(s.accepted < s.drafts for s in steps)


@pytest.mark.bench
def test_emulated_rows_are_replayed_within_three_percent() -> None:
    """Total time of every emulated row within 3% of its replay with the calibrated profile; with one
    step time 20% wrong the error is above 2%."""
    after, before = emulated_agreements(3, 40, first=0), emulated_agreements(2, 40, first=1000)
    rows = emulated_rows()
    with Fleet(emulated_stages(), scripts=emulated_scripts()) as fleet:
        prompts = [Prompt(a.prompt, "", tokens=tuple(range(1, 9))) for a in before]
        profile, _ = calibrate(fleet, [r.pipeline for r in rows], prompts, max_new_tokens=40, agreements=before)
        traces = {row.name: measure(fleet, row, after) for row in rows}
    for row in rows:
        measured = sum(p.total_s for p in traces[row.name].prompts)
        error = total_s(row, profile, after, traces[row.name]) / measured - 1
        print(f"{row.name}: {100 * error:+.2f}%")
        assert abs(error) < 0.03
        target = row.pipeline.target.time_key
        wrong = {**profile.latency, target: type(profile.latency[target])(Constant(0.120 * 1.2))}
        changed = type(profile)(**{**profile.__dict__, "latency": wrong})
        assert abs(total_s(row, changed, after, traces[row.name]) / measured - 1) > 0.02


def measure(fleet: Fleet, row: Row, agreements) -> object:
    trace = new_trace(fleet.configure(row.pipeline), emulated=True)
    for number, agreement in enumerate(agreements):
        prompt = Prompt(agreement.prompt, "", tokens=tuple(range(1, 9)))
        trace.add(*fleet.run_prompt(row.pipeline, prompt, max_new_tokens=40, number=number, agreement=agreement))
    assert metrics.tokens_per_s(trace.prompts)
    return trace


def total_s(row: Row, profile, agreements, trace) -> float:
    replayed = simulate(row.pipeline, profile, replay_set(row.pipeline, agreements, trace.prompts))
    return sum(p.total_s for p in replayed.prompts)
