"""Joules per token from the recorded power of the GPUs that a run names.

A stage's energy over a prompt is its GPUs' idle power times the whole time, plus what they draw more while a
one-token or a wider step runs, times those steps' seconds.  The three powers of a model are fitted on greedy and
synchronous files; a pipelined run is predicted from the busy seconds of its replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from pipespec_model.spec import StageSpec

from .files import PublishedFile, PublishedPrompt
from .replay import Replayed


@dataclass(frozen=True)
class Power:
    """Watts of a stage's GPUs together: idle, and what a one-token or a wider step adds."""

    idle_w: float
    plain_w: float
    wide_w: float

    def joules(self, total_s: float, plain_s: float, wide_s: float) -> float:
        return self.idle_w * total_s + self.plain_w * plain_s + self.wide_w * wide_s


def gpus(stage: StageSpec) -> list[int]:
    """Numbers of the GPUs that a stage names."""
    return [int(device.partition(":")[2]) for device in stage.device.split(",") if device.startswith("cuda:")]


def stage_joules(prompt: PublishedPrompt, stage: StageSpec) -> float | None:
    """Measured: mean sampled power times total time; None without samples of those GPUs."""
    chosen = gpus(stage)
    if not chosen or not prompt.power_w or max(chosen) >= min(len(sample) for sample in prompt.power_w):
        return None
    return float(np.mean([sum(sample[gpu] for gpu in chosen) for sample in prompt.power_w])) * prompt.total_s


def measured_joules_per_token(file: PublishedFile, indices: Iterable[int]) -> float | None:
    """Over the prompts ``indices``; None where a GPU has no samples."""
    keep = set(indices)
    joules, tokens = 0.0, 0
    for prompt in file.prompts:
        if prompt.index in keep:
            found = [stage_joules(prompt, stage) for stage in file.stages]
            if any(value is None for value in found):
                return None
            joules += sum(value for value in found if value is not None)
            tokens += prompt.num_tokens
    return joules / tokens if tokens else None


def fit_power(files: Iterable[PublishedFile]) -> dict[str, Power]:
    """By model, dtype and quantisation, from greedy and two-stage synchronous files."""
    seen: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for file in files:
        if file.strategy == "pipelined" or len(file.stages) > 2:
            continue
        for prompt in file.prompts:
            for i, stage in enumerate(file.stages):
                joules, busy_s = stage_joules(prompt, stage), sum(prompt.step_s[i])
                wide = i > 0 and file.label > 1
                if joules is not None:
                    seen[stage.choice_key].append((prompt.total_s, busy_s * (not wide), busy_s * wide, joules))
    return {key: _fit(np.array(rows)) for key, rows in seen.items()}


def _fit(rows: np.ndarray) -> Power:
    # Each prompt counts alike: power, not energy, is fitted.
    scaled = rows / rows[:, :1]
    idle_w, plain_w, wide_w = nnls(scaled[:, :3], scaled[:, 3])[0]
    if not rows[:, 2].any():
        wide_w = plain_w
    if not rows[:, 1].any():
        plain_w = wide_w
    return Power(float(idle_w), float(plain_w), float(wide_w))


def predicted_joules_per_token(replayed: Replayed, stages: tuple[StageSpec, ...], power: dict[str, Power],
                               ) -> float | None:
    """None where a stage's model has no fitted power."""
    if any(stage.choice_key not in power for stage in stages):
        return None
    busy = np.zeros((len(stages), 2))
    for step in replayed.trace.steps:
        busy[step.stage, int(step.stage > 0 and step.width > 1)] += step.duration_s
    joules = sum(power[stage.choice_key].joules(replayed.total_s, *busy[i]) for i, stage in enumerate(stages))
    return float(joules) / replayed.num_tokens
