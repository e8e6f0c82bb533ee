"""A prompt whose stage failed is run again from what the target had decided.

The text that the target told of is a prefix of the answer and is never taken back, so a new attempt takes it as part
of its prompt.  Assumes that a stage's choice depends on the tokens before it alone.  Returns the records of
``Fleet.run_prompt`` as if nothing had been: positions count from the prompt's end and times from the first request.
The steps of an attempt that failed died with its processes; ``carried`` says how many tokens were theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipespec_model.agreement import Agreement
from pipespec_model.errors import StageError
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import PromptRecord, StepRecord

from .fleet import Fleet
from .prompts import Prompt
from .stopping import Stops

Told = Callable[[list[int]], None]
Failed = Callable[[StageError, int], None]
"""Hears of the error and of the number of tokens that are kept."""


def run_with_retries(fleet: Fleet, pipeline: PipelineSpec, prompt: Prompt, *, max_new_tokens: int, retries: int,
                     agreement: Agreement | None = None, on_text: Told | None = None, on_failure: Failed | None = None,
                     stops: Stops | None = None, **options: Any) -> tuple[PromptRecord, list[StepRecord]]:
    """:meth:`Fleet.run_prompt`, up to ``retries`` times more; the fleet's processes are started anew each time.

    Raises the last attempt's StageError, and InputError at once: what is wrong with the input stays wrong.
    """
    begun = time.perf_counter()
    kept: list[int] = []
    first_s: list[float] = []

    def told(tokens: list[int]) -> None:
        if not kept:
            first_s.append(time.perf_counter() - begun)
        kept.extend(tokens)
        if on_text is not None:
            on_text(tokens)

    for left in range(retries, -1, -1):
        carried, later_s = len(kept), time.perf_counter() - begun
        try:
            record, steps = fleet.run_prompt(
                pipeline, replace(prompt, tokens=(*prompt.tokens, *kept)),
                max_new_tokens=0 if carried and kept[-1] in prompt.eos else max_new_tokens - carried,
                agreement=agreement.after(carried) if agreement and carried else agreement,
                on_text=told if retries or on_text else None,
                stops=replace(stops, decided=tuple(kept)) if stops else None, **options)
        except StageError as error:
            if not left:
                raise
            if on_failure is not None:
                on_failure(error, len(kept))
            fleet.restart()
        else:
            break
    if left == retries:
        return record, steps
    steps = [replace(step, position=step.position + carried, start_s=(step.start_s or 0.0) + later_s)
             for step in steps]
    return replace(record, prompt_length=len(prompt.tokens), tokens=[*kept[:carried], *record.tokens],
                   total_s=record.total_s + later_s, ttft_s=first_s[0] if carried else record.ttft_s + later_s,
                   carried=carried), steps
