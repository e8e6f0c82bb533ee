"""Figures of merit: the one definition of each, computed from a trace whatever its origin.

Definitions follow the field's use (vLLM, Spec-Bench): ``acceptance_rate`` counts the first refused
draft of a window as the rejection, ``accepted_fraction`` divides by all drafts submitted.  A figure
without data is None, never 0 or 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .spec import PipelineSpec
from .trace import BETWEEN_STEPS, PromptRecord, StepRecord, Trace


def ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None


def tokens_per_s(prompts: Sequence[PromptRecord]) -> float | None:
    """Committed target tokens / time, prefill included, ratio of totals."""
    return ratio(sum(len(p.tokens) for p in prompts), sum(p.total_s for p in prompts))


def mean_tokens_per_s(prompts: Sequence[PromptRecord]) -> float | None:
    """The same, mean over prompts."""
    rates = [len(p.tokens) / p.total_s for p in prompts if p.total_s > 0]
    return float(np.mean(rates)) if rates else None


def mean_of_repeats(prompts: Sequence[PromptRecord]) -> list[PromptRecord]:
    """One record a prompt: its first, with the mean times of all its repeats.

    What is drawn for an interval is prompts, not runs: the repeats of one share its text.
    """
    runs: dict[str, list[PromptRecord]] = defaultdict(list)
    for prompt in prompts:
        runs[prompt.name].append(prompt)
    return [replace(found[0], total_s=float(np.mean([p.total_s for p in found])),
                    ttft_s=float(np.mean([p.ttft_s for p in found]))) for found in runs.values()]


def tpot_s(prompts: Sequence[PromptRecord]) -> float | None:
    """Seconds a token after the first, (t_last − t_first) / (n − 1), ratio of totals."""
    return ratio(sum(p.total_s - p.ttft_s for p in prompts), sum(max(len(p.tokens) - 1, 0) for p in prompts))


@dataclass(frozen=True)
class LinkFigures:
    """What became of the drafts of one link, from the counters of its two ends.

    wasted : discarded unverified; overtaken : the verifier decided that position before it saw them;
    unjudged : submitted behind the first refused draft
    """

    drafted: int
    proposed: int
    accepted: int
    rejected: int
    unjudged: int
    overtaken: int
    wasted: int
    undecided: int
    stale_messages: int

    @classmethod
    def of(cls, drafter: dict[str, int], verifier: dict[str, int]) -> LinkFigures:
        submitted_in_vain = verifier["proposed"] - verifier["accepted"]
        return cls(
            drafted=drafter["drafted"], proposed=verifier["proposed"], accepted=verifier["accepted"],
            rejected=verifier["rejected"], unjudged=submitted_in_vain - verifier["rejected"],
            overtaken=drafter["kept"] - verifier["accepted"], wasted=drafter["cut"] - submitted_in_vain,
            undecided=drafter["undecided"], stale_messages=verifier["stale"],
        )

    @property
    def conserved(self) -> bool:
        """Nothing lost, nothing counted twice: every draft is in exactly one place."""
        places = (self.accepted, self.overtaken, self.rejected, self.unjudged, self.wasted, self.undecided)
        return self.drafted == sum(places) and min(places) >= 0


def booked_links(pipeline: PipelineSpec) -> range:
    """Links of which every draft is in exactly one place: all, but of a published chain the last one
    only.  There a draft that a middle stage refused stays until the target has spoken, and may be
    verified again."""
    last = len(pipeline.links)
    published_chain = pipeline.strategy == "speculative" and pipeline.handshake == "blocking"
    return range(last - 1 if published_chain else 0, last)


def link_figures(trace: Trace, link: int) -> LinkFigures:
    """Totals over a trace's prompts for link ``link`` (stage link → link + 1)."""
    total: list[dict[str, int]] = [{}, {}]
    for prompt in trace.prompts:
        for side in (0, 1):
            for key, value in prompt.counters[link + side].items():
                total[side][key] = total[side].get(key, 0) + value
    return LinkFigures.of(*total)


