"""The figures of a simulated pipeline, each with an interval over replications."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from pipespec_model import metrics
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import Trace


def figures(spec: PipelineSpec, traces: list[Trace], plain: list[Trace]) -> dict[str, Any]:
    """Each figure as value and 90% interval over replications."""
    speeds = [metrics.tokens_per_s(trace.prompts) or 0.0 for trace in traces]
    baseline = [metrics.tokens_per_s(trace.prompts) or 0.0 for trace in plain]
    uses = [metrics.stage_use(trace) for trace in traces]
    links = []
    for i, (a, b) in enumerate(zip(spec.stages, spec.stages[1:], strict=False)):
        total = [metrics.link_figures(trace, i) for trace in traces]
        links.append({
            "link": f"{a.name}>{b.name}",
            "acceptance_rate": mean([metrics.acceptance_rate(x) for x in total]),
            "accepted_fraction": mean([metrics.accepted_fraction(x) for x in total]),
            "wasted": mean([metrics.ratio(x.wasted, x.drafted) for x in total if i in metrics.booked_links(spec)])})
    return {
        "pipeline": spec.label, "strategy": spec.strategy,
        "lookahead": [link.lookahead for link in spec.links], "replications": len(traces),
        "num_prompts": len(traces[0].prompts), "num_tokens": sum(len(p.tokens) for p in traces[0].prompts),
        "tokens_per_s": mean(speeds),
        "speedup": mean([a / b if b else None for a, b in zip(speeds, baseline, strict=True)]),
        "mean_acceptance_length": mean([metrics.mean_acceptance_length(trace) for trace in traces]),
        "ttft_s": mean([float(np.mean([p.ttft_s for p in trace.prompts])) for trace in traces]),
        "stages": [{"name": stage.name, **{key: mean([use[i][key] for use in uses]) for key in uses[0][i]}}
                   for i, stage in enumerate(spec.stages)],
        "links": links,
    }


def mean(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and 90% interval over replications; None where there is nothing."""
    found = np.array([value for value in values if value is not None], dtype=float)
    if not len(found):
        return {"value": None, "interval": None}
    middle, half = float(found.mean()), half_width(found)
    return {"value": middle, "interval": None if half is None else [middle - float(half), middle + float(half)]}


def half_width(values: NDArray[np.float64]) -> Any:
    """Of the mean's 90% interval (Student's t) over independent values, the last axis; None of single ones."""
    n = values.shape[-1]
    return _t95(n - 1) * values.std(axis=-1, ddof=1) / np.sqrt(n) if n > 1 else None


@cache
def _t95(degrees: int) -> float:
    return float(stats.t.ppf(0.95, degrees))
