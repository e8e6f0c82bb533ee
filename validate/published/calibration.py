"""Step times, start-up and agreement from greedy and synchronous files; pipelined files are never looked at.

Rules, each fixed by how the published code works:

* A *drafting* stage of a pipeline publishes every token, so its step takes what a greedy token takes in all:
  the recorded step plus the wait for the device that a greedy run spends between its steps.
* In a synchronous chain drafts are not waited for one by one: there a draft step is the recorded one.
* A *verifying* stage takes its time of the synchronous files, by width; a plain one-token step apart.
* The first draft step after a rollback takes longer, by what it does in the synchronous files.
* Steps spread about their means as the calibrating steps do: a verifier waits for the rest of the drafter's
  step, and steps of one constant time would fall into lock-step.
* A middle stage that no file shows verifying at its dtype is scaled from the same model at another one, else
  from its one-token step.
* Prefill is what a synchronous file leaves unrecorded, shared among its stages as their steps are long.  In a
  chain stages prefill and warm up in turn, in a pipeline all at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipespec_model.errors import InputError
from pipespec_model.latency import Constant, Table
from pipespec_model.profile import Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec, StageSpec

from .bits import PromptBits, agreement_rates, merge, rounds
from .files import PublishedFile, PublishedPrompt

Pair = tuple[str, str]
"""Choice keys of a drafter and its target."""
DraftRule = Literal["greedy token", "greedy step", "greedy total", "synchronous step"]
"""What a drafting stage's step takes in a pipeline.  The first is the rule; the others tell how much it matters."""
RULE: DraftRule = "greedy token"
NUM_QUANTILES = 201


@dataclass(frozen=True)
class GreedyTimes:
    """One model alone: recorded step, wait for the device between steps, prefill, whole time a token; seconds.

    spread : quantiles of step / mean step
    """

    step_s: float
    wait_s: float
    prefill_s: float
    total_s: float
    spread: tuple[float, ...]


@dataclass(frozen=True)
class ChainTimes:
    """One pair in a synchronous chain, in seconds.

    draft_s : a draft step; rollback_s : what the first one after a rollback takes more
    verify : the target's step by width
    prefill_s : of both stages; warmup_s : what the first prompt takes more; handover_s : a message
    """

    draft_s: float
    rollback_s: float
    verify: Table
    prefill_s: float
    warmup_s: float
    handover_s: float


def greedy_times(file: PublishedFile) -> GreedyTimes:
    later = file.prompts[1:] or file.prompts
    steps = np.concatenate([prompt.step_s[0][1:] for prompt in later])  # the first one still prepares
    prefill_s, wait_s = _line([p.num_tokens for p in later], [p.unrecorded_s for p in later])
    mean_s = float(steps.mean())
    return GreedyTimes(mean_s, wait_s, prefill_s, file.ms_per_token / 1e3, _spread(steps + wait_s))


def chain_times(files: Sequence[PublishedFile], merged: dict[int, PromptBits], plain_s: float | None) -> ChainTimes:
    """From all synchronous files of a pair; ``plain_s`` stands in where no plain step is among them."""
    drafts: dict[str, list[float]] = {"first": [], "rolled back": [], "later": []}
    by_width: dict[int, list[float]] = defaultdict(list)
    messages: list[int] = []
    unrecorded: list[float] = []
    for file in files:
        window = file.label - 1
        for prompt in file.prompts[1:] or file.prompts:
            for kind, seconds in draft_steps(prompt, window):
                drafts[kind].append(seconds)
            messages.append(2 * len(prompt.step_s[1]))  # one each way a round
            unrecorded.append(prompt.unrecorded_s)
            for width, seconds in widths(prompt, window, merged.get(prompt.index)):
                by_width[width].append(seconds)
    prefill_s, handover_s = _line(messages, unrecorded)
    clean = drafts["first"] + drafts["later"]
    draft_s = float(np.mean(clean or drafts["rolled back"] or [0.0]))
    rollback_s = float(np.mean(drafts["rolled back"])) - draft_s if clean and drafts["rolled back"] else 0.0
    verify = _by_width(by_width, plain_s)
    late = [
        sum(steps[0] for steps in file.prompts[0].step_s if steps) + file.prompts[0].unrecorded_s
        - draft_s * bool(file.prompts[0].step_s[0]) - verify.mean_s(max(file.label, 1), 0) - prefill_s
        for file in files if len(file.prompts) > 1]
    return ChainTimes(draft_s, max(0.0, rollback_s), verify, prefill_s,
                      max(0.0, float(np.mean(late))) if late else 0.0, handover_s)


