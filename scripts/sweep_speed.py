"""How long sweeps and plans take, and that a sweep's time grows with its points and its tokens.

    python scripts/sweep_speed.py [--figure docs/images/sweep-speed.svg]

Two stages of constant times, five replications a point: the 8,463-point sweep of docs/what-if.md, 100,000 points, a
series of points at 1,000 tokens and one of tokens at 1,000 points; then a plan over more than 1,000 candidates.
The engine is compiled before anything is timed.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipespec_model.acceptance import IID
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from simulate.candidates import Catalogue, Limits
from simulate.plan import plan
from simulate.points import Design
from simulate.row import Effort
from simulate.sweep import Sweep, Workers, run_sweep
from simulate.vary import Value, axes_of

PAIR = PipelineSpec.from_dict({"stages": [{"name": "small", "model": "s"}, {"name": "large", "model": "l"}]})
PROFILE = Profile({"small": StageLatency(Constant(0.01)), "large": StageLatency(Constant(0.1))},
                  {"small>large": IID(0.8)})
ASKED: dict[str, Any] = {"links.0.acceptance_rate": "0.05..0.98:31", "stages.small.latency": "0.005..0.08:13",
                         "links.0.lookahead": "0..6", "links.0.buffer_tokens": [8, 12, 16]}
FAMILY = {"0.5B": 0.004, "1B": 0.008, "3B": 0.014, "8B": 0.022, "70B": 0.1}


def seconds(vary: dict[str, str | list[Value]], num_tokens: int, jobs: int) -> tuple[int, float]:
    """Points and seconds of a sweep."""
    effort = Effort(num_tokens=num_tokens, replications=5, predicted=False)
    made = Sweep(PAIR, PROFILE, Design(axes_of(vary)), effort)
    begun = time.perf_counter()
    run_sweep(made, out=None, workers=Workers(jobs))
    return len(made.design), time.perf_counter() - begun


def rates(number: int) -> dict[str, Any]:
    return {"links.0.acceptance_rate": f"0.05..0.98:{number}"}


def plan_seconds(devices: int) -> tuple[int, float]:
    """Candidates and seconds of a plan for five models."""
    names = list(FAMILY)
    pairs = {f"{a}>{b}": IID(0.9 - 0.05 * (j - i)) for i, a in enumerate(names) for j, b in enumerate(names) if i < j}
    profile = Profile({name: StageLatency(Constant(value)) for name, value in FAMILY.items()}, pairs)
    begun = time.perf_counter()
    found = plan(Catalogue(profile, Limits(devices)))
    return found.num_candidates, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    seconds(rates(50), 100, 1)
    out: dict[str, Any] = {"sweep_8463": seconds(ASKED, 1000, -1), "sweep_100000": seconds(
        {**rates(100), "stages.small.latency": "0.005..0.08:100", "links.0.lookahead": "0..9"}, 1000, -1)}
    out["points"] = [seconds(rates(number), 1000, 1) for number in (500, 1000, 2000, 4000, 8000)]
    out["tokens"] = [(number, seconds(rates(1000), number, 1)[1]) for number in (1000, 5000, 10_000, 20_000, 40_000)]
    out["plans"] = [plan_seconds(devices) for devices in (2, 3, 4)]
    print(json.dumps(out, indent=1))
    if options.figure:
        draw(out, options.figure)


def draw(out: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sweep-speed", "font.size": 11}):
        figure, panels = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
        for axes, name, title in ((panels[0], "points", "1,000 tokens a text"), (panels[1], "tokens", "1,000 points")):
            x, y = np.array(out[name]).T
            slope, start = np.polyfit(x, y, 1)
            axes.plot(x, start + slope * x, color="#999999", linewidth=1, label=f"{1e6 * slope:.3g} µs each")
            axes.plot(x, y, "o", color="#0072B2")
            axes.set(xlabel=name if name == "points" else "tokens a text", title=title, ylim=(0, None), xlim=(0, None))
            axes.legend(frameon=False, loc="upper left")
        panels[0].set_ylabel("seconds, one process")
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
