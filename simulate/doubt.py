"""What is not known for certain, and what it would be worth to know it.

A *world* is one draw of everything uncertain: step times, acceptance rates, what sharding gains, and which texts the
work consists of.  Candidates are compared within a world, so what they share cancels.  How sure a choice is, what it
may cost, and what to measure next (the expected value of partial perfect information) follow from a table
``[world, candidate]`` alone.

References: Felli and Hazen 1998 (value of information); Strong, Oakley and Brennan 2014 (by regression).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from pipespec_model.acceptance import IID, AcceptanceModel, Hazard, Markov
from pipespec_model.errors import InputError
from pipespec_model.latency import Scaled
from pipespec_model.profile import Profile, StageLatency

NUM_SHUFFLES = 20


@dataclass(frozen=True)
class Doubt:
    """How far assumed figures may be off, as standard deviations.

    acceptance_sd : of an acceptance rate, near 1/2 absolute and smaller towards 0 and 1 (on the logit scale a rate
        moves by 4 acceptance_sd); not applied to recorded agreement, whose texts are resampled instead
    time_sd : of a model's step times, relative; one draw for all its steps
    """

    acceptance_sd: float = 0.03
    time_sd: float = 0.05

    def __post_init__(self) -> None:
        for name in ("acceptance_sd", "time_sd"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')}", "must be in [0, 1)", getattr(self, name))


@dataclass(frozen=True)
class Unknown:
    """One uncertain figure: ``kind`` ``time`` (of a model) or ``acceptance`` (of a pair)."""

    kind: str
    key: str

    @property
    def label(self) -> str:
        return f"{'step times of' if self.kind == 'time' else 'acceptance'} {_short(self.key)}"

    def shifted(self, profile: Profile, by: float) -> Profile:
        """``profile`` with this figure ``by`` off: log seconds, or logit of the rate."""
        if self.kind == "acceptance":
            return replace(profile, acceptance={
                **profile.acceptance, self.key: _shifted(profile.acceptance[self.key], by)})
        factor = float(np.exp(by))
        latency = {key: StageLatency(Scaled(value.step, factor), value.prefill and Scaled(value.prefill, factor))
                   for key, value in profile.latency.items() if _model_of(key) == self.key}
        return replace(profile, latency={**profile.latency, **latency})


def unknowns(times: Sequence[str], pairs: Sequence[str], doubt: Doubt) -> list[tuple[Unknown, float]]:
    """Everything uncertain and the standard deviation of its shift.

    times : latency keys in use; pairs : acceptance keys in use, none where agreement is recorded
    """
    models = dict.fromkeys(_model_of(key) for key in times)
    found = [(Unknown("time", key), doubt.time_sd) for key in models]
    return [(what, sd) for what, sd in (*found, *((Unknown("acceptance", key), 4 * doubt.acceptance_sd)
                                                  for key in pairs)) if sd > 0]


def worth_knowing(values: NDArray[np.float64], known: NDArray[np.float64], rng: np.random.Generator) -> float:
    """Expected gain of choosing after learning one figure, as a share of the best choice made now.

    values : ``[world, candidate]``, larger is better
    known : ``[world]`` or ``[world, figures]``, what would be learnt
    Expectations given what is learnt are quadratic regressions; what such regressions gain on shuffled worlds,
    where there is nothing to learn, is taken off.
    """
    at = known.reshape(len(known), -1)
    at = (at - at.mean(0)) / np.where(at.std(0) > 0, at.std(0), 1.0)
    terms = np.hstack([np.ones((len(at), 1)), at, at**2])
    now = float(values.mean(0).max())

    def gain(order: NDArray[np.int64]) -> float:
        x = terms[order]
        fitted = x @ np.linalg.lstsq(x, values, rcond=None)[0]
        return float(fitted.max(1).mean()) - now

    straight = np.arange(len(at))
    chance = float(np.mean([gain(rng.permutation(straight)) for _ in range(NUM_SHUFFLES)]))
    return max(0.0, gain(straight) - chance) / now


def regrets(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each candidate is expected to give away against knowing the world, as a share of the best ``[candidate]``.

    >>> regrets(np.array([[1.0, 2.0], [3.0, 2.0]])).tolist()
    [0.25, 0.25]
    """
    return (values.max(1, keepdims=True) - values).mean(0) / values.mean(0).max()


def shares_best(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of worlds in which each candidate is best; ties are shared ``[candidate]``."""
    best = values >= values.max(1, keepdims=True) * (1 - 1e-12)
    return (best / best.sum(1, keepdims=True)).mean(0)


def _shifted(model: AcceptanceModel, by: float) -> AcceptanceModel:
    def rate(value: float) -> float:
        return value if value in (0.0, 1.0) else float(expit(logit(value) + by))

    match model:
        case IID():
            return IID(rate(model.acceptance_rate))
        case Markov():
            return Markov(rate(model.after_accept_rate), rate(model.after_reject_rate))
        case Hazard():
            return Hazard(tuple(rate(value) for value in model.rates))
        case _:
            return model  # recorded: its texts are what is uncertain


def _model_of(key: str) -> str:
    """A latency key without device and threads: one model is as uncertain wherever it runs."""
    parts = key.rsplit("|", 2)
    return parts[0] if len(parts) == 3 and parts[2].endswith("t") else key


def _short(key: str) -> str:
    """A key for people: the defaults of dtype and quantisation left out."""
    return ">".join(part.replace("|float32|none", "").replace("|none", "") for part in key.split(">"))
