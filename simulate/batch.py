"""Many configurations simulated at once: compiled code runs them all, and figures are computed on whole arrays.

A configuration has replications, a replication texts.  The target alone runs the same texts; where those are made up
its time does not depend on what is varied about the drafters, so it is looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipespec_model.profile import Costs, Profile, StageLatency, recorded
from pipespec_model.spec import PipelineSpec, StageSpec

from .compiled import Cases, encode, run_cases
from .encode import MOST_STAGES
from .figures import half_width
from .run import replication_prompts
from .totals import Totals

Point = tuple[PipelineSpec, Profile]
Figures = dict[str, NDArray[Any]]
"""By name; the first axis is replications."""
FIGURES = ("tokens_per_s", "speedup", "mean_acceptance_length", "ttft_s")
USES = ("busy", "waiting", "wasted")


@dataclass(frozen=True)
class Runs:
    """How often and how long: ``num_prompts`` texts of ``num_tokens`` tokens a replication."""

    num_prompts: int
    num_tokens: int
    seed: int


def simulate_all(points: Sequence[Point], runs: Runs, replications: int, *, narrow: float | None = None,
                 most: int = 0) -> list[dict[str, Any]]:
    """One row of figures a point.

    narrow : go on, at most to ``most`` replications, until a point's 90% interval of the throughput is ± this share
    """
    found: list[Figures] = [{} for _ in points]
    at_work, done, wanted = list(range(len(points))), 0, max(replications, 2) if narrow else replications
    while at_work:
        made = _replicate([points[i] for i in at_work], runs, range(runs.seed + done, runs.seed + wanted))
        for i, more in zip(at_work, made, strict=True):
            found[i] = {name: np.concatenate([found[i][name], new]) for name, new in more.items()} if found[i] else more
        done = wanted
        if narrow is None or done >= most:
            break
        at_work = [i for i in at_work if _relative_half_width(found[i]["tokens_per_s"]) > narrow]
        wanted = min(most, math.ceil(1.5 * done))
    rows: list[dict[str, Any]] = [{} for _ in points]
    for chosen in _alike([len(figures["speedup"]) for figures in found]):
        for i, row in zip(chosen, _rows([found[i] for i in chosen]), strict=True):
            rows[i] = row
    for row, (spec, _) in zip(rows, points, strict=True):
        for i in range(len(spec.stages), MOST_STAGES):
            for name in USES:
                row.pop(f"stage_{i}_{name}", None)
    return rows


def _replicate(points: Sequence[Point], runs: Runs, seeds: range) -> list[Figures]:
    cases = [_cases(point, runs, seeds) for point in points]
    alone = np.array([_alone_s(point, runs, seeds) for point in points])
    totals = run_cases([part for parts in cases for part in parts])
    sizes = np.array([sum(map(len, parts)) for parts in cases])
    first = np.cumsum(sizes) - sizes
    out: list[Figures] = [{} for _ in points]
    for chosen in _alike(sizes.tolist()):
        mine = (first[chosen][:, None] + np.arange(sizes[chosen[0]])).ravel()
        found = _figures(totals[mine], alone[chosen])
        for place, i in enumerate(chosen):
            out[i] = {name: values[place] for name, values in found.items()}
    return out


def _figures(found: Totals, alone_s: NDArray[np.float64]) -> Figures:
    """Of points with as many texts each: ``[point, replication]``, uses ``[point, replication, stage]``.

    alone_s : of the target alone ``[point, replication]``
    """
    by = (*alone_s.shape, -1)
    seconds, tokens = found.total_s.reshape(by).sum(2), found.num_tokens.reshape(by).sum(2)
    target = found.counter("emitted")[np.arange(len(found)), found.num_stages - 1]

    def of_stages(values: NDArray[Any]) -> NDArray[np.float64]:
        return values.reshape(*by, values.shape[1]).sum(2).astype(float)

    busy, drafted, cut = of_stages(found.busy_s) / seconds[..., None], of_stages(found.drafted), of_stages(found.cut)
    return {
        "tokens_per_s": tokens / seconds, "speedup": alone_s / seconds, "num_tokens": tokens,
        "mean_acceptance_length": target.reshape(by).sum(2) / found.target_steps.reshape(by).sum(2),
        "ttft_s": found.ttft_s.reshape(by).mean(2), "busy": busy, "waiting": np.maximum(0.0, 1 - busy),
        "wasted": np.divide(cut, drafted, out=np.full_like(cut, np.nan), where=drafted > 0)}


def _rows(found: Sequence[Figures]) -> list[dict[str, Any]]:
    """Rows of points with as many replications each."""
    columns: dict[str, list[Any]] = {
        "num_replications": [len(figures["speedup"]) for figures in found],
        "num_tokens": [int(figures["num_tokens"][0]) for figures in found]}
    for name in FIGURES:
        values = np.stack([figures[name] for figures in found])
        middle = columns[name] = values.mean(1).tolist()
        if name in FIGURES[:2]:
            half = half_width(values)
            low, high = ([None] * len(found),) * 2 if half is None else (
                (values.mean(1) + sign * half).tolist() for sign in (-1, 1))
            columns |= {name: middle, f"{name}_low": low, f"{name}_high": high}
    deep = max(figures["busy"].shape[1] for figures in found)
    for name in USES:
        values = np.stack([np.pad(figures[name], [(0, 0), (0, deep - figures[name].shape[1])]) for figures in found]
                          if any(figures[name].shape[1] < deep for figures in found)
                          else [figures[name] for figures in found])
        known = ~np.isnan(values)
        sums, counts = np.where(known, values, 0.0).sum(1), known.sum(1)
        means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        for i in range(deep):
            columns[f"stage_{i}_{name}"] = [mean if count else None for mean, count in zip(
                means[:, i].tolist(), counts[:, i].tolist(), strict=True)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _relative_half_width(speeds: NDArray[np.float64]) -> float:
    return float((half_width(speeds) or math.inf) / speeds.mean())


def _alike(keys: Sequence[int]) -> list[list[int]]:
    """The places of each key."""
    found: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return list(found.values())


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
