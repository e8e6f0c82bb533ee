"""The parent's side: starts stage processes, places pipelines on them, runs prompts, keeps the trace.

A fleet loads each distinct stage once and then runs any pipeline of them, so that rows that are
compared run in the same processes, in the same minutes.  Only the parent writes files.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from pipespec_model.agreement import Agreement
from pipespec_model.cli import INTERRUPTED
from pipespec_model.errors import InputError, StageError
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec, StageSpec
from pipespec_model.trace import PromptRecord, StepRecord, Trace

from . import worker
from .forced import Draws, Forced
from .host import host, place, versions
from .hosts import FAILED, Hosts
from .processes import end_process, shared_processes, start, whole_models
from .prompts import Prompt
from .scripted import Script, Wrong
from .shared import Shared
from .stopping import Stops
from .watch import PATIENCE_S, Watch, check_patience
from .worker import Job, Outcome

LOAD_TIMEOUT_S = 900.0
CLOCK_TIMEOUT_S = 5.0


class Fleet:
    """Stage processes, by stage name.  A context manager: leaving it ends them all.

    scripts : stages that replay instead of computing, by name
    vocabulary : logits beyond this are padding
    apart : names of the layer-skipping drafters that have a process of their own (processes.stages_apart)
    patience_s : a stage that gives no sign for so long while a prompt runs is taken to hang (watch.py)
    hosts : the other ranks of a run on several hosts (hosts.py): only the first stage is a process of this fleet,
        which runs pipelines of exactly these stages in this order
    """

    def __init__(self, stages: Iterable[StageSpec], *, scripts: Mapping[str, Script | Wrong] | None = None,
                 vocabulary: int | None = None, apart: Collection[str] = (),
                 patience_s: float = PATIENCE_S, hosts: Hosts | None = None) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.apart = frozenset(apart)
        self.scripts = dict(scripts or {})
        self.vocabulary = vocabulary
        self.patience_s = check_patience(patience_s)
        self.hosts = hosts
        self.processes: dict[str, BaseProcess] = {}
        self.connections: dict[str, Connection] = {}
        self.context_limits: dict[str, int | None] = {}
        self._entry_bytes: dict[str, int] = {}
        self._mail: dict[str, deque[tuple[Any, ...]]] = {name: deque() for name in self.stages}
        self._asked: PipelineSpec | None = None
        self._configured: PipelineSpec | None = None
        self._current = ""
        self._loading = False
        self._runs = 0
        self._watch: Watch | None = None

    # -- processes ------------------------------------------------------------------------------

    def __enter__(self) -> Fleet:
        context = get_context("spawn")
        names = list(self.stages)
        here = names[:1] if self.hosts else names
        ends: dict[str, dict[str, Connection]] = {name: {} for name in here}
        for i, a in enumerate(here):
            for b in here[i + 1 :]:
                ends[a][b], ends[b][a] = context.Pipe()
        shared = {name: Shared.make() for name in self.apart}
        try:
            if self.hosts:
                self.connections.update(self.hosts.seat(list(self.stages.values()), self.vocabulary))
                ends[names[0]].update(self.hosts.neighbour)
            for group in shared_processes((self.stages[name] for name in here), self.apart):
                seats = []
                for stage in group:
                    self.connections[stage.name], theirs = context.Pipe()
                    seats.append(worker.Seat(stage, self.scripts.get(stage.name), theirs, ends[stage.name],
                                             self._memory_of(stage, shared)))
                process = context.Process(target=worker.main, name=group[0].name, daemon=True,
                                          args=(seats, self.vocabulary))
                # Of the signals that a launcher may send to all: this side decides what becomes of the stage.
                start(process, deaf_to=(signal.SIGINT, signal.SIGTERM) if self.hosts else (signal.SIGINT,))
                for seat in seats:
                    self.processes[seat.stage.name] = process
                    seat.parent.close()
                    for end in seat.peers.values():
                        end.close()
            self._loading = True
            for name in names:
                _, self.context_limits[name] = self._receive(name, "ready", timeout_s=LOAD_TIMEOUT_S)
            self._loading = False
        except BaseException:
            self.close()
            raise
        finally:
            for memory in shared.values():
                memory.close()
        return self

    def _memory_of(self, stage: StageSpec, shared: dict[str, Shared]) -> dict[str, Shared]:
        """What of the shared memory, by drafter, a stage reads or writes."""
        return {name: memory for name, memory in shared.items()
                if name == stage.name or stage.name in whole_models(self.stages[name], [stage])}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(0 if kind is None else INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED)

    def restart(self) -> None:
        """Every stage anew, after one has failed."""
        self.close()
        self.__enter__()

    def close(self, status: int = FAILED) -> None:
        """End every stage, with this status; whatever they were about is forgotten."""
        for end in self.connections.values():
            try:
                end.send(("exit", status))
            except OSError:
                continue
        for process in self.processes.values():
            # In the midst of something nothing is lost by haste: only this side writes files.
            end_process(process, now=bool(self._current or self._loading))
        for end in self.connections.values():
            end.close()
        self.processes, self.connections = {}, {}
        self._asked = self._configured = self._watch = None
        self._mail = {name: deque() for name in self.stages}
        self._current, self._loading = "", False

    # -- talking to them ------------------------------------------------------------------------

    def _receive(self, name: str, verb: str, timeout_s: float | None = None) -> tuple[Any, ...]:
        """The next message of one stage.  Raises StageError as soon as *any* stage fails or dies."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._mail[name]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._pump(left):
                raise StageError(f"stage {name!r} did not answer within {timeout_s:.0f} s")
        message = self._mail[name].popleft()
        if message[0] != verb:
            raise StageError(f"stage {name!r} sent {message[0]!r} where {verb!r} was expected")
        return message

    def _pump(self, timeout_s: float | None) -> bool:
        """Collect what has arrived; False when nothing did in time."""
        sentinels = {process.sentinel: name for name, process in self.processes.items()}
        names = {id(end): name for name, end in self.connections.items()}
        ready = connection.wait([*self.connections.values(), *sentinels], timeout_s)
        for item in ready:
            if isinstance(item, Connection):
                name = names[id(item)]
                try:
                    message = item.recv()
                except (EOFError, ConnectionResetError):
                    raise self._dead(name) from None
                if message[0] == "error":
                    raise self._failed(name, message)
                if message[0] != "pulse":
                    self._mail[name].append(message)
                elif self._watch is not None and message[1] == self._runs:
                    self._watch.hear(name, message[2])
        for item in ready:
            if item in sentinels and not self.connections[sentinels[item]].poll(0):
                raise self._dead(sentinels[item])
        return bool(ready)

    def _dead(self, name: str, link: str = "") -> Exception:
        # A stage whose neighbour died ends too, with code 0 and a word of the link: the one to name is the first
        # cause, and what it said of it may still wait to be read.
        told = {name} if link else set()
        gone: set[str] = set()
        for other, end in self.connections.items():
            try:
                while end.poll(0):
                    message = end.recv()
                    if message[0] == "error" and message[1] != "link":
                        return self._failed(other, message)
                    if message[0] == "error":
                        told.add(other)
                        name, link = (name, link) if link else (other, message[2])
            except (EOFError, ConnectionResetError):
                gone.add(other)
        if name in self.processes:
            self.processes[name].join(timeout=1)
        codes = {other: process.exitcode for other, process in self.processes.items()}
        first = next((other for other, code in codes.items() if code), None)
        if first is None and self.hosts and (lost := self.hosts.lost(self.connections, gone, told)):
            return StageError(f"stage {lost!r} {self.hosts.where(lost)} is gone: its connection ended{self._during()}")
        if first is None and link:
            return StageError(f"stage {name!r} {link}{self._during()}")
        name = first or name
        return StageError(f"stage {name!r} ended with exit code {codes[name]}{_meaning(codes[name])}{self._during()}")

    def _failed(self, name: str, message: tuple[Any, ...]) -> Exception:
        _, kind, text = message
        if kind == "link":
            return self._dead(name, text)
        if kind == "input":
            return InputError(f"stage {name!r}:", text)
        return StageError(f"stage {name!r} failed {text}{self._during()}")

    def _during(self) -> str:
        if self._loading:
            return ", while loading"
        return f", while working on prompt {self._current!r}" if self._current else ""

    def _next(self, name: str) -> tuple[Any, ...]:
        """The next message of a stage while a prompt runs, however long that takes; raises StageError as
        _receive does, and where a stage hangs."""
        assert self._watch is not None
        while not self._mail[name]:
            now = time.monotonic()
            for other in self._watch.ask(now):
                self._send(other, "pulse", self._runs)
            self._pump(self._watch.due_s(now))
            while self._pump(0):  # what came while this side was busy: an answer may be among it
                pass
            if found := self._watch.fault(time.monotonic()):
                raise StageError(f"{found}{self._during()}")
        return self._mail[name].popleft()

    def _send(self, name: str, *message: Any) -> None:
        try:
            self.connections[name].send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._dead(name) from None

    # -- running --------------------------------------------------------------------------------

    def configure(self, pipeline: PipelineSpec) -> PipelineSpec:
        """Place a pipeline; returns it with the effective cores and threads filled in."""
        pipeline.require_lookaheads()
        if self._configured is not None and self._asked == pipeline:
            return self._configured
        placed = self.place(pipeline)
        for i, stage in enumerate(pipeline.stages):
            if stage.name not in self.connections:
                raise InputError(f"stages.{i}.name", f"must be one of {', '.join(self.stages)}", stage.name)
            self._send(stage.name, "configure", pipeline, i, placed.stages[i].cores)
        stages = []
        for stage in placed.stages:
            _, threads, self._entry_bytes[stage.name] = self._receive(stage.name, "configured", timeout_s=60)
            stages.append(stage.model_copy(update={"threads": threads}))
        self._asked = pipeline
        self._configured = pipeline.model_copy(update={"stages": tuple(stages)})
        return self._configured

    def entry_bytes(self, pipeline: PipelineSpec) -> dict[str, int]:
        """Of one token's cache entries, by the name of the stage that hands them over."""
        return {stage.name: self._entry_bytes[stage.name] for i, stage in enumerate(pipeline.stages)
                if pipeline.hands_over(i)}

    def place(self, pipeline: PipelineSpec) -> PipelineSpec:
        """The pipeline with every stage's cores filled in; nothing is sent."""
        scripted = all(isinstance(self.scripts.get(stage.name), Script) for stage in pipeline.stages)
        return (self.hosts.place if self.hosts else place)(pipeline, scripted=scripted)

    def run_prompt(self, pipeline: PipelineSpec, prompt: Prompt, *, max_new_tokens: int, number: int = 0,
                   repeat: int = 0,
                   agreement: Agreement | None = None, on_text: Callable[[list[int]], None] | None = None,
                   sampling: Sampling | None = None, drawn_as: int | None = None,
                   stops: Stops | None = None,
                   ) -> tuple[PromptRecord, list[StepRecord]]:
        """Generate for one prompt; blocks until every stage has accounted for its drafts.

        The clock starts before the request is sent and includes every stage's prefill.

        number : names the prompt in the trace; must differ between the prompts of one trace
        agreement : what scripted stages replay; it may hold rows of other stages too
        on_text : called with the tokens that the target has decided since the last call; none is ever taken back
        sampling : None = greedy
        drawn_as : number that the noise goes by, for repeats that are to give one text; None = ``number``
        stops : where the text ends, beside the prompt's ``eos``; the last token is the one that completes a string
        """
        self.configure(pipeline)
        self.check_fits(pipeline, [prompt], max_new_tokens)
        if sampling is not None:
            self.check_samples(pipeline, sampling)
        names = [stage.name for stage in pipeline.stages]
        if stops is not None:
            self._send(names[-1], "stops", stops)
            if self._receive(names[-1], "stops", timeout_s=LOAD_TIMEOUT_S)[1]:
                max_new_tokens = 0
        if self.hosts:
            self.hosts.compare_clocks(self._clock)
        self._runs += 1
        self._current = prompt.name
        if agreement is not None:
            agreement = agreement.select([stage.choice_key for stage in pipeline.stages])
        draws = Draws(sampling, number if drawn_as is None else drawn_as, tuple(prompt.eos)) if sampling else None
        job = Job(self._runs, number, time.perf_counter(), tuple(prompt.tokens), max_new_tokens, frozenset(prompt.eos),
                  stream=on_text is not None, draws=draws, agreement=agreement)
        for name in reversed(names):
            self._send(name, "prompt", self.hosts.request(name, job) if self.hosts else job)
        self._watch = Watch(names, self.patience_s, time.monotonic())
        while (message := self._next(names[-1]))[0] != "closed":
            if on_text is not None:
                on_text(message[1])
        outcomes: list[Outcome] = [message[1]]
        # One after the other, target's neighbour first: each stage passes the last verdict on
        # before it closes, so every draft is accounted for.
        for name in reversed(names[:-1]):
            self._send(name, "close", job.run)
            outcomes.insert(0, self._next(name)[1])
        self._watch = None
        clocks = None
        if self.hosts:
            outcomes, clocks = self.hosts.align(outcomes, job.clock, self._clock)
        self._current = ""
        record, steps = self._records(outcomes, prompt, number, repeat)
        return replace(record, clocks=clocks), steps

    def _clock(self, name: str) -> float:
        self._send(name, "clock")
        return float(self._receive(name, "clock", timeout_s=CLOCK_TIMEOUT_S)[1])

    @staticmethod
    def _records(outcomes: list[Outcome], prompt: Prompt, number: int, repeat: int,
                 ) -> tuple[PromptRecord, list[StepRecord]]:
        last = outcomes[-1]
        first = last.steps[0] if last.steps else None
        record = PromptRecord(
            prompt=number, name=prompt.name, prompt_length=len(prompt.tokens), tokens=last.tokens,
            total_s=last.ended_s, ttft_s=(first.start_s or 0.0) + first.duration_s if first else 0.0,
            counters=[outcome.counters for outcome in outcomes], category=prompt.category, repeat=repeat)
        return record, [step for outcome in outcomes for step in outcome.steps]

    def check_fits(self, pipeline: PipelineSpec, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Refuse a prompt that is empty or too long for some stage."""
        for prompt, stage in product(prompts, pipeline.stages):
            if not prompt.tokens:
                raise InputError(f"prompt {prompt.name!r}", "must not be empty")
            limit = self.context_limits[stage.name]
            needed = len(prompt.tokens) + max_new_tokens
            if limit is not None and needed > limit:
                raise InputError(f"prompt {prompt.name!r}", f"plus {max_new_tokens} new tokens must fit the context "
                                 f"of stage {stage.name!r} ({limit} tokens)", needed, "shorten it or ask for fewer")

    def check_samples(self, pipeline: PipelineSpec, sampling: Sampling) -> None:
        """Refuse options where a stage has no scores that they could change."""
        for i, stage in enumerate(pipeline.stages):
            if isinstance(self.scripts.get(stage.name), Script) and not sampling.plain:
                changed = sampling.first_set
                raise InputError(changed, f"must be absent where a stage is scripted (stages.{i}, {stage.name})",
                                 getattr(sampling, changed), "it replays recorded tokens")

    def measure(self, name: str, widths: tuple[int, ...], text: list[int], *, context: int,
                sampling: Sampling | None = None) -> list[StepRecord]:
        """Time a step of each width by one stage, on a cache of ``context`` tokens (0: prefills); drawing takes time
        too."""
        self._send(name, "measure", context, widths, text, sampling)
        self._receive(name, "primed", timeout_s=600)
        self._send(name, "go", [(0.0, 0.0)])
        return list(self._receive(name, "measured", timeout_s=600)[1])

    def measure_together(self, widths: dict[str, tuple[int, ...]], text: list[int], *, context: int, seconds: float,
                         sampling: Sampling | None = None) -> dict[str, list[StepRecord]]:
        """Time steps of these widths by stage: each stage alone for half of ``seconds`` (kind ``alone``),
        then all at once (kind ``measure``; those steps throughout which all were at work)."""
        for name, wanted in widths.items():
            self._send(name, "measure", context, wanted, text, sampling)
        for name in widths:
            self._receive(name, "primed", timeout_s=600)
        begin = time.perf_counter() + 0.002
        common = begin + len(widths) * seconds / 2
        for i, name in enumerate(widths):
            own = begin + i * seconds / 2
            self._send(name, "go", [(own, own + seconds / 2), (common, common + seconds)])
        found = {name: self._receive(name, "measured", timeout_s=600)[1] for name in widths}
        both = {name: [s for s in steps if s.start_s >= common] for name, steps in found.items()}
        begun = max(steps[0].start_s for steps in both.values())
        ended = min(steps[-1].start_s + steps[-1].duration_s for steps in both.values())
        return {name: [replace(s, kind="alone") for s in found[name] if s.start_s < common and s.kind == "measure"]
                + [s for s in both[name] if s.start_s >= begun and s.start_s + s.duration_s <= ended]
                for name in widths}

    def probe(self, pipeline: PipelineSpec, number: int) -> list[StepRecord]:
        """The machine's speed now: steps of one token by each stage of ``pipeline``, at once
        (``PipelineSpec.probed_at_once``) or one stage after the other.

        number : of the prompt that they are taken beside
        """
        at_once = self.configure(pipeline).probed_at_once
        names = [stage.name for stage in pipeline.stages]
        found: list[StepRecord] = []
        for group in [names] if at_once else [[name] for name in names]:
            for name in group:
                self._send(name, "probe")
            for name in group:
                steps = self._receive(name, "probed", timeout_s=600)[1]
                found += [replace(step, prompt=number, stage=names.index(name)) for step in steps]
        return found

    def run_probed(self, pipeline: PipelineSpec, prompt: Prompt, *, number: int = 0, **options: Any,
                   ) -> tuple[PromptRecord, list[StepRecord], list[StepRecord]]:
        """:meth:`run_prompt`, and the probes just before and just after it."""
        before = self.probe(pipeline, number)
        record, steps = self.run_prompt(pipeline, prompt, number=number, **options)
        return record, steps, before + self.probe(pipeline, number)

    def teacher_force(self, name: str, prompt: Sequence[int], answer: Sequence[int],
                      draws: Draws | None = None) -> Forced:
        """What a stage itself chooses at each position of ``answer``; draws : as the answer was drawn, None = greedy"""
        self._send(name, "teacher_force", list(prompt), list(answer), draws)
        _, found = self._receive(name, "choices", timeout_s=600)
        return found


def _meaning(code: int | None) -> str:
    """Of an exit code, in words, where it has one."""
    if code is None or code >= 0:
        return ""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f" ({name}{', perhaps for want of memory' if name == 'SIGKILL' else ''})"


def new_trace(pipeline: PipelineSpec, *, emulated: bool = False, options: dict[str, Any] | None = None,
              seed: int = 0) -> Trace:
    """A trace with this machine's header; ``pipeline`` is the resolved one."""
    return Trace("emulated" if emulated else "measured", pipeline.to_dict(), seed=seed, host=host(),
                 versions=versions(), options=options or {})
