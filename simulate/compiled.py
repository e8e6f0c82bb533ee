"""Many prompts without a trace: the engine for sweeps and planners.

:func:`encode` turns a pipeline and a profile into flat numeric cases, one a prompt and seed; :func:`run_cases`
runs any number of them without Python in between; :func:`run_totals` is both.  Results are those of
``simulate.engine`` to the nanosecond and to the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipespec_model.agreement import Agreement
from pipespec_model.profile import Profile
from pipespec_model.spec import PipelineSpec

from .engine import PromptRun
from .run import agreements_for
from .totals import Totals


@dataclass(frozen=True)
class Cases:
    """Prompt runs that wait to be run, in order."""

    runs: tuple[PromptRun, ...]

    def __len__(self) -> int:
        return len(self.runs)


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
    runs = []
    for seed in seeds:
        prompts = agreements if agreements is not None else agreements_for(
            pipeline, profile, num_prompts=num_prompts, num_tokens=num_tokens, seed=seed)
        runs += [PromptRun(pipeline, profile, prompt, seed=seed, prompt=number, spread=spread)
                 for number, prompt in enumerate(prompts)]
    return Cases(tuple(runs))


def run_cases(cases: Cases | Sequence[Cases]) -> Totals:
    """One row a case, in order; several ``Cases`` one after the other."""
    parts = [cases] if isinstance(cases, Cases) else cases
    return Totals.of_runs(run.run() for part in parts for run in part.runs)


def run_totals(pipeline: PipelineSpec, profile: Profile, *, num_prompts: int, num_tokens: int, seed: int = 0,
               spread: bool = True, agreements: Sequence[Agreement] | None = None) -> Totals:
    """Run every prompt of one pipeline once; parameters as of :func:`encode`."""
    return run_cases(encode(pipeline, profile, num_prompts=num_prompts, num_tokens=num_tokens, seeds=(seed,),
                            spread=spread, agreements=agreements))
