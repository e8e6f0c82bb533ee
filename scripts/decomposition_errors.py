"""Hold the decomposition of three to five stages against the event simulator on random pipelines.

    python scripts/decomposition_errors.py [--pipelines 300] [--prompts 12] [--figure FILE.svg]

Pipelines are drawn with a seed each: depth, step times, acceptance, lookahead, buffers, windows, price of wide
steps, costs between steps and the neighbour rate.  Times are constant, as the model assumes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from pipespec_model.acceptance import IID
from pipespec_model.agreement import synthetic
from pipespec_model.decomposition import decomposed
from pipespec_model.latency import Table
from pipespec_model.profile import Costs, Profile, StageLatency, pairs
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from simulate.engine import PromptRun

TARGET_S = 0.1
WARM_UP = 20  # tokens of a prompt before times count
NUM_TOKENS = 200


def drawn(seed: int, k: int | None = None, handshake: str = "overlapped") -> tuple[PipelineSpec, Profile]:
    """A random pipeline of 3 to 5 stages, each 1.2 to 6 times as fast as the next."""
    rng = np.random.default_rng([7, seed])
    k = k or int(rng.integers(3, 6))
    seconds = [TARGET_S]
    for _ in range(k - 1):
        seconds.insert(0, seconds[0] / rng.uniform(1.2, 6.0))
    costs = bool(rng.random() < 0.5)
    stages = tuple(StageSpec(name=f"s{i}", model=f"m{i}") for i in range(k))
    links, latency, acceptance = [], {}, {}
    for i in range(k):
        wide = 1 + (rng.uniform(0, 1.5) if rng.random() < 0.5 else 0.0)
        times = [seconds[i]] + [seconds[i] * (wide + 0.005 * w) for w in range(1, 33)]
        latency[f"s{i}"] = StageLatency(Table(tuple(range(1, 34)), tuple(times)))
        if i:
            buffer, window = int(rng.choice([4, 8, 16, 32])), int(rng.choice([4, 8, 16, 32]))
            lookahead = min(buffer, window, int(rng.choice([0, 0, 0, 1, 2, 4, 8])))
            links.append(LinkSpec(lookahead=lookahead, buffer_tokens=buffer, max_window=window))
            acceptance[f"s{i - 1}>s{i}"] = IID(float(rng.uniform(0.3, 0.97)))
    paid = {f"s{i}": Costs(turnaround_s=0.002 * seconds[i], handover_s=0.0005, rollback_s=0.02 * seconds[i])
            for i in range(k)} if costs else {}
    spec = PipelineSpec.from_dict({"strategy": "pipelined", "handshake": handshake,
                                   "stages": [stage.model_dump() for stage in stages],
                                   "links": [link.model_dump() for link in links]})
    return spec, Profile(latency, acceptance=acceptance, costs=paid, neighbour_rate=float(rng.uniform(0.5, 0.95)))


def simulated(spec: PipelineSpec, profile: Profile, num_prompts: int, seed: int = 1) -> tuple[float, float]:
    """Tokens per second once under way, and its standard error over prompts."""
    models = [profile.pair(a, b) for a, b, _ in pairs(spec)]
    names, last, found = [stage.choice_key for stage in spec.stages], len(spec.stages) - 1, []
    for prompt in range(num_prompts):
        made = synthetic(names, models, num_tokens=NUM_TOKENS + 40, seed=seed, prompt=prompt)
        _, steps = PromptRun(spec, profile, made, seed=seed, prompt=prompt, spread=False).run()
        ends = [(s.start_s + s.duration_s, s.position + s.emitted) for s in steps
                if s.stage == last and s.start_s is not None]
        first, final = np.searchsorted([tokens for _, tokens in ends], (WARM_UP, NUM_TOKENS))
        found.append([ends[final][0] - ends[first][0], ends[final][1] - ends[first][1]])
    seconds, tokens = np.array(found).T
    speed = float(tokens.sum() / seconds.sum())
    influence = tokens / tokens.mean() - seconds / seconds.mean()
    return speed, speed * float(influence.std(ddof=1)) / float(np.sqrt(num_prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    rows = []
    for seed in range(args.pipelines):
        spec, profile = drawn(seed)
        found, error = simulated(spec, profile, args.prompts)
        said = decomposed(spec, profile).tokens_per_s
        rows.append({"seed": seed, "stages": len(spec.stages), "simulated": found, "formula": said,
                     "percent": 100 * (said / found - 1), "error": 100 * error / found,
                     "acceptance": np.mean([model.acceptance_rate for model in profile.acceptance.values()])})
        if seed % 20 == 19:
            print(f"{seed + 1} of {args.pipelines}", file=sys.stderr)
    print(told(rows))
    if args.figure:
        draw(rows, args.figure)


def told(rows: list[dict]) -> str:
    """The figures in one paragraph, and the five worst pipelines."""
    percent = np.array([row["percent"] for row in rows])
    lines = [f"{len(rows)} pipelines: median {np.median(abs(percent)):.2f}%, 95th percentile "
             f"{np.percentile(abs(percent), 95):.2f}%, worst {abs(percent).max():.2f}%, mean {percent.mean():+.2f}%; "
             f"standard error of the simulation {np.median([row['error'] for row in rows]):.2f}%"]
    for row in sorted(rows, key=lambda row: -abs(row["percent"]))[:5]:
        lines.append(f"  seed {row['seed']}, {row['stages']} stages: {row['percent']:+.1f}% (± {row['error']:.1f})")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for stages, colour, marker in ((3, "#0072B2", "o"), (4, "#E69F00", "s"), (5, "#009E73", "^")):
        chosen = [row for row in rows if row["stages"] == stages]
        axis.errorbar([row["acceptance"] for row in chosen], [row["percent"] for row in chosen],
                      yerr=[row["error"] for row in chosen], fmt=marker, ms=4, lw=0.6, color=colour,
                      label=f"{stages} stages")
    axis.axhline(0, color="0.3", lw=0.8)
    for level in (-8, 8):
        axis.axhline(level, color="0.6", lw=0.8, ls="--")
    axis.set(xlabel="mean acceptance rate of the links", ylabel="formula against simulation, %")
    axis.legend(frameon=False, ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
