"""Predictions of published runs, on files that our own simulator wrote: there the truth is known."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_files import (
    LARGE,
    MEDIUM,
    PREFILL_S,
    ROLLBACK_S,
    SMALL,
    TIMES,
    WATTS,
    run_data,
    truth,
    write_folder,
    write_run,
)

from pipespec_model.__main__ import main
from pipespec_model.errors import InputError
from validate.published.bits import UNKNOWN_BIT, PromptBits, Round, merge, rounds
from validate.published.calibration import Calibration
from validate.published.energy import fit_power, gpus
from validate.published.files import PublishedFile, read_folder
from validate.published.lookahead import inferred, overlap
from validate.published.predict import Study
from validate.published.replay import agreements, run

ROOT = Path(__file__).parents[1]
CONTRACT_ROW = {
    "file", "strategy", "models", "labelled_lookahead", "inferred_lookahead", "num_prompts", "measured_ms_per_token",
    "predicted_ms_per_token", "error_percent", "error_percent_own_drafter", "predicted_by_model",
    "measured_verifications", "predicted_verifications", "used_for_calibration", "warnings"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def files(folder: Path) -> list[PublishedFile]:
    return read_folder(folder)[0]


@pytest.fixture(scope="module")
def study(files: list[PublishedFile]) -> Study:
    made = Study.of(files, {})
    made.predict(lambda what, done: None)
    return made


@pytest.fixture(scope="module")
def rows(study: Study) -> dict[str, dict[str, Any]]:
    return {f"{row['strategy']} {len(row['models'])} {row['models'][0]} {row['labelled_lookahead']}": row
            for row in study.rows}


# -- bits -----------------------------------------------------------------------------------------


def test_recovered_bits_are_the_truth(files: list[PublishedFile]):
    """Every bit that the synchronous files of a pair tell is right, and they tell almost all."""
    bits = Calibration.of(files).pair_bits(SMALL, LARGE)
    for index, agreement in enumerate(truth()):
        right = (agreement.tokens[0] == agreement.tokens[-1]).astype(int)
        known = bits[index].bits != UNKNOWN_BIT
        assert (bits[index].bits == right)[known].all()
        assert known.mean() > 0.98
        assert bits[index].contradictory == ()


@pytest.mark.parametrize("lookahead", [2, 3, 5, 9])
def test_one_file_never_tells_a_wrong_bit(tmp_path: Path, lookahead: int):
    """With a single file some positions stay unknown; none is wrong."""
    made = truth((SMALL, LARGE), num_prompts=6, num_tokens=60)
    write_run(tmp_path, "chain", [SMALL, LARGE], lookahead, made)
    for plain_s, wide_s in ((0.0, 0.0), (0.120, 0.430)):
        found = merge(read_folder(tmp_path)[0], plain_s, wide_s)
        for index, agreement in enumerate(made):
            right = (agreement.tokens[0] == agreement.tokens[-1]).astype(int)
            known = found[index].bits != UNKNOWN_BIT
            assert (found[index].bits == right)[known].all()


def one_prompt(files: list[PublishedFile], emitted: list[int], label: int, seconds: float = 0.03) -> PublishedFile:
    file = next(f for f in files if f.strategy == "speculative" and f.label == 6)
    prompt = replace(file.prompts[0], emitted=(tuple(emitted),), step_s=((), (seconds,) * len(emitted)),
                     num_tokens=sum(emitted) + 1)
    return replace(file, label=label, prompts=(prompt,))


def test_the_rules_of_a_round(files: list[PublishedFile]):
    """By hand, γ = 3: three accepted and the bonus; then one token after a bonus position, which says only
    that 4 and 5 are not both right; then one accepted and a refusal."""
    file = one_prompt(files, [4, 1, 2], 4)
    assert list(rounds(file.prompts[0], 3)) == [Round(1, 4, True, 0.03), Round(5, 1, True, 0.03),
                                                Round(6, 2, False, 0.03)]
    assert merge([file], 0.0, 0.0)[0].bits.tolist() == [1, 1, 1, 1, -1, -1, 1, 0]


def test_another_file_settles_an_open_pair(files: list[PublishedFile]):
    """A file with γ = 4 that saw position 4 accepted makes 5 wrong, which neither tells alone; so does a step's
    time where plain steps are short."""
    opened = one_prompt(files, [4, 1, 2], 4)
    other = one_prompt(files, [5, 1, 1], 5)
    assert merge([other], 0.0, 0.0)[0].bits[4:7].tolist() == [1, -1, -1]
    assert merge([opened, other], 0.0, 0.0)[0].bits[4:7].tolist() == [1, 0, 1]
    slow, fast = (one_prompt(files, [4, 1, 2], 4, seconds) for seconds in (0.4, 0.1))
    assert merge([slow], 0.12, 0.43)[0].bits[4:6].tolist() == [1, 0]
    assert merge([fast], 0.12, 0.43)[0].bits[4:6].tolist() == [0, -1]


def test_contradictions_and_other_outputs_are_named(files: list[PublishedFile]):
    """Files that differ on a position mark it; a file whose output has another length is left out by name."""
    one, two = one_prompt(files, [3, 5], 9), one_prompt(files, [8], 9)
    found = merge([one, two, two], 0.0, 0.0)[0]
    assert found.contradictory == (3,)
    assert found.bits[3] == 1
    longer = replace(one_prompt(files, [3, 5, 4], 9), name="longer")
    found = merge([one, one, longer], 0.0, 0.0)[0]
    assert (found.other_output, found.num_tokens, found.clean) == (("longer",), 9, False)


# -- calibration ----------------------------------------------------------------------------------


def test_step_times_come_out_as_they_went_in(files: list[PublishedFile]):
    """Draft and verify times by width, prefill, and no warm-up or hand-over where there was none."""
    calibration = Calibration.of(files)
    for stage in (SMALL, MEDIUM):
        times = calibration.pairs[stage.choice_key, LARGE.choice_key]
        assert times.draft_s == pytest.approx(TIMES[stage.name].one_s)
        assert 0.7 * ROLLBACK_S[stage.name] < times.rollback_s <= ROLLBACK_S[stage.name]
        for width in (1, 2, 7, 40):
            assert times.verify.mean_s(width, 0) == pytest.approx(TIMES[LARGE.name].mean_s(width, 0), rel=2e-3)
        assert times.prefill_s == pytest.approx(PREFILL_S[stage.name] + PREFILL_S[LARGE.name], rel=1e-3)
        assert (times.warmup_s, times.handover_s) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))


def test_a_missing_pair_is_a_clear_error(files: list[PublishedFile]):
    """Without a synchronous file of a pair there are no bits, and the error names the pair."""
    calibration = Calibration.of(file for file in files if file.strategy != "speculative")
    with pytest.raises(InputError, match=r"\{Llama-1B-Instruct,Llama-70B-Instruct\} must have a synchronous file"):
        calibration.pair_bits(SMALL, LARGE)


def test_power_comes_out_as_it_went_in(files: list[PublishedFile]):
    """Idle and busy watts of one GPU and of two are found again from energies."""
    power = fit_power(files)
    for stage in (SMALL, MEDIUM, LARGE):
        found, n = power[stage.choice_key], len(gpus(stage))
        assert found.idle_w == pytest.approx(n * WATTS["idle"], rel=0.02)
        assert found.plain_w == pytest.approx(n * WATTS["busy"], rel=0.02)
        assert found.wide_w == pytest.approx(n * WATTS["busy"], rel=0.02)


# -- predictions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bound"), [
    ("pipelined 2 Llama-1B-Instruct 1", 0.5), ("pipelined 2 Llama-1B-Instruct 6", 0.5),
    ("pipelined 2 Llama-8B-Instruct 0", 2.5), ("pipelined 3 Llama-1B-Instruct 4", 2.5),
])
def test_a_simulated_pipeline_is_predicted(rows: dict[str, dict[str, Any]], name: str, bound: float):
    """Round trip: simulate, write, import, predict.  Half a percent where the files tell every bit; where four
    short prompts leave some unknown, the truth lies between the extremes or near them."""
    row = rows[name]
    assert abs(row["error_percent"]) <= bound
    assert abs(row["predicted_verifications"] - row["measured_verifications"]) <= 0.05 * row["measured_verifications"]
    if row["extremes"]:
        ends = sorted(end["ms_per_token"] for end in row["extremes"].values())
        assert 0.99 * ends[0] <= row["measured_ms_per_token"] <= 1.01 * ends[1]


@pytest.mark.parametrize("label", [3, 6, 10])
def test_a_synchronous_run_is_predicted_without_its_own_file(files: list[PublishedFile],
                                                             rows: dict[str, dict[str, Any]], label: int):
    """Verifications and drafts are exact on every prompt whose bits the other files all tell, and where that is
    every prompt, the time is within half a percent."""
    row = rows[f"speculative 2 Llama-1B-Instruct {label}"]
    bits = Calibration.of(file for file in files if file.name != row["file"]).pair_bits(SMALL, LARGE)
    unsure = {index for index, item in bits.items() if item.num_unknown}
    assert {item["prompt"] for item in row["prompts_that_differ"]} <= unsure
    assert len(unsure) < 3
    assert abs(row["error_percent"]) <= (2.0 if unsure else 0.5)
    assert not row["used_for_calibration"]


def test_no_time_of_a_pipelined_file_enters_its_prediction(files: list[PublishedFile], rows: dict[str, dict[str, Any]]):
    """A pipelined file in which everything took twice as long is predicted to take what it took before; the
    column that uses its drafter's own time does move."""
    name = "pipelined 2 Llama-1B-Instruct 6"
    of_pair = [file for file in files if MEDIUM not in file.stages]
    slow = [replace(file, prompts=tuple(
        replace(p, total_s=2 * p.total_s, step_s=tuple(tuple(2 * s for s in steps) for steps in p.step_s))
        for p in file.prompts)) if file.strategy == "pipelined" else file
        for file in of_pair if file.strategy != "pipelined" or file.label == 6]
    study = Study.of(slow, {})
    study.predict(lambda what, done: None)
    again = study.rows[[row["strategy"] for row in study.rows].index("pipelined")]
    assert again["predicted_ms_per_token"] == rows[name]["predicted_ms_per_token"]
    assert again["measured_ms_per_token"] == pytest.approx(2 * rows[name]["measured_ms_per_token"])
    assert again["error_percent_own_drafter"] > again["error_percent"] + 5


