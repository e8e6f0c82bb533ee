"""Draw where autoregressive, synchronous and pipelined decoding win on the same devices.

    python scripts/regions.py [--points 36] [--figure docs/images/regions.svg]

By formula (pipespec_model/uses.py): acceptance rate against cost ratio, i.i.d. acceptance, windows of up to 16, the
best window or lookahead at each point, no costs between steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from pipespec_model.pays import Pair
from pipespec_model.uses import Uses, uses_of_devices

WINDOW = 16
# Devices of the target (the drafter has one more), the share of its step that sharding leaves, and what it is of.
COLUMNS = ((1, 0.25, "8B on one"), (2, 0.065, "70B on two"), (4, 0.065, "70B on four"))
WIDE = (1.0, 2.0)
# Okabe and Ito's colours; each region is named in the figure too.
REGIONS = (("autoregressive", "#BBBBBB"), ("synchronous", "#E69F00"), ("pipelined", "#56B4E9"))


def solved(rate: float, cost_ratio: float, wide: float, column: tuple[int, float, str]) -> Uses:
    pair = Pair(cost_ratio, (1.0,) + (wide,) * WINDOW, rate, buffer_tokens=2 * WINDOW)
    return uses_of_devices(pair, target_devices=column[0], serial_share=column[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=36, help="a side")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    rates = np.linspace(0.01, 0.99, args.points)
    ratios = np.geomspace(0.01, 1.0, args.points)
    names = [name for name, _ in REGIONS]
    panels = []
    for wide in WIDE:
        for column in COLUMNS:
            grid = [[solved(float(rate), float(ratio), wide, column) for rate in rates] for ratio in ratios]
            winner = np.array([[names.index(uses.best) for uses in row] for row in grid])
            gain = np.array([[uses.pipelined / max(uses.autoregressive, uses.synchronous) for uses in row]
                             for row in grid])
            title = f"{column[2]} + 1, " + ("wide steps the same" if wide == 1 else f"wide steps {wide:g}×")
            shares = ", ".join(f"{name} {100 * np.mean(winner == i):.0f}%" for i, name in enumerate(names))
            print(f"{title}: {shares} of the points; pipelined at best {gain.max():.2f} times the next use")
            panels.append((title, winner, gain))
    if args.figure:
        draw(rates, ratios, panels, args.figure)


def draw(rates: np.ndarray, ratios: np.ndarray, panels: list, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(len(WIDE), len(COLUMNS), figsize=(9.5, 6.4), sharex=True, sharey=True,
                                layout="constrained")
    for axis, (title, winner, gain) in zip(axes.flat, panels, strict=True):
        axis.pcolormesh(rates, ratios, winner, cmap=ListedColormap([colour for _, colour in REGIONS]), vmin=-0.5,
                        vmax=2.5, shading="nearest", rasterized=True)
        axis.contour(rates, ratios, gain, levels=[1.2], colors="black", linewidths=1.2)
        axis.set(yscale="log", xlim=(0, 1), ylim=(0.01, 1))
        axis.set_title(title, fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("acceptance rate α")
    for axis in axes[:, 0]:
        axis.set_ylabel("cost ratio c, drafter / target step")
    keys = [Patch(facecolor=colour, label=name) for name, colour in REGIONS]
    keys.append(plt.Line2D([], [], color="black", lw=1.2, label="pipelined 1.2× the next best"))
    figure.legend(handles=keys, loc="outside upper center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
