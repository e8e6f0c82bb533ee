"""Where a row's timing error comes from: one assumption after the other gives way to what the run showed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipespec_model import metrics
from pipespec_model.agreement import Agreement
from pipespec_model.fit import fit_costs
from pipespec_model.latency import Table, fit_line
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import BETWEEN_STEPS, StepRecord, Trace
from simulate.run import simulate


def budget(pipeline: PipelineSpec, profile: Profile, trace: Trace, agreements: Sequence[Agreement],
           slowness: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of the error in percent of the measured throughput; the first four sum to the timing error.

    agreements, slowness : one entry a run of ``trace``, as they were replayed

    Replaced one after the other: step times (with what stages cost each other) by those of the run, the
    seconds between steps, the drafts that the target accepted.  What is left is ``rest``.  Then what
    the error would have been without the profile's contention, and at the machine's speed as it was in
    calibration; and the run's throughput over that of the same steps with nothing between them.
    """
    measured = metrics.tokens_per_s(trace.prompts)
    assert measured is not None

    def error(with_profile: Profile, tokens: Sequence[Agreement], slow: Sequence[Sequence[float]] | None) -> float:
        said = metrics.tokens_per_s(simulate(pipeline, with_profile, tokens, slowness=slow).prompts)
        assert said is not None
        return 100 * (said / measured - 1)

    even = [[1.0] * len(pipeline.stages)] * len(trace.prompts)
    own = [accepted_as_run(agreement, _of_target(trace, prompt.prompt))
           for agreement, prompt in zip(agreements, trace.prompts, strict=True)]
    as_timed = replace(profile, latency=profile.latency | latency_of(trace, profile), contention=(), turns=())
    as_spaced = replace(as_timed, costs=fit_costs([trace]))
    chain = [error(profile, agreements, slowness), error(as_timed, agreements, even),
             error(as_spaced, agreements, even), error(as_spaced, own, even)]
    return {
        "step_times": chain[0] - chain[1], "between_steps": chain[1] - chain[2], "acceptance": chain[2] - chain[3],
        "rest": chain[3],
        "without_contention": error(replace(profile, contention=(), turns=()), agreements, slowness),
        "at_calibrated_speed": error(profile, agreements, None),
        "efficiency": 1 / (1 + error(replace(as_timed, costs={}), own, even) / 100),
    }


def latency_of(trace: Trace, profile: Profile) -> dict[str, StageLatency]:
    """Mean step times of a run, whatever slowed them, by stage key; widths that it had less than three
    times are the profile's, as much slower or faster as the others were."""
    out = {}
    for i, stage in enumerate(PipelineSpec.from_dict(trace.pipeline).stages):
        before = profile.stage_latency(stage)
        mine = [step for step in trace.steps
                if step.stage == i and step.duration_s > 0 and step.kind not in BETWEEN_STEPS]
        prefills = [step for step in mine if step.kind == "prefill"]
        by_width: dict[int, list[StepRecord]] = defaultdict(list)
        for step in mine:
            if step.kind not in ("prefill", "lookup"):
                by_width[step.width].append(step)
        steps = [step for found in by_width.values() for step in found]
        model = before.step
        if steps:
            context = round(float(np.mean([step.context for step in steps])))
            scale = sum(s.duration_s for s in steps) / sum(before.step.mean_s(s.width, s.context) for s in steps)
            times = {width: float(np.mean([s.duration_s for s in found])) if len(found) >= 3
                     else scale * before.step.mean_s(width, context) for width, found in sorted(by_width.items())}
            model = Table(tuple(times), tuple(times.values()), at_context=context)
        line = fit_line([s.width for s in prefills], [s.duration_s for s in prefills]) if prefills else before.prefill
        out[stage.time_key] = StageLatency(model, line)
    return out


def accepted_as_run(agreement: Agreement, steps: Sequence[StepRecord]) -> Agreement:
    """The agreement with the last drafter's choices as the target's ``steps`` met them: a quantised drafter's
    near-ties fall either way, with the number of tokens that it takes at once."""
    if len(agreement.names) < 2:
        return agreement
    tokens = agreement.tokens.copy()
    for step in steps:
        end = step.position + step.accepted
        tokens[-2, step.position : end] = tokens[-1, step.position : end]
        if step.accepted < step.drafts and end < agreement.num_tokens and tokens[-2, end] == tokens[-1, end]:
            tokens[-2, end] = tokens[-1, end] + 1
    return replace(agreement, tokens=tokens)


def _of_target(trace: Trace, prompt: int) -> list[StepRecord]:
    return [step for step in metrics.target_steps(trace) if step.prompt == prompt]


def sentence(shares: dict[str, Any]) -> str:
    """The largest share, in words."""
    words = {"step_times": "its steps' times", "between_steps": "the time between its steps",
             "acceptance": "drafts that were accepted otherwise than recorded", "rest": "what none of these explains"}
    name = max(words, key=lambda key: abs(shares[key]))
    return f"Mostly {words[name]} ({shares[name]:+.1f}%).".replace("-", "−")