def test_wrong_bits_give_a_wrong_prediction(files: list[PublishedFile]):
    """Negative control: with every tenth bit flipped the round trip misses its half percent by far."""
    calibration = Calibration.of(files)
    file = next(f for f in files if f.strategy == "pipelined" and f.label == 6)
    pair = (SMALL.choice_key, LARGE.choice_key)
    flipped = {}
    for index, item in calibration.bits[pair].items():
        bits = item.bits.copy()
        bits[5::10] = 1 - np.abs(bits[5::10])
        flipped[index] = PromptBits(item.num_tokens, bits)
    calibration.bits[pair] = flipped
    pipeline = file.pipeline(6)
    found = run(pipeline, calibration, agreements(pipeline, calibration, [p.index for p in file.prompts]))
    assert abs(found.ms_per_token / file.ms_per_token - 1) > 0.02


def test_a_wrong_label_is_found_out(rows: dict[str, dict[str, Any]]):
    """A run with L = 5 that says 0 is predicted with 5 and says so; right labels stand, 0 and 1 alike."""
    row = rows["pipelined 2 Llama-8B-Instruct 0"]
    assert row["inferred_lookahead"] == 5
    assert any("labelled lookahead 0" in text for text in row["warnings"])
    for label in (1, 6):
        assert rows[f"pipelined 2 Llama-1B-Instruct {label}"]["inferred_lookahead"] == label
    for label in (3, 6, 10):
        assert rows[f"speculative 2 Llama-1B-Instruct {label}"]["inferred_lookahead"] == label