def draft_steps(prompt: PublishedPrompt, window: int) -> Iterable[tuple[str, float]]:
    """A prompt's draft steps: ``rolled back`` right after a rejection, ``first`` of another round, ``later``.

    Of a file without windows it is not known which steps followed a rollback, and of one whose steps do not
    add up to its rounds neither; such steps are left out.
    """
    counts = [window + (item.at_bonus and item.position > 1) for item in rounds(prompt, window)]
    if window < 1 or sum(counts) != len(prompt.step_s[0]):
        return
    steps = iter(prompt.step_s[0])
    for count, item in zip(counts, rounds(prompt, window), strict=True):
        for i in range(count):
            yield "later" if i else "first" if item.at_bonus else "rolled back", next(steps)


def widths(prompt: PublishedPrompt, window: int, merged: PromptBits | None) -> Iterable[tuple[int, float]]:
    """Width and seconds of a prompt's verifications, where the width is sure: a round that emitted one token
    after a bonus position is a plain step if the drafter was wrong there, which the bits tell."""
    for item in rounds(prompt, window):
        if window < 1:
            yield 1, item.target_s
        elif item.emitted > 1 or not item.at_bonus:
            yield window + 1, item.target_s
        elif merged is not None and item.position < merged.num_tokens:
            bit = int(merged.bits[item.position - 1])
            if bit == 0 and item.position - 1 not in merged.contradictory:
                yield 1, item.target_s


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, neither below nothing."""
    if len(x) < 3 or np.ptp(x) == 0:
        return max(0.0, float(np.mean(y))), 0.0
    slope = max(0.0, float(np.polyfit(x, y, 1)[0]))
    intercept = float(np.mean(y) - slope * np.mean(x))
    if intercept < 0:
        return 0.0, float(np.sum(y) / np.sum(x))
    return intercept, slope


def _by_width(by_width: dict[int, list[float]], plain_s: float | None) -> Table:
    """A verifier's step: at one token its own value, from two up a line; a wider step than any seen lies on it."""
    plain = float(np.mean(by_width[1])) if by_width.get(1) else plain_s
    wide = {width: values for width, values in by_width.items() if width > 1}
    base, slope = plain or 0.0, 0.0
    if wide:
        x = np.repeat(list(wide), [len(values) for values in wide.values()])
        base, slope = _line(x.tolist(), [seconds for values in wide.values() for seconds in values])
    table = Table((1, 2, 3), (base + slope if plain is None else plain, base + 2 * slope, base + 3 * slope))
    seen = wide or by_width
    ratios = [seconds / table.mean_s(width, 0) for width, values in seen.items() for seconds in values]
    return replace(table, quantiles=_spread(np.array(ratios or [1.0])))


