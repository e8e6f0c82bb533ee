"""Step times of the compiled engine: the latency models as runs of numbers, evaluated in the same order of operations,
so that both engines round to the same nanosecond.

A model is ``kind, parameters…, number of factors, factors…`` in ``World.numbers``; factors (``latency.Scaled``) are
applied innermost first.
"""

from __future__ import annotations

import numpy as np

from pipespec_model.latency import Affine, Constant, Empirical, LatencyModel, Roofline, Scaled, Table

from .twin_memory import compiled
from .twin_memory import number_at as at

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


@compiled
def is_constant(numbers: int, place: int) -> bool:
    return at(numbers, place) == CONSTANT


@compiled
def step_seconds(numbers: int, place: int, width: int, context: int, draw: float) -> float:
    """``LatencyModel.sample_s``."""
    kind = int(at(numbers, place))
    a = place + 1
    if kind == CONSTANT:
        seconds, end = at(numbers, a), a + 1
    elif kind == AFFINE:
        at_width = at(numbers, a) if width <= 1 else at(numbers, a + 1) + at(numbers, a + 2) * width
        seconds, end = at_width + at(numbers, a + 3) * context, a + 4
    elif kind == TABLE:
        n, m = int(at(numbers, a)), int(at(numbers, a + 1))
        seconds, end = _table(numbers, a, width, context, draw), a + 4 + 2 * n + m
    elif kind == EMPIRICAL:
        n = int(at(numbers, a))
        seconds, end = _quantile(numbers, a + 1, n, draw), a + 1 + n
    else:
        memory = (at(numbers, a) + at(numbers, a + 4) * context) / at(numbers, a + 2)
        seconds, end = at(numbers, a + 5) + max(memory, width * at(numbers, a + 1) / at(numbers, a + 3)), a + 6
    for i in range(int(at(numbers, end))):
        seconds = at(numbers, end + 1 + i) * seconds
    return seconds


@compiled
def _table(numbers: int, a: int, width: int, context: int, draw: float) -> float:
    n, m = int(at(numbers, a)), int(at(numbers, a + 1))
    w, s = a + 4, a + 4 + n
    last = n - 1
    if n > 1 and width > at(numbers, w + last):
        rise = at(numbers, s + last) - at(numbers, s + last - 1)
        run = at(numbers, w + last) - at(numbers, w + last - 1)
        slope = max(0.0, rise / run)
        at_width = at(numbers, s + last) + slope * (width - at(numbers, w + last))
    elif width <= at(numbers, w):
        at_width = at(numbers, s)
    elif width >= at(numbers, w + last):
        at_width = at(numbers, s + last)
    else:
        j = 0
        while at(numbers, w + j + 1) <= width:
            j += 1
        slope = (at(numbers, s + j + 1) - at(numbers, s + j)) / (at(numbers, w + j + 1) - at(numbers, w + j))
        at_width = slope * (width - at(numbers, w + j)) + at(numbers, s + j)
    mean = max(at_width + at(numbers, a + 2) * (context - at(numbers, a + 3)), 0.0)
    if m == 0:
        return mean
    q = s + n
    i = min(int(draw * (m - 1)), m - 2)
    ratio = at(numbers, q + i) + (at(numbers, q + i + 1) - at(numbers, q + i)) * (draw * (m - 1) - i)
    return mean * ratio


@compiled
def _quantile(numbers: int, first: int, n: int, draw: float) -> float:
    """np.quantile of sorted numbers, linear: a + (b - a) t, from the nearer end."""
    place = draw * (n - 1)
    i = int(np.floor(place))
    t = place - i
    low, high = at(numbers, first + i), at(numbers, first + min(i + 1, n - 1))
    return low + (high - low) * t if t < 0.5 else high - (high - low) * (1 - t)


@compiled
def to_ns(seconds: float) -> int:
    """Halves to even, like Python's round."""
    return int(np.rint(seconds * NS))
