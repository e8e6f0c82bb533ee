"""Many prompts without a trace: the engine for sweeps and planners.

:func:`encode` turns a pipeline and a profile into flat numeric cases, one a prompt and seed; :func:`run_cases`
runs any number of them without Python in between; :func:`run_totals` is both.  Results are those of
``simulate.engine`` to the nanosecond and to the token: what the compiled rules do not cover (``encode.covers`` says
why) is run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipespec_model.agreement import Agreement
from pipespec_model.profile import Profile, recorded
from pipespec_model.spec import PipelineSpec

from .encode import Encoder, covers
from .engine import Event, PromptRun
from .run import agreements_for
from .totals import Totals
from .twin_layout import EVENTS, EXCLUDED, RING
from .twin_run import Outcome, Scratch, Tables, engine, prepare

__all__ = ["Cases", "covers", "encode", "event_log", "outcome_of", "prepare", "run_cases", "run_totals"]

RING_SIZE = 64
"""Tokens off the target's path, and messages on their way, that there is room for at first; few runs need more."""


@dataclass(frozen=True)
class Cases:
    """Prompt runs that wait to be run, in order: encoded, or left to the SimPy model."""

    encoder: Encoder
    runs: tuple[PromptRun, ...] = ()

    def __len__(self) -> int:
        return len(self.encoder.cases) + len(self.runs)


def encode(pipeline: PipelineSpec, profile: Profile, *, num_prompts: int, num_tokens: int,
           seeds: Sequence[int] = (0,), spread: bool = True, agreements: Sequence[Agreement] | None = None) -> Cases:
    """Cases of a pipeline: for each seed, each prompt.

    Parameters
    ----------
    num_prompts, num_tokens : of synthetic prompts, made of the profile's acceptance models
    seeds : one replication each
    spread : draw step times and the machine's slowness from their distributions; False = their means
    agreements : prompts to replay instead, rows in the order of the pipeline's stages
    """
    prompts = list(agreements) if agreements is not None else recorded(profile, pipeline)
    encoder = Encoder(spread)
    if covers(pipeline, profile, prompts) is None:
        encoder.add(pipeline, profile, seeds=seeds, prompts=prompts or num_prompts, num_tokens=num_tokens)
        return Cases(encoder)
    runs = []
    for seed in seeds:
        found = prompts or agreements_for(pipeline, profile, num_prompts=num_prompts, num_tokens=num_tokens, seed=seed)
        runs += [PromptRun(pipeline, profile, prompt, seed=seed, prompt=number, spread=spread)
                 for number, prompt in enumerate(found)]
    return Cases(encoder, tuple(runs))


def run_cases(cases: Cases | Sequence[Cases]) -> Totals:
    """One row a case, in order; several ``Cases`` one after the other.  Other threads run meanwhile."""
    parts = [cases] if isinstance(cases, Cases) else list(cases)
    encoded = [part.encoder for part in parts if part.encoder.cases]
    if not encoded:
        return Totals.joined([Totals.of_runs(run.run() for run in part.runs) for part in parts])
    tables = Tables.joined([encoder.tables() for encoder in encoded])
    made = Totals.of_outcome(_outcome(tables)[0], tables.plan["num_stages"][tables.case["plan"]])
    if len(encoded) == len(parts):
        return made
    found, done = [], 0
    for part in parts:
        found.append(Totals.of_runs(run.run() for run in part.runs) if part.runs else made[done : done + len(part)])
        done += len(part.encoder.cases)
    return Totals.joined(found)


def outcome_of(cases: Cases) -> Outcome:
    """The engine's own figures of encoded cases, in nanoseconds and events."""
    return _outcome(cases.encoder.tables())[0]


def _outcome(tables: Tables, *, log_events: int = 0, shortcuts: bool = True) -> tuple[Outcome, NDArray[np.int64]]:
    """Run all cases; those whose rings were too small again, with larger ones."""
    deep = int(tables.plan["num_stages"].max(initial=1))
    outcome = Outcome.of(len(tables.case), deep)
    chosen, ring = np.arange(len(tables.case)), RING_SIZE
    while True:
        log = np.zeros((log_events, 4), np.int64)
        engine()(tables, Scratch.of(deep, ring), chosen, outcome, log, shortcuts and not log_events)
        if (outcome.figures[:, 3] == EXCLUDED).any():
            raise RuntimeError("a state that the protocol's rules exclude")
        if log_events and outcome.figures[0, 4] > log_events:
            log_events = int(outcome.figures[0, 4])
            continue
        chosen = np.flatnonzero(outcome.figures[:, 3] == RING)
        if not len(chosen):
            return outcome, log
        ring *= 4


def event_log(pipeline: PipelineSpec, profile: Profile, agreement: Agreement | int, *, seed: int = 0, prompt: int = 0,
              spread: bool = True) -> tuple[list[Event], Totals]:
    """Every event of one prompt, as ``PromptRun.log`` has them, and its totals.

    agreement : to replay, or the number of tokens of a made-up prompt
    """
    encoder = Encoder(spread)
    if isinstance(agreement, int):
        encoder.add(pipeline, profile, seeds=(seed,), prompts=1, num_tokens=agreement, first_number=prompt)
    else:
        encoder.add(pipeline, profile, seeds=(seed,), prompts=[agreement], first_number=prompt)
    tables = encoder.tables()
    outcome, log = _outcome(tables, log_events=1024)
    events = [(time, stage, EVENTS[what], position)
              for time, stage, what, position in log[: outcome.figures[0, 4]].tolist()]
    return events, Totals.of_outcome(outcome, np.array([len(pipeline.stages)]))


def run_totals(pipeline: PipelineSpec, profile: Profile, *, num_prompts: int, num_tokens: int, seed: int = 0,
               spread: bool = True, agreements: Sequence[Agreement] | None = None) -> Totals:
    """Run every prompt of one pipeline once; parameters as of :func:`encode`."""
    return run_cases(encode(pipeline, profile, num_prompts=num_prompts, num_tokens=num_tokens, seeds=(seed,),
                            spread=spread, agreements=agreements))
