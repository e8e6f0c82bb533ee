"""Pictures of a sweep: what they show is what the table says."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from sweeps import CHAIN, PROFILE

from pipespec_model.__main__ import main
from pipespec_model.errors import InputError
from simulate import pictures
from simulate.row import Effort
from simulate.sweep import sweep


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """Acceptance, lookahead, depth and handshake of a chain of three."""
    vary = {"links.1.acceptance_rate": [0.1, 0.5, 0.9], "links.1.lookahead": [0, 4], "depth": [1, 2, 3],
            "handshake": ["overlapped", "blocking"]}
    return sweep(CHAIN, PROFILE, vary, effort=Effort(num_tokens=60, replications=2, predicted=False))


@pytest.fixture
def axes() -> Any:
    plt.switch_backend("Agg")
    figure, made = plt.subplots()
    yield made
    plt.close(figure)


def test_every_picture_that_the_table_supports_is_drawn(table, tmp_path):
    """One map and one winner a pair of numbers, one curve a number, devices and stages; each as PNG and SVG."""
    made = pictures.draw_all(table, tmp_path)
    assert [path.stem for path in made] == [
        "map-links_1_lookahead-links_1_acceptance_rate", "winner-links_1_lookahead-links_1_acceptance_rate",
        "speedup-links_1_acceptance_rate", "speedup-links_1_lookahead", "speedup-depth", "latency-devices", "use"]
    for path in made:
        assert path.stat().st_size > 5000
        assert "<svg" in path.with_suffix(".svg").read_text(encoding="utf-8")
    assert pictures.varied(table) == ["links_1_acceptance_rate", "links_1_lookahead", "depth", "handshake"]


def test_the_map_breaks_even_where_the_table_does(axes):
    """Speed-up = 2 × rate: the line lies at a rate of one half at every lookahead."""
    rates = np.linspace(0.1, 0.9, 9)
    rows = [{"point": 0, "rate": x, "ahead": y, "pipeline": "{a,b}", "speedup": 2 * x}
            for x in rates for y in (0, 1, 2)]
    pictures.heat_map(axes, pd.DataFrame(rows), "rate", "ahead")
    drawn = [path.vertices for line in axes.collections if hasattr(line, "levels") for path in line.get_paths()]
    assert drawn
    assert np.allclose(np.concatenate(drawn)[:, 0], 0.5)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rate", "ahead")


def test_the_winner_is_the_fastest_row(table, axes):
    """Every cell's colour is that of the fastest way of decoding at those values."""
    pictures.region_map(axes, table, "links_1_acceptance_rate", "depth")
    cells = axes.collections[0].get_array().reshape(3, 3)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    for row, depth in enumerate((1, 2, 3)):
        for column, rate in enumerate((0.1, 0.5, 0.9)):
            here = table[(table["depth"] == depth) & (table["links_1_acceptance_rate"] == rate)]
            best = here.loc[here["speedup"].idxmax()]
            assert names[int(cells[row, column])] == pictures._way(best)


def test_curves_go_through_the_best_rows_with_their_intervals(table, axes):
    """A line a rate, named; each point is the best row there."""
    pictures.lines(axes, table, "depth", "links_1_acceptance_rate")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["0.1", "0.5", "0.9"]
    for line, rate in zip(axes.lines, (0.1, 0.5, 0.9), strict=False):
        here = table[table["links_1_acceptance_rate"] == rate].groupby("depth")["speedup"].max()
        assert line.get_ydata() == pytest.approx(here.to_numpy())
    assert len(axes.collections) == 3
    assert axes.get_title() == "at the best lookahead (link 1), handshake"


def test_bars_add_up_to_the_whole_time(table, axes):
    """Kept, rolled back and waiting make 100% of every stage's time."""
    pictures.stage_bars(axes, table)
    ends = {}
    for bar in axes.patches:
        ends[bar.get_y()] = ends.get(bar.get_y(), 0.0) + bar.get_width()
    assert list(ends.values()) == pytest.approx([100.0] * len(ends))
    assert len(ends) == len(axes.get_yticks())


def test_the_front_is_what_nothing_beats(axes):
    """Of 1 device at 100 ms, 2 at 80 and 60, 3 at 70 and 4 at 50 the front is 100, 60, 60, 50."""
    rows = pd.DataFrame({"num_devices": [1, 2, 2, 3, 4], "tokens_per_s": 1e3 / np.array([100, 80, 60, 70, 50]),
                         "strategy": "pipelined", "pipeline": "{a,b}", "handshake": "overlapped"})
    pictures.pareto(axes, rows)
    (front,) = axes.lines
    assert front.get_xdata().tolist() == [1, 2, 4, 4]
    assert front.get_ydata().tolist() == pytest.approx([100, 60, 50, 50])


@pytest.mark.parametrize(("column", "words"), [
    ("links_all_acceptance_rate", "acceptance rate"), ("links_1_lookahead", "lookahead (link 1)"),
    ("stages_large_latency_s", "latency (stage large), s"), ("depth", "depth")])
def test_labels_are_words(column: str, words: str):
    """Columns are named for people, seconds with their unit."""
    assert pictures.label(column) == words


def test_nothing_to_draw_is_bad_input(table, tmp_path, capsys):
    """A table with one row varies nothing; a missing one is named."""
    with pytest.raises(InputError, match="must have a column that varies"):
        pictures.draw_all(table.head(1), tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["simulate", "plot", str(tmp_path / "absent")])
    assert end.value.code == 2
    assert "must be a sweep's table" in capsys.readouterr().err