def test_the_right_lookahead_stands_out(rows: dict[str, dict[str, Any]]):
    """The true candidate explains almost every verification, no other one nearly as many; 0 and 1 are one class."""
    scores = rows["pipelined 2 Llama-1B-Instruct 6"]["lookahead_scores"]
    assert scores[6] > 0.95
    assert max(score for candidate, score in scores.items() if candidate != 6) < 0.8
    assert overlap({0: [3]}, {1: [3]}) == 0.0
    assert [inferred({1: 0.9, 2: 0.3}, label) for label in (0, 1, 2)] == [0, 1, 1]


def test_what_could_be_had(study: Study):
    """With the best lookaheads the overlapped handshake beats what was measured, for every pipeline."""
    assert len(study.what_if) == 4
    for row in study.what_if:
        assert row["best_ms_per_token"] < row["measured_ms_per_token"]
        assert row["best_ms_per_token"] <= row["overlapped_ms_per_token"] * 1.01
        assert (row["num_gpus"], row["alone_num_gpus"]) == (len(row["models"]) + 1, 2)


def test_speed_up_is_taken_on_common_prompts(study: Study, rows: dict[str, dict[str, Any]], files: list[PublishedFile]):
    """A baseline with fewer prompts is compared on those alone."""
    alone = next(f for f in files if f.strategy == "autoregressive" and f.target == LARGE)
    file = next(f for f in files if f.strategy == "pipelined" and f.label == 6)
    few = replace(alone, prompts=alone.prompts[1:3])
    study = Study.of([few if f is alone else f for f in files], {})
    replayed = run(file.pipeline(6), study.calibration, agreements(file.pipeline(6), study.calibration, [0, 1, 2]))
    found = study._speedup(file, replayed)
    assert found is not None
    assert found["num_common_prompts"] == 2
    base, other = (sum(p.total_s for p in prompts[1:3]) for prompts in (alone.prompts, file.prompts))
    assert found["measured"] == pytest.approx(base / other)
    assert found["measured_interval"][0] <= found["measured"] <= found["measured_interval"][1]
    assert rows["pipelined 2 Llama-1B-Instruct 6"]["speedup"]["num_common_prompts"] == 3


