"""Step times of the compiled engine: the latency models as runs of numbers, evaluated in the same order of operations,
so that both engines round to the same nanosecond.

A model is ``kind, parameters…, number of factors, factors…`` in ``World.numbers``; factors (``latency.Scaled``) are
applied innermost first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from pipespec_model.latency import Affine, Constant, Empirical, LatencyModel, Roofline, Scaled, Table

NS = 1e9
CONSTANT, AFFINE, TABLE, EMPIRICAL, ROOFLINE = range(5)


def encode_latency(model: LatencyModel, spread: bool) -> list[float] | None:
    """The numbers of a model; None of one that is not known here.  Without ``spread`` its means."""
    factors: list[float] = []
    while isinstance(model, Scaled):
        factors.insert(0, model.factor)
        model = model.model
    if isinstance(model, Constant):
        head = [CONSTANT, model.seconds]
    elif isinstance(model, Affine):
        head = [AFFINE, model.one_s, model.base_s, model.per_token_s, model.per_context_s]
    elif isinstance(model, Table):
        quantiles = model.quantiles if spread else ()
        quantiles *= 2 if len(quantiles) == 1 else 1
        head = [TABLE, len(model.widths), len(quantiles), model.per_context_s, model.at_context, *model.widths,
                *model.seconds, *quantiles]
    elif isinstance(model, Empirical):
        if spread:
            head = [EMPIRICAL, len(model.observed_s), *sorted(model.observed_s)]
        else:
            head = [CONSTANT, model.mean_s(1, 0)]
    elif isinstance(model, Roofline):
        head = [ROOFLINE, model.weight_bytes, model.flops_per_token, model.bandwidth_bytes_per_s, model.flops_per_s,
                model.cache_bytes_per_token, model.overhead_s]
    else:
        return None
    return [*head, len(factors), *factors]


@njit
def is_constant(numbers: Any, place: int) -> bool:
    return numbers[place] == CONSTANT


@njit
def step_seconds(numbers: Any, place: int, width: int, context: int, draw: float) -> float:
    """``LatencyModel.sample_s``."""
    kind = int(numbers[place])
    a = place + 1
    if kind == CONSTANT:
        seconds, end = numbers[a], a + 1
    elif kind == AFFINE:
        at_width = numbers[a] if width <= 1 else numbers[a + 1] + numbers[a + 2] * width
        seconds, end = at_width + numbers[a + 3] * context, a + 4
    elif kind == TABLE:
        n, m = int(numbers[a]), int(numbers[a + 1])
        seconds, end = _table(numbers, a, width, context, draw), a + 4 + 2 * n + m
    elif kind == EMPIRICAL:
        n = int(numbers[a])
        seconds, end = _quantile(numbers, a + 1, n, draw), a + 1 + n
    else:
        memory = (numbers[a] + numbers[a + 4] * context) / numbers[a + 2]
        seconds, end = numbers[a + 5] + max(memory, width * numbers[a + 1] / numbers[a + 3]), a + 6
    for i in range(int(numbers[end])):
        seconds = numbers[end + 1 + i] * seconds
    return seconds


@njit
def _table(numbers: Any, a: int, width: int, context: int, draw: float) -> float:
    n, m = int(numbers[a]), int(numbers[a + 1])
    w, s = a + 4, a + 4 + n
    last = n - 1
    if n > 1 and width > numbers[w + last]:
        slope = max(0.0, (numbers[s + last] - numbers[s + last - 1]) / (numbers[w + last] - numbers[w + last - 1]))
        at_width = numbers[s + last] + slope * (width - numbers[w + last])
    elif width <= numbers[w]:
        at_width = numbers[s]
    elif width >= numbers[w + last]:
        at_width = numbers[s + last]
    else:
        j = 0
        while numbers[w + j + 1] <= width:
            j += 1
        slope = (numbers[s + j + 1] - numbers[s + j]) / (numbers[w + j + 1] - numbers[w + j])
        at_width = slope * (width - numbers[w + j]) + numbers[s + j]
    mean = max(at_width + numbers[a + 2] * (context - numbers[a + 3]), 0.0)
    if m == 0:
        return mean
    q = s + n
    i = min(int(draw * (m - 1)), m - 2)
    ratio = numbers[q + i] + (numbers[q + i + 1] - numbers[q + i]) * (draw * (m - 1) - i)
    return mean * ratio


@njit
def _quantile(numbers: Any, first: int, n: int, draw: float) -> float:
    """np.quantile of sorted numbers, linear: a + (b - a) t, from the nearer end."""
    place = draw * (n - 1)
    i = int(np.floor(place))
    t = place - i
    low, high = numbers[first + i], numbers[first + min(i + 1, n - 1)]
    return low + (high - low) * t if t < 0.5 else high - (high - low) * (1 - t)


@njit
def to_ns(seconds: float) -> int:
    """Halves to even, like Python's round."""
    return int(np.rint(seconds * NS))
