"""How fast the machine was around each run, from single steps that were timed just before and after it.

On a shared machine a core's speed shifts by tens of percent for seconds at a time.  That is no part of
a model of a pipeline's time, and it can only be told apart from one by steps outside the run.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from .profile import Profile
from .spec import PipelineSpec
from .trace import Trace

STALL = 2.0


def probed_slowness(trace: Trace, profile: Profile) -> dict[tuple[int, int], float]:
    """By prompt and stage, how many times slower than in ``profile`` the steps beside the prompt were.

    Of stages that were probed at once the profile's contention is taken out.
    """
    spec = PipelineSpec.from_dict(trace.pipeline)
    keys = [profile.rate_key(stage) for stage in spec.stages]
    rates = dict.fromkeys(keys, 1.0)
    if spec.probed_at_once:
        rates |= profile.rates(frozenset(key for key, stage in zip(keys, spec.stages, strict=True) if not stage.block))
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in trace.probes:
        expected_s = profile.stage_latency(spec.stages[step.stage]).step.mean_s(step.width, step.context)
        ratios[step.prompt, step.stage].append(step.duration_s / expected_s * rates[keys[step.stage]])
    return {key: _without_stalls(found) for key, found in ratios.items()}


def _without_stalls(ratios: list[float]) -> float:
    """The mean, but for steps that took more than ``STALL`` times the median: a step of two threads of which one was
    put aside for half a second says nothing of the run beside it."""
    return float(np.mean([ratio for ratio in ratios if ratio <= STALL * np.median(ratios)]))