def test_energy_is_predicted_from_busy_seconds(rows: dict[str, dict[str, Any]]):
    """Powers that are what the fit assumes give the energy of a pipelined run within 2%."""
    row = rows["pipelined 2 Llama-1B-Instruct 6"]
    assert row["predicted_joules_per_token"] == pytest.approx(row["measured_joules_per_token"], rel=0.02)


def test_a_pair_that_no_synchronous_file_holds_gets_a_warning(tmp_path: Path):
    """Its row is there, null, with the pair's name; the other rows are predicted."""
    made = truth(num_prompts=2, num_tokens=40)
    for stage in (SMALL, LARGE):
        write_run(tmp_path, "greedy", [stage], 0, made)
    write_run(tmp_path, "chain", [SMALL, LARGE], 4, made)
    write_run(tmp_path, "async-chain", [SMALL, LARGE], 3, made)
    write_run(tmp_path, "async-chain", [MEDIUM, LARGE], 3, made)
    study = Study.of(*read_folder(tmp_path))
    study.predict(lambda what, done: None)
    by_models = {(row["strategy"], *row["models"]): row for row in study.rows}
    lonely = by_models["pipelined", MEDIUM.name, LARGE.name]
    assert lonely["predicted_ms_per_token"] is None
    assert not lonely["used_for_calibration"]
    assert "must have a synchronous file" in lonely["warnings"][0]
    only = by_models["speculative", SMALL.name, LARGE.name]
    assert (only["predicted_ms_per_token"], only["used_for_calibration"]) == (None, True)
    assert by_models["pipelined", SMALL.name, LARGE.name]["predicted_ms_per_token"] > 0


