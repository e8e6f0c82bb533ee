"""A pipeline under load beside its target alone: throughput and latencies over rates of arrival.

Three ways meet the same prompts at the same times: the pipeline, the target alone on one device, and copies of the
target on as many devices as the pipeline holds.  Each replication has texts and arrivals of its own; between rates only
the distance of arrivals changes.  The first fifth of a replication's prompts warm up: their latencies are left out,
and tokens and use of stages are counted from there to the last arrival.  Percentiles are those of one replication, so
of 100 prompts the 99th is nearly the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import joblib
import numpy as np

from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.errors import InputError
from pipespec_model.profile import Profile, pairs, recorded
from pipespec_model.spec import PipelineSpec

from .arrivals import Request, at_rate, poisson_s, rate_of
from .figures import mean
from .run import agreements_for
from .traffic import Policy, Served, Traffic

WARM_UP = 0.2
"""Of a replication's prompts."""
PERCENTILES = (50, 95, 99)
LATENCIES = {"ttft_s": "from a prompt's request to its first token", "tpot_s": "a token after the first",
             "e2e_s": "from a prompt's request to its last token"}
KEEPS_UP = 0.95
"""Tokens that come out over tokens asked for; below, waiting grows for as long as the traffic lasts."""


@dataclass(frozen=True)
class Effort:
    """How much traffic: ``replications`` times ``num_prompts`` prompts, of ``num_tokens`` tokens where the texts
    are made up and no trace says how long they are."""

    num_prompts: int = 100
    num_tokens: int = 64
    replications: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 5), ("num_tokens", 1), ("replications", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')}", f"must be >= {least}", getattr(self, name))


@dataclass(frozen=True)
class Way:
    """One way to serve the traffic."""

    name: str
    pipeline: PipelineSpec
    policy: Policy

    @property
    def devices(self) -> int:
        return self.policy.copies * num_devices(self.pipeline)


@dataclass(frozen=True)
class Study:
    """Everything that the figures depend on.

    policy : of the pipeline; the target's copies follow the same one, ``in_flight`` a copy
    requests : of a trace; None = Poisson arrivals
    """

    pipeline: PipelineSpec
    profile: Profile
    policy: Policy = field(default_factory=Policy)
    effort: Effort = field(default_factory=Effort)
    requests: tuple[Request, ...] | None = None

    def ways(self) -> list[Way]:
        """The pipeline, its target alone, and that on as many devices."""
        alone = PipelineSpec.alone(self.pipeline.target)
        found = [Way(f"{self.pipeline.strategy} {self.pipeline.label}", self.pipeline, self.policy)]
        devices = num_devices(self.pipeline)
        for copies in (1, devices) if self.pipeline.links and devices > 1 else (1,) if self.pipeline.links else ():
            name = f"target {alone.label}" if copies == 1 else f"{copies} × target {alone.label}"
            found.append(Way(name, alone, Policy(self.policy.in_flight, self.policy.discipline, copies)))
        return found

    @property
    def own_rate(self) -> float | None:
        """Of the trace, prompts a second."""
        return None if self.requests is None else rate_of(list(self.requests))

    def traffic(self, rate: float, seed: int) -> Traffic:
        if self.requests is not None:
            asked = at_rate(list(self.requests), rate)
            return Traffic(self._texts(asked, seed), [item.arrived_s for item in asked])
        number = self.effort.num_prompts
        found = agreements_for(self.pipeline, self.profile, num_prompts=number, num_tokens=self.effort.num_tokens,
                               seed=seed)
        if recorded(self.profile, self.pipeline):
            found = [found[i] for i in np.random.default_rng(seed).integers(0, len(found), size=number)]
        return Traffic(found, poisson_s(rate, number, seed=seed))

    def _texts(self, asked: Sequence[Request], seed: int) -> list[Agreement]:
        """Made-up ones, as long as asked for: what was recorded has lengths of its own."""
        models = [self.profile.pair(a, b) for a, b, _ in pairs(self.pipeline)]
        names = [stage.choice_key for stage in self.pipeline.stages]
        return [synthetic(names, models, num_tokens=item.num_decode_tokens, prompt_length=item.num_prefill_tokens,
                          seed=seed, prompt=number) for number, item in enumerate(asked)]

    def replication(self, rate: float, seed: int) -> list[dict[str, Any]]:
        """Figures of each way, with the same prompts."""
        traffic = self.traffic(rate, seed)
        out = []
        for way in self.ways():
            names = [stage.choice_key for stage in way.pipeline.stages]
            own = Traffic([prompt.select(names) for prompt in traffic.prompts], traffic.times_s)
            out.append(measure(own.run(way.pipeline, self.profile, way.policy, seed=seed), way))
        return out


def num_devices(pipeline: PipelineSpec) -> int:
    """Devices that are held: those that stages name, one for each stage that just says ``cpu``, none for a lookup."""
    return max(1, len({stage.device if ":" in stage.device else stage.name
                       for stage in pipeline.stages if not stage.block}))


def measure(served: Sequence[Served], way: Way) -> dict[str, Any]:
    """One replication's figures.  Seconds; ``busy`` a list over stages, drafter first."""
    first = int(WARM_UP * len(served))
    begin, end = served[first].arrived_ns / 1e9, served[-1].arrived_ns / 1e9
    if end <= begin:
        raise InputError("traffic", "must hold prompts that come after its first fifth", mend="simulate more prompts")
    counted = served[first:]
    tokens, asked = 0, sum(len(item.record.tokens) for item in counted[:-1])
    busy = [0.0] * len(way.pipeline.stages)
    for item in served:
        arrived = item.arrived_ns / 1e9
        for step in item.steps:
            start = arrived + (step.start_s or 0.0)
            stop = start + step.duration_s
            busy[step.stage] += max(0.0, min(stop, end) - max(start, begin))
            if step.stage == len(busy) - 1 and begin < stop <= end:
                tokens += step.emitted
    values = {
        "ttft_s": [item.record.ttft_s for item in counted],
        "tpot_s": [(item.record.total_s - item.record.ttft_s) / (len(item.record.tokens) - 1) for item in counted
                   if len(item.record.tokens) > 1],
        "e2e_s": [item.record.total_s for item in counted]}
    return {"tokens_per_s": tokens / (end - begin), "kept_up": tokens / asked,
            "busy": [seconds / (end - begin) / way.policy.copies for seconds in busy],
            **{name: dict(zip(PERCENTILES, np.percentile(found, PERCENTILES).tolist(), strict=True)) if found else
               dict.fromkeys(PERCENTILES) for name, found in values.items()}}


def curves(study: Study, rates: Sequence[float], *, jobs: int = 1,
           advance: Callable[[], None] | None = None) -> list[dict[str, Any]]:
    """One row a rate and way, figures as mean and 90% interval over replications; the same for any number of jobs."""
    seeds = range(study.effort.seed, study.effort.seed + study.effort.replications)
    tasks = [(rate, seed) for rate in rates for seed in seeds]
    found: list[list[dict[str, Any]]] = []
    for item in _all(study, tasks, jobs):
        found.append(item)
        if advance:
            advance()
    rows = []
    for i, rate in enumerate(rates):
        mine = found[i * len(seeds) : (i + 1) * len(seeds)]
        rows += [_row(rate, way, [item[number] for item in mine]) for number, way in enumerate(study.ways())]
    return rows


def _all(study: Study, tasks: Sequence[tuple[float, int]], jobs: int) -> Iterator[list[dict[str, Any]]]:
    if jobs == 1 or len(tasks) == 1:
        yield from (study.replication(*task) for task in tasks)
    else:
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator")(
            joblib.delayed(study.replication)(*task) for task in tasks)


def _row(rate: float, way: Way, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kept_up = mean([item["kept_up"] for item in found])
    return {
        "rate": rate, "way": way.name, "devices": way.devices, "replications": len(found),
        "tokens_per_s": mean([item["tokens_per_s"] for item in found]),
        "kept_up": kept_up, "overloaded": kept_up["value"] < KEEPS_UP,
        **{name: {f"p{p}": mean([item[name][p] for item in found]) for p in PERCENTILES} for name in LATENCIES},
        "stages": [{"name": stage.name, "busy": mean([item["busy"][i] for item in found])}
                   for i, stage in enumerate(way.pipeline.stages)]}
