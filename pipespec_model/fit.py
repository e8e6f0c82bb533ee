"""From traces to a profile: the one loop of the design, measurement back into assumption.

What is read from which record:

* step and prefill times from the steps of stages that computed alone,
* rates of stages that take turns from synchronous traces, likewise,
* contention from traces marked ``together``: the alone time of the same steps / their time there,
* costs between steps from traces of generation, for each strategy its own.

Every trace may carry ``options["round"]``: a calibration goes round and round all that it measures, so
that a shift of the machine's speed touches everything alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .acceptance import AcceptanceModel, Markov
from .agreement import Agreement
from .between import OPTION, Between, end_of, joined, start_of, undisturbed
from .errors import InputError
from .latency import Observed, fit_line, fit_table
from .profile import Contention, Costs, Profile, StageLatency, costs_key
from .spec import PipelineSpec, Strategy
from .trace import StepRecord, Trace
from .yardstick import probed_slowness

STEP_KINDS = {"measure", "draft", "verify", "decode"}
Block = tuple[int, int]
"""Which prompt of which trace: within it, the machine had one speed."""
Sample = tuple[Block, StepRecord]
Slowness = dict[tuple[int, str], list[float]]
"""By round and place key, how many times slower than undisturbed steps were."""


def fit(traces: Iterable[Trace], agreement: Sequence[Agreement] = (), source: str = "") -> Profile:
    """Fit a profile.

    traces : of calibration runs; ``options["together"]`` marks stages that were timed while the
        others of the same trace computed too
    agreement : recorded choices of the calibration prompts, kept as they are; acceptance per pair is
        fitted from them

    Raises InputError when no stage can be timed.
    """
    traces = list(traces)
    steps: dict[str, list[Sample]] = defaultdict(list)
    prefills: dict[str, list[Sample]] = defaultdict(list)
    rollbacks: dict[str, list[float]] = defaultdict(list)
    places: dict[tuple[int, str], str] = {}
    for number, trace in enumerate(traces):
        stages = PipelineSpec.from_dict(trace.pipeline).stages
        if trace.options.get("together"):
            continue
        for i, stage in enumerate(stages):
            if len(stages) > 1 and not stage.block:
                continue  # not alone; a lookup disturbs nobody and is timed where it runs
            mine = [step for step in trace.steps if step.stage == i and not step.includes_wait]
            key = stage.time_key
            places[number, key] = stage.place_key
            steps[key] += [((number, step.prompt), step) for step in mine if step.kind in STEP_KINDS]
            prefills[key] += [((number, step.prompt), step) for step in mine if step.kind == "prefill"]
            cuts = [step for step in mine if step.kind == "rollback" and step.width > 1]
            rollbacks[key] += [step.duration_s for step in cuts]
    latency: dict[str, StageLatency] = {}
    slow: Slowness = defaultdict(list)
    for key, found in steps.items():
        if found:
            latency[key], blocks = _stage_latency(found, prefills[key])
            for (number, _), value in blocks.items():
                slow[_round(traces[number]), places[number, key]].append(value)
    if not latency:
        raise InputError("trace", "must hold the steps of at least one stage")
    together = [trace for trace in traces if trace.options.get("together")]
    chains = [trace for trace in traces
              if trace.pipeline["strategy"] == "speculative" and not trace.options.get("together")]
    computing = Profile(latency, contention=_rates(together, latency, {}))
    beside = {id(trace): probed_slowness(trace, computing) for trace in traces}
    if any(beside.values()):
        slow = _by_place(traces, beside)
    costs = fit_costs(traces, {key: float(np.median(x)) for key, x in rollbacks.items() if x})
    computing = replace(computing, turns=_rates(chains, latency, beside))
    return replace(
        computing, costs=undisturbed(costs, computing),
        acceptance=_acceptance(agreement), agreement=tuple(agreement),
        slowness=_quantiles(slow), timing_spread=_spread(slow), origin="fitted", source=source,
    )


def _stage_latency(steps: list[Sample], prefills: list[Sample]) -> tuple[StageLatency, dict[Block, float]]:
    """The latency, and by block how slow the machine was."""
    blocks = list(dict.fromkeys(block for block, _ in steps))
    number = {block: i for i, block in enumerate(blocks)}
    table, slow = fit_table(Observed(
        np.array([step.width for _, step in steps]), np.array([step.context for _, step in steps]),
        np.array([step.duration_s for _, step in steps]), np.array([number[block] for block, _ in steps])))
    slowness = {block: slow[i] for i, block in enumerate(blocks)}
    if not prefills:
        return StageLatency(table), slowness
    line = fit_line([step.width for _, step in prefills],
                    [step.duration_s / slowness.get(block, 1.0) for block, step in prefills])
    return StageLatency(table, line), slowness


def _rates(traces: list[Trace], latency: dict[str, StageLatency], beside: dict[int, dict[tuple[int, int], float]],
           ) -> tuple[Contention, ...]:
    """Per set of stages: how fast a step goes there, in a chain the first after another stage's, as a share of how
    fast it goes alone.

    beside : by trace, the slowness of single steps around each of its prompts

    The step alone is what was timed beside it: ``alone`` in the same trace, or the probes.  Stages can
    only slow each other, so a share above 1 is noise and counts as 1.
    """
    ratios: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        stages = PipelineSpec.from_dict(trace.pipeline).stages
        group = tuple(stage.time_key for stage in stages)
        for i, (stage, key) in enumerate(zip(stages, group, strict=True)):
            if stage.block or key not in latency:
                continue
            alone = _scaled(trace.steps, i, latency[key], {"alone"})
            alone = alone or [x for (_, at), x in beside.get(id(trace), {}).items() if at == i] or [1.0]
            steps = _first_in_turn(trace) if trace.pipeline["strategy"] == "speculative" else trace.steps
            if found := _scaled(steps, i, latency[key], STEP_KINDS):
                ratios[group][key].append(float(np.median(found) / np.median(alone)))
    return tuple(Contention({key: min(1.0 / float(np.median(found)), 1.0) for key, found in members.items()})
                 for members in ratios.values() if members)


def _round(trace: Trace) -> int:
    return int(trace.options.get("round", -1))


def _first_in_turn(trace: Trace) -> list[StepRecord]:
    """A chain's steps that follow another stage's: those find their weights evicted from the caches."""
    blocks = {i for i, stage in enumerate(PipelineSpec.from_dict(trace.pipeline).stages) if stage.block}
    steps = sorted((step for step in trace.steps if step.stage not in blocks),
                   key=lambda step: (step.prompt, step.start_s or 0.0))
    return [step for before, step in pairwise(steps) if before.prompt == step.prompt and before.stage != step.stage]


def _scaled(steps: Sequence[StepRecord], i: int, latency: StageLatency, kinds: set[str]) -> list[float]:
    """Step times of stage ``i`` as multiples of what they are undisturbed."""
    return [step.duration_s / latency.step.mean_s(step.width, step.context) for step in steps
            if step.stage == i and step.kind in kinds]


def _by_place(traces: Sequence[Trace], beside: dict[int, dict[tuple[int, int], float]]) -> Slowness:
    """What was found beside every prompt, where its stages ran."""
    slow: Slowness = defaultdict(list)
    for trace in traces:
        stages = PipelineSpec.from_dict(trace.pipeline).stages
        for (_, i), value in beside[id(trace)].items():
            slow[_round(trace), stages[i].place_key].append(value)
    return slow


def _quantiles(slow: Slowness) -> dict[str, tuple[float, ...]]:
    """By place key, and by time key over all places."""
    out: dict[str, list[float]] = defaultdict(list)
    for (_, place), found in slow.items():
        for key in {place, place.partition("|cores")[0]}:
            out[key] += found
    return {key: tuple(sorted(found)) for key, found in out.items()}


def _spread(slow: Slowness) -> float:
    """The standard error, over rounds, of the mean of log slowness.

    What disturbs a machine outlasts a round, so rounds count as half as many.
    """
    rounds: dict[int, list[float]] = defaultdict(list)
    for (number, _), found in slow.items():
        rounds[number].append(float(np.mean(np.log(found))))
    means = [float(np.mean(found)) for found in rounds.values()]
    return float(np.std(means, ddof=1) / np.sqrt(len(means) / 2)) if len(means) > 1 else 0.0


def fit_costs(traces: Sequence[Trace], rollback_s: Mapping[str, float] | None = None) -> dict[str, Costs]:
    """Seconds between steps of generation, by ``costs_key``: a stage of a pipeline talks to its neighbours
    after every step, so its gaps are not those of a chain.

    rollback_s : by stage key, seconds of a cut of the cache; None = 0
    """
    rollback_s = rollback_s or {}
    gaps: dict[Strategy, Gaps] = defaultdict(Gaps)
    pooled = Gaps()
    stages: dict[Strategy, set[str]] = defaultdict(set)
    for trace in traces:
        if trace.options.get("together"):
            continue
        spec = PipelineSpec.from_dict(trace.pipeline)
        for prompt in trace.prompts:
            timed = [s for s in trace.steps if s.prompt == prompt.prompt and s.start_s is not None]
            for found in (gaps[spec.strategy], pooled):
                found.add(spec, timed)
                found.between.add(spec, timed, trace.options.get(OPTION, {}))
            stages[spec.strategy].update(stage.time_key for stage in spec.stages)
    return {
        costs_key(strategy, key): seen.costs(key, rollback_s.get(key, 0.0), pooled)
        for strategy, seen in gaps.items() for key in sorted(stages[strategy])
    }


@dataclass
class Gaps:
    """Seconds between steps, by the stage key of the step that follows."""

    start: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    turnaround: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    handover: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    between: Between = field(default_factory=Between)

    def add(self, spec: PipelineSpec, steps: list[StepRecord]) -> None:
        """Book the gaps of one prompt.

        A gap counts from what was waited for: the last step of another stage that ended within it (in
        a pipeline, of a neighbour), or else the stage's own step before.
        """
        pipelined = spec.strategy == "pipelined"
        by_stage = [joined((s for s in steps if s.stage == i), pipelined=pipelined) for i in range(len(spec.stages))]
        ends = [[end_of(step) for step in mine] for mine in by_stage]
        for i, (stage, mine) in enumerate(zip(spec.stages, by_stage, strict=True)):
            key, own = stage.time_key, -1.0
            near = {i - 1, i + 1} & set(range(len(ends))) if pipelined else set(range(len(ends))) - {i}
            for step, next_own in zip(mine, ends[i], strict=True):
                end, sender = max(((_last(ends[j], start_of(step)), j) for j in near), default=(-1.0, i))
                if own < 0 and (pipelined or end < 0):
                    self.start[key].append(start_of(step))
                elif end > own:
                    self.handover[key].append((start_of(step) - end) / abs(sender - i))
                else:
                    self.turnaround[key].append(start_of(step) - own)
                own = next_own

    def costs(self, key: str, rollback_s: float, pooled: Gaps) -> Costs:
        """Of stage ``key``; what these runs did not show is taken from those of other strategies."""
        # A stage that always waits for another shows no start of its own: the first stage's serves.
        start = self.start.get(key) or [x for found in self.start.values() for x in found]
        turnaround = self.turnaround.get(key) or pooled.turnaround.get(key, [])
        handover = self.handover.get(key) or pooled.handover.get(key, [])
        # Of a wait that the last message did not end, only part is hand-over: the short ones are whole.
        return Costs(start_s=_quantile(start, 0.5), turnaround_s=_quantile(turnaround, 0.5),
                     handover_s=_quantile(handover, 0.25), rollback_s=rollback_s,
                     **self.between.costs(key, pooled.between))


def _last(ends: list[float], before: float) -> float:
    """The last of ``ends`` (increasing) that is not after ``before``; -1 = none."""
    found = bisect_right(ends, before)
    return ends[found - 1] if found else -1.0


def _quantile(values: list[float], at: float) -> float:
    return max(0.0, float(np.quantile(values, at))) if values else 0.0


def _acceptance(agreement: Sequence[Agreement]) -> dict[str, AcceptanceModel]:
    """A Markov model per pair of recorded stages, along the target's path."""
    counts: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
    for entry in agreement:
        for a, first in enumerate(entry.names):
            for b in range(a + 1, len(entry.names)):
                # Expected numbers where probabilities are recorded: given the text, its positions are independent.
                now = entry.hits(a, b)
                last = np.concatenate([[0.0], now[:-1]]) if len(now) else now
                counts[f"{first}>{entry.names[b]}"] += [
                    float((before * after).sum()) for before in (1 - last, last) for after in (1 - now, now)]
    out: dict[str, AcceptanceModel] = {}
    for pair, (miss_miss, miss_hit, hit_miss, hit_hit) in counts.items():
        out[pair] = Markov(
            after_accept_rate=float(hit_hit / (hit_miss + hit_hit)) if hit_miss + hit_hit else 0.0,
            after_reject_rate=float(miss_hit / (miss_miss + miss_hit)) if miss_miss + miss_hit else 0.0,
        )
    return out

