"""The study's pictures, as SVG files.  Colours are told apart by colour-blind readers and in grey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KIND_STYLE = {"dp": ("#0072B2", "o", "dynamic programme"), "hindsight": ("#CC79A7", "v", "the same, in hindsight"),
              "fixed": ("#E69F00", "D", "fixed, of other prompts"),
              "uniform": ("#009E73", "s", "evenly spread"), "random": ("#777777", "^", "random")}
M_STYLE = (("#0072B2", "o"), ("#E69F00", "D"), ("#009E73", "s"), ("#CC79A7", "^"), ("#555555", "v"))


@contextmanager
def _figure(path: Path, size: tuple[float, float], panels: int = 1) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 11}):
        figure, axes = plt.subplots(1, panels, figsize=size, squeeze=False)
        for one in axes[0]:
            one.spines[["top", "right"]].set_visible(False)
            one.grid(axis="y", color="#E5E5E5", linewidth=0.7)
            one.set_axisbelow(True)
        yield axes[0]
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, bbox_inches="tight")
        plt.close(figure)


def _bars(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[v - low for v, (low, _) in zip(values, intervals, strict=True)],
            [high - v for v, (_, high) in zip(values, intervals, strict=True)]]


def draw_agreement(rows: Sequence[dict[str, Any]], num_layers: int, path: Path) -> None:
    with _figure(path, (9.0, 3.9), 2) as panels:
        for axes, key, interval, title in (
            (panels[0], "agreement", "interval", "next token as the full model's"),
            (panels[1], "cosine", "cosine_interval", "cosine to the full model's last state")):
            for number, (kind, (colour, marker, label)) in enumerate(KIND_STYLE.items()):
                mine = [row for row in rows if row["kind"] == kind]
                values = [row[key] for row in mine]
                axes.errorbar([row["skipped"] + 0.16 * (number - 2) for row in mine], values,
                              yerr=_bars(values, [row[interval] for row in mine]), color=colour, marker=marker,
                              label=label, linewidth=1.4, elinewidth=1.0)
            axes.set_title(title, fontsize=11, loc="left")
            axes.set_xlabel(f"layers skipped, of {num_layers}")
            axes.set_xticks(sorted({row["skipped"] for row in rows}))
        panels[0].set_ylim(0, 1)
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, frameon=False, fontsize=10, ncols=5, loc="lower center",
                                columnspacing=1.2, bbox_to_anchor=(0.5, 1.0))


def draw_persistence(by_count: dict[str, list[dict[str, Any]]], path: Path) -> None:
    with _figure(path, (7.2, 3.7)) as (axes,):
        for number, (count, rows) in enumerate(by_count.items()):
            colour, marker = M_STYLE[number % len(M_STYLE)]
            values = [row["jaccard"] for row in rows]
            xs = [i + 0.09 * (number - 2) for i in range(len(rows))]
            bars = _bars(values, [row["interval"] for row in rows])
            axes.errorbar(xs, values, yerr=bars, color=colour, marker=marker, linestyle="none", label=f"M = {count}",
                          elinewidth=1.0)
            axes.plot(xs[:-1], values[:-1], color=colour, linewidth=1.0)
        axes.set_xticks(range(len(rows)), [row["distance"] for row in rows])
        axes.set_ylim(0, 1)
        axes.set_xlabel("tokens apart")
        axes.set_ylabel("overlap of skip sets (Jaccard)")
        axes.legend(frameon=False, fontsize=10, ncols=len(by_count), loc="upper center")


def draw_speed(speed: dict[str, Any], path: Path) -> None:
    threads = [number for number in (1, 2) if f"evaluation-{number}" in speed]
    with _figure(path, (8.2, 0.9 + 0.62 * len(speed["evaluation-1"]))) as (axes,):
        names = [row["name"] for row in speed["evaluation-1"]]
        for number in threads:
            rows = speed[f"evaluation-{number}"]
            colour, hatch = (("#0072B2", ""), ("#E69F00", "//"))[number - 1]
            values = [row["speedup"] for row in rows]
            ys = [i + (0.19 if number == 2 else -0.19 if len(threads) == 2 else 0) for i in range(len(rows))]
            axes.barh(ys, values, height=0.36, color=colour, hatch=hatch, edgecolor="white",
                      label=("one core", "two cores")[number - 1])
            axes.errorbar(values, ys, xerr=_bars(values, [row["interval"] for row in rows]), color="black",
                          linestyle="none", elinewidth=1.1, capsize=2)
        axes.axvline(1.0, color="#333333", linewidth=1.0, linestyle="--")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("speed against plain decoding on the same cores (90% interval over prompts)")
        axes.legend(frameon=False, fontsize=10, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
