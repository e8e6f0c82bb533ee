"""Strategies side by side on the same prompts, in the same minutes; the transformers library as a peer.

Contenders take turns prompt by prompt, in an order that moves on by one each time, so that a shift of
the machine's speed touches all.  What comes of it is said in ``bench_report``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipespec_model import metrics
from pipespec_model.errors import InputError
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec, load_pipeline
from pipespec_model.trace import PromptRecord, StepRecord, Trace, TraceWriter

from .fleet import Fleet, new_trace
from .host import assign_cores
from .peer import Peer, has_twin
from .processes import processes_for, stages_apart
from .prompts import Prompt
from .vocabulary import common_vocabulary

MIN_REPEATS = 3  # of fewer, one lull of the machine shows
T = TypeVar("T")
Advance = Callable[[str, float], None]


class Runs(Protocol):
    """What runs a contender: the fleet of our stages, or the peer."""

    def run_prompt(self, pipeline: PipelineSpec, prompt: Prompt, *, max_new_tokens: int, number: int = 0,
                   repeat: int = 0, sampling: Sampling | None = None, drawn_as: int | None = None,
                   ) -> tuple[PromptRecord, list[StepRecord]]: ...


@dataclass(frozen=True)
class Contender:
    """One side's way to decode.  ``trace`` holds what it did; its pipeline is the resolved one.

    asked : what ``runs`` is given; twin_of : of the peer's, our contender that does the same work
    """

    name: str
    asked: PipelineSpec
    runs: Runs
    trace: Trace
    twin_of: str = ""

    @property
    def side(self) -> str:
        return "transformers" if self.twin_of else "pipespec"

    @property
    def title(self) -> str:
        """In words: ``pipelined {int8,full} γ=0, blocking``."""
        ahead = ",".join(str(link.lookahead) for link in self.asked.links)
        text = f"{self.asked.strategy} {self.asked.label}" + (f" γ={ahead}" if ahead else "")
        if not self.twin_of:
            return text + (", blocking" if self.asked.handshake == "blocking" else "")
        if not ahead:
            return "generate()"
        return f"{'prompt lookup' if self.asked.stages[0].block else 'assisted ' + self.asked.label} γ={ahead}"

    @property
    def by_prompt(self) -> list[PromptRecord]:
        """One record a prompt, in the order of the prompts."""
        return metrics.mean_of_repeats(self.trace.prompts)


# -- what is compared -----------------------------------------------------------------------------


def from_files(paths: Sequence[Path]) -> dict[str, PipelineSpec]:
    """Pipelines by file name, with their target alone in front where none of them is that.

    Raises InputError where they cannot be compared: one target, and one meaning for a stage's name.
    """
    found: dict[str, PipelineSpec] = {}
    for path in paths:
        if path.stem in found:
            raise InputError(str(path), "must differ in name from the other pipelines", path.stem, "rename the file")
        found[path.stem] = spec = load_pipeline(path)
        spec.require_lookaheads()
        assign_cores(spec, scripted=False)
    targets = {name: spec.target.choice_key for name, spec in found.items()}
    other = next((name for name, key in targets.items() if key != next(iter(targets.values()))), None)
    if other is not None:
        raise InputError(f"{other}: target", f"must be that of {next(iter(targets))}", targets[other],
                         "give pipelines of one target")
    if not any(spec.strategy == "autoregressive" for spec in found.values()):
        found = {"autoregressive": PipelineSpec.alone(next(iter(found.values())).target), **found}
    return found


def num_runs(pipelines: Mapping[str, PipelineSpec], num_prompts: int, *, repeats: int, peer: bool) -> int:
    """Prompts that all contenders together will run, warm-ups included."""
    contenders = len(pipelines) + peer * sum(has_twin(spec) for spec in pipelines.values())
    return contenders * (1 + repeats * num_prompts)


# -- measuring ------------------------------------------------------------------------------------


def bench(pipelines: Mapping[str, PipelineSpec], prompts: Sequence[Prompt], *, max_new_tokens: int, repeats: int,
          peer: bool, out: Path | None, advance: Advance, sampling: Sampling | None = None) -> list[Contender]:
    """Measure every pipeline, and its twin where the peer has one, on every prompt.

    sampling : None = greedy.  Repeats of a prompt draw one text
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "repeats": repeats}
    seed = sampling.seed if sampling else 0
    if sampling:
        options["sampling"] = sampling.to_dict()
    stages = processes_for(pipelines)
    with ExitStack() as stack:
        advance(f"starting {len(stages)} stage processes", 0.0)
        fleet = stack.enter_context(Fleet(stages, vocabulary=common_vocabulary(pipelines.values()),
                                          apart=stages_apart(pipelines.values())))
        for spec in pipelines.values():
            fleet.check_fits(spec, prompts, max_new_tokens)
        contenders = [Contender(name, spec, fleet, new_trace(fleet.configure(spec), options=options, seed=seed))
                      for name, spec in pipelines.items()]
        if peer:
            advance("starting the peer", 0.0)
            contenders += stack.enter_context(_twins(contenders, options))
        measure(contenders, prompts, options, keeper=stack.enter_context(Keeper(out, contenders)), advance=advance,
                sampling=sampling)
    return contenders


