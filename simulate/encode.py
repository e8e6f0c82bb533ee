"""From a pipeline and a profile to numbers: what the compiled engine runs, and what it leaves to the SimPy model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipespec_model.acceptance import IID, AcceptanceModel, Hazard, Markov, Recorded
from pipespec_model.agreement import Agreement, Replay
from pipespec_model.profile import Profile, pairs
from pipespec_model.spec import PipelineSpec
from pipespec_model.uniforms import MACHINE, uniform

from .engine import to_ns
from .twin_layout import CASE, PLAN, PROMPT, SPEC
from .twin_run import Tables
from .twin_time import encode_latency

MOST_STAGES = 8  # 2^k sets of computing stages


def covers(pipeline: PipelineSpec, profile: Profile, agreements: Sequence[Agreement] = ()) -> str | None:
    """Why the compiled engine cannot run this; None where it can.

    agreements : prompts to replay; none = made up from the profile's acceptance models
    """
    if len(pipeline.stages) > MOST_STAGES:
        return f"more than {MOST_STAGES} stages"
    if any(stage.clasp for stage in pipeline.stages):
        return "a layer-skipping drafter chooses its layers by a calendar"
    texts = any(agreement.prompt_tokens for agreement in agreements)
    if texts and any(stage.block or stage.hybrid for stage in pipeline.stages):
        return "a lookup in the text itself"
    for stage in pipeline.stages:
        latency = profile.stage_latency(stage)
        for model in (latency.step, latency.prefill):
            if model is not None and encode_latency(model, True) is None:
                return f"step times of kind {type(model).__name__}"
    if not agreements:
        for a, b, _ in pairs(pipeline):
            if _acceptance(profile.pair(a, b)) is None:
                return f"acceptance of kind {type(profile.pair(a, b)).__name__}"
    return None


@dataclass
class Encoder:
    """Collects cases; :meth:`tables` makes them the engine's.  Rows are plain tuples until then, which is what makes
    a sweep's points cheap."""

    spread: bool = True
    plans: list[tuple[float, ...]] = field(default_factory=list)
    specs: list[tuple[float, ...]] = field(default_factory=list)
    prompts: list[tuple[float, ...]] = field(default_factory=list)
    cases: list[tuple[int, ...]] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    eos: list[int] = field(default_factory=list)
    num_rows: int = 0

    def add(self, pipeline: PipelineSpec, profile: Profile, *, seeds: Sequence[int], prompts: Sequence[Agreement] | int,
            num_tokens: int = 0, first_number: int = 0) -> None:
        """For each seed, each prompt.

        prompts : to replay, or how many are made up of ``num_tokens`` tokens
        first_number : of the first prompt; with the seed it chooses its luck
        """
        plan, first = len(self.plans), len(self.prompts)
        made_up = isinstance(prompts, int)
        count = prompts if isinstance(prompts, int) else len(prompts)
        self._plan(pipeline, profile, made_up)
        numbers = range(first_number, first_number + count)
        by_seed = 0  # places that each seed has for itself
        if isinstance(prompts, int):
            self.prompts.append((1, num_tokens, num_tokens, -1, 0, 0, 1.0 if num_tokens > 1 else 0.0))
        elif any(agreement.same_draw is not None for agreement in prompts):
            by_seed = count
            for seed in seeds:
                for number, agreement in zip(numbers, prompts, strict=True):
                    self._prompt(agreement.drawn(seed, number))
        else:
            for agreement in prompts:
                self._prompt(agreement)
        slow = any(profile.slowness_of(stage) != (1.0,) for stage in pipeline.stages)
        for turn, seed in enumerate(seeds):
            for i, number in enumerate(numbers):
                slowness = self._slowness(pipeline, profile, seed, number) if slow else -1
                place = first if made_up else first + turn * by_seed + i
                self.cases.append((plan, place, seed, number, slowness))

    def _slowness(self, pipeline: PipelineSpec, profile: Profile, seed: int, number: int) -> int:
        place = len(self.numbers)
        draw = uniform(seed, number, 0, MACHINE) if self.spread else None
        self.numbers += [profile.slowness_at(stage, draw) for stage in pipeline.stages]
        return place

    def _plan(self, pipeline: PipelineSpec, profile: Profile, made_up: bool) -> None:
        stages, links, chain = pipeline.stages, pipeline.links, pipeline.strategy == "speculative"
        pipeline.require_lookaheads()
        first = len(self.specs)
        for i, stage in enumerate(stages):
            latency, costs = profile.stage_latency(stage), profile.stage_costs(stage, pipeline.strategy)
            step = self._latency(latency.step)
            prefill = self._latency(latency.prefill) if latency.prefill else step
            up, down = (links[i - 1] if i else None), (links[i] if i < len(links) else None)
            self.specs.append((
                stage.block, down.buffer_tokens if down else 0, down.lookahead if down else 0,
                up.lookahead if up else 0, up.max_window if up else 0, to_ns(costs.start_s), to_ns(costs.turnaround_s),
                to_ns(costs.handover_s), to_ns(costs.finish_s), step, prefill, costs.rollback_s,
                profile.turn_rate(stages, stage) if chain else 1.0))
        rates, num_rates = 0, 0
        if profile.contention:
            rates, num_rates = len(self.numbers), 1 << len(stages)
            self.numbers += _rates(pipeline, profile)
        acceptance = len(self.numbers)
        if made_up:
            for a, b, _ in reversed(pairs(pipeline)):
                self.numbers += _acceptance(profile.pair(a, b)) or ()
        self.plans.append((len(stages), first, chain, pipeline.handshake == "blocking", num_rates, rates, acceptance,
                           self.spread, profile.neighbour_rate))

    def _latency(self, model: object) -> int:
        place = len(self.numbers)
        self.numbers += encode_latency(model, self.spread) or ()  # type: ignore[arg-type]
        return place

    def _prompt(self, agreement: Agreement) -> None:
        self.prompts.append((agreement.prompt_length, agreement.budget, agreement.num_tokens, self.num_rows,
                             len(self.eos), len(agreement.eos), Replay(agreement).goes_on_rate(0)))
        self.eos += agreement.eos
        self.rows.append(np.asarray(agreement.tokens, np.int64).ravel())
        self.num_rows += agreement.tokens.size

    def tables(self) -> Tables:
        rows = np.concatenate(self.rows) if self.rows else np.zeros(0, np.int64)
        return Tables(np.array(self.plans, PLAN), np.array(self.specs, SPEC), np.array(self.prompts, PROMPT),
                      np.array(self.cases, CASE), np.array(self.numbers, np.float64), rows,
                      np.array(self.eos, np.int64))


def _acceptance(model: AcceptanceModel) -> list[float] | None:
    """One probability per agreement since the last disagreement, the last one repeating; recorded bits have a
    negative length."""
    if isinstance(model, IID):
        rates: Sequence[float] = (model.acceptance_rate,)
    elif isinstance(model, Markov):
        rates = (model.after_reject_rate, model.after_accept_rate)
    elif isinstance(model, Hazard):
        rates = model.rates
    elif isinstance(model, Recorded):
        return [-len(model.record), *model.record]
    else:
        return None
    return [len(rates), *rates]


def _rates(pipeline: PipelineSpec, profile: Profile) -> list[float]:
    """Rates of progress for every set of computing stages, by bits: ``[set, stage]``."""
    keys = [profile.rate_key(stage) for stage in pipeline.stages]
    out: list[float] = []
    for number in range(1 << len(keys)):
        computing = [key for i, key in enumerate(keys) if number >> i & 1]
        rates = profile.rates(frozenset(computing)) if computing else {}
        out += [rates[key] if number >> i & 1 else 1.0 for i, key in enumerate(keys)]
    return out
