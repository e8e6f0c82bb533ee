"""From an index to a configuration: the design of a sweep, and how a point changes pipeline and profile.

Nothing is enumerated beforehand: point 7 of 10⁹ is computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from scipy.stats import qmc

from pipespec_model.acceptance import IID
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant, Scaled
from pipespec_model.profile import Contention, Profile, StageLatency
from pipespec_model.spec import PipelineSpec

from .vary import COST_FIELDS, Axis, Value, targets

Kind = Literal["grid", "zip", "lhs"]
_OF_PROFILE = {"acceptance_rate", "latency", "latency_factor", "contention", "neighbour_rate", *COST_FIELDS}


@dataclass(frozen=True)
class Design:
    """Which combinations of the axes' values there are.

    kind : ``grid`` every one, the last axis changing fastest; ``zip`` the first values, the second values, …;
        ``lhs`` a Latin hypercube of ``num_points``: each axis is cut into as many strata as there are points,
        and each stratum is used once (McKay, Beckman, Conover 1979)
    """

    axes: tuple[Axis, ...]
    kind: Kind = "grid"
    num_points: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError("--design", f"must be one of {', '.join(get_args(Kind))}", self.kind)
        sizes = {len(axis.values) for axis in self.axes}
        if self.kind == "zip" and len(sizes) > 1:
            raise InputError("--design zip", "must have as many values on every --vary",
                             [len(axis.values) for axis in self.axes])
        if (self.num_points is not None) != (self.kind == "lhs"):
            raise InputError("--points", "must be given with --design lhs, and only there", self.num_points)
        if self.num_points is not None and self.num_points < 1:
            raise InputError("--points", "must be >= 1", self.num_points)

    def __len__(self) -> int:
        if self.num_points is not None:
            return self.num_points
        sizes = [len(axis.values) for axis in self.axes]
        return sizes[0] if self.kind == "zip" else int(np.prod(sizes, dtype=object))

    def rows(self, indices: Sequence[int]) -> list[tuple[Value, ...]]:
        """The values of these points, one tuple a point, in the axes' order."""
        if self.kind == "lhs":
            sample = qmc.LatinHypercube(len(self.axes), rng=np.random.default_rng(self.seed)).random(len(self))
            return [tuple(map(_at, self.axes, sample[i].tolist())) for i in indices]
        return [self._row(i) for i in indices]

    def _row(self, index: int) -> tuple[Value, ...]:
        if self.kind == "zip":
            return tuple(axis.values[index] for axis in self.axes)
        out: list[Value] = []
        for axis in reversed(self.axes):
            index, place = divmod(index, len(axis.values))
            out.append(axis.values[place])
        return tuple(reversed(out))


def _at(axis: Axis, share: float) -> Value:
    """The value ``share`` of the way along an axis."""
    if axis.span is not None:
        low, high = axis.span
        return float(f"{low + share * (high - low):.12g}")
    return axis.values[min(int(share * len(axis.values)), len(axis.values) - 1)]


