"""The rows of a validation: which pipelines are predicted and measured.

Real rows are built from one model: the target, its int8 copy and prompt lookup.  Emulated rows are
real processes whose stages replay tokens and hold for a step time, so that deep pipelines run on two
cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from execute.built_in import INT8_WINDOW, LOOKUP_WINDOW, chain, pipeline, stages
from execute.scripted import Script
from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.latency import Constant
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec


@dataclass(frozen=True)
class Row:
    """One pipeline to predict and to measure.  ``name`` is also its trace's file name."""

    name: str
    pipeline: PipelineSpec
    note: str = ""

    @property
    def num_cores(self) -> int:
        """Cores that its computing stages use: together, or in turn."""
        threads = [stage.threads for stage in self.pipeline.stages if not stage.block]
        return sum(threads) if self.pipeline.strategy == "pipelined" else max(threads)


def real_rows(model: str, dtype: str, num_cores: int) -> list[Row]:
    """The built-in rows for a model.  On one core, only what fits there."""
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
    return rows


# Step times of the emulated stages in seconds, drafter first: the published 1B, 8B and 70B models'
# on A100s, and one between.
EMULATED_STEP_S = {"s12": 0.012, "s22": 0.022, "s27": 0.027, "s120": 0.120}
EMULATED_ACCEPTANCE = 0.85


def emulated_stages() -> list[StageSpec]:
    return [StageSpec(name=name, model=f"emulated-{name}") for name in EMULATED_STEP_S]


def emulated_scripts() -> dict[str, Script]:
    return {name: Script(Constant(seconds)) for name, seconds in EMULATED_STEP_S.items()}


def emulated_rows() -> list[Row]:
    s12, s22, s27, s120 = emulated_stages()
    link = LinkSpec(lookahead=1)
    note = "stages hold their device for a set time"
    return [
        Row("emulated-2", pipeline((s12, s120), link), note),
        Row("emulated-3", pipeline((s12, s22, s120), link, link), note),
        Row("emulated-4", pipeline((s12, s22, s27, s120), link, link, link), note),
    ]


def emulated_agreements(count: int, num_tokens: int, first: int) -> list[Agreement]:
    """Made-up choices of the four emulated stages; ``first`` keeps halves apart."""
    names = [stage.choice_key for stage in emulated_stages()]
    models = [IID(EMULATED_ACCEPTANCE)] * (len(names) - 1)
    return [synthetic(names, models, num_tokens=num_tokens, seed=7, prompt=first + i, prompt_length=8)
            for i in range(count)]
