"""``pipespec simulate traffic`` and what it is made of: traces, windows, curves, the picture, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from sweeps import CHAIN, PAIR, PROFILE, written

from pipespec_model.__main__ import main
from pipespec_model.acceptance import IID
from pipespec_model.agreement import synthetic
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec, StageSpec
from simulate.arrivals import Request, at_rate, load_arrivals, poisson_s
from simulate.load import Effort, Study, Way, curves, measure, num_devices
from simulate.traffic import Policy, Traffic
from simulate.traffic_command import verdict
from simulate.traffic_picture import curve

SMALL = Effort(num_prompts=12, num_tokens=12, replications=2)
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n2.0,7,3\n1.0,5,2\n4.0,9,4\n"


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["simulate", "traffic", *args])
    return int(end.value.code or 0)


# -- arrivals -----------------------------------------------------------------------------------------


def test_poisson_arrivals_have_exponential_gaps():
    """Mean and standard deviation of 4,000 gaps at 2 a second are half a second, within four standard errors
    (1/√n of the mean, √2/√n of the deviation); false alarms one in 8,000."""
    gaps = np.diff([0.0, *poisson_s(2.0, 4000, seed=1)])
    assert abs(gaps.mean() - 0.5) < 4 * 0.5 / np.sqrt(4000)
    assert abs(gaps.std() - 0.5) < 4 * 0.5 * np.sqrt(2 / 4000)


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path):
    """Both sets of names give the same prompts, the first at 0 s; other columns are left alone."""
    ours, theirs = tmp_path / "a.csv", tmp_path / "b.csv"
    ours.write_text(TRACE, encoding="utf-8")
    theirs.write_text("Timestamp,Model,Request tokens,Response tokens,Log Type\n"
                      "2,x,7,3,API\n1,x,5,2,API\n4,y,9,4,API\n", encoding="utf-8")
    assert load_arrivals(ours) == load_arrivals(theirs) == [
        Request(0.0, 5, 2), Request(1.0, 7, 3), Request(3.0, 9, 4)]


def test_a_rate_stretches_a_trace():
    """Two gaps in three seconds are 2/3 a second; at 2 a second they take one."""
    trace = [Request(0.0, 5, 2), Request(1.0, 7, 3), Request(3.0, 9, 4)]
    assert [item.arrived_s for item in at_rate(trace, 2.0)] == pytest.approx([0.0, 1 / 3, 1.0])


@pytest.mark.parametrize(("text", "message"), [
    ("arrived_at,num_decode_tokens\n1,2\n", r"t.csv:1 must name a column num_prefill_tokens \(or Request tokens\)"),
    (TRACE + "5.0,x,3\n", r"t.csv:5: num_prefill_tokens must be a number, got 'x'"),
    (TRACE + "5.0,3,0\n", r"t.csv:5: num_decode_tokens must be a whole number >= 1, got '0'"),
    (TRACE + "nan,3,1\n", r"t.csv:5: arrived_at must be a finite number"),
    (TRACE + "5.0,3\n", r"t.csv:5: num_decode_tokens must be a number, got ''"),
    ("arrived_at,num_prefill_tokens,num_decode_tokens\n", "must hold at least one prompt")])
def test_a_bad_trace_names_line_and_column(tmp_path: Path, text: str, message: str):
    """Missing columns, words, zero tokens, no finite time, short lines, nothing."""
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_arrivals(path)


def test_a_trace_gives_the_lengths():
    """Each prompt has the trace's lengths, which the target answers in full."""
    study = Study(PAIR, PROFILE, effort=SMALL, requests=(Request(0.0, 5, 2), Request(1.0, 7, 3)))
    served = study.traffic(1.0, 0).run(PAIR, PROFILE)
    assert [(item.record.prompt_length, len(item.record.tokens)) for item in served] == [(5, 2), (7, 3)]


# -- figures ------------------------------------------------------------------------------------------


def test_figures_of_a_replication_by_hand():
    """One stage of 100 ms, ten prompts of four tokens a second apart: of the window from the third to the last
    arrival, 40% is busy, four tokens a second come out, and nobody waits."""
    one = PipelineSpec.alone(StageSpec(name="t", model="t"))
    profile = Profile({"t": StageLatency(Constant(0.1))})
    prompt = synthetic([one.target.choice_key], [], num_tokens=4, seed=0)
    found = measure(Traffic([prompt] * 10, [float(i) for i in range(10)]).run(one, profile), Way("t", one, Policy()))
    assert found["busy"] == pytest.approx([0.4])
    assert found["tokens_per_s"] == pytest.approx(4.0)
    assert found["kept_up"] == pytest.approx(1.0)
    assert list(found["ttft_s"].values()) == pytest.approx([0.1] * 3)
    assert list(found["tpot_s"].values()) == pytest.approx([0.1] * 3)
    assert list(found["e2e_s"].values()) == pytest.approx([0.4] * 3)


def test_load_shows_in_the_figures():
    """From an idle pipeline to an overloaded one: nothing is lost at first, then the target is the bottleneck, and
    the copies of the target, as many as devices, carry as many times its tokens."""
    rows = curves(Study(PAIR, PROFILE, effort=Effort(30, 12, 3)), [0.05, 50.0])
    quiet, busy = ([row for row in rows if row["rate"] == rate] for rate in (0.05, 50.0))
    assert [row["overloaded"] for row in quiet] == [False] * 3
    assert [row["overloaded"] for row in busy] == [True] * 3
    assert [row["devices"] for row in busy] == [2, 1, 2]
    for before, after in zip(quiet, busy, strict=True):
        assert before["e2e_s"]["p50"]["value"] < after["e2e_s"]["p50"]["value"]
        assert after["stages"][-1]["busy"]["value"] > 0.9
    alone, copies = busy[1]["tokens_per_s"]["value"], busy[2]["tokens_per_s"]["value"]
    assert copies / alone == pytest.approx(2.0, rel=0.1)


