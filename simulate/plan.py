"""Which pipeline for these devices?  Every candidate simulated on the same texts, the best ones again in many worlds.

First all candidates run at the profile's figures; those that a proved bound keeps from the lead are left out.  The
leaders, and always the best autoregressive and the best synchronous one, then run in worlds drawn from what is
uncertain (doubt.py).  Ranks, intervals, the chance of being best and what to measure next are over those worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement
from pipespec_model.bounds import bounds
from pipespec_model.errors import InputError
from pipespec_model.fair import cost_per_million_tokens, joules_per_token, tokens_per_s_per_device
from pipespec_model.profile import Profile, pairs, recorded
from pipespec_model.spec import PipelineSpec

from .candidates import Candidate, Catalogue
from .compiled import encode, run_cases
from .doubt import Doubt, Unknown, regrets, shares_best, unknowns, worth_knowing
from .totals import Totals

Objective = Literal["latency", "per-device", "energy", "cost"]
BOUND_SLACK = 1.05
"""A bound is of mean step times; what the luck of a few texts may add to a simulated speed."""


@dataclass(frozen=True)
class Aim:
    """What is to be best, and the price of a device's time where it matters.

    idle_w, busy_w : watts of one device; price_per_hour : of one device
    """

    objective: Objective = "latency"
    idle_w: float | None = None
    busy_w: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise InputError("--objective", f"must be one of {', '.join(get_args(Objective))}", self.objective)
        if self.objective == "energy" and (self.idle_w is None or self.busy_w is None):
            raise InputError("--objective energy", "must have --idle-watts and --busy-watts")
        if self.objective == "cost" and self.price_per_hour is None:
            raise InputError("--objective cost", "must have --price-per-hour")

    def figures(self, candidate: Candidate, tokens_per_s: float, busy: Sequence[float]) -> dict[str, float]:
        """Every figure of merit that the prices allow.

        busy : share of the time in which each stage computes
        """
        found = {"tokens_per_s_per_device": tokens_per_s_per_device(tokens_per_s, candidate.devices)}
        if self.idle_w is not None and self.busy_w is not None:
            idle_w = candidate.devices * self.idle_w
            found["joules_per_token"] = joules_per_token(tokens_per_s, idle_w=idle_w, busy_w=idle_w, busy_fraction=0)
            for stage, shards, share in zip(candidate.pipeline.stages, candidate.shards, busy, strict=True):
                held = 0 if stage.block else max(shards, stage.threads)
                found["joules_per_token"] += joules_per_token(
                    tokens_per_s, idle_w=0.0, busy_w=held * max(0.0, self.busy_w - self.idle_w), busy_fraction=share)
        if self.price_per_hour is not None:
            found["cost_per_million_tokens"] = cost_per_million_tokens(
                tokens_per_s, self.price_per_hour, candidate.devices)
        return found

    def value(self, candidate: Candidate, tokens_per_s: float, busy: Sequence[float]) -> float:
        """Larger is better."""
        found = self.figures(candidate, tokens_per_s, busy)
        return {"latency": lambda: tokens_per_s, "per-device": lambda: found["tokens_per_s_per_device"],
                "energy": lambda: 1 / found["joules_per_token"],
                "cost": lambda: 1 / found["cost_per_million_tokens"]}[self.objective]()


@dataclass(frozen=True)
class Effort:
    """How hard to look.

    num_texts, num_tokens : synthetic texts a candidate and their length; recorded prompts are used whole
    finalists : candidates that are compared in worlds; worlds : how many
    """

    num_texts: int = 4
    num_tokens: int = 256
    finalists: int = 16
    worlds: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_texts", 1), ("num_tokens", 1), ("finalists", 1), ("worlds", 10)):
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')}", f"must be >= {least}", getattr(self, name))


@dataclass(frozen=True)
class Choice:
    """A finalist over the worlds, ``[world]``."""

    candidate: Candidate
    values: NDArray[np.float64]
    tokens_per_s: NDArray[np.float64]
    busy: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """Finalists, the best first, and how sure that order is.

    num_candidates, num_pruned : looked at; of these left out by a bound
    worth : what knowing each uncertain figure is expected to gain, as a share of the best value
    break_even : acceptance rate of the best one's last pair from which on it beats the target alone on as many
        devices; None where it has no drafter, or always or never does
    """

    choices: tuple[Choice, ...]
    best_share: NDArray[np.float64]
    regret: NDArray[np.float64]
    worth: tuple[tuple[str, float], ...]
    break_even: float | None
    num_candidates: int
    num_pruned: int
    profile: Profile
    aim: Aim


def plan(catalogue: Catalogue, aim: Aim | None = None, *, doubt: Doubt | None = None, effort: Effort | None = None,
         advance: Callable[[str, float], None] | None = None) -> Plan:
    """The best pipelines of a catalogue; progress is told as shares of 1."""
    return _Planner(catalogue, aim or Aim(), doubt or Doubt(), effort or Effort(),
                    advance or (lambda what, done: None)).plan()


@dataclass
class _Planner:
    catalogue: Catalogue
    aim: Aim
    doubt: Doubt
    effort: Effort
    advance: Callable[[str, float], None]

    def plan(self) -> Plan:
        profile, found = self.catalogue.profile, list(self.catalogue.candidates())
        kept, values = self._screen(found, profile)
        finalists = self._finalists(kept, values)
        worlds, known = self._worlds([kept[i] for i in finalists])
        choices = [self._in_worlds(kept[i], worlds) for i in finalists]
        order = np.argsort([-choice.values.mean() for choice in choices], kind="stable")
        choices = [choices[i] for i in order]
        table = np.column_stack([choice.values for choice in choices])
        rng = np.random.default_rng(self.effort.seed)
        worth = sorted(((name, worth_knowing(table, at, rng)) for name, at in known), key=lambda item: -item[1])
        return Plan(tuple(choices), shares_best(table), regrets(table), tuple(worth),
                    self._break_even(choices[0].candidate), len(found), len(found) - len(kept), profile, self.aim)

    # -- every candidate at the profile's figures ----------------------------------------------

    def _screen(self, found: list[Candidate], profile: Profile) -> tuple[list[Candidate], NDArray[np.float64]]:
        """The candidates that a bound does not rule out, and their values."""
        kept: list[Candidate] = []
        values: list[float] = []
        best, ceilings = 0.0, {}
        for candidate in found:
            key = (candidate.pipeline.stages, candidate.pipeline.strategy)
            if key not in ceilings:
                ceilings[key] = self._ceiling(candidate, profile)
            if ceilings[key] * BOUND_SLACK >= best:
                kept.append(candidate)
                values.append(self._value(candidate, _run(candidate.pipeline, profile, self.effort)))
                best = max(best, values[-1])
            self.advance("simulating candidates", 0.5 / len(found))
        return kept, np.array(values)

    def _ceiling(self, candidate: Candidate, profile: Profile) -> float:
        """What the value of a candidate with these stages cannot exceed, whatever its lookaheads."""
        freest = candidate.pipeline
        if freest.strategy != "pipelined" or any(stage.drafter != "model" for stage in freest.stages):
            return np.inf
        try:
            most = bounds(freest.with_lookaheads([0] * len(freest.links)), profile).upper
        except InputError:
            return np.inf  # no acceptance model of the pair: its agreement is recorded
        return self.aim.value(candidate, most, [0.0] * len(freest.stages))

    def _value(self, candidate: Candidate, found: Totals) -> float:
        speed = float(found.num_tokens.sum() / found.total_s.sum())
        return self.aim.value(candidate, speed, _busy(found))

    def _finalists(self, kept: list[Candidate], values: NDArray[np.float64]) -> list[int]:
        """The best designs at their best lookaheads, and the best without a pipeline on each number of devices."""
        designs: dict[Any, int] = {}
        plain: dict[Any, int] = {}
        for i in np.argsort(-values, kind="stable").tolist():
            designs.setdefault(kept[i].design, i)
            if kept[i].pipeline.strategy != "pipelined":
                plain.setdefault((kept[i].pipeline.strategy, kept[i].devices), i)
        return list(dict.fromkeys([*list(designs.values())[: self.effort.finalists], *plain.values()]))

    # -- the leaders in worlds ------------------------------------------------------------------

    def _worlds(self, finalists: list[Candidate]) -> tuple[list[Profile], list[tuple[str, NDArray[np.float64]]]]:
        """Profiles, one a world, and by name what was drawn in each."""
        profile, rng = self.catalogue.profile, np.random.default_rng([self.effort.seed, 1])
        used = dict.fromkeys(stage.time_key for c in finalists for stage in c.pipeline.stages if not stage.block)
        drafted = dict.fromkeys(
            f"{a.choice_key}>{b.choice_key}" for c in finalists for a, b, _ in pairs(c.pipeline))
        found: list[tuple[Unknown, float]] = unknowns(
            list(used), [] if profile.agreement else [key for key in drafted if key in profile.acceptance], self.doubt)
        shifts = rng.standard_normal((self.effort.worlds, len(found))) * [sd for _, sd in found]
        worlds = [profile] * self.effort.worlds
        for column, (what, _) in enumerate(found):
            worlds = [what.shifted(world, by) for world, by in zip(worlds, shifts[:, column].tolist(), strict=True)]
        known = [(what.label, shifts[:, column]) for column, (what, _) in enumerate(found)]
        if profile.agreement:
            texts = rng.integers(0, len(profile.agreement), (self.effort.worlds, len(profile.agreement)))
            worlds = [replace(world, agreement=tuple(profile.agreement[i] for i in row))
                      for world, row in zip(worlds, texts, strict=True)]
            rates = np.array([[entry.rate(name) or 0.0 for name in entry.names[:-1]] for entry in profile.agreement])
            known.append(("which texts it is for: agreement on more prompts", rates[texts].mean(1)))
        return worlds, known

    def _in_worlds(self, candidate: Candidate, worlds: list[Profile]) -> Choice:
        cases = [_cases(candidate.pipeline, world, self.effort) for world in worlds]
        found, start, values, speeds, busy = run_cases(cases), 0, [], [], []
        for case in cases:
            part = found[start : start + len(case)]
            start += len(case)
            values.append(self._value(candidate, part))
            speeds.append(float(part.num_tokens.sum() / part.total_s.sum()))
            busy.append(_busy(part))
        self.advance("drawing worlds", 0.5 / (2 * self.effort.finalists))
        return Choice(candidate, np.array(values), np.array(speeds), tuple(np.mean(busy, axis=0).tolist()))

    def _break_even(self, best: Candidate) -> float | None:
        """See Plan.break_even; to a hundredth, all else as it is."""
        if not best.pipeline.links or best.pipeline.stages[-2].block:
            return None
        alone = [c for c in self.catalogue.candidates() if not c.pipeline.links and c.devices <= best.devices]
        profile = replace(self.catalogue.profile, agreement=())
        rival = max(self._value(c, _run(c.pipeline, profile, self.effort)) for c in alone)
        drafter, target, _ = pairs(best.pipeline)[-1]
        pair = f"{drafter.choice_key}>{target.choice_key}"
        rates = np.arange(0, 1.0, 0.01)
        loses = [rate for rate in rates if self._value(best, _run(best.pipeline, replace(
            profile, acceptance={**profile.acceptance, pair: IID(float(rate))}), self.effort)) < rival]
        return float(loses[-1]) + 0.01 if loses and loses[-1] < rates[-1] else None


def _cases(pipeline: PipelineSpec, profile: Profile, effort: Effort) -> Any:
    """A candidate's texts: recorded ones where there are, the same for every candidate either way."""
    prompts: list[Agreement] | None = recorded(profile, pipeline) or None
    seeds = (effort.seed,) if prompts else tuple(range(effort.seed, effort.seed + effort.num_texts))
    # A lookup follows its recorded proposals, so that one text costs microseconds.
    prompts = [replace(entry, prompt_tokens=()) for entry in prompts] if prompts else None
    return encode(pipeline, profile, num_prompts=1, num_tokens=effort.num_tokens, seeds=seeds, agreements=prompts)


def _run(pipeline: PipelineSpec, profile: Profile, effort: Effort) -> Totals:
    return run_cases(_cases(pipeline, profile, effort))


def _busy(found: Totals) -> list[float]:
    return (found.busy_s.sum(0) / found.total_s.sum()).tolist()
