"""Devices and runtimes for estimates: a table of data-sheet figures, each row with its source.

Idle power and prices are nobody's constant, so the table has none: they are the user's to give.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from .errors import InputError
from .latency import non_negative
from .spec import read_document

_TABLE = files(__package__) / "devices.json"


@dataclass(frozen=True)
class Device:
    """Peaks of one device.

    bandwidth_bytes_per_s : of its memory
    flops_per_s : dense, in the type that weights are multiplied in
    power_w : at most, as the maker states it; idle_w, price_per_hour : None until the user gives them
    """

    label: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    source: str
    power_w: float | None = None
    idle_w: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth_bytes_per_s", "flops_per_s", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise InputError(f"device.{name}", "must be > 0", getattr(self, name))
        for name in ("power_w", "idle_w", "price_per_hour"):
            if getattr(self, name) is not None:
                non_negative(f"device.{name}", getattr(self, name))


@dataclass(frozen=True)
class Runtime:
    """What a way of running a model loses against the peaks.

    bandwidth_share : of the peak that reading weights reaches, in (0, 1]
    layer_s : added by every layer, between its kernels
    launch_layer_s : that the host takes to start a layer's kernels; it works ahead, so the longer of this and
        the device's own time counts
    """

    bandwidth_share: float
    layer_s: float
    launch_layer_s: float
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_share <= 1:
            raise InputError("runtime.bandwidth_share", "must be in (0, 1]", self.bandwidth_share)
        non_negative("runtime.layer_s", self.layer_s)
        non_negative("runtime.launch_layer_s", self.launch_layer_s)


Row = TypeVar("Row", Device, Runtime)


def device(name: str) -> Device:
    """A row of the table, or of a JSON or YAML file with the same keys.

    >>> device("h200").memory_bytes
    141000000000.0
    """
    return _row(name, "devices", Device)


def runtime(name: str) -> Runtime:
    """As ``device``: ``ideal``, ``compiled``, ``eager``, or a file."""
    return _row(name, "runtimes", Runtime)


def _row(name: str, table: str, kind: type[Row]) -> Row:
    rows = read_document(Path(str(_TABLE)))[table]
    if name in rows:
        return kind(**rows[name])
    if not Path(name).is_file():
        raise InputError(f"--{table[:-1]}", f"must be one of {', '.join(rows)}, or a file with the same keys", name)
    data: Any = read_document(name)
    known = {item.name for item in fields(kind)}
    if not isinstance(data, dict) or set(data) - known:
        raise InputError(name, f"must hold a mapping with keys among {', '.join(sorted(known))}")
    try:
        return kind(**data)
    except TypeError as error:
        raise InputError(name, f"cannot be read ({str(error).split(') ', 1)[-1]})") from None