def test_rows_do_not_depend_on_the_workers():
    """Two processes give the rows of one."""
    study = Study(PAIR, PROFILE, effort=SMALL)
    assert curves(study, [0.5, 1.0], jobs=2) == curves(study, [0.5, 1.0])


def test_devices_are_those_that_are_named():
    """Numbered ones count once however many stages name them; each stage on ``cpu`` has its own; a lookup none."""
    assert num_devices(CHAIN) == 3
    plain = [StageSpec(name=name, model=name) for name in "ab"]
    assert num_devices(PipelineSpec(stages=tuple(plain), links=PAIR.links)) == 2
    shared = tuple(stage.model_copy(update={"device": "cpu:1"}) for stage in plain)
    assert num_devices(PipelineSpec(stages=shared, links=PAIR.links)) == 1
    lookup = plain[0].model_copy(update={"drafter": "prompt-lookup"})
    assert num_devices(PipelineSpec(stages=(lookup, plain[1]), links=PAIR.links)) == 1


def test_the_verdict_names_the_rates():
    """Sooner at one rate, later at the other, and who does not keep up."""
    def row(way: str, rate: float, median: float, overloaded: bool = False) -> dict:
        return {"way": way, "rate": rate, "e2e_s": {"p50": {"value": median}}, "overloaded": overloaded}

    said = verdict([row("a", 1.0, 2.0), row("b", 1.0, 3.0), row("a", 2.0, 9.0, True), row("b", 2.0, 4.0)])
    assert said == ["a answers sooner than b at 1 prompts/s, not at 2 (median from request to last token).",
                    "a does not keep up at 2 prompts/s: there, waiting grows for as long as the traffic lasts."]


def test_the_curve_is_the_rows():
    """A line a way through its throughputs and percentiles."""
    rows = curves(Study(PAIR, PROFILE, effort=SMALL), [0.2, 1.0])
    plt.switch_backend("Agg")
    figure, axes = plt.subplots()
    curve(axes, rows, "p95")
    drawn = [line for line in axes.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 2]
    for line, way in zip(drawn, dict.fromkeys(row["way"] for row in rows), strict=True):
        mine = [row for row in rows if row["way"] == way]
        assert line.get_xdata() == pytest.approx([row["tokens_per_s"]["value"] for row in mine])
        assert line.get_ydata() == pytest.approx([row["e2e_s"]["p95"]["value"] for row in mine])
    plt.close(figure)


# -- the command ----------------------------------------------------------------------------------------


def test_the_command_writes_table_document_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Rates from a range; JSON alone on stdout; CSV with a row a rate and way; a trace cut short is said so."""
    arrivals = tmp_path / "arrivals.csv"
    arrivals.write_text(TRACE + "".join(f"{5 + i},4,6\n" for i in range(9)), encoding="utf-8")
    out = tmp_path / "out"
    args = [*written(tmp_path), "--rate", "0.2..1:2", "--arrivals", str(arrivals), "--num-prompts", "10",
            "--replications", "2", "--in-flight", "3", "--jobs", "1", "--out", str(out)]
    assert run(*args, "--json") == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert "the first 10 of 12 prompts" in said.err
    assert [row["rate"] for row in document["rows"]] == [0.2] * 3 + [1.0] * 3
    assert json.loads((out / "traffic.json").read_text(encoding="utf-8")) == document
    table = pd.read_csv(out / "traffic.csv")
    assert table["e2e_s_p95"].tolist() == pytest.approx([row["e2e_s"]["p95"]["value"] for row in document["rows"]])
    assert (table["tokens_per_s_low"] <= table["tokens_per_s"]).all()
    assert (out / "throughput-latency.png").stat().st_size > 5000
    assert run(*args) == 0
    shown = capsys.readouterr().out
    assert "median" in shown
    assert document["verdict"][0] in shown


@pytest.mark.parametrize(("args", "message"), [
    ([], "--rate must be given, or --arrivals"),
    (["--rate", "0..4:5"], "--rate must be numbers > 0 of prompts a second"),
    (["--rate", "4..1:5"], "--rate must not be an empty range"),
    (["--rate", "1", "--in-flight", "0"], "--in-flight must be >= 1, got 0"),
    (["--rate", "1", "--discipline", "newest"], "--discipline must be one of oldest, rotation, got 'newest'"),
    (["--rate", "1", "--num-prompts", "1"], "--num-prompts must be >= 5, got 1"),
    (["--arrivals", "absent.csv"], "absent.csv must be a readable CSV file")])
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str):
    """Exit status 2, and what to mend."""
    assert run(*written(tmp_path), *args, "--jobs", "1") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_acceptance_that_is_not_known_is_refused():
    """A trace's lengths need acceptance rates: recorded texts have lengths of their own."""
    bare = Profile(PROFILE.latency, {"middle>large": IID(0.5)})
    with pytest.raises(InputError, match=r"profile.acceptance\[small>large\] must be there"):
        Study(PAIR, bare, requests=(Request(0.0, 1, 2), Request(1.0, 1, 2))).traffic(1.0, 0)
