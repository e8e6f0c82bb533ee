"""The built-in contenders: every way to decode one model with its own int8 copy and prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence

from pipespec_model.errors import InputError
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec

from .host import assign_cores

LOOKUP_WINDOW = 8  # tokens of a prompt lookup's block
INT8_WINDOW = 4


def chain(stages: Sequence[StageSpec], lookahead: int) -> PipelineSpec:
    links = tuple(LinkSpec(lookahead=lookahead) for _ in stages[1:])
    return PipelineSpec(strategy="speculative", stages=tuple(stages), links=links)


def pipeline(stages: Sequence[StageSpec], *links: LinkSpec) -> PipelineSpec:
    return PipelineSpec(stages=tuple(stages), links=links)


def stages(model: str, dtype: str, *, threads: int) -> tuple[StageSpec, StageSpec, StageSpec]:
    """The lookup, the int8 copy and the model itself."""
    return (
        StageSpec(name="lookup", model=model, drafter="prompt-lookup", dtype=dtype),
        # Of the float32 weights whatever the target's type: that is what the quantised layers are made from.
        StageSpec(name="int8", model=model, quantize="int8", threads=threads),
        StageSpec(name="full", model=model, dtype=dtype, threads=threads),
    )


def contenders(model: str, dtype: str, *, threads: int, lookahead: int) -> dict[str, PipelineSpec]:
    """Pipelines by name, the baseline first; pipelined ones only where the cores suffice.

    threads : of every stage; lookahead : of the synchronous int8 drafter
    Raises InputError where the threads of one stage alone do not fit.
    """
    longest = LinkSpec().max_window
    if not 1 <= lookahead <= longest:
        raise InputError("--lookahead", f"must be in 1..{longest}", lookahead)
    if threads < 1:
        raise InputError("--threads", "must be >= 1", threads)
    lookup, int8, full = stages(model, dtype, threads=threads)
    found = {"autoregressive": PipelineSpec.alone(full), "speculative-int8": chain((int8, full), lookahead),
             "speculative-lookup": chain((lookup, full), LOOKUP_WINDOW)}
    assign_cores(found["autoregressive"], scripted=False)
    together: dict[str, PipelineSpec] = {}
    for ahead in (0, 1):
        made = pipeline((int8, full), LinkSpec(lookahead=ahead, max_window=INT8_WINDOW))
        together[f"pipelined-int8-{ahead}"] = made
        together[f"pipelined-int8-{ahead}-blocking"] = made.model_copy(update={"handshake": "blocking"})
    together["pipelined-lookup-int8"] = pipeline(
        (lookup, int8, full), LinkSpec(max_window=LOOKUP_WINDOW), LinkSpec(max_window=INT8_WINDOW))
    return found | {name: spec for name, spec in together.items() if fits(spec)}


def fits(spec: PipelineSpec) -> bool:
    """Whether the stages that compute together find cores of their own here."""
    try:
        assign_cores(spec, scripted=False)
    except InputError:
        return False
    return True
