"""Measure what a prediction needs, with nothing of the rows that will be predicted.

Per stage: step time against width and context, alone; prefill; the cost of a rollback.  Per set of
stages that compute at once: the same steps while the others run.  Between steps: turnaround and
hand-over, from short runs of every strategy.  Per prompt: each stage's own choices along the
target's output, and where text is sampled the probability that it would draw the target's token too.  Everything
is kept as traces, and ``pipespec_model.fit`` makes the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from pipespec_model.agreement import Agreement
from pipespec_model.between import OPTION
from pipespec_model.fit import fit
from pipespec_model.profile import Profile
from pipespec_model.sampling import Sampling
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import Trace

from .fleet import Fleet, new_trace
from .prompts import Prompt
from .record import Drawn, check_recordable, draws_of, record_agreement

# Narrow steps are the common ones and are timed more often.
STEP_WIDTHS = {64: (1, 2, 3, 1, 4, 2, 8, 16), 160: (1, 2, 1, 4, 2, 3, 32)}  # by context
CONTEXTS = tuple(STEP_WIDTHS)  # alternately, a round each
PREFILL_WIDTHS = (48, 96)
TOGETHER_S = (0.2, 0.8)  # least and most, for twenty steps of the slowest; before it, half as long each stage alone
COMMON_WIDTHS = (1, 2, 3, 2)  # of a verifier; a drafter takes one token a step
GAP_TOKENS = 16  # of the short runs that show the gaps between steps

Tick = Callable[[str], None]


def calibrate(fleet: Fleet, pipelines: Sequence[PipelineSpec], prompts: Sequence[Prompt], *, max_new_tokens: int,
              rounds: int | None = None, agreements: Sequence[Agreement] | None = None,
              sampling: Sampling | None = None, tick: Tick = lambda _: None) -> tuple[Profile, list[Trace]]:
    """Calibrate every stage of ``pipelines``.

    Each round measures everything once: on a shared machine speed shifts for seconds at a time, and
    what is measured minutes apart cannot be compared.

    prompts : the calibration half, encoded
    rounds : of timing, a prompt each; None = one a prompt.  Agreement is recorded of every prompt
    agreements : the scripted stages' tokens, at least one a round; None = record the models' own
    sampling : None = greedy
    tick : called with a few words as each part begins

    Returns
    -------
    profile, and the traces that it was fitted from
    """
    for pipeline in pipelines:
        fleet.check_fits(pipeline, prompts, max_new_tokens)
        check_recordable(pipeline, sampling)
    text = list(prompts[0].tokens)
    traces: list[Trace] = []
    answers: list[list[int]] = []
    timed = prompts[:rounds]
    alone = distinct_stages(fleet.place(pipeline) for pipeline in pipelines)
    baseline, *others = reference_runs(pipelines)
    for number, prompt in enumerate(timed):
        tick(f"calibration round {number + 1} of {len(timed)}")
        context = CONTEXTS[number % len(CONTEXTS)]
        made = [_time_alone(fleet, stage, text, context=context, sampling=sampling) for stage in alone]
        # Long enough for several steps of the slowest stage.
        slowest = max(step.duration_s for trace in made for step in trace.steps if step.width <= max(COMMON_WIDTHS))
        seconds = max(5 * slowest, min(max(20 * slowest, TOGETHER_S[0]), TOGETHER_S[1]))
        made += [_time_together(fleet, group, text, seconds=seconds, sampling=sampling)
                 for group in computing_sets(pipelines)]
        options: dict[str, Any] = {"agreement": agreements[number] if agreements else None,
                                   "sampling": sampling, "drawn_as": number}
        made.append(_run(fleet, baseline, prompt, max_new_tokens, options))
        answers.append(made[-1].prompts[0].tokens)
        made += [_run(fleet, other, prompt, min(GAP_TOKENS, max_new_tokens), options) for other in others]
        for trace in made:
            trace.options["round"] = number
        traces += made
    if agreements is None:
        tick("recording each stage's own choices on calibration prompts")
        answers += [fleet.run_prompt(baseline, prompt, max_new_tokens=max_new_tokens, sampling=sampling,
                                     drawn_as=number)[0].tokens
                    for number, prompt in enumerate(prompts[len(timed):], len(timed))]
        texts = [Drawn(prompt, answer, draws_of(prompt, sampling, number))
                 for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))]
        agreements = record_agreement(fleet, pipelines, texts, max_new_tokens=max_new_tokens, probabilities=True)
    profile = fit(traces, agreements, source=f"{len(prompts)} calibration prompts")
    return replace(profile, sampling=sampling), traces


def _run(fleet: Fleet, pipeline: PipelineSpec, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> Trace:
    sampling: Sampling | None = options["sampling"]
    trace = new_trace(fleet.configure(pipeline), seed=sampling.seed if sampling else 0, options={
        OPTION: fleet.entry_bytes(pipeline), **({"sampling": sampling.to_dict()} if sampling else {})})
    trace.add(*fleet.run_probed(pipeline, prompt, max_new_tokens=max_new_tokens, **options))
    return trace


def distinct_stages(pipelines: Iterable[PipelineSpec]) -> list[StageSpec]:
    """One stage a time key and place, in order of appearance; lookups are timed where they run."""
    found: dict[str, StageSpec] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            if not stage.block:
                found.setdefault(stage.place_key, stage)
    return list(found.values())


def computing_sets(pipelines: Iterable[PipelineSpec]) -> list[tuple[StageSpec, ...]]:
    """Every pair, and the whole, of the stages that compute at once in some pipeline, if they make one: a
    layer-skipping drafter does so only before its own model."""
    found: dict[frozenset[str], tuple[StageSpec, ...]] = {}
    for pipeline in pipelines:
        if pipeline.strategy != "pipelined":
            continue
        stages = [stage for stage in pipeline.stages if not stage.block]
        for group in [*combinations(stages, 2), tuple(stages)]:
            if len({stage.time_key for stage in group}) == len(group) > 1 and _makes_sense(group):
                found.setdefault(frozenset(stage.time_key for stage in group), group)
    return list(found.values())


def _makes_sense(group: Sequence[StageSpec]) -> bool:
    before_own = all(not a.clasp or (a.model, a.dtype) == (b.model, b.dtype) for a, b in pairwise(group))
    return before_own and not group[-1].clasp


def reference_runs(pipelines: Sequence[PipelineSpec]) -> list[PipelineSpec]:
    """Short runs that show the gaps between steps: each target alone, and each strategy on each set of
    stages, with windows that make every stage wait at times.  The first is the target of the first
    pipeline alone."""
    runs: dict[tuple[str, ...], PipelineSpec] = {}
    for pipeline in pipelines:
        alone = PipelineSpec.alone(pipeline.target)
        runs.setdefault((alone.strategy, alone.target.time_key), alone)
    for pipeline in pipelines:
        lookahead, buffer = (1, 4) if pipeline.strategy == "pipelined" else (3, 16)
        link = LinkSpec(lookahead=lookahead, buffer_tokens=buffer, max_window=buffer)
        short = pipeline.model_copy(update={"links": (link,) * len(pipeline.links)})
        runs.setdefault((pipeline.strategy, *(stage.time_key for stage in pipeline.stages)), short)
    return list(runs.values())


def _time_alone(fleet: Fleet, stage: StageSpec, text: list[int], *, context: int,
                sampling: Sampling | None) -> Trace:
    trace = new_trace(fleet.configure(PipelineSpec.alone(stage)))
    trace.steps = fleet.measure(stage.name, STEP_WIDTHS[context], text, context=context, sampling=sampling)
    trace.steps += fleet.measure(stage.name, PREFILL_WIDTHS, text, context=0, sampling=sampling)
    return trace


def _time_together(fleet: Fleet, group: Sequence[StageSpec], text: list[int], *, seconds: float,
                   sampling: Sampling | None) -> Trace:
    """Each stage alone, and at once all of them: the contrast must not be one of two times of day."""
    links = tuple(LinkSpec() for _ in group[1:])
    spec = fleet.configure(PipelineSpec(stages=tuple(group), links=links))
    trace = new_trace(spec, options={"together": True})
    widths: dict[str, tuple[int, ...]] = {stage.name: COMMON_WIDTHS if i else (1,) for i, stage in enumerate(group)}
    measured = fleet.measure_together(widths, text, context=CONTEXTS[0], seconds=seconds, sampling=sampling)
    for i, stage in enumerate(group):
        trace.steps += [replace(step, stage=i) for step in measured[stage.name]]
    return trace
