"""Timing single steps of a runner, outside any generation."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from pipespec_model.agreement import Agreement
from pipespec_model.lookup import PromptLookup
from pipespec_model.messages import Step
from pipespec_model.trace import NO_PROMPT, StepRecord

from .scripted import ScriptedRunner

PROBE_S = (0.05, 0.1)  # least and most, for twenty steps


def prime(runner: Any, prompt: list[int], text: list[int], sampler: Any = None) -> None:
    """Fill the cache with ``prompt`` and run one step that is not counted.

    sampler : what chooses in the steps that follow, where the runner computes; None = greedy
    """
    if isinstance(runner, ScriptedRunner):
        nothing = Agreement("measure", len(prompt), ("",), np.zeros((1, 1), dtype=np.int64))
        runner.begin_replay(nothing, 0, 0, block=False)
        return
    _begin(runner, prompt, sampler)
    if prompt and uses_torch(runner):
        runner.run([], Step("prefill", 0, 0, len(prompt), (), 1, 0, False))
    if prompt:
        measure(runner, prompt, 1, text)


def _begin(runner: Any, prompt: list[int], sampler: Any) -> None:
    if uses_torch(runner):
        runner.begin(prompt, sampler)
    else:
        runner.begin(prompt)


def measure(runner: Any, prompt: list[int], width: int, text: list[int], sampler: Any = None) -> list[StepRecord]:
    """One step of ``width`` tokens after ``prompt``; without a prompt, a prefill of that width, with ``sampler``.

    The cut back to the prompt is timed apart, as kind ``rollback``.
    """
    context = len(prompt)
    if not prompt and uses_torch(runner):
        _begin(runner, (text * (1 + width // len(text)))[:width], sampler)
    sequence = [text[0]] if prompt else []
    drafts = tuple(text[i % len(text)] for i in range(1, width)) if prompt else ()
    step = Step("verify", len(sequence), context, width, drafts, width, 0, False)
    start = time.perf_counter()
    runner.forget(context)
    middle = time.perf_counter()
    runner.run(sequence, step)
    end = time.perf_counter()
    return [
        StepRecord(prompt=NO_PROMPT, stage=0, kind=kind, start_s=begun, duration_s=ended - begun, position=0,
                   context=context, width=width, drafts=len(drafts), accepted=0, emitted=0, epoch=0)
        for kind, begun, ended in (("rollback", start, middle), ("measure" if prompt else "prefill", middle, end))
    ]


def probe(runner: Any) -> list[StepRecord]:
    """Steps of one token on the prompt that the cache holds, for about PROBE_S and at least one: how fast
    the machine is for this stage now.  None where nothing computes."""
    if not uses_torch(runner):
        return []
    begun = time.perf_counter()
    if not runner.prompt_length:
        prime(runner, [0] * 16, [0])
    # One more comes first: it fetches the weights that another stage's pushed out of the caches.
    measure(runner, [0] * runner.prompt_length, 1, [0])
    records: list[StepRecord] = []
    least, most = PROBE_S
    while not records or (passed := time.perf_counter() - begun) < least or (passed < most and len(records) < 2 * 20):
        records += measure(runner, [0] * runner.prompt_length, 1, [0])
    return [replace(step, kind="probe") for step in records if step.kind == "measure"]


def uses_torch(runner: Any) -> bool:
    """Whether a runner computes."""
    return not isinstance(runner, PromptLookup | ScriptedRunner)
