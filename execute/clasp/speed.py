"""The study's real runs: M, LOI and DET tuned on the calibration prompts, reported on the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from execute.bench_report import throughput_ratio
from execute.built_in import chain
from execute.fleet import Fleet, new_trace
from execute.host import available_cores
from execute.processes import processes_for, stages_apart
from execute.prompts import Prompt
from pipespec_model import metrics
from pipespec_model.metrics import mean_of_repeats
from pipespec_model.spec import PipelineSpec, StageSpec
from pipespec_model.trace import Trace, TraceWriter, load_trace

INTERVALS, THRESHOLDS = (16, 64), (0.0, 0.6)
TUNING_TOKENS, REPEATS = 32, 2
BASELINE = "autoregressive"


def grid(model: str, dtype: str, skipped: Sequence[int], *, threads: int, lookahead: int) -> dict[str, PipelineSpec]:
    """By name: the model alone, layer skipping in turn with it, and its int8 copy."""
    full = StageSpec(name="full", model=model, dtype=dtype, threads=threads)
    kinds = (None, "int8") if dtype == "float32" else (None,)
    out = {BASELINE: PipelineSpec.alone(full)}
    for quantize, count, interval, threshold in product(kinds, skipped, INTERVALS, THRESHOLDS):
        name = f"{quantize or 'clasp'}-M{count}-LOI{interval}-DET{threshold:g}"
        drafter = StageSpec(
            name=name, drafter="clasp", model=model, dtype=dtype, threads=threads, quantize=quantize,
            num_skipped_layers=count, layer_opt_interval=interval, draft_exit_threshold=threshold)
        out[name] = chain([drafter, full], lookahead)
    if "int8" in kinds:
        int8 = StageSpec(name="int8", model=model, dtype=dtype, threads=threads, quantize="int8")
        out["int8"] = chain([int8, full], lookahead)
    return out


def on_threads(spec: PipelineSpec, threads: int) -> PipelineSpec:
    """The same with so many threads a stage."""
    stages = tuple(stage.model_copy(update={"threads": threads}) for stage in spec.stages)
    return spec.model_copy(update={"stages": stages})


@dataclass
class Bench:
    """Real runs of pipelines, kept run by run; no process is started for what is there.

    pipelines : all that may be asked for, whatever their threads
    out : folder of the traces; tick : called with a few words before each prompt
    """

    pipelines: dict[str, PipelineSpec]
    out: Path
    tick: Callable[[str], None]
    _fleet: Fleet | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fleet is not None:
            self._fleet.close()

    @property
    def fleet(self) -> Fleet:
        if self._fleet is None:
            self._fleet = Fleet(processes_for(self.pipelines), apart=stages_apart(self.pipelines.values())).__enter__()
        return self._fleet

    def measure(self, pipelines: dict[str, PipelineSpec], prompts: Sequence[Prompt], name: str, *,
                max_new_tokens: int, repeats: int) -> dict[str, Trace]:
        """Every one on every prompt, in turns."""
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        traces = {name: self._open(folder / f"{name}.jsonl", spec) for name, spec in pipelines.items()}
        for repeat, (n, prompt) in product(range(repeats), enumerate(prompts)):
            self.tick(f"study: {folder.name}, run {repeat * len(prompts) + n + 1} of {repeats * len(prompts)}")
            for name, spec in pipelines.items():
                number = repeat * len(prompts) + n
                if all(done.prompt != number for done in traces[name].prompts):
                    made = self.fleet.run_prompt(spec, prompt, max_new_tokens=max_new_tokens, number=number,
                                                 repeat=repeat)
                    with TraceWriter(folder / f"{name}.jsonl", traces[name]) as writer:
                        writer.append(*made)
                    traces[name].add(*made)
        return traces

    def _open(self, path: Path, spec: PipelineSpec) -> Trace:
        there = path.exists() and path.stat().st_size
        return load_trace(path)[0] if there else new_trace(self.fleet.configure(spec))


def best(traces: dict[str, Trace], kind: str) -> str:
    """The fastest configuration whose name begins with ``kind``, ratio of totals."""
    speeds = {name: metrics.tokens_per_s(trace.prompts) or 0.0 for name, trace in traces.items()
              if name.startswith(f"{kind}-")}
    return max(speeds, key=lambda name: speeds[name])


def summary(traces: dict[str, Trace], baseline: str = BASELINE) -> list[dict[str, Any]]:
    """Per configuration: speed-up with its interval, per category, time shares, acceptance, identical texts."""
    base = traces[baseline].prompts
    texts = {prompt.name: prompt.tokens for prompt in base}
    out = []
    for name, trace in traces.items():
        total, interval = throughput_ratio(mean_of_repeats(trace.prompts), mean_of_repeats(base))
        by_category: dict[str, float] = {}
        for category in sorted({prompt.category for prompt in base}):
            mine, theirs = ([p for p in found if p.category == category] for found in (trace.prompts, base))
            by_category[category] = throughput_ratio(mean_of_repeats(mine), mean_of_repeats(theirs))[0]
        out.append({
            "name": name, "tokens_per_s": metrics.tokens_per_s(trace.prompts), "speedup": total, "interval": interval,
            "by_category": by_category, "time_shares": time_shares(trace),
            "acceptance_rate": metrics.acceptance_rate(metrics.link_figures(trace, 0)) if trace.prompts[0].counters[1:]
            else None,
            "mean_acceptance_length": metrics.mean_acceptance_length(trace),
            "identical_prompts": len({p.name for p in trace.prompts}
                                     - {p.name for p in trace.prompts if p.tokens != texts[p.name]}),
            "num_prompts": len(texts)})
    return out


def time_shares(trace: Trace) -> dict[str, float]:
    """Of the wall time; ``between`` is what no step accounts for."""
    wall = sum(prompt.total_s for prompt in trace.prompts)
    spent: dict[str, float] = defaultdict(float)
    target = len(trace.pipeline["stages"]) - 1
    for step in trace.steps:
        kind = step.kind if step.kind in ("prefill", "optimise", "draft") else "verify"
        # The drafter reads the prompt; the target's first pass is a verification.
        spent["verify" if kind == "prefill" and target and step.stage == target else kind] += step.duration_s
    shares = {kind: seconds / wall for kind, seconds in spent.items()}
    return shares | {"between": max(0.0, 1.0 - sum(shares.values()))}


def run_all(model: str, dtype: str, skipped: Sequence[int], calibration: Sequence[Prompt],
            evaluation: Sequence[Prompt], out: Path, *, lookahead: int, max_new_tokens: int,
            tick: Callable[[str], None]) -> dict[str, Any]:
    """Tune on one core, report on one core and on both."""
    configurations = grid(model, dtype, skipped, threads=1, lookahead=lookahead)
    kinds = ("clasp", "int8") if dtype == "float32" else ("clasp",)
    with Bench(configurations, out, tick) as bench:
        tuning = bench.measure(configurations, calibration, "tuning", repeats=1,
                               max_new_tokens=min(TUNING_TOKENS, max_new_tokens))
        found: dict[str, Any] = {"tuning": summary(tuning), "chosen": {kind: best(tuning, kind) for kind in kinds}}
        wanted = [BASELINE, *found["chosen"].values(), *(["int8"] if "int8" in configurations else [])]
        for threads in (1, 2)[: len(available_cores())]:
            these = {name: on_threads(configurations[name], threads) for name in wanted}
            traces = bench.measure(these, evaluation, f"evaluation-{threads}", repeats=REPEATS,
                                   max_new_tokens=max_new_tokens)
            found[f"evaluation-{threads}"] = summary(traces)
    return found