@dataclass
class Changes:
    """Applies points to a pipeline and its profile.

    In a grid few pipelines meet many profiles, so both are kept once made.
    """

    pipeline: PipelineSpec
    profile: Profile
    axes: tuple[Axis, ...]
    _specs: dict[Any, PipelineSpec | InputError] = field(default_factory=dict)
    _profiles: dict[Any, Profile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = [targets(axis.path, self.pipeline) for axis in self.axes]
        self._of_profile = [name in _OF_PROFILE for name, _ in where]
        self._where = where
        if any(name == "acceptance_rate" for name, _ in where):
            # What is recorded would be replayed, and the varied rate never used.
            self.profile = replace(self.profile, agreement=())
        for axis in self.axes:
            self._check(axis)

    def _check(self, axis: Axis) -> None:
        """Values that are wrong in any company; a lookahead may yet fit a larger buffer."""
        name, places = targets(axis.path, self.pipeline)
        if name in _OF_PROFILE:
            for value in axis.span or axis.values:
                for place in places or (0,):
                    _changed(self.profile, self.pipeline, (name, place, value))
        elif name == "depth":
            most = len(self.pipeline.stages)
            for value in axis.values:
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                    raise InputError("depth", f"must be in [1, {most}], the stages of the pipeline file", value)

    def at(self, values: tuple[Value, ...]) -> tuple[PipelineSpec, Profile]:
        """Pipeline and profile of a point; raises InputError where its values do not go together."""
        own = tuple(None if mine else value for mine, value in zip(self._of_profile, values, strict=True))
        if own not in self._specs:
            try:
                self._specs[own] = self._spec(own)
            except InputError as error:
                self._specs[own] = error
        spec = self._specs[own]
        if isinstance(spec, InputError):
            raise spec
        key = (own, tuple(value for mine, value in zip(self._of_profile, values, strict=True) if mine))
        if key not in self._profiles:
            if len(self._profiles) > 4096:
                self._profiles.clear()
            self._profiles[key] = self._profile(spec, values)
        return spec, self._profiles[key]

    def _spec(self, values: tuple[Value | None, ...]) -> PipelineSpec:
        data = self.pipeline.to_dict()
        depth = len(data["stages"])
        for (name, places), axis, value in zip(self._where, self.axes, values, strict=True):
            if value is None:
                continue
            head = axis.path.partition(".")[0]
            if name == "depth":
                depth = int(value)
            elif head in ("links", "stages"):
                for place in places:
                    data[head][place][name] = value
            else:
                data[name] = value
        if data["strategy"] == "autoregressive":
            depth = 1
        if depth == 1:
            data["strategy"] = "autoregressive"
        data["stages"] = data["stages"][-depth:]
        data["links"] = data["links"][len(data["links"]) - (depth - 1):]
        made = PipelineSpec.from_dict(data)
        made.require_lookaheads()
        return made

    def _profile(self, spec: PipelineSpec, values: tuple[Value, ...]) -> Profile:
        made = self.profile
        cut = len(self.pipeline.stages) - len(spec.stages)
        for (name, places), mine, value in zip(self._where, self._of_profile, values, strict=True):
            if mine:
                for place in places or (cut,):
                    if place >= cut and (name != "acceptance_rate" or place - cut < len(spec.links)):
                        made = _changed(made, spec, (name, place - cut, value))
        return made


def _changed(profile: Profile, spec: PipelineSpec, change: tuple[str, int, Value]) -> Profile:
    """``profile`` with one field set for one stage or link of ``spec``."""
    name, place, value = change
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(name, "must be a number", value)
    if name == "neighbour_rate":
        made = replace(profile, neighbour_rate=float(value))
        made.check()
        return made
    if name == "acceptance_rate":
        a, b = list(pairwise(spec.stages))[place]
        if a.choice_key == b.choice_key:
            raise InputError(f"links.{place}.acceptance_rate", "must join two different models", a.choice_key,
                             "two that are alike always agree")
        return replace(profile, acceptance={**profile.acceptance, f"{a.choice_key}>{b.choice_key}": IID(value)})
    stage = spec.stages[place]
    if name in ("latency", "latency_factor"):
        if name == "latency":
            latency = StageLatency(Constant(value))
        else:
            known = profile.stage_latency(stage)
            latency = StageLatency(Scaled(known.step, value), known.prefill and Scaled(known.prefill, value))
        return replace(profile, latency={**profile.latency, stage.time_key: latency})
    if name == "contention":
        return _contended(profile, spec, place, float(value))
    costs = replace(profile.stage_costs(stage, spec.strategy), **{name: float(value)})
    keys = [key for key in profile.costs if key.endswith(f" {stage.time_key}")]
    return replace(profile, costs={**profile.costs, **dict.fromkeys([*keys, stage.time_key], costs)})


def _contended(profile: Profile, spec: PipelineSpec, place: int, rate: float) -> Profile:
    keys = [profile.rate_key(stage) for stage in spec.stages]
    if len(set(keys)) < 2:
        return profile
    rates = {**profile.rates(frozenset(keys)), keys[place]: rate}
    others = tuple(entry for entry in profile.contention if frozenset(entry.rates) != frozenset(keys))
    return replace(profile, contention=(*others, Contention(rates)))
