"""A sweep's table as pictures, each made of the table alone.

Which ones a table supports follows from what was varied: :func:`draw_all` makes those.  Colours (Okabe-Ito, viridis)
are told apart by colour-blind readers and in grey.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pipespec_model.errors import InputError

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#555555")
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MOST_LINES = 6
MOST_BARS = 12
FORMATS = ("png", "svg")


def varied(table: pd.DataFrame) -> list[str]:
    """The columns that were varied: those between ``point`` and ``pipeline`` with more than one value."""
    names = list(table.columns)
    own = names[names.index("point") + 1 : names.index("pipeline")]
    return [name for name in own if name != "problem" and table[name].nunique() > 1]


def draw_all(table: pd.DataFrame, out: Path) -> list[Path]:
    """Every picture that the table supports, as PNG and SVG in ``out``; the paths of the PNG files."""
    table = table[table["tokens_per_s"].notna()]
    names = varied(table)
    numbers = [name for name in names if pd.api.types.is_numeric_dtype(table[name])]
    if not names:
        raise InputError("table", "must have a column that varies")
    made = []
    piped = table[table["strategy"] != "autoregressive"]
    for x, y in combinations([name for name in numbers if name != "depth"][:3], 2):
        across, up = sorted((x, y), key=lambda name: (-table[name].nunique(), name))
        if len(piped):
            made += _saved(out, f"map-{up}-{across}", heat_map, piped, across, up)
        if table.apply(_way, axis=1).nunique() > 1:
            made += _saved(out, f"winner-{up}-{across}", region_map, table, across, up)
    for x in numbers:
        # The target alone has no lookahead: its rows would hide where pipelines are slower.
        rows = piped if x.startswith("links") else table
        if len(rows):
            made += _saved(out, f"speedup-{x}", lines, rows, x, _told_apart(rows, x))
    if "num_devices" in table and table["num_devices"].nunique() > 1:
        made += _saved(out, "latency-devices", pareto, table)
    return made + _saved(out, "use", stage_bars, table)


def _saved(out: Path, name: str, draw: Any, *args: Any) -> list[Path]:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11, "font.family": "sans-serif"}):
        figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        draw(axes, *args)
        for kind in FORMATS:
            figure.savefig(out / f"{name}.{kind}", dpi=150, metadata={"Date": None} if kind == "svg" else None)
        plt.close(figure)
    return [out / f"{name}.png"]


# -- one picture each ----------------------------------------------------------------------------------


def heat_map(axes: Any, table: pd.DataFrame, x: str, y: str) -> None:
    """Speed-up over two fields, the best of all else, with the line where a pipeline begins to pay."""
    grid = _best(table, x, y).pivot(index=y, columns=x, values="speedup")
    shown = axes.pcolormesh(grid.columns, grid.index, grid, cmap="viridis", shading="nearest")
    bar = axes.figure.colorbar(shown, ax=axes, label="speed-up over the target alone")
    low, high = float(grid.min(axis=None)), float(grid.max(axis=None))
    if low < 1 < high and min(grid.shape) > 1:
        line = axes.contour(grid.columns, grid.index, grid, levels=[1.0], colors="white", linewidths=3)
        axes.contour(grid.columns, grid.index, grid, levels=[1.0], colors="black", linewidths=1.4)
        axes.clabel(line, fmt={1.0: "breaks even"}, fontsize=10, colors="white")
        bar.ax.axhline(1.0, color="black", linewidth=1.4)
    _labelled(axes, table, x, y)
    axes.set_title(_rest(table, x, y), fontsize=10)


def region_map(axes: Any, table: pd.DataFrame, x: str, y: str) -> None:
    """Which way of decoding is fastest at each pair of values."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    best = _best(table, x, y)
    name = best.apply(_way, axis=1)
    order = list(name.value_counts().index[: len(PALETTE) - 1])
    best["which"] = [order.index(value) if value in order else len(order) for value in name]
    grid = best.pivot(index=y, columns=x, values="which")
    size = int(best["which"].max()) + 1
    axes.pcolormesh(grid.columns, grid.index, grid, cmap=ListedColormap(PALETTE[:size]), vmin=-0.5, vmax=size - 0.5,
                    shading="nearest")
    labels = [*order, "others"][:size]
    axes.legend(handles=[Patch(color=PALETTE[i], label=label) for i, label in enumerate(labels)], fontsize=9,
                loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
    _labelled(axes, table, x, y)
    axes.set_title("fastest" + (f": {_rest(table, x, y)}" if _rest(table, x, y) else ""), fontsize=10)


def lines(axes: Any, table: pd.DataFrame, x: str, by: str | None) -> None:
    """Speed-up against one field, a line for each value of another, with 90% intervals."""
    best = _best(table, x, *([by] if by else []))
    groups = [(None, best)] if by is None else list(best.groupby(by, sort=True))
    shown = np.unique(np.linspace(0, len(groups) - 1, min(len(groups), MOST_LINES)).round().astype(int))
    for i, (value, group) in enumerate(groups[at] for at in shown):
        colour = PALETTE[i % len(PALETTE)]
        axes.plot(group[x], group["speedup"], color=colour, marker=MARKERS[i % len(MARKERS)], markersize=5,
                  label=None if by is None else _text(value))
        if "speedup_low" in group:
            axes.fill_between(group[x], group["speedup_low"], group["speedup_high"], color=colour, alpha=0.2,
                              linewidth=0)
    axes.axhline(1.0, color="#555555", linewidth=1, linestyle="--")
    axes.annotate("the target alone", (1.0, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                  fontsize=9, color="#555555")
    if by is not None:
        axes.legend(title=label(by), fontsize=9, title_fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    _labelled(axes, table, x, None)
    axes.set_title(_rest(table, x, *([by] if by else [])), fontsize=10)


def pareto(axes: Any, table: pd.DataFrame) -> None:
    """Milliseconds a token against devices held; the front is what nothing beats in both."""
    ms = 1e3 / table["tokens_per_s"]
    ways = table.apply(_way, axis=1)
    shown = ways.unique()[: len(PALETTE)]
    for i, way in enumerate(shown):
        mine = ways == way
        aside = 0.3 * ((i + 0.5) / len(shown) - 0.5)  # so that ways on as many devices lie side by side
        axes.scatter(table["num_devices"][mine] + aside, ms[mine], color=PALETTE[i], marker=MARKERS[i], s=28, alpha=0.7,
                     label=way)
    best = ms.groupby(table["num_devices"]).min().cummin()
    front = best[best.diff().fillna(-1) < 0]
    axes.step([*front.index, table["num_devices"].max()], [*front, front.iloc[-1]], where="post", color="black",
              linewidth=1.2, label="nothing is better in both")
    axes.set_xticks(sorted(table["num_devices"].unique()))
    axes.set_xlabel("devices held")
    axes.set_ylabel("milliseconds a token")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9)


def stage_bars(axes: Any, table: pd.DataFrame) -> None:
    """Where each stage's time goes in the fastest configurations: of use, wasted, waiting."""
    from matplotlib.patches import Patch

    rows = _distinct(table).head(MOST_BARS // 3)
    ends, names = 0, []
    for _, row in rows.iterrows():
        for i in range(int(row["num_stages"])):
            busy, wasted = row[f"stage_{i}_busy"], row.get(f"stage_{i}_wasted")
            lost = busy * (0.0 if wasted is None or np.isnan(wasted) else wasted)
            for left, width, colour, hatch in ((0, busy - lost, PALETTE[0], ""), (busy - lost, lost, PALETTE[1], "//"),
                                               (busy, 1 - busy, "#DDDDDD", "")):
                axes.barh(-ends, 100 * width, left=100 * left, color=colour, hatch=hatch, edgecolor="white", height=0.8)
            names.append((-ends, str(row["pipeline"]).strip("{}").split(",")[i]))
            ends += 1
        axes.annotate(f"{_way(row)}, {row['speedup']:.2f}×", (100, -ends + 0.35), ha="right", va="center", fontsize=9)
        ends += 1
    axes.set_yticks([at for at, _ in names], [name for _, name in names])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time")
    axes.legend(handles=[Patch(facecolor=PALETTE[0], label="busy, tokens kept"),
                         Patch(facecolor=PALETTE[1], hatch="//", edgecolor="white", label="busy, tokens rolled back"),
                         Patch(facecolor="#DDDDDD", label="waiting")],
                loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False, fontsize=9)


# -- what they share -----------------------------------------------------------------------------------


def label(column: str) -> str:
    """A column's name for people: ``links_all_acceptance_rate`` → ``acceptance rate``."""
    for head in ("links_all_", "stages_all_"):
        column = column.removeprefix(head)
    unit = ", s" if column.endswith("_s") else ""
    words = column.removesuffix("_s").split("_")
    if words[0] in ("links", "stages") and len(words) > 2:
        words = [*words[2:], f"({words[0][:-1]} {words[1]})"]
    return " ".join(words) + unit


def _told_apart(table: pd.DataFrame, x: str) -> str | None:
    """The field that gets a line for each value: against a lookahead or a depth the acceptance rate, else the
    strategy, else what has fewest values."""
    others = [name for name in varied(table) if name != x]
    wanted = ("acceptance_rate", "strategy") if x == "depth" or x.endswith("lookahead") else ("strategy", "lookahead")
    return min(others, key=lambda name: (*(not name.endswith(end) for end in wanted), table[name].nunique()),
               default=None)


def _best(table: pd.DataFrame, *by: str) -> pd.DataFrame:
    """The fastest row for each combination of values."""
    return table.loc[table.groupby(list(by))["speedup"].idxmax()].copy()


def _distinct(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest row of each way of decoding, fastest first."""
    best = table.loc[table.groupby(table.apply(_way, axis=1))["speedup"].idxmax()]
    return best.sort_values("speedup", ascending=False)


def _way(row: Any) -> str:
    blocking = " blocking" if row.get("handshake") == "blocking" else ""
    return f"{row['strategy']}{blocking} {row['pipeline']}"


def _rest(table: pd.DataFrame, *shown: str) -> str:
    """What a picture takes the best of."""
    rest = [label(name) for name in varied(table) if name not in shown]
    return f"at the best {', '.join(rest)}" if rest else ""


def _labelled(axes: Any, table: pd.DataFrame, x: str, y: str | None) -> None:
    axes.set_xlabel(label(x))
    _whole(axes.xaxis, table[x])
    if y is not None:
        axes.set_ylabel(label(y))
        _whole(axes.yaxis, table[y])


def _whole(axis: Any, values: pd.Series) -> None:
    """Ticks on whole numbers where a field has only those."""
    if pd.api.types.is_integer_dtype(values):
        axis.get_major_locator().set_params(integer=True)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

