"""Best depth: which of a pipeline's drafters are worth having, by formula.

Asked of predict.py, so its models' ranges and errors hold here (docs/theory.md): a difference of a few percent
between chains of more than two stages is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from .errors import InputError
from .predict import predict
from .profile import Profile, pairs
from .spec import PipelineSpec


@dataclass(frozen=True)
class Depth:
    """A choice of drafters, in tokens per second; on what it holds, not per device (fair.py)."""

    pipeline: PipelineSpec
    tokens_per_s: float


def depths(pipeline: PipelineSpec, profile: Profile, *, context: int = 0) -> list[Depth]:
    """The target with every choice of the pipeline's drafters, none to all, fastest first.

    A stage keeps the settings of the link before it, whichever drafter is left there.  Chains of a pair whose
    acceptance the profile does not know are left out.

    context : cache length at which step times are taken

    >>> from pipespec_model.latency import Constant
    >>> from pipespec_model.profile import StageLatency
    >>> from pipespec_model.acceptance import IID
    >>> spec = PipelineSpec.from_dict({"strategy": "pipelined", "links": [{}, {}], "stages": [
    ...     {"name": name, "model": name} for name in ("1B", "8B", "70B")]})
    >>> times = {"1B": 0.012, "8B": 0.022, "70B": 0.12}
    >>> known = Profile({name: StageLatency(Constant(seconds)) for name, seconds in times.items()}, acceptance={
    ...     "1B>8B": IID(0.8), "8B>70B": IID(0.85), "1B>70B": IID(0.7)})
    >>> [found.pipeline.label for found in depths(spec, known)][-1]  # the target alone
    '{70B}'
    """
    if pipeline.strategy != "pipelined":
        raise InputError(pipeline.label, "must be pipelined")
    found = [Depth(chain, predict(chain, profile, context=context).tokens_per_s)
             for chain in _chains(pipeline) if _known(chain, profile)]
    return sorted(found, key=lambda depth: -depth.tokens_per_s)


def best_depth(pipeline: PipelineSpec, profile: Profile, *, context: int = 0, margin: float = 0.02) -> Depth:
    """The fewest drafters within ``margin`` of the fastest chain.

    margin : relative; the formulas' typical error, so that no stage is added for it
    """
    found = depths(pipeline, profile, context=context)
    enough = [depth for depth in found if depth.tokens_per_s >= (1 - margin) * found[0].tokens_per_s]
    return min(enough, key=lambda depth: len(depth.pipeline.stages))


def _chains(pipeline: PipelineSpec) -> Iterator[PipelineSpec]:
    yield PipelineSpec.alone(pipeline.target)
    last = len(pipeline.stages) - 1
    for number in range(1, last + 1):
        for kept in combinations(range(last), number):
            indices = (*kept, last)
            yield pipeline.model_copy(update={
                "stages": tuple(pipeline.stages[i] for i in indices),
                "links": tuple(pipeline.links[i - 1] for i in indices[1:])})


def _known(chain: PipelineSpec, profile: Profile) -> bool:
    try:
        for drafter, verifier, _ in pairs(chain):
            profile.pair(drafter, verifier)
    except InputError:
        return False
    return True