def test_the_summary_covers_what_was_not_calibrated_on(study: Study):
    """Mean and worst over predicted rows alone, and the contract's keys in every row."""
    data = study.to_dict()
    judged = [abs(row["error_percent"]) for row in data["rows"] if row["error_percent"] is not None]
    assert data["mape_percent"] == pytest.approx(np.mean(judged))
    assert data["worst_percent"] == max(judged)
    assert all(set(row) >= CONTRACT_ROW for row in data["rows"])
    assert all(row["used_for_calibration"] for row in data["rows"] if row["strategy"] == "autoregressive")
    json.dumps(data, allow_nan=False)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    made = truth((SMALL, LARGE), num_prompts=2, num_tokens=40)
    for stage in (SMALL, LARGE):
        write_run(folder, "greedy", [stage], 0, made)
    for lookahead in (3, 6, 9):
        write_run(folder, "chain", [SMALL, LARGE], lookahead, made)
        write_run(folder, "async-chain", [SMALL, LARGE], lookahead, made)
    return folder


@pytest.mark.parametrize("module", [["pipespec_model", "validate"], ["validate"]], ids=["script", "module"])
def test_the_command_writes_its_report_and_never_loads_torch(small_folder: Path, tmp_path: Path, module: list[str]):
    """JSON alone on stdout; page, table and figures in the folder; torch is not loaded, whichever way it
    is called."""
    call = f"""
import runpy, sys
sys.argv = {[module[0], *module[1:], 'published', str(small_folder), '--json', '--out', str(tmp_path / 'out')]!r}
try:
    runpy.run_module({module[0]!r}, run_name='__main__', alter_sys=True)
except SystemExit as end:
    assert end.code in (0, None), end.code
assert 'torch' not in sys.modules and 'transformers' not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, cwd=ROOT, check=False,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert len(data["rows"]) == 8
    out = tmp_path / "out"
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == data
    with (out / "report.csv").open(encoding="utf-8", newline="") as file:
        assert [line["file"] for line in csv.DictReader(file)] == [row["file"] for row in data["rows"]]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", "").replace("https://matplotlib.org", "")
    assert {path.name for path in out.glob("*.svg")} == {"scatter.svg", "lookahead.svg", "lengths.svg"}


@pytest.mark.parametrize(("tolerance", "code"), [("50", 0), ("0", 1)])
def test_exit_status_tells_a_missed_tolerance(small_folder: Path, tmp_path: Path, tolerance: str, code: int,
                                              capsys: pytest.CaptureFixture[str]):
    """0 within the stated tolerance, 1 above it; a table for people on stdout."""
    with pytest.raises(SystemExit) as end:
        main(["validate", "published", str(small_folder), "--out", str(tmp_path), "--tolerance", tolerance])
    assert end.value.code == code
    assert "pipelined {1B,70B} L=6" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["nowhere"], []])
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, args: list[str], capsys: pytest.CaptureFixture[str]):
    """A folder that is not there, or none at all."""
    with pytest.raises(SystemExit) as end:
        main(["validate", "published", *(str(tmp_path / arg) for arg in args)])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_names_in_the_page_are_escaped(small_folder: Path, tmp_path: Path):
    """A model whose name is markup stays text, and an output folder is made."""
    data = run_data("greedy", [SMALL], 0, truth((SMALL, LARGE), num_prompts=2, num_tokens=40))
    data["metadata"]["model_configs"][0]["path"] = "evil/<script>alert(1)<"
    for path in small_folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "greedy_<b>.json").write_text(json.dumps(data), encoding="utf-8")
    (tmp_path / "cut<i>.json").write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["validate", "published", str(tmp_path), "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "<i>" not in page
    assert "cut&lt;i&gt;.json" in page
