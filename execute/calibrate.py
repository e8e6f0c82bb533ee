"""Measure what a prediction needs, with nothing of the rows that will be predicted.

Per stage: step time against width and context, alone; prefill; the cost of a rollback.  Per set of
stages that compute at once: the same steps while the others run.  Between steps: turnaround and
hand-over, from short autoregressive and synchronous runs.  Per prompt: each stage's own choices
along the target's output.  Everything is kept as traces, and ``pipespec_model.fit`` makes the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from pipespec_model.agreement import Agreement
from pipespec_model.fit import fit
from pipespec_model.profile import Profile
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import Trace

from .fleet import Fleet, new_trace
from .prompts import Prompt

# (width, context, repeats): narrow steps are the common ones and get most of the repeats.
STEP_CASES = [(1, 64, 5), (2, 64, 4), (3, 64, 3), (4, 64, 2), (8, 64, 2), (16, 64, 2), (32, 64, 1),
              (1, 192, 3), (2, 192, 2), (4, 192, 1)]
PREFILL_CASES = [(32, 0, 1), (64, 0, 1), (128, 0, 1)]
TOGETHER_CASES = {"drafter": [(1, 64, 4), (1, 128, 4)], "verifier": [(1, 64, 2), (2, 64, 3), (3, 64, 2), (2, 128, 2)]}
TOGETHER_S = 2.5

Tick = Callable[[str], None]


def calibrate(fleet: Fleet, pipelines: Sequence[PipelineSpec], prompts: Sequence[Prompt], *, max_new_tokens: int,
              rounds: int = 2, agreements: Sequence[Agreement] | None = None, tick: Tick = lambda _: None,
              ) -> tuple[Profile, list[Trace]]:
    """Calibrate every stage of ``pipelines``.

    prompts : the calibration half, encoded
    agreements : the scripted stages' tokens, one a prompt; None = record the models' own
    tick : called with a few words as each part begins

    Returns
    -------
    profile, and the traces that it was fitted from
    """
    text = list(prompts[0].tokens) if prompts else [1]
    alone = distinct_stages(pipelines)
    traces: list[Trace] = []
    watch = pipelines[0].target.name

    def keep(trace: Trace, before: float | None) -> None:
        after = fleet.probe_s(watch)
        if before and after:
            trace.options["probe_s"] = (before + after) / 2
        traces.append(trace)

    for number in range(rounds):
        for stage in alone:
            tick(f"timing {stage.name} alone on {stage.threads} thread(s), round {number + 1}")
            for cases in _alone_cases(stage):
                before = fleet.probe_s(watch)
                keep(_time_alone(fleet, stage, text, cases), before)
        for group in computing_sets(pipelines):
            tick(f"timing {' and '.join(stage.name for stage in group)} together, round {number + 1}")
            before = fleet.probe_s(watch)
            keep(_time_together(fleet, group, text), before)
    recorded = list(agreements or [])
    for i, pipeline in enumerate(reference_runs(pipelines)):
        tick(f"running {pipeline.strategy} {pipeline.label} on calibration prompts")
        answers = []
        for n, prompt in enumerate(prompts if i == 0 and agreements is None else prompts[:3]):
            before = fleet.probe_s(watch)
            trace = new_trace(fleet.configure(pipeline))
            trace.add(*fleet.run_prompt(pipeline, prompt, max_new_tokens=max_new_tokens if i == 0 else 16,
                                        agreement=_scripted(agreements, n, pipeline)))
            answers.append(trace.prompts[0].tokens)
            keep(trace, before)
        if i == 0 and agreements is None:
            tick("recording each stage's own choices on calibration prompts")
            recorded = record_agreement(fleet, pipelines, prompts, answers, max_new_tokens=max_new_tokens)
    return fit(traces, recorded, source=f"{len(prompts)} calibration prompts"), traces


def _scripted(agreements: Sequence[Agreement] | None, n: int, pipeline: PipelineSpec) -> Agreement | None:
    return agreements[n].select([stage.choice_key for stage in pipeline.stages]) if agreements else None


def distinct_stages(pipelines: Iterable[PipelineSpec]) -> list[StageSpec]:
    """One stage a time key, in order of appearance."""
    found: dict[str, StageSpec] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            found.setdefault(stage.time_key, stage)
    return list(found.values())


def computing_sets(pipelines: Iterable[PipelineSpec]) -> list[tuple[StageSpec, ...]]:
    """Every pair, and the whole, of the stages that compute at once in some pipeline."""
    found: dict[frozenset[str], tuple[StageSpec, ...]] = {}
    for pipeline in pipelines:
        if pipeline.strategy != "pipelined":
            continue
        stages = [stage for stage in pipeline.stages if not stage.block]
        for group in [*combinations(stages, 2), tuple(stages)]:
            if len(group) > 1:
                found.setdefault(frozenset(stage.time_key for stage in group), group)
    return list(found.values())


def reference_runs(pipelines: Sequence[PipelineSpec]) -> list[PipelineSpec]:
    """Runs in which a gap between steps has one cause: each target alone, each set of stages as a
    chain.  The first is the target of the first pipeline alone."""
    runs: dict[tuple[str, ...], PipelineSpec] = {}
    for stage in [pipeline.target for pipeline in pipelines]:
        runs.setdefault((stage.time_key,), PipelineSpec(strategy="autoregressive", stages=(stage,)))
    for pipeline in pipelines:
        if len(pipeline.stages) > 1:
            links = tuple(LinkSpec(lookahead=3, buffer_tokens=16, max_window=16) for _ in pipeline.links)
            chain = PipelineSpec(strategy="speculative", stages=pipeline.stages, links=links)
            runs.setdefault(tuple(stage.time_key for stage in pipeline.stages), chain)
    return list(runs.values())


def _single(stage: StageSpec) -> PipelineSpec:
    return PipelineSpec(strategy="autoregressive", stages=(stage,))


def _alone_cases(stage: StageSpec) -> list[list[tuple[int, int, int]]]:
    """Groups of cases, each short enough for one speed."""
    if stage.block:
        return [[(width, 64, 3) for width in (1, 2, 4, 8)]]
    return [STEP_CASES[:4], STEP_CASES[4:], PREFILL_CASES]


def _time_alone(fleet: Fleet, stage: StageSpec, text: list[int], cases: list[tuple[int, int, int]]) -> Trace:
    trace = new_trace(fleet.configure(_single(stage)))
    fleet.measure({stage.name: [(1, 64, 2)]}, text)  # warm-up, not counted
    trace.steps = fleet.measure({stage.name: cases}, text)[stage.name]
    return trace


def _time_together(fleet: Fleet, group: Sequence[StageSpec], text: list[int]) -> Trace:
    links = tuple(LinkSpec() for _ in group[1:])
    spec = fleet.configure(PipelineSpec(stages=tuple(group), links=links))
    trace = new_trace(spec, options={"together": True})
    cases = {stage.name: TOGETHER_CASES["drafter" if i == 0 else "verifier"] for i, stage in enumerate(group)}
    measured = fleet.measure(cases, text, seconds=TOGETHER_S)
    for i, stage in enumerate(group):
        trace.steps += [replace(step, stage=i) for step in measured[stage.name]]
    return trace


def record_agreement(fleet: Fleet, pipelines: Sequence[PipelineSpec], prompts: Sequence[Prompt],
                     answers: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[Agreement]:
    """Each distinct stage's choice at each position of the target's ``answers``.

    A stage whose choices are the target's by definition is not run again.
    """
    target = pipelines[0].target
    stages: dict[str, StageSpec] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            stages.setdefault(stage.choice_key, stage)
    stages.pop(target.choice_key, None)
    out = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows: list[Sequence[int]] = [
            fleet.teacher_force(stage.name, prompt.tokens, answer)[0] for stage in stages.values()
        ]
        tokens = np.array([*rows, answer], dtype=np.int64).reshape(len(stages) + 1, len(answer))
        out.append(Agreement(prompt.name, len(prompt.tokens), (*stages, target.choice_key), tokens,
                             prompt.category, max_new_tokens, prompt.eos))
    return out

