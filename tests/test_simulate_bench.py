"""``pipespec simulate bench``: what its document holds, and, under its own mark, how fast the engines must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simulate import bench
from simulate.__main__ import main


def test_the_document_has_every_engine_on_every_case(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Three cases by two engines and by SimPy without rules; where both engines run the same tokens they count the
    same events; rates are counts over seconds; words go to stderr."""
    monkeypatch.setattr(bench, "NUM_RUNS", 1)
    cases = bench.bench_cases(1e-4)
    monkeypatch.setattr(bench, "bench_cases", lambda: cases)
    with pytest.raises(SystemExit) as end:
        main(["bench", "--json"])
    assert end.value.code == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["cases"]
    names = ["two-stage-iid", "three-stage-recorded", "five-stage-iid"]
    assert [(row["case"], row["engine"]) for row in rows] == [(name, e) for name in names for e in bench.ENGINES]
    for row in rows:
        assert set(row) == {"case", "engine", "tokens", "events", "tokens_per_s", "events_per_s"}
        assert row["tokens"] / row["tokens_per_s"] == pytest.approx(row["events"] / row["events_per_s"])
    bare, two, _, three_bare, three, three_compiled, *_ = rows
    assert (bare["tokens"], three_bare["tokens"]) == (two["tokens"], three["tokens"])
    assert bare["events"] > two["tokens"]
    assert two["tokens"] == 2000
    assert (three["tokens"], three["events"]) == (three_compiled["tokens"], three_compiled["events"])
    assert "compiled engine:" in err


@pytest.mark.bench
def test_speed():
    """At least 50 million simulated tokens a second for two stages with independent drafts, and two million for three
    with recorded choices, on one core that nobody else uses."""
    rows = {(row["case"], row["engine"]): row for row in bench.bench(bench.bench_cases())["cases"]}
    assert rows["two-stage-iid", "compiled"]["tokens_per_s"] >= 50e6
    assert rows["three-stage-recorded", "compiled"]["tokens_per_s"] >= 2e6
