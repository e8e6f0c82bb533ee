"""Latency models: seconds for a step of ``width`` tokens at ``context`` tokens.

Each owns its mean, its spread and its sampler.  The sampler maps a uniform to a time, so an engine
that asks for the same uniform gets the same time.  Times here are those of a stage computing
*alone*; what stages cost each other is the profile's contention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import InputError


class LatencyModel(Protocol):
    def mean_s(self, width: int, context: int) -> float:
        """Mean seconds of a step."""
        ...

    def sample_s(self, width: int, context: int, draw: float) -> float:
        """The ``draw``-quantile of the step time."""
        ...

    def to_dict(self) -> dict[str, Any]: ...


def non_negative(name: str, value: object) -> None:
    """Raise InputError unless ``value`` is a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(name, "must be a finite number >= 0", value)


@dataclass(frozen=True)
class Constant:
    """The same time for every step."""

    seconds: float

    def __post_init__(self) -> None:
        non_negative("seconds", self.seconds)

    def mean_s(self, width: int, context: int) -> float:
        return self.seconds

    def sample_s(self, width: int, context: int, draw: float) -> float:
        return self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "constant", "seconds": self.seconds}


@dataclass(frozen=True)
class Affine:
    """Affine in width from 2 up, with its own value at width 1 (quantised kernels jump there).

    >>> Affine(one_s=0.12, base_s=0.425, per_token_s=0.001).mean_s(2, 0)
    0.427
    """

    one_s: float
    base_s: float
    per_token_s: float
    per_context_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("one_s", "base_s", "per_token_s", "per_context_s"):
            non_negative(name, getattr(self, name))

    def mean_s(self, width: int, context: int) -> float:
        at_width = self.one_s if width <= 1 else self.base_s + self.per_token_s * width
        return at_width + self.per_context_s * context

    def sample_s(self, width: int, context: int, draw: float) -> float:
        return self.mean_s(width, context)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "affine", "one_s": self.one_s, "base_s": self.base_s, "per_token_s": self.per_token_s,
                "per_context_s": self.per_context_s}


