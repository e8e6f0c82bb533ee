"""Throughput against latency, a curve a way, from the rows of a load study alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .pictures import FORMATS, MARKERS, PALETTE

NAME = "throughput-latency"
BOUNDLESS = 30.0
"""Times the shortest median: a latency axis that goes farther hides what can be used."""


def draw(rows: Sequence[dict[str, Any]], out: Path) -> Path:
    """PNG and SVG in ``out``; the path of the PNG."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": NAME, "font.size": 11, "font.family": "sans-serif"}):
        figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.4), layout="constrained")
        ways = list(dict.fromkeys(row["way"] for row in rows))
        for panel, (percentile, title) in zip(axes, (("p50", "median"), ("p95", "95th percentile")), strict=True):
            curve(panel, rows, percentile)
            panel.set_title(title, fontsize=11)
        figure.legend(handles=_legend(ways), loc="outside lower center", ncols=len(ways) + 1, fontsize=10,
                      frameon=False)
        for kind in FORMATS:
            figure.savefig(out / f"{NAME}.{kind}", dpi=150, metadata={"Date": None} if kind == "svg" else None)
        plt.close(figure)
    return out / f"{NAME}.png"


def curve(axes: Any, rows: Sequence[dict[str, Any]], percentile: str) -> None:
    """Seconds from request to last token over tokens a second, with 90% intervals both ways; open where a way does
    not keep up."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for i, way in enumerate(ways):
        mine = [row for row in rows if row["way"] == way]
        x, y = ([row[name] if name == "tokens_per_s" else row[name][percentile] for row in mine]
                for name in ("tokens_per_s", "e2e_s"))
        colour = PALETTE[i]
        axes.errorbar([item["value"] for item in x], [item["value"] for item in y], xerr=_halves(x), yerr=_halves(y),
                      color=colour, linewidth=1.4, elinewidth=0.8)
        for row, across, up in zip(mine, x, y, strict=True):
            axes.plot(across["value"], up["value"], MARKERS[i], color=colour, markersize=6,
                      markerfacecolor="white" if row["overloaded"] else colour)
    values = [row["e2e_s"][percentile]["value"] for row in rows]
    if max(values) > BOUNDLESS * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per second, all prompts together")
    axes.set_ylabel("from request to last token, s")
    axes.grid(alpha=0.3)


def _legend(ways: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    known = [Line2D([], [], color=PALETTE[i], marker=MARKERS[i], markersize=6, label=way) for i, way in enumerate(ways)]
    return [*known, Line2D([], [], color="#555555", marker="o", markersize=6, markerfacecolor="white", linewidth=0,
                           label="open: does not keep up")]


def _halves(figures: Sequence[dict[str, Any]]) -> list[float] | None:
    if any(figure["interval"] is None for figure in figures):
        return None
    return [(figure["interval"][1] - figure["interval"][0]) / 2 for figure in figures]