def _spread(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Quantiles of value / mean, such that a sampler's mean is the mean."""
    quantiles = np.quantile(values, np.linspace(0, 1, NUM_QUANTILES))
    area = float(np.trapezoid(quantiles, dx=1 / (NUM_QUANTILES - 1)))
    return tuple((quantiles / area).tolist())


@dataclass
class Calibration:
    """Everything that greedy and synchronous files of a folder tell.

    greedy : by choice key; pairs, bits : by pair; files : the names of those used
    """

    greedy: dict[str, GreedyTimes]
    pairs: dict[Pair, ChainTimes]
    bits: dict[Pair, dict[int, PromptBits]]
    files: tuple[str, ...]

    @classmethod
    def of(cls, files: Iterable[PublishedFile]) -> Calibration:
        used = [file for file in files if file.strategy == "autoregressive"
                or (file.strategy == "speculative" and len(file.stages) == 2)]
        greedy = {file.target.choice_key: greedy_times(file) for file in used if len(file.stages) == 1}
        grouped: dict[Pair, list[PublishedFile]] = defaultdict(list)
        for file in used:
            if len(file.stages) == 2:
                grouped[file.stages[0].choice_key, file.target.choice_key].append(file)
        bits, pairs = {}, {}
        for pair, group in grouped.items():
            alone = greedy.get(pair[1])
            plain_s = alone.step_s + alone.wait_s if alone else None
            wide = [r.target_s for file in group for p in file.prompts[1:] or file.prompts
                    for r in rounds(p, file.label - 1) if r.emitted > 1]
            bits[pair] = merge(group, plain_s or 0.0, float(np.median(wide)) if wide and plain_s else 0.0)
            pairs[pair] = chain_times(group, bits[pair], plain_s)
        return cls(greedy, pairs, bits, tuple(file.name for file in used))

    # -- what a stage takes --------------------------------------------------------------------

    def profile(self, pipeline: PipelineSpec, *, warm: bool, rule: DraftRule = RULE, draft_s: float | None = None,
                ) -> Profile:
        """Latencies of a pipeline's stages, under their names.

        warm : False for the first prompt of a file, which carries the warm-up
        draft_s : the first drafter's step, where it is known otherwise
        Raises InputError where a stage's times are in no file.
        """
        together = pipeline.strategy == "pipelined"
        latency: dict[str, StageLatency] = {}
        costs: dict[str, Costs] = {}
        last = len(pipeline.stages) - 1
        for i, stage in enumerate(pipeline.stages):
            one_s = None
            if i < last:
                one_s = self.draft_s(stage, rule if together else "synchronous step", pipeline.target)
            if i == 0 and draft_s is not None:
                one_s = draft_s
            step = self.draft(stage, one_s) if i == 0 and one_s is not None else self.verify(stage, one_s)
            start_s = self.start_s(stage, pipeline, "prefill_s")
            start_s += 0.0 if warm else self.start_s(stage, pipeline, "warmup_s")
            latency[stage.name] = StageLatency(step, Constant(start_s))
            costs[stage.name] = Costs(handover_s=self._handover_s(pipeline),
                                      rollback_s=self._rollback_s(stage, pipeline.target))
        return Profile(latency, costs=costs, neighbour_rate=self.neighbour_rate(pipeline), origin="fitted",
                       source="greedy and synchronous files")

    def draft_s(self, stage: StageSpec, rule: DraftRule = RULE, target: StageSpec | None = None) -> float:
        """Seconds of a drafting stage's one-token step; in a chain best from chains with the same target."""
        alone = self._near(self.greedy, stage)
        if alone is not None and rule != "synchronous step":
            return {"greedy token": alone.step_s + alone.wait_s, "greedy step": alone.step_s,
                    "greedy total": alone.total_s}[rule]
        found = [times.draft_s for times in self._drafting(stage, target) if times.draft_s]
        if found:
            return float(np.mean(found))
        if alone is not None:
            return alone.step_s
        raise InputError(f"step time of {stage.name}", "must be in a greedy or synchronous file")

    def draft(self, stage: StageSpec, mean_s: float) -> Table:
        """A drafting stage's step, spread as in its greedy file."""
        alone = self._near(self.greedy, stage)
        return Table((1,), (mean_s,), quantiles=alone.spread if alone else ())

    def verify(self, stage: StageSpec, one_s: float | None = None) -> Table:
        """A verifying stage's step by width; ``one_s``: its plain step, where that is known."""
        exact = [times.verify for (_, target), times in self.pairs.items() if target == stage.choice_key]
        if exact and one_s is None:
            return _mean(exact)
        if one_s is None:
            one_s = self.draft_s(stage)
        near = exact or [times.verify for (_, target), times in self.pairs.items() if _path(target) == stage.model]
        if not near:
            return self.draft(stage, one_s)
        other = _mean(near)
        return replace(other, seconds=tuple(seconds * one_s / other.seconds[0] for seconds in other.seconds))

    def start_s(self, stage: StageSpec, pipeline: PipelineSpec, name: Literal["prefill_s", "warmup_s"]) -> float:
        """A stage's part of the prefill or of the warm-up."""
        if len(pipeline.stages) == 1 and (alone := self._near(self.greedy, stage)):
            return alone.prefill_s if name == "prefill_s" else 0.0
        drafts = stage != pipeline.target
        chains = self._drafting(stage, pipeline.target) if drafts else [
            times for (_, target), times in self.pairs.items() if target == stage.choice_key]
        found = []
        for times in chains:
            wide_s = times.verify.mean_s(2, 0)
            share = times.draft_s / (wide_s + times.draft_s) if name == "prefill_s" else 0.5
            found.append((share if drafts else 1 - share) * getattr(times, name))
        return float(np.mean(found)) if found else 0.0

    def _drafting(self, stage: StageSpec, target: StageSpec | None) -> list[ChainTimes]:
        """Chains in which a model drafts: for this target, else for any."""
        if target and (exact := self.pairs.get((stage.choice_key, target.choice_key))):
            return [exact]
        return [times for (drafter, _), times in self.pairs.items() if _path(drafter) == stage.model]

    def _handover_s(self, pipeline: PipelineSpec) -> float:
        if pipeline.strategy != "speculative":
            return 0.0
        found = [times.handover_s for (_, target), times in self.pairs.items() if target == pipeline.target.choice_key]
        return float(np.mean(found)) if found else 0.0

    def _rollback_s(self, stage: StageSpec, target: StageSpec) -> float:
        found = [times.rollback_s for times in self._drafting(stage, target)]
        return float(np.mean(found)) if found else 0.0

    def neighbour_rate(self, pipeline: PipelineSpec) -> float:
        """How often two stages that have both left the target's path agree: their rate on a path of their
        own where a file of that pair tells it, else the profile's default."""
        first, second = pipeline.stages[:2] if len(pipeline.stages) > 2 else (None, None)
        if first and second:
            for (drafter, target), merged in self.bits.items():
                if _path(drafter) == first.model and _path(target) == second.model:
                    return agreement_rates(merged.values())[0]
        return Profile.neighbour_rate

    def pair_bits(self, drafter: StageSpec, target: StageSpec) -> dict[int, PromptBits]:
        """Raises InputError where no synchronous file of the pair was given."""
        exact = (drafter.choice_key, target.choice_key)
        if exact in self.bits:
            return self.bits[exact]
        for (a, b), merged in self.bits.items():
            if _path(a) == drafter.model and _path(b) == target.model:
                return merged
        raise InputError(f"{{{drafter.name},{target.name}}}", "must have a synchronous file to calibrate on")

    def known_prompts(self, pipeline: PipelineSpec) -> list[int]:
        """Indices of the prompts whose bits are known for every drafting stage."""
        found = [set(self.pair_bits(stage, pipeline.target)) for stage in pipeline.stages[:-1]]
        return sorted(set.intersection(*found)) if found else []

    @staticmethod
    def _near(found: dict[str, GreedyTimes], stage: StageSpec) -> GreedyTimes | None:
        if stage.choice_key in found:
            return found[stage.choice_key]
        return next((value for key, value in found.items() if _path(key) == stage.model), None)


def _path(choice_key: str) -> str:
    return choice_key.split("|")[0]


def _mean(found: Sequence[Table]) -> Table:
    """The mean of tables of the same widths, with the spread of the first."""
    return replace(found[0], seconds=tuple(np.mean([table.seconds for table in found], axis=0).tolist()))
