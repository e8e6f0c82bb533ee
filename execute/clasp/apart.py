"""The study's pipelined runs: the drafter in a process of its own, beside its model, each on a core.

Tuned on the calibration prompts (layers skipped, lookahead), reported on the others, against plain decoding on one
core and on both, all in turns.  Also how often a draft is right by its distance from the last token whose entries the
full model computed, which is where a drafter beside its model differs from one that waits for its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from execute.built_in import INT8_WINDOW, pipeline
from execute.prompts import Prompt
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import PromptRecord, StepRecord, Trace, load_trace

from .speed import BASELINE, REPEATS, TUNING_TOKENS, Bench, best, summary
from .tables import over_prompts

LOOKAHEADS = (0, 1, 3)
BOTH = f"{BASELINE}-2"  # plain decoding on the cores that a pipeline has
FARTHEST = 4  # drafts from the last committed token, told apart


@dataclass(frozen=True)
class Prompts:
    tuning: Sequence[Prompt]
    evaluation: Sequence[Prompt]


def grid(chosen: Mapping[str, str], skipped: Sequence[int], *, model: str, dtype: str) -> dict[str, PipelineSpec]:
    """By name; the interval and the threshold of each kind are those that were best in turn.

    chosen : by kind, the name that speed.grid gave it
    """
    full = StageSpec(name="full", model=model, dtype=dtype)
    out = {BASELINE: PipelineSpec.alone(full), BOTH: PipelineSpec.alone(full.model_copy(update={"threads": 2}))}
    for (kind, name), count in product(chosen.items(), skipped):
        interval, threshold = name.partition("-LOI")[2].split("-DET")
        drafter = StageSpec(
            name=f"{kind}-M{count}-apart", drafter="clasp", model=model, dtype=dtype, num_skipped_layers=count,
            quantize="int8" if kind == "int8" else None, layer_opt_interval=int(interval),
            draft_exit_threshold=float(threshold))
        for lookahead in LOOKAHEADS:
            out[f"{kind}-M{count}-lookahead{lookahead}"] = pipeline(
                (drafter, full), LinkSpec(lookahead=lookahead, max_window=INT8_WINDOW))
    return out


def run_all(chosen: Mapping[str, str], prompts: Prompts, out: Path, *, model: str, dtype: str, skipped: Sequence[int],
            max_new_tokens: int, tick: Callable[[str], None]) -> dict[str, Any]:
    """Tune, report, and measure the hand-over."""
    pipelines = grid(chosen, skipped, model=model, dtype=dtype)
    with Bench(pipelines, out, tick) as bench:
        tuning = bench.measure(pipelines, prompts.tuning, "apart-tuning", repeats=1,
                               max_new_tokens=min(TUNING_TOKENS, max_new_tokens))
        found: dict[str, Any] = {"tuning": summary(tuning), "chosen": {kind: best(tuning, kind) for kind in chosen}}
        names = [BASELINE, BOTH, *found["chosen"].values()]
        traces = bench.measure({name: pipelines[name] for name in names}, prompts.evaluation, "apart-evaluation",
                               repeats=REPEATS, max_new_tokens=max_new_tokens)
    against_both = {row["name"]: row for row in summary(traces, BOTH)}
    rows = summary(traces)
    for row in rows:
        row["speedup_both"], row["interval_both"] = (against_both[row["name"]][key] for key in ("speedup", "interval"))
    found["evaluation"] = rows
    found["handover"] = {name: handover(traces[name]) for name in found["chosen"].values()}
    found["distances"] = distances(out, chosen, skipped)
    return found


def handover(trace: Trace) -> dict[str, float]:
    """Medians in seconds, rows of a hand-over, and what all of it takes of the wall time."""
    wall = sum(prompt.total_s for prompt in trace.prompts)
    out = {}
    for kind in ("give", "take", "optimise"):
        found = [step.duration_s for step in trace.steps if step.kind == kind]
        out[f"{kind}_s"] = float(np.median(found)) if found else 0.0
        out[f"{kind}_share"] = sum(found) / wall
    out["rows"] = float(np.mean([step.width for step in trace.steps if step.kind == "give"]))
    return out


def judged(prompt: PromptRecord, steps: Sequence[StepRecord], *, pipelined: bool) -> Iterator[tuple[int, bool]]:
    """Of a pair's drafts that the target verified: how far each was from the last token whose entries the full model
    had computed (1: all before it were), and whether it was right."""
    drafts: dict[int, list[tuple[float, int]]] = {}
    begun = 1  # position of the first draft whose past is the full model's, all of it
    waiting = True
    for step in sorted(steps, key=lambda step: (step.start_s or 0.0, step.stage)):
        ended = (step.start_s or 0.0) + step.duration_s
        if step.kind == "take":
            begun = step.context + step.width - prompt.prompt_length + 1
        elif step.stage == 0 and step.kind in ("draft", "prefill"):
            if waiting and not pipelined:
                begun, waiting = step.position + (step.kind == "prefill"), False
            distance = step.position - begun + 1 if step.kind == "draft" else 0
            drafts.setdefault(step.position, []).append((ended, distance))
        elif step.stage == 1 and step.drafts:
            for position in range(step.position, step.position + min(step.accepted + 1, step.drafts)):
                made = [distance for end, distance in drafts.get(position, []) if end <= (step.start_s or 0.0)]
                if made and made[-1] > 0:
                    yield made[-1], position < step.position + step.accepted
        waiting = waiting or step.stage == 1


def distance_table(traces: Iterable[Trace]) -> list[dict[str, Any]]:
    """By distance: how many drafts were judged, and the share that was right, with its interval over prompts."""
    seen: dict[int, list[tuple[str, float, float]]] = {}
    for trace in traces:
        pipelined = trace.pipeline["strategy"] == "pipelined"
        for prompt in trace.prompts:
            steps = [step for step in trace.steps if step.prompt == prompt.prompt]
            for distance, right in judged(prompt, steps, pipelined=pipelined):
                seen.setdefault(min(distance, FARTHEST), []).append((prompt.name, float(right), 1.0))
    out = []
    for distance in sorted(seen):
        rate, interval = over_prompts(seen[distance])
        out.append({"distance": distance, "num_drafts": len(seen[distance]), "right": rate, "interval": interval})
    return out


def distances(out: Path, chosen: Mapping[str, str], skipped: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """In turn and beside, on the same calibration prompts with the same settings; beside, over all lookaheads."""
    found = {}
    for (kind, name), count in product(chosen.items(), skipped):
        interval = name.partition("-LOI")[2]
        for where, paths in (("in turn", (out / "tuning").glob(f"{kind}-M{count}-LOI{interval}.jsonl")),
                             ("beside", (out / "apart-tuning").glob(f"{kind}-M{count}-lookahead*.jsonl"))):
            found[f"{kind}-M{count}, {where}"] = distance_table(load_trace(path)[0] for path in sorted(paths))
    return found
