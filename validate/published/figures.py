"""The study's pictures, as SVG text: predicted against measured, time against lookahead, accepted lengths."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import FixedLocator, MaxNLocator

from validate.figures import STRATEGY_STYLE, as_inline, svg

NAMES = {"speculative": "synchronous", "pipelined": "pipelined"}
MODEL_STYLE = {  # label, colour, line; the measurement is drawn over them
    "replay": ("replay of the recovered bits", "#0072B2", "-"),
    "markov": ("Markov acceptance", "#009E73", "--"),
    "iid": ("i.i.d. acceptance", "#E69F00", "-."),
    "renewal": ("renewal formula", "#56B4E9", (0, (5, 1))),
    "closed_form": ("the paper's closed form", "#CC79A7", ":"),
}
MOST_PANELS = 12


def label(models: Sequence[str]) -> str:
    """Drafter first, by size: ``{1B,8B}``."""
    return "{" + ",".join(next((part for part in name.split("-") if part[:-1].replace(".", "").isdigit()
                                and part[-1] in "BbMm"), name) for name in models) + "}"


def predicted_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a prediction, by strategy, models and lookahead."""
    found = [row for row in rows if row["predicted_ms_per_token"] is not None]
    return sorted(found, key=lambda row: (row["strategy"], len(row["models"]), label(row["models"]),
                                          row["inferred_lookahead"]))


def scatter(rows: Sequence[dict[str, Any]]) -> str:
    """Predicted against measured milliseconds per token on logarithmic axes, with lines at ±5%."""
    found = predicted_rows(rows)
    with svg("published-scatter", 5.6, 4.8) as (_, panels, out):
        axes = panels[0, 0]
        values = [row[key] for row in found for key in ("measured_ms_per_token", "predicted_ms_per_token")] or [1.0]
        ends = [min(values) * 0.88, max(values) * 1.14]
        axes.plot(ends, ends, color="#999999", linewidth=1)
        for factor in (0.95, 1.05):
            axes.plot(ends, [factor * v for v in ends], color="#999999", linewidth=0.8, linestyle="--",
                      label="±5%" if factor > 1 else None)
        seen: set[str] = set()
        for row in found:
            colour, marker = STRATEGY_STYLE[row["strategy"]]
            big = len(row["models"]) > 2 or "70B" in label(row["models"])
            text = f"{NAMES[row['strategy']]} {label(row['models'])}"
            axes.plot(row["measured_ms_per_token"], row["predicted_ms_per_token"], marker, color=colour, markersize=6,
                      markerfacecolor="white" if big else colour, label=None if text in seen else text)
            seen.add(text)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", xlabel="measured, ms per token",
                 ylabel="predicted, ms per token")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(_ticks(ends))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(_ticks([1, 1]))
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    return as_inline(out)


def _ticks(ends: Sequence[float]) -> Any:
    steps = (10, 12, 14, 16, 18, 20, 25, 30, 40, 50, 60, 80, 100, 125, 150, 200, 300, 500)
    return FixedLocator([step for step in steps if ends[0] <= step <= ends[1]])


def against_lookahead(rows: Sequence[dict[str, Any]]) -> str | None:
    """Time per token against the published L, one panel a pipeline with three lookaheads or more."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in predicted_rows(rows):
        groups[row["strategy"], label(row["models"])].append(row)
    shown = {key: found for key, found in groups.items() if len({row["inferred_lookahead"] for row in found}) > 2}
    if not shown:
        return None
    with svg("published-lookahead", 4.2 * len(shown), 3.8, ncols=len(shown)) as (figure, panels, out):
        for axes, ((strategy, models), found) in zip(panels[0], sorted(shown.items()), strict=True):
            x = [row["inferred_lookahead"] for row in found]
            for name, (text, colour, line) in MODEL_STYLE.items():
                y = [row["predicted_by_model"].get(name) or math.nan for row in found]
                axes.plot(x, y, linestyle=line, color=colour, linewidth=1.6, label=text)
            axes.plot(x, [row["measured_ms_per_token"] for row in found], "o", color="black", markersize=5,
                      label="measured")
            axes.set_title(f"{NAMES[strategy]} {models}", loc="left", fontsize=10)
            axes.set_xlabel("lookahead (published L)")
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0, 0].set_ylabel("ms per token")
        handles, texts = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="lower center", ncols=3, fontsize=8, frameon=False,
                      bbox_to_anchor=(0.5, 1.0))
    return as_inline(out)


def accepted_lengths(rows: Sequence[dict[str, Any]]) -> str | None:
    """How many tokens a verification emitted: recorded as bars, replayed as dots; pipelined runs first."""
    found = [row for row in predicted_rows(rows) if row["inferred_lookahead"] != 1][:MOST_PANELS]
    if not found:
        return None
    columns = min(3, len(found))
    lines = math.ceil(len(found) / columns)
    size = 3.3 * columns, 2.1 * lines + 0.4
    with svg("published-lengths", *size, nrows=lines, ncols=columns) as (figure, panels, out):
        for axes in panels.flat[len(found) :]:
            axes.set_visible(False)
        for axes, row in zip(panels.flat, found, strict=False):
            measured, replayed = row["accepted_lengths"]["measured"], row["accepted_lengths"]["replayed"]
            axes.bar(range(1, len(measured)), measured[1:], color="#BBBBBB", label="recorded")
            axes.plot(range(1, len(replayed)), replayed[1:], "o", color="#0072B2", markersize=3.5, label="replayed")
            axes.set_title(f"{NAMES[row['strategy']]} {label(row['models'])}, L = {row['inferred_lookahead']}",
                           fontsize=9, loc="left")
            axes.set_xlim(0.3, max(len(measured), len(replayed), 4) - 0.3)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.spines[["top", "right"]].set_visible(False)
        for axes in panels[:, 0]:
            axes.set_ylabel("verifications", fontsize=9)
        for axes in panels[-1]:
            axes.set_xlabel("tokens emitted", fontsize=9)
        handles, texts = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="lower right", ncols=2, fontsize=9, frameon=False,
                      bbox_to_anchor=(1.0, 1.0))
    return as_inline(out)
