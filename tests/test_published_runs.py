"""The published measurements themselves, where their folder lies beside this checkout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from validate.published.files import read_folder
from validate.published.predict import Study

FOLDER = Path(__file__).parents[2] / "shared" / "pipespec-runs"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the published runs are not at ../shared/pipespec-runs")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    started = time.process_time()
    study = Study.of(*read_folder(FOLDER))
    study.predict(lambda what, done: None)
    return {**study.to_dict(), "cpu_s": time.process_time() - started}


def test_every_file_is_read(data: dict[str, Any]):
    """All are whole; the time per token is the sum of times over the sum of tokens."""
    assert data["refused"] == {}
    found = {row["file"]: row["measured_ms_per_token"] for row in data["rows"]}
    assert found["greedy_Meta-Llama-3.1-70B-Instruct.json"] == pytest.approx(123.7, abs=0.05)
    pipelined = "async-chain_Llama-3.1-8B-Instruct-Meta-Llama-3.1-70B-Instruct_0.json"
    assert found[pipelined] == pytest.approx(54.5, abs=0.05)


def test_pipelined_runs_are_predicted(data: dict[str, Any]):
    """Mean absolute error of the time per token at most 2.5%, worst 6%; with the file's own drafter step 1.5%."""
    found = data["by_strategy"]["pipelined"]
    assert found["mape_percent"] <= 2.5
    assert found["worst_percent"] <= 6.0
    assert data["own_drafter"]["mape_percent"] <= 1.5


def test_synchronous_runs_are_predicted_without_their_own_file(data: dict[str, Any]):
    """Mean absolute error at most 2%."""
    assert data["by_strategy"]["speculative"]["mape_percent"] <= 2.0


def test_rounds_and_drafts_are_exact_but_for_contradictions(data: dict[str, Any]):
    """Verifications and drafts of a synchronous file are predicted exactly, prompt by prompt, except where files
    of the pair contradict each other.  A contradiction may show only between this file and the others."""
    bits = next(item for item in data["bits"] if "float32" in item["pair"][1])
    contradicted = {int(index) for index in bits["contradictory"]} | {int(index) for index in bits["other_output"]}
    checked = [row for row in data["rows"] if row.get("prompts_that_differ") is not None]
    assert len(checked) == 7
    for row in checked:
        assert {item["prompt"] for item in row["prompts_that_differ"]} <= contradicted
    assert bits["unknown"] == 0
    assert bits["positions"] > 3000


def test_verifications_of_pipelined_runs(data: dict[str, Any]):
    """Within 5%; where positions are unknown, both extremes are told."""
    for row in data["rows"]:
        if row["strategy"] == "pipelined":
            assert row["predicted_verifications"] == pytest.approx(row["measured_verifications"], rel=0.05)
            assert (row["extremes"] is not None) == ("70B" in row["file"])


def test_lookaheads_are_read_off_the_windows(data: dict[str, Any]):
    """5 for the pipelined 70B file, which is labelled 0; the label for every {1B,8B} file."""
    for row in data["rows"]:
        if row["strategy"] != "autoregressive":
            wrong = row["strategy"] == "pipelined" and "70B" in row["file"]
            assert row["inferred_lookahead"] == (5 if wrong else row["labelled_lookahead"])
            assert any("labelled" in text for text in row["warnings"]) == wrong


def test_weaker_models_are_weaker(data: dict[str, Any]):
    """On pipelined runs the replay beats Markov, i.i.d. and the closed form with the same step times."""
    found = data["mape_percent_by_model"]["pipelined"]
    assert found["replay"] < min(found[name] for name in ("markov", "iid", "renewal", "closed_form"))


def test_the_renewal_formula_on_published_runs(data: dict[str, Any]):
    """Calibrated on synchronous files: within 4% on average over pipelined pairs; none for others."""
    errors = {row["file"]: row["error_percent_by_model"]["renewal"] for row in data["rows"]
              if row["strategy"] == "pipelined"}
    assert len(errors) == 7
    assert np.mean(np.abs(list(errors.values()))) < 4
    assert data["mape_percent_by_model"]["speculative"]["renewal"] is None


@pytest.mark.bench
def test_the_whole_study_takes_a_minute_of_one_core(data: dict[str, Any]):
    """At most 60 seconds of processor time."""
    assert data["cpu_s"] <= 60
