"""Recovered bits and calibrated times through the simulator: what a run would have recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pipespec_model.acceptance import AcceptanceModel
from pipespec_model.agreement import Agreement
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import Trace
from pipespec_model.uniforms import ON_PATH, uniform
from simulate.run import simulate

from .bits import UNKNOWN_BIT, rate_after_rejection
from .calibration import RULE, Calibration, DraftRule
from .files import BUFFER_TOKENS

Unknown = Literal["drawn", "all 0", "all 1"]
"""What positions that no file tells are taken for."""


@dataclass(frozen=True)
class Replayed:
    """A replayed run.

    indices : of its prompts, in the order of the trace's
    """

    trace: Trace
    indices: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.trace.prompts)

    @property
    def total_s(self) -> float:
        return sum(prompt.total_s for prompt in self.trace.prompts)

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.total_s / self.num_tokens

    def seconds(self) -> dict[int, tuple[float, int]]:
        """By prompt index: seconds and tokens."""
        return {i: (p.total_s, len(p.tokens)) for i, p in zip(self.indices, self.trace.prompts, strict=True)}

    def steps(self, stage: int) -> dict[int, int]:
        """By prompt index: steps of a stage after its prefill."""
        out = dict.fromkeys(self.indices, 0)
        for step in self.trace.steps:
            if step.stage == stage and step.kind != "prefill":
                out[self.indices[step.prompt]] += 1
        return out

    def ends(self) -> dict[int, list[int]]:
        """By prompt index: tokens held by the target after each step of its own after prefill."""
        out: dict[int, list[int]] = {index: [] for index in self.indices}
        last = len(self.trace.pipeline["stages"]) - 1
        for step in self.trace.steps:
            if step.stage == last and step.kind != "prefill":
                out[self.indices[step.prompt]].append(step.position + step.emitted)
        return out


def agreements(pipeline: PipelineSpec, calibration: Calibration, indices: Sequence[int], *, unknown: Unknown = "drawn",
               wrong_alike_rate: float | None = None, seed: int = 0) -> list[Agreement]:
    """Choices of a pipeline's stages along the target's output, built from each drafter's bits.

    Stages that are both wrong choose the same token at ``wrong_alike_rate`` (default: the neighbour rate),
    which no file tells.  Raises InputError where a pair has no synchronous file.
    """
    alike = calibration.neighbour_rate(pipeline) if wrong_alike_rate is None else wrong_alike_rate
    tables = [calibration.pair_bits(stage, pipeline.target) for stage in pipeline.stages[:-1]]
    rates = [rate_after_rejection(table.values()) for table in tables]
    out = []
    for index in indices:
        length = min(table[index].num_tokens for table in tables)
        tokens = np.empty((len(pipeline.stages), length), dtype=np.int64)
        tokens[-1] = np.arange(1, length + 1)
        for stage in range(len(tables) - 1, -1, -1):
            own_wrong = (stage + 2) * 1_000_000 + tokens[-1]
            for position in range(length):
                bit = int(tables[stage][index].bits[position])
                if bit == UNKNOWN_BIT:
                    draw = uniform(seed, index, stage, ON_PATH, position)
                    bit = {"drawn": int(draw < rates[stage]), "all 0": 0, "all 1": 1}[unknown]
                wrong = own_wrong[position]
                below = tokens[stage + 1, position]
                if below != tokens[-1, position] and uniform(seed, index, stage, ON_PATH, position, 1) < alike:
                    wrong = below
                tokens[stage, position] = tokens[-1, position] if bit else wrong
        out.append(Agreement(f"prompt-{index}", 0, tuple(stage.choice_key for stage in pipeline.stages), tokens,
                             budget=length + BUFFER_TOKENS, eos=(length,)))
    return out


def redrawn(pipeline: PipelineSpec, calibration: Calibration, indices: Sequence[int],
            models: Sequence[AcceptanceModel], *, seed: int = 0) -> list[Agreement]:
    """The same prompts with every bit drawn from an acceptance model a stage, its agreement with the target."""
    out = []
    for agreement in agreements(pipeline, calibration, indices):
        tokens = agreement.tokens.copy()
        length = tokens.shape[1]
        for stage, model in enumerate(models):
            draws = [uniform(seed, _index(agreement), stage, ON_PATH, position) for position in range(length)]
            tokens[stage] = np.where(model.bits(draws), tokens[-1], (stage + 2) * 1_000_000 + tokens[-1])
        out.append(Agreement(agreement.prompt, 0, agreement.names, tokens, budget=agreement.budget, eos=agreement.eos))
    return out


def run(pipeline: PipelineSpec, calibration: Calibration, made: Sequence[Agreement], *, rule: DraftRule = RULE,
        draft_s: float | None = None, neighbour_rate: float | None = None) -> Replayed:
    """Simulate prompts of a run; the first one with the warm-up of the processes."""
    cold, warm = (calibration.profile(pipeline, warm=warm, rule=rule, draft_s=draft_s) for warm in (False, True))
    if neighbour_rate is not None:
        cold, warm = (replace(profile, neighbour_rate=neighbour_rate) for profile in (cold, warm))
    trace, first = simulate(pipeline, warm, made[1:]), simulate(pipeline, cold, made[:1])
    number = len(made) - 1
    trace.add(replace(first.prompts[0], prompt=number), [replace(step, prompt=number) for step in first.steps])
    return Replayed(trace, tuple(_index(agreement) for agreement in (*made[1:], made[0])))


def _index(agreement: Agreement) -> int:
    return int(agreement.prompt.rpartition("-")[2])
