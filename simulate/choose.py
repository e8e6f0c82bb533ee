"""Choose lookaheads that are left ``auto``: the fastest by simulation of a profile's prompts."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from pipespec_model import metrics
from pipespec_model.agreement import Agreement
from pipespec_model.profile import Profile
from pipespec_model.spec import AUTO, PipelineSpec

from .run import agreements_for, simulate

MOST = 12  # a longer window than this pays for no drafter short of perfect


def choose_lookaheads(pipeline: PipelineSpec, profile: Profile, prompts: Sequence[Agreement]) -> PipelineSpec:
    """``pipeline`` with every ``auto`` replaced by a number.

    One link after the other, from the target's down to the drafter's, and round again until nothing
    changes: links interact weakly, and a full grid grows with the power of their number.  Step times are
    means, so that equal pipelines compare equal; of equals the smaller lookahead wins.
    """
    least = 1 if pipeline.strategy == "speculative" else 0
    free = [i for i, link in enumerate(pipeline.links) if link.lookahead == AUTO]
    chosen = [least if link.lookahead == AUTO else link.lookahead for link in pipeline.links]
    speeds: dict[tuple[int, ...], float] = {}

    def speed(lookaheads: Sequence[int]) -> float:
        key = tuple(lookaheads)
        if key not in speeds:
            trace = simulate(pipeline.with_lookaheads(key), profile, prompts, spread=False)
            speeds[key] = metrics.tokens_per_s(trace.prompts) or 0.0
        return speeds[key]

    before: list[int] = []
    while free and before != chosen:
        before = list(chosen)
        for i in reversed(free):
            link = pipeline.links[i]
            wide = range(least, min(MOST, link.buffer_tokens, link.max_window) + 1)
            tried = [[*chosen[:i], number, *chosen[i + 1 :]] for number in wide]
            chosen = max(tried, key=speed)
    return pipeline.with_lookaheads(chosen)


def chosen(spec: PipelineSpec, profile: Profile) -> PipelineSpec:
    """The pipeline with every ``auto`` lookahead chosen; says so on stderr."""
    made = choose_lookaheads(spec, profile, agreements_for(spec, profile, num_prompts=12, num_tokens=64, seed=0))
    if made != spec:
        typer.echo(f"lookahead: {', '.join(str(link.lookahead) for link in made.links)}", err=True)
    return made
