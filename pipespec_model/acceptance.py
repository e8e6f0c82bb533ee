"""Acceptance models: whether a draft is agreed to, given that all before it in the window were.

Each model owns its moments *and* its sampler, so that closed forms and engines cannot drift apart.
A sampler turns given uniforms into bits; it draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import InputError


class AcceptanceModel(Protocol):
    """A drafter's agreement with its verifier along the target's path."""

    def bits(self, draws: Sequence[float]) -> list[bool]:
        """One bit a position, from one uniform in [0, 1) a position."""
        ...

    def mean_emitted(self, window: int) -> float:
        """Mean tokens emitted by a verification of ``window`` drafts that starts just after a
        rejection, correction or bonus included."""
        ...

    def to_dict(self) -> dict[str, Any]: ...


def _rate(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise InputError(name, "must be in [0, 1]", value)
    return float(value)


@dataclass(frozen=True)
class IID:
    """Every draft is accepted with the same probability, whatever came before.

    >>> IID(0.5).mean_emitted(2)
    1.75
    """

    acceptance_rate: float

    def __post_init__(self) -> None:
        _rate("acceptance_rate", self.acceptance_rate)

    def bits(self, draws: Sequence[float]) -> list[bool]:
        return [draw < self.acceptance_rate for draw in draws]

    def mean_emitted(self, window: int) -> float:
        return _emitted([self.acceptance_rate] * window)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "iid", "acceptance_rate": self.acceptance_rate}


@dataclass(frozen=True)
class Markov:
    """Bursts: one probability after an agreement, another after a disagreement.

    The first position counts as following a disagreement.
    """

    after_accept_rate: float
    after_reject_rate: float

    def __post_init__(self) -> None:
        _rate("after_accept_rate", self.after_accept_rate)
        _rate("after_reject_rate", self.after_reject_rate)

    def bits(self, draws: Sequence[float]) -> list[bool]:
        out: list[bool] = []
        last = False
        for draw in draws:
            last = draw < (self.after_accept_rate if last else self.after_reject_rate)
            out.append(last)
        return out

    def mean_emitted(self, window: int) -> float:
        return _emitted([self.after_reject_rate] + [self.after_accept_rate] * (window - 1)) if window else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Long-run share of ones."""
        leave = 1 - self.after_accept_rate
        enter = self.after_reject_rate
        return enter / (enter + leave) if enter + leave else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "markov", "after_accept_rate": self.after_accept_rate,
                "after_reject_rate": self.after_reject_rate}


@dataclass(frozen=True)
class Hazard:
    """One probability per position since the last disagreement; the last one repeats."""

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates:
            raise InputError("rates", "must hold at least one probability")
        for i, rate in enumerate(self.rates):
            _rate(f"rates.{i}", rate)

    def bits(self, draws: Sequence[float]) -> list[bool]:
        out: list[bool] = []
        run = 0
        for draw in draws:
            bit = draw < self.rates[min(run, len(self.rates) - 1)]
            run = run + 1 if bit else 0
            out.append(bit)
        return out

    def mean_emitted(self, window: int) -> float:
        return _emitted([self.rates[min(i, len(self.rates) - 1)] for i in range(window)])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "hazard", "rates": list(self.rates)}


@dataclass(frozen=True)
class Recorded:
    """The bits themselves; positions beyond the record repeat it from the start."""

    record: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.record:
            raise InputError("record", "must hold at least one bit")

    def bits(self, draws: Sequence[float]) -> list[bool]:
        return [self.record[i % len(self.record)] for i in range(len(draws))]

    def mean_emitted(self, window: int) -> float:
        """Mean over every window that starts just after a disagreement (or at the start)."""
        n = len(self.record)
        starts = [i for i in range(n) if i == 0 or not self.record[i - 1]]
        total = 0
        for start in starts:
            run = 0
            while run < window and self.record[(start + run) % n]:
                run += 1
            total += run + 1
        return total / len(starts)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "recorded", "record": [int(bit) for bit in self.record]}


def _emitted(rates: Sequence[float]) -> float:
    """1 + sum over i of P(first i+1 drafts accepted)."""
    total = reach = 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total


def acceptance_from_dict(data: dict[str, Any]) -> AcceptanceModel:
    """The inverse of ``to_dict``; raises InputError for an unknown kind or key."""
    kinds = {"iid": IID, "markov": Markov, "hazard": Hazard, "recorded": Recorded}
    rest = dict(data)
    kind = rest.pop("kind", None)
    if kind not in kinds:
        raise InputError("acceptance.kind", f"must be one of {', '.join(kinds)}", kind)
    for key in ("rates", "record"):
        if key in rest:
            rest[key] = tuple(bool(x) if key == "record" else x for x in rest[key])
    try:
        return kinds[kind](**rest)
    except TypeError as error:
        raise InputError(f"acceptance ({kind})", str(error).split(") ", 1)[-1]) from None
