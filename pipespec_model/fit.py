"""From traces to a profile: the one loop of the design, measurement back into assumption.

What is read from which record:

* step and prefill times from the steps of stages that computed alone,
* rates of stages that take turns from synchronous traces, likewise,
* contention from traces marked ``together``: the alone time of the same steps / their time there,
* costs between steps from traces of generation: autoregressive and synchronous ones, where a gap has
  one cause.

Every trace may carry ``options["probe_s"]``, the machine's speed probe beside it, and
``options["round"]``: a calibration goes round and round all that it measures, so that a shift of the
machine's speed touches everything alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from .acceptance import AcceptanceModel, Markov
from .agreement import NO_PROPOSAL, Agreement
from .errors import InputError
from .latency import Table, fit_table, undisturbed
from .profile import Contention, Costs, Profile, StageLatency
from .spec import PipelineSpec, StageSpec
from .trace import StepRecord, Trace

STEP_KINDS = {"measure", "draft", "verify", "decode"}


def fit(traces: Iterable[Trace], agreement: Sequence[Agreement] = (), source: str = "") -> Profile:
    """Fit a profile.

    traces : of calibration runs; ``options["together"]`` marks stages that were timed while the
        others of the same trace computed too
    agreement : recorded choices of the calibration prompts, kept as they are; acceptance per pair is
        fitted from them

    Raises InputError when no stage can be timed.
    """
    traces = list(traces)
    steps: dict[str, list[StepRecord]] = defaultdict(list)
    prefills: dict[str, list[StepRecord]] = defaultdict(list)
    rollbacks: dict[str, list[float]] = defaultdict(list)
    specs: dict[str, StageSpec] = {}
    for trace in traces:
        stages = PipelineSpec.from_dict(trace.pipeline).stages
        specs |= {stage.time_key: stage for stage in stages}
        if trace.options.get("together"):
            continue
        for i, stage in enumerate(stages):
            if len(stages) > 1 and not stage.block:
                continue  # not alone; a lookup disturbs nobody and is timed where it runs
            mine = [step for step in trace.steps if step.stage == i and not step.includes_wait]
            steps[stage.time_key] += [step for step in mine if step.kind in STEP_KINDS]
            prefills[stage.time_key] += [step for step in mine if step.kind == "prefill"]
            cuts = [step for step in mine if step.kind == "rollback" and step.width > 1]
            rollbacks[stage.time_key] += [step.duration_s for step in cuts]
    latency = {key: _stage_latency(found, prefills[key]) for key, found in steps.items() if found}
    if not latency:
        raise InputError("trace", "must hold the steps of at least one stage")
    together = [trace for trace in traces if trace.options.get("together")]
    chains = [trace for trace in traces
              if trace.pipeline["strategy"] == "speculative" and not trace.options.get("together")]
    return Profile(
        latency=latency, contention=_rates(together, latency), turns=_rates(chains, latency),
        costs=_costs(traces, {key: float(np.median(x)) for key, x in rollbacks.items() if x}),
        acceptance=_acceptance(agreement), agreement=tuple(agreement),
        **_speed(traces), origin="fitted", source=source,
    )


def _stage_latency(steps: list[StepRecord], prefills: list[StepRecord]) -> StageLatency:
    def table(found: list[StepRecord]) -> Table:
        return fit_table([s.width for s in found], [s.context for s in found], [s.duration_s for s in found])

    return StageLatency(table(steps), table(_merged(prefills)) if prefills else None)


def _merged(prefills: list[StepRecord]) -> list[StepRecord]:
    """Prefill widths are all different; bin them to 16 tokens so that each mean has some data."""
    return [replace(step, width=max(16, round(step.width / 16) * 16)) for step in prefills]


def _rates(traces: list[Trace], latency: dict[str, StageLatency]) -> tuple[Contention, ...]:
    """Per set of stages: how fast a step goes there, as a share of how fast it goes alone.

    Stages can only slow each other, so a share above 1 is noise and counts as 1.
    """
    ratios: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        stages = PipelineSpec.from_dict(trace.pipeline).stages
        group = tuple(stage.time_key for stage in stages)
        for step in trace.steps:
            key = group[step.stage]
            if step.kind in STEP_KINDS and key in latency and not stages[step.stage].block:
                ratios[group][key].append(step.duration_s / latency[key].step.mean_s(step.width, step.context))
    return tuple(
        Contention({key: min(1.0 / undisturbed(found), 1.0) for key, found in members.items()})
        for members in ratios.values() if members
    )


def _speed(traces: list[Trace]) -> dict[str, Any]:
    """The mean speed probe, and the standard error of that mean over rounds."""
    rounds: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        if trace.options.get("probe_s"):
            rounds[trace.options.get("round", 0)].append(trace.options["probe_s"])
    if not rounds:
        return {}
    means = np.array([np.mean(found) for found in rounds.values()])
    return {"probe_s": float(np.mean([x for found in rounds.values() for x in found])),
            "timing_spread": float(np.std(np.log(means), ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0}


def _costs(traces: list[Trace], rollback_s: dict[str, float]) -> dict[str, Costs]:
    start: dict[str, list[float]] = defaultdict(list)
    turnaround: dict[str, list[float]] = defaultdict(list)
    handover: dict[str, list[float]] = defaultdict(list)
    for trace in traces:
        if trace.options.get("together"):
            continue
        spec = PipelineSpec.from_dict(trace.pipeline)
        if spec.strategy == "pipelined":
            continue  # stages overlap there: a gap may have several causes
        for prompt in trace.prompts:
            timeline = sorted((s for s in trace.steps if s.prompt == prompt.prompt and s.start_s is not None),
                              key=lambda s: s.start_s or 0.0)
            _gaps(timeline, spec, start, turnaround, handover)
    keys = set(start) | set(turnaround) | set(handover) | set(rollback_s)

    def typical(found: dict[str, list[float]], key: str) -> float:
        return max(0.0, float(np.median(found[key]))) if found.get(key) else 0.0

    # A stage that always waits for another shows no start of its own: the first stage's serves.
    general = float(np.median([x for found in start.values() for x in found])) if start else 0.0
    return {
        key: Costs(start_s=typical(start, key) or general, turnaround_s=typical(turnaround, key),
                   handover_s=typical(handover, key), rollback_s=rollback_s.get(key, 0.0))
        for key in keys
    }


def _gaps(timeline: list[StepRecord], spec: PipelineSpec, start: dict[str, list[float]],
          turnaround: dict[str, list[float]], handover: dict[str, list[float]]) -> None:
    keys = [stage.time_key for stage in spec.stages]
    if timeline:
        start[keys[timeline[0].stage]].append(timeline[0].start_s or 0.0)
    for before, after in pairwise(timeline):
        gap = (after.start_s or 0.0) - (before.start_s or 0.0) - before.duration_s
        if after.stage == before.stage:
            turnaround[keys[after.stage]].append(gap)
        else:
            handover[keys[after.stage]].append(gap / abs(after.stage - before.stage))


def _acceptance(agreement: Sequence[Agreement]) -> dict[str, AcceptanceModel]:
    """A Markov model per pair of recorded stages, along the target's path."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for entry in agreement:
        for a, first in enumerate(entry.names):
            for b in range(a + 1, len(entry.names)):
                mine = entry.tokens[a]
                bits = (mine == entry.tokens[b]) & (mine != NO_PROPOSAL)
                last = False
                for bit in bits.tolist():
                    counts[f"{first}>{entry.names[b]}"][2 * last + bit] += 1
                    last = bit
    out: dict[str, AcceptanceModel] = {}
    for pair, (miss_miss, miss_hit, hit_miss, hit_hit) in counts.items():
        out[pair] = Markov(
            after_accept_rate=hit_hit / (hit_miss + hit_hit) if hit_miss + hit_hit else 0.0,
            after_reject_rate=miss_hit / (miss_miss + miss_hit) if miss_miss + miss_hit else 0.0,
        )
    return out

