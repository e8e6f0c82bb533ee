"""Sweeps: rows that are right, the same whoever computes them, and none lost or doubled by a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sweeps import CHAIN, PAIR, PROFILE, lines, written

from pipespec_model.__main__ import main
from pipespec_model.acceptance import IID
from pipespec_model.agreement import synthetic
from pipespec_model.errors import InputError
from pipespec_model.predict import predict
from pipespec_model.spec import PipelineSpec
from simulate import sweep_command
from simulate.batch import Runs, simulate_all
from simulate.figures import figures
from simulate.points import Design
from simulate.row import Effort, is_documented
from simulate.run import replication_prompts, simulate
from simulate.store import Store, load_table
from simulate.sweep import Sweep, Workers, run_sweep, sweep
from simulate.vary import axes_of

ROOT = Path(__file__).parents[1]
QUICK = Effort(num_tokens=40, replications=2)
VARY = {"links.0.acceptance_rate": [0.2, 0.9], "links.0.lookahead": [0, 2]}


def small() -> Sweep:
    return Sweep(PAIR, PROFILE, Design(axes_of(VARY)), QUICK)


def test_a_row_by_hand():
    """A drafter that is always right at a tenth of the target's time, one draft a window: prefill 0.1 s, then
    windows of up to 16; with one that is never right the target steps alone, one token each 0.1 s."""
    found = sweep(PAIR, PROFILE, {"links.0.acceptance_rate": [0.0], "links.0.lookahead": [0]}, effort=QUICK)
    (row,) = found.to_dict("records")
    # Its first draft is found wrong by the target's own token, so it is never verified.
    assert row["mean_acceptance_length"] == 1.0
    assert row["tokens_per_s"] == pytest.approx(10.0)
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx((1.0, 1.0, 1.0))
    assert row["stage_1_busy"] == pytest.approx(1.0)
    assert row["stage_0_wasted"] == 1.0
    assert row["num_tokens"] == 40
    alone = sweep(PAIR, PROFILE, {"strategy": ["autoregressive"]}, effort=QUICK)
    assert alone["tokens_per_s"].tolist() == pytest.approx([10.0])
    assert alone["speedup"].tolist() == [1.0]


def test_every_column_is_documented_and_varied_fields_come_first():
    """A reader finds each column in COLUMNS or among what was varied."""
    found = sweep(CHAIN, PROFILE, {"depth": [1, 2, 3]}, effort=QUICK)
    assert [name for name in found if not is_documented(name)] == ["depth"]
    assert list(found)[:2] == ["point", "depth"]
    assert found["pipeline"].tolist() == ["{large}", "{middle,large}", "{small,middle,large}"]
    assert found["num_devices"].tolist() == [1, 2, 3]


def test_the_formula_stands_beside_the_simulation():
    """The column is predict's answer; rows outside its range have none, and say by what the others are."""
    found = sweep(CHAIN, PROFILE, {"strategy": ["pipelined", "speculative"], "depth": [2, 3]}, effort=QUICK)
    said = predict(CHAIN, PROFILE, context=QUICK.num_tokens // 2)
    assert found["predicted_by"].fillna("").tolist() == ["renewal", "decomposition", "synchronous rounds", ""]
    assert found["predicted_tokens_per_s"][1] == said.tokens_per_s
    assert np.isnan(found["predicted_tokens_per_s"][3])
    formula = sweep(CHAIN, PROFILE, {"depth": [1, 2]}, effort=Effort(engine="analytic"))
    assert formula["speedup"][0] == 1.0
    assert formula["tokens_per_s"].tolist() == formula["predicted_tokens_per_s"].tolist()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("spec", [PAIR, CHAIN, PAIR.model_copy(update={"strategy": "speculative"})],
                         ids=["pair", "chain", "synchronous"])
def test_a_row_is_what_the_traces_say(spec: PipelineSpec, recorded: bool):
    """Every figure of a row is the mean over replications of the figure that metrics.py computes from a trace, the
    speed-up that over the target's own run of the same texts."""
    names, models = [s.choice_key for s in CHAIN.stages], [IID(0.6), IID(0.8)]
    texts = [synthetic(names, models, num_tokens=30, seed=3, prompt=i) for i in range(3)]
    profile = replace(PROFILE, agreement=tuple(texts)) if recorded else PROFILE
    (row,) = simulate_all([(spec, profile)], Runs(num_prompts=2, num_tokens=40, seed=5), 3)
    traces, plain = [], []
    for seed in (5, 6, 7):
        prompts = replication_prompts(spec, profile, num_prompts=2, num_tokens=40, seed=seed)
        traces.append(simulate(spec, profile, prompts, seed=seed))
        alone = [text.select([spec.target.choice_key]) for text in prompts]
        plain.append(simulate(PipelineSpec.alone(spec.target), profile, alone, seed=seed))
    said = figures(spec, traces, plain)
    for name in ("tokens_per_s", "speedup", "mean_acceptance_length", "ttft_s"):
        assert row[name] == pytest.approx(said[name]["value"]), name
    for name in ("tokens_per_s", "speedup"):
        assert (row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx(tuple(said[name]["interval"]))
    for i, stage in enumerate(said["stages"]):
        for name in ("busy", "waiting", "wasted"):
            assert row[f"stage_{i}_{name}"] == pytest.approx(stage[name]["value"]), (i, name)
    assert row["num_tokens"] == said["num_tokens"]


def test_rows_meet_the_same_luck():
    """Common random numbers: with all else equal a better drafter is never slower, text by text, at lookahead 0;
    with texts of their own 40 tokens would often tell otherwise."""
    rates = np.linspace(0.3, 0.9, 13)
    found = sweep(PAIR, PROFILE, {"links.0.acceptance_rate": rates.tolist()},
                  effort=Effort(num_tokens=40, replications=1, predicted=False))
    assert (np.diff(found["mean_acceptance_length"]) >= 0).all()


def test_replications_go_on_until_the_interval_is_narrow():
    """The asked half-width is met, with more runs than the least; a limit that is reached ends it."""
    vary = {"links.0.acceptance_rate": [0.7]}
    (row,) = sweep(PAIR, PROFILE, vary, effort=Effort(num_tokens=60, replications=2, half_width=0.03,
                                                      predicted=False)).to_dict("records")
    assert (row["tokens_per_s_high"] - row["tokens_per_s_low"]) / 2 / row["tokens_per_s"] <= 0.03
    assert row["num_replications"] > 2
    (limited,) = sweep(PAIR, PROFILE, vary, effort=Effort(num_tokens=60, replications=2, half_width=1e-6,
                                                          max_replications=4, predicted=False)).to_dict("records")
    assert limited["num_replications"] == 4


def test_rows_are_the_same_for_any_number_of_workers_and_any_order(tmp_path):
    """One worker, two processes and points asked for backwards give one table, cell by cell."""
    made = small()
    one = run_sweep(made, out=tmp_path / "one", workers=Workers(1))
    two = run_sweep(made, out=tmp_path / "two", workers=Workers(2))
    pd.testing.assert_frame_equal(one, two)
    backwards = pd.DataFrame(made.rows([3, 2, 1, 0])).sort_values("point", ignore_index=True)
    pd.testing.assert_frame_equal(one, backwards[list(one)])


def test_parquet_and_csv_hold_the_table(tmp_path):
    """Both are read back as what was returned, from the folder or by file."""
    found = run_sweep(small(), out=tmp_path, workers=Workers(1))
    pd.testing.assert_frame_equal(load_table(tmp_path), found)
    pd.testing.assert_frame_equal(load_table(tmp_path / "sweep.csv"), found)
    with pytest.raises(InputError, match=r"absent must be a sweep's table"):
        load_table(tmp_path / "absent")


def test_a_combination_that_is_no_pipeline_keeps_its_row():
    """Lookahead 8 fits a buffer of 8, not of 4: that row says why and has no figures; if no row is a pipeline
    the sweep is refused."""
    vary = {"links.0.buffer_tokens": [4, 8], "links.0.lookahead": [2, 8]}
    found = sweep(PAIR, PROFILE, vary, effort=QUICK)
    assert found["problem"].notna().tolist() == [False, True, False, False]
    assert "lookahead must be <= min" in found["problem"][1]
    assert found["tokens_per_s"].isna().tolist() == [False, True, False, False]
    with pytest.raises(InputError, match="must have a point that is a pipeline"):
        sweep(PAIR, PROFILE, {"links.0.lookahead": [50]}, effort=QUICK)


def test_a_last_line_cut_off_at_any_byte_is_done_again(tmp_path):
    """Whatever remains of the last row, the resumed sweep has every row once, and equal to the whole one's."""
    whole = run_sweep(small(), out=tmp_path, workers=Workers(1))
    text = (tmp_path / "rows.jsonl").read_bytes()
    last = text.rindex(b"\n", 0, len(text) - 1) + 1
    made = small()
    for end in range(last, len(text), 97):
        (tmp_path / "rows.jsonl").write_bytes(text[:end])
        with Store(tmp_path, made.identity()) as store:
            assert [row["point"] for row in store.rows] == [0, 1, 2]
    pd.testing.assert_frame_equal(run_sweep(small(), out=tmp_path, workers=Workers(1)), whole)
    assert [row["point"] for row in lines(tmp_path)] == [0, 1, 2, 3]


def test_a_folder_holds_one_sweep_and_one_writer(tmp_path):
    """Other options, or a second process at the same time, are refused before a row is written."""
    run_sweep(small(), out=tmp_path, workers=Workers(1))
    other = Sweep(PAIR, PROFILE, Design(axes_of(VARY)), Effort(num_tokens=41, replications=2))
    with pytest.raises(InputError, match="must be empty or hold the same sweep"):
        run_sweep(other, out=tmp_path, workers=Workers(1))
    with Store(tmp_path, small().identity()), pytest.raises(InputError, match="must not be in use by another sweep"):
        Store(tmp_path, small().identity())
    assert len(lines(tmp_path)) == 4


def test_kill_9_in_mid_sweep_then_resume(tmp_path):
    """A killed sweep's rows stay, the resumed one adds the others; no row is lost or doubled, and the table is
    that of a sweep that was left alone."""
    options = ["--vary", "links.0.acceptance_rate=0.1..0.9:17", "--vary", "links.0.lookahead=0..5", "--num-tokens",
               "8000", "--replications", "2", "--no-predicted", "--jobs", "1"]
    command = ["sweep", *written(tmp_path, CHAIN), *options]
    child = subprocess.Popen([sys.executable, "-m", "simulate", *command, "--out", str(tmp_path / "killed")], cwd=ROOT,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    rows = tmp_path / "killed" / "rows.jsonl"
    deadline = time.monotonic() + 60
    while not rows.exists() or rows.stat().st_size < 2000:
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    before = rows.read_bytes()
    finished = before.count(b"\n")
    assert 0 < finished < 102, "the kill came too late to show anything"
    for folder in ("killed", "alone"):
        with pytest.raises(SystemExit) as end:
            main(["simulate", *command, "--out", str(tmp_path / folder)])
        assert end.value.code == 0
    assert rows.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert sorted(row["point"] for row in lines(tmp_path / "killed")) == list(range(102))
    pd.testing.assert_frame_equal(load_table(tmp_path / "killed"), load_table(tmp_path / "alone"))


def test_a_sweep_larger_than_memory_is_estimated_first(tmp_path, monkeypatch, capsys):
    """10¹⁰ points end with status 2 at once where nobody can answer, without a folder; --yes goes on; on a
    terminal the question's no ends it."""
    args = ["simulate", "sweep", *written(tmp_path), "--out", str(tmp_path / "out"), "--num-tokens", "10"]
    huge = [arg for axis in ("small.latency", "large.latency") for arg in ("--vary", f"stages.{axis}=0.1..1:100000")]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(SystemExit) as end:
        main([*args, *huge])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "10,000,000,000 points need about 40000.0 GB of memory" in said
    assert "insist with --yes" in said
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sweep_command, "free_bytes", lambda: 1)
    two = ["--vary", "links.0.lookahead=0,1", "--jobs", "1"]
    with pytest.raises(SystemExit) as end:
        main([*args, *two, "--yes", "--json"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["num_rows"] == 2
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: (_ for _ in ()).throw(__import__("typer").Abort()))
    with pytest.raises(SystemExit) as end:
        main([*args, *two])
    assert end.value.code == 130


@pytest.mark.parametrize(("options", "said"), [
    (["--vary", "links.0.lookahed=0..3"], "did you mean links.0.lookahead?"),
    (["--vary", "links.0.lookahead=3..0"], "must not be an empty range"),
    (["--vary", "links.0.lookahead=0..3", "--design", "cube"], "--design must be one of grid, zip, lhs"),
    (["--vary", "links.0.lookahead=0..3", "--engine", "fast"], "--engine must be events or analytic"),
    (["--vary", "links.0.lookahead=0..3", "--half-width", "2"], "--half-width must be in (0, 1)"),
    (["--vary", "links.0.lookahead=0..3", "--num-tokens", "0"], "--num-tokens must be >= 1"),
    (["--vary", "links.0.lookahead=0..3", "--jobs", "0"], "--jobs must be >= 1"),
    (["--vary", "links.0.acceptance_rate=0.5,1.5"], "acceptance_rate must be in [0, 1], got 1.5"),
])
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, options: list[str], said: str):
    """What was wrong is named, no folder is made, no traceback shown."""
    with pytest.raises(SystemExit) as end:
        main(["simulate", "sweep", *written(tmp_path), "--out", str(tmp_path / "out"), *options])
    err = capsys.readouterr().err
    assert (end.value.code, err.count("\n")) == (2, 1), err
    assert said in err
    assert not (tmp_path / "out").exists()


def test_the_table_says_which_point_is_fastest(tmp_path, capsys):
    """The summary names the best row; progress goes to stderr."""
    with pytest.raises(SystemExit):
        main(["simulate", "sweep", *written(tmp_path), "--vary", "links.0.acceptance_rate=0.1,0.9", "--num-tokens",
              "40", "--out", str(tmp_path / "out"), "--jobs", "1"])
    out, err = capsys.readouterr()
    assert out.startswith("2 points\nfastest: point 1, ")
    assert out.endswith("sweep.parquet\n")
    assert "points" in err
