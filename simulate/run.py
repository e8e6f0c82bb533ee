"""Simulate a pipeline over prompts, and say how sure the result is.

Prompts come from the profile's recorded agreement where its rows cover the pipeline; otherwise from
its acceptance models, as many prompts as asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from pipespec_model import metrics
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.errors import InputError
from pipespec_model.profile import Profile, load_profile, pairs, recorded
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import Trace

from .engine import PromptRun


@dataclass(frozen=True)
class Forecast:
    """A predicted throughput in tokens per second.

    interval : 90% interval of the throughput measured on ``num_prompts`` *new* prompts
    """

    tokens_per_s: float
    interval: tuple[float, float] | None
    mean_acceptance_length: float | None
    num_prompts: int


def simulate(pipeline: PipelineSpec, profile: Profile, agreements: Sequence[Agreement], *, seed: int = 0,
             spread: bool = True, slowness: Sequence[Sequence[float]] | None = None) -> Trace:
    """Run every prompt once; a trace of origin ``simulated``.

    agreements : rows in the order of the pipeline's stages
    spread : draw step times from their distribution; False = their means
    slowness : by prompt and stage, how much slower than undisturbed the machine was; None = as in calibration
    """
    trace = Trace("simulated", pipeline.to_dict(), seed=seed,
                  options={"spread": spread, "profile": profile.source, "neighbour_rate": profile.neighbour_rate})
    if profile.sampling is not None:
        trace.options["sampling"] = profile.sampling.to_dict()
    for number, agreement in enumerate(agreements):
        trace.add(*PromptRun(pipeline, profile, agreement, seed=seed, prompt=number, spread=spread,
                             slowness=None if slowness is None else slowness[number]).run())
    return trace


def agreements_for(pipeline: PipelineSpec, profile: Profile, *, num_prompts: int, num_tokens: int,
                   seed: int) -> list[Agreement]:
    """Recorded prompts where the profile has them, else synthetic ones from its acceptance models."""
    found = recorded(profile, pipeline)
    if found:
        return found
    if num_prompts < 1 or num_tokens < 1:
        raise InputError("prompts and tokens", "must be >= 1", f"{num_prompts} prompts, {num_tokens} tokens")
    models = [profile.pair(a, b) for a, b, _ in pairs(pipeline)]
    names = [stage.choice_key for stage in pipeline.stages]
    return [synthetic(names, models, num_tokens=num_tokens, seed=seed, prompt=i) for i in range(num_prompts)]


def replication_prompts(spec: PipelineSpec, profile: Profile, *, num_prompts: int, num_tokens: int,
                        seed: int) -> list[Agreement]:
    """A replication's prompts: synthetic ones, or the recorded ones resampled, so that the interval over
    replications holds the luck of the prompts either way."""
    found = agreements_for(spec, profile, num_prompts=num_prompts, num_tokens=num_tokens, seed=seed)
    if not recorded(profile, spec):
        return found
    return [found[i] for i in np.random.default_rng(seed).integers(0, len(found), size=len(found))]


def read_profile(path: Path) -> Profile:
    """A profile for a command; says on stderr where its step times were never measured."""
    profile = load_profile(path)
    if profile.estimated:
        print(f"step times of {', '.join(profile.estimated)} are ESTIMATES from data sheets, not measured",
              file=sys.stderr)
    return profile


def forecast(trace: Trace, profile: Profile, *, num_prompts: int, repeats: int = 1) -> Forecast:
    """What ``num_prompts`` new prompts of the same kind would measure, each run ``repeats`` times.

    ``trace`` may hold each prompt several times.  On the logarithm of the ratio of totals the variance is
    the sum of: s² (1/n + 1/m), as the n calibration prompts are one sample and the m new ones another (s²
    of a prompt's influence, by the delta method); 2 spread², as the machine's speed drifts between rounds,
    in calibration and in evaluation (the profile's timing spread); and σ² (1/c + 1/(m repeats)), as each
    run meets the machine at a speed of its own (σ of the log slowness of the stage that varies most, seen
    c times in calibration).  With few prompts Student's t with n - 1 degrees of freedom is what keeps the
    stated level.
    """
    value = metrics.tokens_per_s(trace.prompts)
    if value is None:
        raise InputError("trace", "must hold at least one prompt")
    prompts = metrics.mean_of_repeats(trace.prompts)
    tokens = np.array([len(p.tokens) for p in prompts], dtype=float)
    seconds = np.array([p.total_s for p in prompts])
    n = len(prompts)
    interval = None
    if n > 1:
        influence = tokens / tokens.mean() - seconds / seconds.mean()
        stages = PipelineSpec.from_dict(trace.pipeline).stages
        seen = [profile.slowness_of(stage) for stage in stages]
        wobble = max(float(np.log(found).var()) * (1 / len(found) + 1 / (num_prompts * repeats)) for found in seen)
        variance = float(influence.var(ddof=1)) * (1 / n + 1 / num_prompts) + 2 * profile.timing_spread**2 + wobble
        half = float(stats.t.ppf(0.95, n - 1) * np.sqrt(variance))
        interval = (value * np.exp(-half), value * np.exp(half))
    return Forecast(value, interval, metrics.mean_acceptance_length(trace), num_prompts)
