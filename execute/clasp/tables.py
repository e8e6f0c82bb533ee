"""The study's figures from its parts' entries, with intervals: percentile bootstraps over prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from .probes import CACHES

KINDS = ("dp", "hindsight", "fixed", "uniform", "random")
Interval = tuple[float, float]


def overlap(a: Sequence[int], b: Sequence[int]) -> float:
    """Jaccard index."""
    return len(set(a) & set(b)) / len(set(a) | set(b))


def persistence(chosen_sets: Sequence[dict[str, Any]], skipped: int) -> dict[str, list[tuple[str, float]]]:
    """Overlaps of pairs of sets, by token distance and between prompts; each with the prompt it counts for."""
    by_prompt: dict[str, list[tuple[int, list[int]]]] = {}
    for entry in chosen_sets:
        if entry["skipped"] == skipped:
            by_prompt.setdefault(entry["prompt"], []).append((entry["position"], entry["layers"]))
    out: dict[str, list[tuple[str, float]]] = {}
    for name, found in by_prompt.items():
        for (p, a), (q, b) in combinations(found, 2):
            out.setdefault(_distance(q - p), []).append((name, overlap(a, b)))
    for a_name, b_name in combinations(by_prompt, 2):
        pairs = zip(by_prompt[a_name][::4], by_prompt[b_name][::4], strict=False)
        out.setdefault("other prompt", []).extend((a_name, overlap(a, b)) for (_, a), (_, b) in pairs)
    return out


def _distance(tokens: int) -> str:
    return next((f"{low}" if low == high else f"{low}–{high}" for low, high in _BINS if low <= tokens <= high), "64+")


_BINS = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63))
DISTANCES = (*(_distance(low) for low, _ in _BINS), "other prompt")


def over_prompts(values: Sequence[tuple[str, float, float]], *, draws: int = 2000) -> tuple[float, Interval]:
    """Ratio of sums and its 90% interval, prompts drawn again.

    values : (prompt, top, bottom)
    """
    names = sorted({name for name, _, _ in values})
    sums = np.zeros((len(names), 2))
    for name, top, bottom in values:
        sums[names.index(name)] += (top, bottom)
    pick = np.random.default_rng(0).integers(0, len(names), size=(draws, len(names)))
    drawn = sums[pick].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.05, 0.95])
    total = sums.sum(0)
    return float(total[0] / total[1]), (float(low), float(high))


def cache_table(entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By number of layers: agreement and its interval for each kind of cache."""
    for count in sorted({entry["skipped"] for entry in entries}):
        row: dict[str, Any] = {"skipped": count}
        for kind in CACHES:
            mine = [entry for entry in entries if entry["skipped"] == count and entry["cache"] == kind]
            row[kind] = over_prompts([(e["prompt"], e["num_right"], e["num"]) for e in mine])
        yield row


def agreement_table(entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By number of layers and kind: agreement and cosine with their intervals."""
    for count in sorted({entry["skipped"] for entry in entries}):
        for kind in KINDS:
            mine = [entry for entry in entries if entry["skipped"] == count and entry["kind"] == kind]
            rate, interval = over_prompts([(e["prompt"], e["num_right"], e["num"]) for e in mine])
            near, near_interval = over_prompts([(e["prompt"], e["cosine"] * e["num"], e["num"]) for e in mine])
            yield {"skipped": count, "kind": kind, "agreement": rate, "interval": interval, "cosine": near,
                   "cosine_interval": near_interval}
