"""Many configurations simulated at once: compiled code runs them all, and figures are computed on whole arrays.

A configuration has replications, a replication texts.  The target alone runs the same texts; where those are made up
its time does not depend on what is varied about the drafters, so it is looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipespec_model.profile import Costs, Profile, StageLatency, recorded
from pipespec_model.spec import PipelineSpec, StageSpec

from .compiled import Cases, encode, run_cases
from .figures import half_width
from .run import replication_prompts
from .totals import Totals

Point = tuple[PipelineSpec, Profile]
FIGURES = ("tokens_per_s", "speedup", "mean_acceptance_length", "ttft_s")
USES = ("busy", "waiting", "wasted")


@dataclass(frozen=True)
class Runs:
    """How often and how long: ``num_prompts`` texts of ``num_tokens`` tokens a replication."""

    num_prompts: int
    num_tokens: int
    seed: int


@dataclass
class _Open:
    """A configuration at work; figures ``[replication]``, uses ``[replication, stage]``."""

    point: Point
    figures: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in (*FIGURES, *USES)})
    num_tokens: int = 0

    def row(self) -> dict[str, Any]:
        found = {name: np.concatenate(parts) for name, parts in self.figures.items()}
        out: dict[str, Any] = {"num_replications": len(found["speedup"]), "num_tokens": self.num_tokens}
        for name in FIGURES:
            out[name] = float(found[name].mean())
            if name in FIGURES[:2]:
                half = half_width(found[name])
                out |= {f"{name}_low": out[name] - half, f"{name}_high": out[name] + half} if half is not None else {
                    f"{name}_low": None, f"{name}_high": None}
        for i in range(len(self.point[0].stages)):
            for name in USES:
                known = found[name][:, i]
                known = known[~np.isnan(known)]
                out[f"stage_{i}_{name}"] = float(known.mean()) if len(known) else None
        return out

    def relative_half_width(self) -> float:
        speeds = np.concatenate(self.figures["tokens_per_s"])
        return (half_width(speeds) or math.inf) / float(speeds.mean())


def simulate_all(points: Sequence[Point], runs: Runs, replications: int, *, narrow: float | None = None,
                 most: int = 0) -> list[dict[str, Any]]:
    """One row of figures a point.

    narrow : go on, at most to ``most`` replications, until a point's 90% interval of the throughput is ± this share
    """
    found = [_Open(point) for point in points]
    at_work, done, wanted = found, 0, max(replications, 2) if narrow else replications
    while at_work:
        _replicate(at_work, runs, range(runs.seed + done, runs.seed + wanted))
        done = wanted
        if narrow is None or done >= most:
            break
        at_work = [item for item in at_work if item.relative_half_width() > narrow]
        wanted = min(most, math.ceil(1.5 * done))
    return [item.row() for item in found]


def _replicate(at_work: Sequence[_Open], runs: Runs, seeds: range) -> None:
    cases = [_cases(item.point, runs, seeds) for item in at_work]
    alone = [_alone_s(item.point, runs, seeds) for item in at_work]
    totals = run_cases([part for parts in cases for part in parts])
    start = 0
    for item, parts, plain_s in zip(at_work, cases, alone, strict=True):
        size = sum(map(len, parts))
        _book(item, totals[start : start + size], plain_s, len(seeds))
        start += size


def _book(item: _Open, found: Totals, plain_s: NDArray[np.float64], replications: int) -> None:
    """Append the figures of these replications; ``plain_s``: seconds of the target alone ``[replication]``."""
    by = (replications, -1)
    seconds, tokens = found.total_s.reshape(by).sum(1), found.num_tokens.reshape(by).sum(1)
    deep = len(item.point[0].stages)

    def of_stages(values: NDArray[Any]) -> NDArray[np.float64]:
        return values[:, :deep].reshape(replications, -1, deep).sum(1).astype(float)

    busy, drafted, cut = of_stages(found.busy_s) / seconds[:, None], of_stages(found.drafted), of_stages(found.cut)
    emitted = of_stages(found.counter("emitted"))[:, -1]
    figures = {
        "tokens_per_s": tokens / seconds, "speedup": plain_s / seconds,
        "mean_acceptance_length": emitted / found.target_steps.reshape(by).sum(1),
        "ttft_s": found.ttft_s.reshape(by).mean(1), "busy": busy, "waiting": np.maximum(0.0, 1 - busy),
        "wasted": np.divide(cut, drafted, out=np.full_like(cut, np.nan), where=drafted > 0)}
    for name, values in figures.items():
        item.figures[name].append(values)
    item.num_tokens = int(tokens[0])


# -- texts, and the target alone on them -----------------------------------------------------------


def _cases(point: Point, runs: Runs, seeds: Iterable[int]) -> list[Cases]:
    spec, profile = point
    if recorded(profile, spec):
        return [encode(spec, profile, num_prompts=1, num_tokens=1, seeds=(seed,), agreements=replication_prompts(
            spec, profile, num_prompts=runs.num_prompts, num_tokens=runs.num_tokens, seed=seed)) for seed in seeds]
    return [encode(spec, profile, num_prompts=runs.num_prompts, num_tokens=runs.num_tokens, seeds=tuple(seeds))]


def _alone_s(point: Point, runs: Runs, seeds: range) -> NDArray[np.float64]:
    """Seconds of the target alone ``[replication]``."""
    spec, profile = point
    target = PipelineSpec.alone(spec.target)
    if recorded(profile, spec):
        texts = [[text.select([spec.target.choice_key]) for text in replication_prompts(
            spec, profile, num_prompts=runs.num_prompts, num_tokens=runs.num_tokens, seed=seed)] for seed in seeds]
        return _seconds([encode(target, profile, num_prompts=1, num_tokens=1, seeds=(seed,), agreements=prompts)
                         for seed, prompts in zip(seeds, texts, strict=True)], len(seeds))
    stage = spec.target
    return _made_up_alone_s(stage, profile.stage_latency(stage), profile.stage_costs(stage, "autoregressive"),
                            profile.slowness_of(stage), (runs, seeds))


@lru_cache(maxsize=4096)
def _made_up_alone_s(stage: StageSpec, latency: StageLatency, costs: Costs, slowness: tuple[float, ...],
                     what: tuple[Runs, range]) -> NDArray[np.float64]:
    runs, seeds = what
    profile = Profile({stage.time_key: latency}, costs={"*": costs}, slowness={stage.time_key: slowness})
    cases = _cases((PipelineSpec.alone(stage), profile), runs, seeds)
    return _seconds(cases, len(seeds))


def _seconds(cases: list[Cases], replications: int) -> NDArray[np.float64]:
    return run_cases(cases).total_s.reshape(replications, -1).sum(1)
