"""A stage without weights: replays given tokens and holds its device for a given time.

It sleeps, so it uses no core and a deep pipeline becomes real processes on a small machine.  It
never imports torch.  Rows made with it are labelled ``emulated``: their processes, messages, waits
and rollbacks are real, their step times are not a model's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipespec_model.agreement import Agreement, Replay
from pipespec_model.latency import LatencyModel
from pipespec_model.messages import Step
from pipespec_model.uniforms import STEP_TIME, uniform


@dataclass(frozen=True)
class Script:
    """What a scripted stage does.

    latency : seconds a step is held
    fail_at : raise at this many steps (fault injection in tests); None = never
    """

    latency: LatencyModel
    seed: int = 0
    neighbour_rate: float = 0.9
    fail_at: int | None = None

    def runner(self) -> ScriptedRunner:
        return ScriptedRunner(self)


@dataclass(frozen=True)
class Wrong:
    """Makes a real drafter always wrong: it computes as usual and then names another token id.
    For measuring the worst case (it may hit the target's token by chance where its own was wrong)."""


class ScriptedRunner:
    """Tokens from a replay, time from a latency model."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._steps = 0

    def begin_replay(self, agreement: Agreement, stage: int, prompt: int, *, block: bool) -> None:
        self._replay = Replay(agreement, self.script.seed, prompt, self.script.neighbour_rate)
        self._stage, self._prompt, self._block, self._steps = stage, prompt, block, 0

    def forget(self, length: int) -> None:
        """Nothing is cached."""

    def run(self, sequence: Sequence[int], step: Step) -> list[int]:
        start = time.perf_counter()
        if self.script.fail_at is not None and self._steps >= self.script.fail_at:
            raise RuntimeError(f"scripted failure at step {self._steps}")
        if self._block:
            tokens = self._replay.propose(self._stage, sequence, step.limit)
            width = len(tokens)
        else:
            tokens = self._replay.choices(self._stage, sequence, step.drafts)
            width = step.width
        draw = uniform(self.script.seed, self._prompt, self._stage, STEP_TIME, self._steps)
        self._steps += 1
        hold_until(start + self.script.latency.sample_s(width, step.cached, draw))
        return tokens


class WrongRunner:
    """A real runner whose every choice is off by one id."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.context_limit = runner.context_limit

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None:
        self._runner.begin(prompt, sampler)

    def run(self, sequence: Sequence[int], step: Step) -> list[int]:
        # Downwards, so that no id leaves the vocabulary.
        return [token - 1 if token else 1 for token in self._runner.run(sequence, step)]

    def forget(self, length: int) -> None:
        self._runner.forget(length)

    @property
    def prompt_length(self) -> int:
        return int(self._runner.prompt_length)


def hold_until(deadline: float) -> None:
    """Sleep until ``time.perf_counter()`` reaches ``deadline``."""
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)