@dataclass(frozen=True)
class Table:
    """Measured means by width, linear between widths and beyond the last, affine in context.

    widths : increasing, tokens
    seconds : mean step time at ``at_context`` tokens of context, one a width
    quantiles : step time / its mean at evenly spaced probabilities (0 … 1); empty = no spread
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    per_context_s: float = 0.0
    at_context: int = 0
    quantiles: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.seconds):
            raise InputError("table", "must have as many seconds as widths, and at least one",
                             f"{len(self.widths)} widths, {len(self.seconds)} seconds")
        if any(b <= a for a, b in zip(self.widths, self.widths[1:], strict=False)):
            raise InputError("table.widths", "must increase", self.widths)
        for seconds in (*self.seconds, *self.quantiles, self.per_context_s):
            non_negative("table", seconds)

    def mean_s(self, width: int, context: int) -> float:
        w, s = self.widths, self.seconds
        if len(w) > 1 and width > w[-1]:
            slope = max(0.0, (s[-1] - s[-2]) / (w[-1] - w[-2]))
            at_width = s[-1] + slope * (width - w[-1])
        else:
            at_width = float(np.interp(width, w, s))
        return max(at_width + self.per_context_s * (context - self.at_context), 0.0)

    def sample_s(self, width: int, context: int, draw: float) -> float:
        mean = self.mean_s(width, context)
        if not self.quantiles:
            return mean
        n = len(self.quantiles) - 1
        i = min(int(draw * n), n - 1)
        ratio = self.quantiles[i] + (self.quantiles[i + 1] - self.quantiles[i]) * (draw * n - i)
        return mean * ratio

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "table", "widths": list(self.widths), "seconds": list(self.seconds),
                "per_context_s": self.per_context_s, "at_context": self.at_context,
                "quantiles": list(self.quantiles)}


@dataclass(frozen=True)
class Empirical:
    """Observed step times, whatever the width; the sampler reads their quantiles."""

    observed_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.observed_s:
            raise InputError("observed_s", "must hold at least one time")
        for seconds in self.observed_s:
            non_negative("observed_s", seconds)

    def mean_s(self, width: int, context: int) -> float:
        return float(np.mean(self.observed_s))

    def sample_s(self, width: int, context: int, draw: float) -> float:
        return float(np.quantile(self.observed_s, draw))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "empirical", "observed_s": list(self.observed_s)}


@dataclass(frozen=True)
class Roofline:
    """An ESTIMATE from a model's size and a device's peaks: the largest of the time to read the weights and
    cache, the time to multiply, and the host's time to start kernels.  Measure instead (docs/estimates.md).

    weight_bytes, cache_bytes_per_token : read every step, the latter for each token of context
    flops_per_token : about 2 per weight
    flops_per_cached_token : attention's, by token and token of context
    overhead_s : added to every step; launch_s : no step is shorter
    """

    weight_bytes: float
    flops_per_token: float
    bandwidth_bytes_per_s: float
    flops_per_s: float
    cache_bytes_per_token: float = 0.0
    overhead_s: float = 0.0
    flops_per_cached_token: float = 0.0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            non_negative(name, getattr(self, name))
        for name in ("bandwidth_bytes_per_s", "flops_per_s"):
            if not getattr(self, name) > 0:
                raise InputError(name, "must be > 0", getattr(self, name))

    def mean_s(self, width: int, context: int) -> float:
        memory_s = (self.weight_bytes + self.cache_bytes_per_token * context) / self.bandwidth_bytes_per_s
        flops = width * (self.flops_per_token + self.flops_per_cached_token * context)
        return self.overhead_s + max(memory_s, flops / self.flops_per_s, self.launch_s)

    def sample_s(self, width: int, context: int, draw: float) -> float:
        return self.mean_s(width, context)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "roofline", **self.__dict__}


@dataclass(frozen=True)
class Scaled:
    """Another model's times, ``factor`` times as long: what if this stage were faster?"""

    model: LatencyModel
    factor: float

    def __post_init__(self) -> None:
        non_negative("factor", self.factor)

    def mean_s(self, width: int, context: int) -> float:
        return self.factor * self.model.mean_s(width, context)

    def sample_s(self, width: int, context: int, draw: float) -> float:
        return self.factor * self.model.sample_s(width, context, draw)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "scaled", "model": self.model.to_dict(), "factor": self.factor}


def latency_from_dict(data: dict[str, Any]) -> LatencyModel:
    """The inverse of ``to_dict``; raises InputError for an unknown kind or key."""
    kinds = {"constant": Constant, "affine": Affine, "table": Table, "empirical": Empirical, "roofline": Roofline,
             "scaled": Scaled}
    rest: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    kind = rest.pop("kind", None)
    if kind not in kinds:
        raise InputError("latency.kind", f"must be one of {', '.join(kinds)}", kind)
    if isinstance(data.get("model"), dict):
        rest["model"] = latency_from_dict(data["model"])
    try:
        return kinds[kind](**rest)
    except TypeError as error:
        raise InputError(f"latency ({kind})", str(error).split(") ", 1)[-1]) from None


# A step slower than this times the lower quartile was disturbed by something else on the machine.
DISTURBED = 1.12


def undisturbed(values: Sequence[float] | NDArray[Any]) -> float:
    """Mean of the values that are not much above the lower quartile.

    On a shared machine a neighbour can slow a core by 1.4x for seconds at a time, so the samples of
    one quantity fall into two heaps.  A mean would measure the neighbour, and a median flips between
    the heaps; this is the mean of the fast heap, as long as that holds a quarter of the samples.

    >>> undisturbed([10.0, 10.0, 10.0, 14.0, 15.0, 10.0])
    10.0
    """
    found = np.asarray(values, dtype=float)
    return float(found[found <= DISTURBED * np.quantile(found, 0.25)].mean())


@dataclass(frozen=True)
class Observed:
    """Step times as measured, one entry a step.  Steps of one ``block`` were taken within a second or
    so of each other, with the machine at one speed."""

    widths: NDArray[Any]
    contexts: NDArray[Any]
    seconds: NDArray[Any]
    blocks: NDArray[Any]