def acceptance_rate(figures: LinkFigures) -> float | None:
    """α = accepted / (accepted + rejected)."""
    return ratio(figures.accepted, figures.accepted + figures.rejected)


def accepted_fraction(figures: LinkFigures) -> float | None:
    """accepted / drafts submitted to verification."""
    return ratio(figures.accepted, figures.proposed)


def target_steps(trace: Trace) -> list[StepRecord]:
    last = len(trace.pipeline["stages"]) - 1
    return [step for step in trace.steps if step.stage == last and step.kind not in BETWEEN_STEPS]


def mean_acceptance_length(trace: Trace) -> float | None:
    """Tokens emitted per target step, plain one-token steps included (autoregressive = 1.00)."""
    steps = target_steps(trace)
    return ratio(sum(step.emitted for step in steps), len(steps))


def tokens_per_target_step(prompts: Sequence[PromptRecord]) -> float | None:
    """:func:`mean_acceptance_length` from the target's counters, where the steps are not at hand."""
    target = [prompt.counters[-1] for prompt in prompts]
    return ratio(sum(count["emitted"] for count in target), sum(count["steps"] for count in target))


def acceptance_histogram(trace: Trace) -> list[int]:
    """How many target steps emitted 1, 2, 3, … tokens."""
    emitted = [step.emitted for step in target_steps(trace)]
    return np.bincount(emitted, minlength=2)[1:].tolist() if emitted else []


def acceptance_at_position(trace: Trace) -> list[float | None]:
    """Share of submitted drafts that were accepted, by position in the window."""
    steps = [step for step in target_steps(trace) if step.drafts]
    longest = max((step.drafts for step in steps), default=0)
    return [ratio(sum(s.accepted > i for s in steps), sum(s.drafts > i for s in steps)) for i in range(longest)]


def stage_use(trace: Trace) -> list[dict[str, float | None]]:
    """Per stage: share of the wall time spent computing and waiting, and share of its tokens cut."""
    wall = sum(prompt.total_s for prompt in trace.prompts)
    ends = {prompt.prompt: prompt.total_s for prompt in trace.prompts}
    out = []
    for stage in range(len(trace.pipeline["stages"])):
        busy = sum(_within(step, ends.get(step.prompt)) for step in trace.steps if step.stage == stage)
        drafted = sum(prompt.counters[stage]["drafted"] for prompt in trace.prompts)
        cut = sum(prompt.counters[stage]["cut"] for prompt in trace.prompts)
        share = ratio(busy, wall)
        out.append({"busy": share, "waiting": None if share is None else max(0.0, 1 - share),
                    "wasted": ratio(cut, drafted)})
    return out


def _within(step: StepRecord, end_s: float | None) -> float:
    """What of a step lies before its prompt's end: a drafter's last one may outlast the target's."""
    if step.start_s is None or end_s is None:
        return step.duration_s
    return min(step.duration_s, max(0.0, end_s - step.start_s))


def bootstrap_interval(prompts: Sequence[PromptRecord], statistic: Callable[[NDArray[Any], NDArray[Any]], Any], *,
                       rng: np.random.Generator, level: float = 0.9) -> tuple[float, float] | None:
    """Percentile bootstrap over prompts.

    statistic : of (tokens [draws, prompts], seconds [draws, prompts]), one value a draw
    """
    if len(prompts) < 2:
        return None
    tokens = np.array([len(p.tokens) for p in prompts], dtype=float)
    seconds = np.array([p.total_s for p in prompts])
    pick = rng.integers(0, len(prompts), size=(4000, len(prompts)))
    values = statistic(tokens[pick], seconds[pick])
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def throughput(tokens: NDArray[Any], seconds: NDArray[Any]) -> NDArray[Any]:
    """Ratio of totals along the last axis."""
    return np.asarray(tokens.sum(-1) / seconds.sum(-1))
