"""The rows of a validation: which pipelines are predicted and measured.

Real rows are built from one model: the target, its int8 copy and prompt lookup; or from the built-in
family of three sizes.  Emulated rows are real processes whose stages replay tokens and hold for a
step time, so that deep pipelines run on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from execute.built_in import INT8_WINDOW, LOOKUP_WINDOW, chain, pipeline, stages
from execute.host import available_cores
from execute.scripted import Script
from execute.zoo import BUILT_IN, FAMILY
from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.latency import Constant
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec


@dataclass(frozen=True)
class Row:
    """One pipeline to predict and to measure.  ``name`` is also its trace's file name; an ``extra`` row is
    measured once, whatever the repeats of the others."""

    name: str
    pipeline: PipelineSpec
    note: str = ""
    extra: bool = False


def real_rows(model: str, dtype: str, num_cores: int, *, extra: bool = False) -> list[Row]:
    """The built-in rows for a model.  On one core, only what fits there.

    extra : also other lookaheads, the published handshake, a hybrid drafter, and two stages on one core
    """
    lookup, int8, full = stages(model, dtype, threads=1)
    rows = [Row("autoregressive-1", PipelineSpec.alone(full), "the baseline")]
    both = min(2, num_cores)
    _, int8_2, full_2 = stages(model, dtype, threads=both)
    if both == 2:
        rows.append(Row("autoregressive-2", PipelineSpec.alone(full_2),
                        "the same cores as the pipelines"))
    rows += [
        Row("speculative-int8", chain((int8_2, full_2), 3), "both cores for each stage in turn"),
        Row("speculative-lookup", chain((lookup, full_2), LOOKUP_WINDOW), "both cores for the target"),
    ]
    if both == 2:
        rows += [
            Row("pipelined-int8-0", pipeline((int8, full), LinkSpec(max_window=INT8_WINDOW)), "the target never waits"),
            Row("pipelined-int8-1", pipeline((int8, full), LinkSpec(lookahead=1, max_window=INT8_WINDOW)),
                "the target waits for one draft"),
            Row("pipelined-lookup-int8", pipeline((lookup, int8, full), LinkSpec(max_window=LOOKUP_WINDOW),
                                                  LinkSpec(max_window=INT8_WINDOW)), "three stages"),
        ]
    others = _extra_rows(model, dtype, both) if extra else []
    if extra and model == BUILT_IN and dtype == "float32":  # of another model it is not known yet
        others += clasp_rows(model, dtype, both)
    return rows + [replace(row, extra=True) for row in others]


def _extra_rows(model: str, dtype: str, both: int) -> list[Row]:
    lookup, int8, full = stages(model, dtype, threads=1)
    _, int8_2, full_2 = stages(model, dtype, threads=both)
    hybrid, hybrid_2 = (stage.model_copy(update={"name": "hybrid", "drafter": "hybrid"}) for stage in (int8, int8_2))
    rows = [Row(f"speculative-int8-{ahead}", chain((int8_2, full_2), ahead)) for ahead in (1, 5)]
    rows += [Row(f"speculative-lookup-{ahead}", chain((lookup, full_2), ahead)) for ahead in (4, 16)]
    rows.append(Row("speculative-hybrid", chain((hybrid_2, full_2), 3), "lookup where it finds something"))
    if both == 1:
        return rows
    link = LinkSpec(max_window=INT8_WINDOW)
    shared = tuple(stage.model_copy(update={"device": f"cpu:{available_cores()[0]}"}) for stage in (int8, full))
    rows += [
        Row("pipelined-int8-2", pipeline((int8, full), link.model_copy(update={"lookahead": 2}))),
        Row("pipelined-hybrid", pipeline((hybrid, full), link), "lookup where it finds something"),
        Row("pipelined-shared", pipeline(shared, link), "both stages on one core"),
    ]
    published = [("pipelined-int8-0", pipeline((int8, full), link)),
                 ("pipelined-int8-1", pipeline((int8, full), link.model_copy(update={"lookahead": 1}))),
                 ("pipelined-lookup-int8", pipeline((lookup, int8, full), LinkSpec(max_window=LOOKUP_WINDOW), link))]
    return rows + [blocking(Row(name, spec, "the published handshake")) for name, spec in published]


def clasp_rows(model: str, dtype: str, both: int) -> list[Row]:
    """Layer skipping in turn with its model and beside it, of the weights as they are and of their int8 copy, with the
    settings that were best on calibration prompts (docs/clasp.md).

    In a pipeline the drafter has a process of its own, so it has a name of its own.
    """
    *_, full = stages(model, dtype, threads=1)
    *_, full_2 = stages(model, dtype, threads=both)
    kinds = {"clasp": StageSpec(name="clasp", model=model, drafter="clasp", dtype=dtype, num_skipped_layers=3),
             "int8-clasp": StageSpec(name="int8-clasp", model=model, drafter="clasp", dtype=dtype, quantize="int8",
                                     num_skipped_layers=3, layer_opt_interval=16)}
    rows = [Row(f"speculative-{name}", chain((stage.model_copy(update={"threads": both}), full_2), 3),
                "three layers skipped") for name, stage in kinds.items()]
    if both == 1:
        return rows
    for name, stage in kinds.items():
        apart = stage.model_copy(update={"name": f"{name}-apart"})
        rows += [Row(f"pipelined-{name}-{ahead}",
                     pipeline((apart, full), LinkSpec(lookahead=ahead, max_window=INT8_WINDOW)),
                     "three layers skipped, entries handed over") for ahead in (0, 1)]
    return rows


def blocking(row: Row) -> Row:
    """The same with the published handshake."""
    pipeline = row.pipeline.model_copy(update={"handshake": "blocking"})
    return replace(row, name=f"{row.name}-blocking", pipeline=pipeline)


def family_rows(dtype: str, num_cores: int, *, extra: bool = False) -> list[Row]:
    """The rows of the built-in family of three trained models, which need no network.

    On two cores the drafters of the three-stage pipeline share one.

    extra : also a lookahead, and the published handshake
    """
    small, middle, large = (StageSpec(name=name, model=name, dtype=dtype) for name in FAMILY)
    rows = [Row("autoregressive-1", PipelineSpec.alone(large), "the baseline"),
            Row("speculative-m", chain((middle, large), 3)), Row("speculative-s", chain((small, large), 3)),
            Row("speculative-s-m", chain((small, middle, large), 3), "three stages in turn")]
    if num_cores < 2:
        return rows
    three: tuple[StageSpec, ...] = (small, middle, large)
    note = "three stages"
    if num_cores < len(three):
        cores, note = available_cores(), "three stages, the drafters on one core"
        three = tuple(stage.model_copy(update={"device": f"cpu:{core}"})
                      for stage, core in zip(three, (cores[1], cores[1], cores[0]), strict=True))
    link = LinkSpec(max_window=4)
    pipelined = [
        Row("pipelined-m-0", pipeline((middle, large), link), "the target never waits"),
        Row("pipelined-s-0", pipeline((small, large), link)),
        Row("pipelined-s-m", pipeline(three, link, link), note),
    ]
    if not extra:
        return rows + pipelined
    waiting = Row("pipelined-m-1", pipeline((middle, large), link.model_copy(update={"lookahead": 1})), extra=True)
    return rows + pipelined + [waiting, *(replace(blocking(row), extra=True) for row in pipelined)]


# Step times of the emulated stages in seconds, drafter first: the published 1B, 8B and 70B models'
# on A100s, one between and one below.
EMULATED_STEP_S = {"s7": 0.007, "s12": 0.012, "s22": 0.022, "s27": 0.027, "s120": 0.120}
EMULATED_ACCEPTANCE = 0.85


def emulated_stages() -> list[StageSpec]:
    return [StageSpec(name=name, model=f"emulated-{name}") for name in EMULATED_STEP_S]


def emulated_scripts() -> dict[str, Script]:
    return {name: Script(Constant(seconds)) for name, seconds in EMULATED_STEP_S.items()}


def emulated_rows(*, extra: bool = False) -> list[Row]:
    """Two to four stages; ``extra``: five too, and all with the published handshake."""
    s7, s12, s22, s27, s120 = emulated_stages()
    sets = [(s12, s120), (s12, s22, s120), (s12, s22, s27, s120), (s7, s12, s22, s27, s120)]
    rows = [Row(f"emulated-{len(chosen)}", pipeline(chosen, *[LinkSpec(lookahead=1)] * (len(chosen) - 1)),
                "stages hold their device for a set time") for chosen in sets]
    return [*rows, *map(blocking, rows)] if extra else rows[:3]


def emulated_agreements(count: int, num_tokens: int, first: int) -> list[Agreement]:
    """Made-up choices of the emulated stages; ``first`` keeps halves apart."""
    names = [stage.choice_key for stage in emulated_stages()]
    models = [IID(EMULATED_ACCEPTANCE)] * (len(names) - 1)
    return [synthetic(names, models, num_tokens=num_tokens, seed=7, prompt=first + i, prompt_length=8)
            for i in range(count)]
