"""When prompts come, and how long they are: at random (Poisson), or as in a trace file.

A trace is CSV with a header; ``arrived_at``, ``num_prefill_tokens`` and ``num_decode_tokens`` name its columns, or
``Timestamp``, ``Request tokens`` and ``Response tokens`` as in BurstGPT (Wang et al. 2024); times in seconds, other
columns are left alone.  Of one seed, arrivals at two rates are the same ones, farther apart or closer together.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path

from pipespec_model.errors import InputError
from pipespec_model.uniforms import ARRIVAL, uniform

COLUMNS = (("arrived_at", "Timestamp"), ("num_prefill_tokens", "Request tokens"),
           ("num_decode_tokens", "Response tokens"))


@dataclass(frozen=True)
class Request:
    """One prompt of a trace.

    arrived_s : since the trace began
    num_prefill_tokens : of the prompt, >= 1; num_decode_tokens : of the answer, >= 1
    """

    arrived_s: float
    num_prefill_tokens: int
    num_decode_tokens: int


def poisson_s(rate: float, number: int, *, seed: int) -> list[float]:
    """Arrival times in seconds of ``number`` prompts that come independently, ``rate`` a second on average.

    >>> [b / a for a, b in zip(poisson_s(1.0, 2, seed=3), poisson_s(0.5, 2, seed=3))]
    [2.0, 2.0]
    """
    positive_rate(rate)
    times, now = [], 0.0
    for i in range(number):
        now -= math.log1p(-uniform(seed, i, 0, ARRIVAL))
        times.append(now / rate)
    return times


def positive_rate(rate: float) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise InputError("--rate", "must be a number > 0 of prompts a second", rate)


def rate_of(requests: list[Request]) -> float:
    """Prompts a second, from the first to the last arrival."""
    span = requests[-1].arrived_s - requests[0].arrived_s
    if len(requests) < 2 or span <= 0:
        raise InputError("--arrivals", "must hold at least two prompts that come at different times", len(requests))
    return (len(requests) - 1) / span


def at_rate(requests: list[Request], rate: float) -> list[Request]:
    """The same prompts in the same rhythm, stretched or squeezed to ``rate`` a second."""
    positive_rate(rate)
    factor = rate_of(requests) / rate
    return [replace(item, arrived_s=item.arrived_s * factor) for item in requests]


def load_arrivals(path: str | Path) -> list[Request]:
    """Prompts of a trace file in order of arrival, the first at 0 s.  Raises InputError with line and column."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = _columns(path, reader.fieldnames or [])
            found = [_request(f"{path}:{reader.line_num}", row, names) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), f"must be a readable CSV file ({error})") from None
    if not found:
        raise InputError(str(path), "must hold at least one prompt")
    found.sort(key=lambda item: item.arrived_s)
    return [replace(item, arrived_s=item.arrived_s - found[0].arrived_s) for item in found]


def _columns(path: Path, header: object) -> list[str]:
    names = list(header) if isinstance(header, list | tuple) else []
    chosen = [next((name for name in names if name.strip() in known), None) for known in COLUMNS]
    for name, known in zip(chosen, COLUMNS, strict=True):
        if name is None:
            raise InputError(f"{path}:1", f"must name a column {known[0]} (or {known[1]})", ", ".join(names))
    return [name for name in chosen if name is not None]


def _request(where: str, row: dict[str, str], names: list[str]) -> Request:
    values = [_number(where, name, row[name]) for name in names]
    for name, value in zip(names[1:], values[1:], strict=True):
        if value < 1 or value != int(value):
            raise InputError(f"{where}: {name}", "must be a whole number >= 1", row[name])
    return Request(values[0], int(values[1]), int(values[2]))


def _number(where: str, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise InputError(f"{where}: {name}", "must be a number", text or "") from None
    if not math.isfinite(value):
        raise InputError(f"{where}: {name}", "must be a finite number", text)
    return value