def slowness(found: Observed) -> dict[Any, float]:
    """By block, how many times slower than undisturbed the machine was.

    Log time is a value of the width plus a value of the block, found by turns of medians (Tukey's
    median polish): the widths within a block share its disturbance, so few samples of a width suffice.
    """
    log_s, widths, blocks = np.log(found.seconds), found.widths, found.blocks
    by_block = np.zeros(len(log_s))
    for _ in range(10):
        by_width = _medians(log_s - by_block, widths)
        by_block = _medians(log_s - by_width, blocks)
    level = np.log(undisturbed(np.exp(log_s - by_width)))
    return {block: float(np.exp(by_block[blocks == block][0] - level)) for block in np.unique(blocks)}


def _medians(values: NDArray[Any], groups: NDArray[Any]) -> NDArray[Any]:
    """Each entry replaced by its group's median."""
    out = np.empty(len(values))
    for group in np.unique(groups):
        out[groups == group] = np.median(values[groups == group])
    return out


def fit_table(found: Observed, *, num_quantiles: int = 33) -> tuple[Table, dict[Any, float]]:
    """A table of undisturbed step times: one value a width, and one common slope in context.

    Returns
    -------
    Table whose sampler has the spread of the undisturbed steps and, as its mean, the table's value;
    and the slowness of each block.
    """
    w, c, t = found.widths, found.contexts.astype(float), found.seconds
    levels = np.unique(w)
    slope = max(0.0, _theil_sen(w, c, t))
    at = float(c.mean())
    # Noise must not turn into a step that costs nothing at an empty cache.
    slope = min(slope, 0.25 * min(float(np.quantile(t[w == x], 0.25)) for x in levels) / at) if at > 0 else 0.0
    flat = t - slope * (c - at)
    slow = slowness(Observed(w, c, flat, found.blocks))
    clean = flat / np.array([slow[block] for block in found.blocks])
    table = Table(tuple(int(x) for x in levels), tuple(float(np.median(clean[w == x])) for x in levels), slope,
                  round(at))
    ratios = t / np.array([table.mean_s(int(x), int(y)) for x, y in zip(w, c, strict=True)])
    quantiles = np.quantile(ratios[ratios <= max(DISTURBED, ratios.min())], np.linspace(0, 1, num_quantiles))
    area = float(np.trapezoid(quantiles, dx=1 / (num_quantiles - 1)))
    return Table(table.widths, table.seconds, slope, table.at_context, tuple((quantiles / area).tolist())), slow


def fit_line(widths: Sequence[int], seconds: Sequence[float]) -> Table:
    """Times that are affine in width, from one token up: of prefills, whose widths all differ."""
    w, t = np.asarray(widths, dtype=float), np.asarray(seconds)
    first, second = np.triu_indices(len(w), k=1)
    apart = w[first] != w[second]
    slopes = ((t[first] - t[second]) / np.where(apart, w[first] - w[second], 1.0))[apart]
    # A line that falls, or that is below nothing at one token, is noise.
    slope = min(max(0.0, float(np.median(slopes))), float((t / w).min())) if len(slopes) else 0.0
    base = float(np.median(t - slope * w))
    ends = (1, max(2, int(w.max())))
    return Table(ends, tuple(base + slope * end for end in ends))


def _theil_sen(w: NDArray[Any], c: NDArray[Any], t: NDArray[Any]) -> float:
    """Median slope of time in context over pairs of steps of one width."""
    slopes: list[float] = []
    for level in np.unique(w):
        x, y = c[w == level], t[w == level]
        first, second = np.triu_indices(len(x), k=1)
        apart = np.abs(x[first] - x[second]) >= 16
        if apart.any():
            found = (y[first] - y[second])[apart] / (x[first] - x[second])[apart]
            slopes += found[:: max(1, len(found) // 2000)].tolist()
    return float(np.median(slopes)) if slopes else 0.0
