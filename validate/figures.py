"""The report's pictures, as SVG text.  Colours are told apart by colour-blind readers and in grey."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pipespec_model.trace import Trace
from simulate.timeline import draw, span_s

STRATEGY_STYLE = {
    "autoregressive": ("#555555", "s"), "speculative": ("#E69F00", "D"), "pipelined": ("#0072B2", "o"),
}


@contextmanager
def svg(name: str, width: float, height: float, **grid: Any) -> Iterator[tuple[Any, Any, io.StringIO]]:
    # Text stays text (selectable, small); the salt keeps ids of several pictures on a page apart.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "font.family": "sans-serif"}):
        figure, axes = plt.subplots(figsize=(width, height), squeeze=False, **grid)
        out = io.StringIO()
        yield figure, axes, out
        figure.tight_layout()
        figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)


def as_inline(out: io.StringIO) -> str:
    """Without the XML prologue, which has no place inside a page."""
    text = out.getvalue()
    return text[text.index("<svg") :]


def scatter(rows: Sequence[dict[str, Any]]) -> str:
    """Predicted against measured throughput with 90% intervals, and lines at ±5%."""
    with svg("scatter", 5.2, 4.6) as (_, panels, out):
        axes = panels[0, 0]
        values = [row["measured_tokens_per_s"] for row in rows]
        values += [row["predicted_tokens_per_s"]["simulation"] for row in rows]
        low, high = min(values) * 0.8, max(values) * 1.2
        line = [low, high]
        axes.plot(line, line, color="#999999", linewidth=1)
        axes.fill_between(line, [0.95 * v for v in line], [1.05 * v for v in line], color="#DDDDDD", label="within 5%")
        seen: set[str] = set()
        for row in rows:
            colour, marker = STRATEGY_STYLE[row["strategy"]]
            emulated = row["origin"] == "emulated"
            label = row["strategy"] + (" (emulated)" if emulated else "")
            x, y = row["measured_tokens_per_s"], row["predicted_tokens_per_s"]["simulation"]
            axes.errorbar(x, y, xerr=_bars(x, row["measured_interval"]), yerr=_bars(y, row["predicted_interval"]),
                          color=colour, marker=marker, markersize=7, linewidth=0.8, linestyle="none",
                          markerfacecolor="white" if emulated else colour, label=None if label in seen else label)
            seen.add(label)
        axes.set(xlim=line, ylim=line, xlabel="measured, tokens per second",
                 ylabel="predicted by simulation, tokens per second", aspect="equal")
        axes.legend(fontsize=8, frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
    return as_inline(out)


def _bars(value: float, interval: Sequence[float] | None) -> list[list[float]] | None:
    if interval is None:
        return None
    return [[max(0.0, value - interval[0])], [max(0.0, interval[1] - value)]]


def throughput_bars(rows: Sequence[dict[str, Any]]) -> str:
    """Measured throughput of the real rows as bars, the prediction as a mark with its interval."""
    with svg("bars", 6.4, 0.9 + 0.52 * len(rows)) as (_, panels, out):
        axes = panels[0, 0]
        for place, row in enumerate(reversed(rows)):
            colour, _ = STRATEGY_STYLE[row["strategy"]]
            axes.barh(place, row["measured_tokens_per_s"], color=colour, alpha=0.75, height=0.62,
                      label="measured" if place == 0 else None)
            predicted = row["predicted_tokens_per_s"]["simulation"]
            axes.errorbar(predicted, place, xerr=_bars(predicted, row["predicted_interval"]), color="black",
                          marker="|", markersize=14, linewidth=1, capsize=3,
                          label="predicted before the run, 90% interval" if place == 0 else None)
        axes.set_yticks(range(len(rows)), [describe(row) for row in reversed(rows)])
        axes.set_xlabel("tokens per second")
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    return as_inline(out)


def describe(row: dict[str, Any]) -> str:
    """A row in the field's notation, with what tells it from its neighbours."""
    cores = f"{row['cores']} core" + ("s" if row["cores"] > 1 else "")
    text = f"{row['strategy']} {{{','.join(row['stages'])}}}"
    if row["lookahead"]:
        text += f" γ={','.join(str(x) for x in row['lookahead'])}"
    if row["handshake"] == "blocking":
        text += ", blocking"
    return text if row["origin"] == "emulated" else f"{text}, {cores}"


def timelines(simulated: Trace, measured: Trace, *, num_tokens: int = 14) -> str:
    """The first tokens of one prompt, simulated over measured, on one time axis."""
    pair = (simulated, measured)
    until = max(span_s(trace, trace.prompts[0].prompt, num_tokens) for trace in pair)
    with svg("timeline", 7.6, 4.0, nrows=2, ncols=1, sharex=True) as (figure, panels, out):
        handles: dict[str, Any] = {}
        for axes, trace in zip(panels[:, 0], pair, strict=True):
            draw(axes, trace, prompt=trace.prompts[0].prompt, until_s=until)
            axes.set_title(trace.origin, loc="left", fontsize=10)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        panels[-1, 0].set_xlabel("milliseconds since the request")
        figure.legend(handles.values(), handles.keys(), loc="upper right", ncols=3, fontsize=8, frameon=False)
    return as_inline(out)