def measure(contenders: Sequence[Contender], prompts: Sequence[Prompt], options: Mapping[str, Any], *, keeper: Keeper,
            advance: Advance, sampling: Sampling | None = None) -> None:
    """Every contender on every prompt, in turns, after one prompt each that does not count."""
    budget, repeats = options["max_new_tokens"], options["repeats"]
    for contender in contenders:
        advance("warming up", 1.0)
        contender.runs.run_prompt(contender.asked, prompts[0], max_new_tokens=budget, sampling=sampling)
    for turn in range(repeats * len(prompts)):
        repeat, n = divmod(turn, len(prompts))
        for contender in rotated(contenders, turn):
            advance(f"repeat {repeat + 1} of {repeats}, prompt {n + 1} of {len(prompts)}", 1.0)
            made = contender.runs.run_prompt(
                contender.asked, prompts[n], max_new_tokens=budget, number=turn, repeat=repeat, sampling=sampling,
                drawn_as=n)
            keeper.append(contender, *made)
            contender.trace.add(*made)


@contextmanager
def _twins(contenders: Sequence[Contender], options: dict[str, Any]) -> Iterator[list[Contender]]:
    """The peer's process, as the contenders that it runs."""
    ours = [contender for contender in contenders if has_twin(contender.asked)]
    with Peer([PipelineSpec.from_dict(contender.trace.pipeline) for contender in ours]) as peer:
        yield [Contender(f"transformers-{mine.name}", spec, peer, new_trace(spec, options=options), mine.name)
               for mine, spec in zip(ours, peer.pipelines, strict=True)]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Beginning with another one each turn, so that each comes first, second, … equally often."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


class Keeper:
    """Writes each finished prompt at once: our traces, and the peer's answers in ``peer.jsonl``."""

    def __init__(self, out: Path | None, contenders: Sequence[Contender]) -> None:
        self._out = out
        self._writers: dict[str, TraceWriter] = {}
        if out is None:
            return
        (out / "traces").mkdir(parents=True, exist_ok=True)
        (out / "peer.jsonl").unlink(missing_ok=True)
        for contender in contenders:
            if not contender.twin_of:
                path = out / "traces" / f"{contender.name}.jsonl"
                path.unlink(missing_ok=True)
                self._writers[contender.name] = TraceWriter(path, contender.trace)

    def append(self, contender: Contender, prompt: PromptRecord, steps: Sequence[StepRecord]) -> None:
        if self._out is None:
            return
        if contender.name in self._writers:
            self._writers[contender.name].append(prompt, steps)
            return
        with (self._out / "peer.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"contender": contender.name, "prompt": prompt.name, "repeat": prompt.repeat,
                                   "tokens": prompt.tokens, "total_s": prompt.total_s}) + "\n")

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()
