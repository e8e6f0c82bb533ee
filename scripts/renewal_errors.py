"""Hold the renewal model against the event simulator on a grid, and draw where it is off.

    python scripts/renewal_errors.py [--points 320] [--tokens 6000] [--spread 0.3] [--figure FILE.svg]

Points come from a seeded low-discrepancy sequence over acceptance, cost ratio, lookahead, buffer, both
handshakes, the price of a wide verification, costs between steps and kinds of acceptance model.  Times are
constant, or with ``--spread`` random with that coefficient of variation (gamma, each step by itself).  A point
passes within 0.5% or four standard errors of the simulation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import gamma, qmc

from pipespec_model.acceptance import IID, AcceptanceModel, Hazard, Markov
from pipespec_model.agreement import synthetic
from pipespec_model.latency import Table
from pipespec_model.profile import Costs, Profile, StageLatency
from pipespec_model.renewal import renewal
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from simulate.engine import PromptRun

TARGET_S = 0.1
WARM_UP = 200  # tokens before times count
NUM_BATCHES = 20


@dataclass(frozen=True)
class Point:
    """One pipeline of the grid.

    wide : a verification's time over that of a one-token step
    spread : coefficient of variation of both stages' step times
    """

    acceptance_rate: float
    cost_ratio: float
    lookahead: int
    buffer_tokens: int
    max_window: int
    wide: float
    blocking: bool
    kind: str = "iid"
    costs: bool = False
    spread: float = 0.0

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Step time / mean at evenly spaced probabilities, both tails cut at one in a thousand."""
        if not self.spread:
            return ()
        levels = np.linspace(0, 1, 65).clip(1e-3, 1 - 1e-3)
        found = gamma.ppf(levels, self.spread**-2)
        return tuple((found / np.trapezoid(found, dx=1 / 64)).tolist())

    @property
    def acceptance(self) -> AcceptanceModel:
        a = self.acceptance_rate
        if self.kind == "markov":
            return Markov(a + (1 - a) * 0.4, 0.7 * a)
        return IID(a) if self.kind == "iid" else Hazard((0.7 * a, a, a + (1 - a) * 0.3))

    def made(self) -> tuple[PipelineSpec, Profile]:
        stages = (StageSpec(name="drafter", model="d"), StageSpec(name="target", model="t"))
        link = LinkSpec(lookahead=self.lookahead, buffer_tokens=self.buffer_tokens, max_window=self.max_window)
        spec = PipelineSpec(strategy="pipelined", handshake="blocking" if self.blocking else "overlapped",
                            stages=stages, links=(link,))
        times = [TARGET_S] + [TARGET_S * (self.wide + 0.002 * w) for w in range(1, self.max_window + 1)]
        verify = Table(tuple(range(1, self.max_window + 2)), tuple(times), quantiles=self.quantiles)
        draft = Table((1, 2), (TARGET_S * self.cost_ratio,) * 2, quantiles=self.quantiles)
        paid = {"drafter": Costs(turnaround_s=0.0004, handover_s=0.0009, rollback_s=0.0021),
                "target": Costs(turnaround_s=0.0007, handover_s=0.0013)} if self.costs else {}
        return spec, Profile({"drafter": StageLatency(draft), "target": StageLatency(verify)}, costs=paid,
                             acceptance={"drafter>target": self.acceptance})


def points(number: int) -> Iterator[Point]:
    for u in qmc.Halton(9, seed=11).random(number):
        buffer = [1, 2, 4, 8, 16, 32, 64][int(7 * u[2])]
        window = [1, 2, 4, 8, 16, 32][int(6 * u[3])]
        yield Point(
            acceptance_rate=float(0.02 + 0.97 * u[0]), cost_ratio=float(0.02 * 50 ** u[1]),
            lookahead=min(buffer, window, [0, 0, 1, 2, 3, 5, 8, 12, 16][int(9 * u[4])]),
            buffer_tokens=buffer, max_window=window, wide=float(1 + 3 * u[5] * (u[5] > 0.3)), blocking=bool(u[6] < 0.5),
            kind=("iid", "markov", "hazard")[int(3 * u[7])], costs=bool(u[8] < 0.5))


def simulated(point: Point, num_tokens: int, seed: int = 1) -> tuple[float, float]:
    """Tokens per second once under way, and its standard error by batch means."""
    spec, profile = point.made()
    names = [stage.choice_key for stage in spec.stages]
    made = synthetic(names, [point.acceptance], num_tokens=num_tokens + 200, seed=seed)
    _, steps = PromptRun(spec, profile, made, seed=seed, spread=point.spread > 0).run()
    ends = [(s.start_s + s.duration_s, s.position + s.emitted) for s in steps if s.stage == 1 and s.start_s is not None]
    wanted = np.linspace(WARM_UP, num_tokens, NUM_BATCHES + 1)
    chosen = np.searchsorted([tokens for _, tokens in ends], wanted)
    times, tokens = np.array([ends[i] for i in chosen]).T
    paces = np.diff(times) / np.diff(tokens)
    pace = float((times[-1] - times[0]) / (tokens[-1] - tokens[0]))
    return 1 / pace, float(paces.std(ddof=1) / np.sqrt(NUM_BATCHES)) / pace**2


def compare(point: Point, num_tokens: int) -> dict:
    spec, profile = point.made()
    said = renewal(spec, profile, spread=point.spread > 0).tokens_per_s
    constant = renewal(spec, profile).tokens_per_s
    found, error = simulated(point, num_tokens)
    percent = 100 * (said / found - 1)
    bound = max(0.5, 400 * error / found)
    return {**asdict(point), "simulated": found, "renewal": said, "percent": percent, "bound": bound,
            "percent_of_means": 100 * (constant / found - 1),
            "passes": bool(abs(percent) <= bound)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    rows = []
    for i, point in enumerate(points(args.points)):
        rows.append(compare(replace(point, spread=args.spread), args.tokens))
        if i % 20 == 19:
            print(f"{i + 1} of {args.points}", file=sys.stderr)
    errors = np.abs([row["percent"] for row in rows])
    print(f"{sum(row['passes'] for row in rows)} of {len(rows)} points within 0.5% or four standard errors; "
          f"mean {errors.mean():.2f}%, median {np.median(errors):.2f}%, worst {errors.max():.2f}%")
    if args.spread:
        means = np.abs([row["percent_of_means"] for row in rows])
        print(f"with the mean times alone: mean {means.mean():.2f}%, median {np.median(means):.2f}%, "
              f"worst {means.max():.2f}%")
    for row in sorted(rows, key=lambda row: -abs(row["percent"]) / row["bound"])[:5]:
        print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}))
    if args.figure:
        draw(rows, args.figure)


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, blocking in zip(axes, (False, True), strict=True):
        chosen = [row for row in rows if row["blocking"] == blocking]
        found = axis.scatter([row["acceptance_rate"] for row in chosen], [row["cost_ratio"] for row in chosen], s=22,
                             c=[row["percent"] for row in chosen], cmap="RdBu", vmin=-1, vmax=1, edgecolors="0.4",
                             linewidths=0.4)
        axis.set(yscale="log", xlabel="acceptance rate α", title="blocking" if blocking else "overlapped")
    axes[0].set_ylabel("cost ratio c")
    figure.colorbar(found, ax=axes, label="renewal against simulation, %", extend="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
