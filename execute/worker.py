"""A stage process: loads its model once, then serves every pipeline that it is configured for.

Runs one loop whatever its position (execute/fleet.py is the other side).  Module import is cheap and
torch-free: a scripted or lookup stage never loads torch.

Commands from the parent are tuples ``(verb, ...)``; neighbours exchange ``(run, message)`` over
pipes that block without spinning and notice a dead peer.
"""

from __future__ import annotations

import os
import pickle
import selectors
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.lookup import PromptLookup
from pipespec_model.messages import Entries, Step
from pipespec_model.protocol import Stage
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec, StageSpec
from pipespec_model.trace import StepRecord

from .forced import Draws, forced
from .scripted import Script, ScriptedRunner, Wrong, WrongRunner
from .shared import Shared
from .skipping import Skipping, skipping
from .stopping import Ends, Stops
from .timing import measure, prime, probe, uses_torch
from .watch import Pulse

T = TypeVar("T")


class StepFailed(RuntimeError):
    """Says in which step; its cause is what the runner raised."""


class LinkLost(RuntimeError):
    """A neighbour is gone, or the pipe to it."""


class Runner(Protocol):
    """What runs a stage's steps.  ``begin``: a new prompt.  ``run``: propose or verify (the sequence
    tells it what was accepted).  ``forget``: drop cached tokens beyond a length."""

    def run(self, sequence: Sequence[int], step: Step) -> list[int]: ...

    def forget(self, length: int) -> None: ...


@dataclass(frozen=True)
class Job:
    """One prompt for one stage.  ``run`` tells its messages from those of the prompt before; ``number``
    names it in the trace.  ``clock``: time.perf_counter() of the request, by the stage's own host: that clock is the
    machine's monotonic one, the same in every process of a host."""

    run: int
    number: int
    clock: float
    prompt: tuple[int, ...]
    budget: int
    eos: frozenset[int]
    stream: bool = False
    draws: Draws | None = None
    agreement: Agreement | None = None


@dataclass
class Outcome:
    """What a stage tells when a prompt ends."""

    run: int
    counters: dict[str, int]
    steps: list[StepRecord]
    tokens: list[int]
    ended_s: float


@dataclass
class Placement:
    """Where this worker stands in the configured pipeline."""

    pipeline: PipelineSpec
    index: int
    up: Connection | None
    down: Connection | None


@dataclass
class Worker:
    stage: StageSpec
    parent: Connection
    peers: dict[str, Connection]
    runner: Any
    place: Placement | None = None
    inputs: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)  # made once a pipeline
    job: Job | None = None
    ends: Ends | None = None
    closing: bool = False
    steps: list[StepRecord] = field(default_factory=list)
    traffic: Counter[str] = field(default_factory=Counter)  # messages of this prompt, by Pulse's names
    skipping: Skipping = field(default_factory=Skipping)
    pool: ThreadPoolExecutor | None = None  # the one thread that computes, where stages share a process

    def compute(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        return work(*args, **options) if self.pool is None else self.pool.submit(work, *args, **options).result()

    # -- commands -------------------------------------------------------------------------------

    def serve(self) -> None:
        self.parent.send(("ready", getattr(self.runner, "context_limit", None)))
        while True:
            verb, *args = self.parent.recv()
            if verb == "exit":
                raise SystemExit(*args)
            getattr(self, f"on_{verb}")(*args)

    def on_configure(self, pipeline: PipelineSpec, index: int, cores: tuple[int, ...]) -> None:
        stages = pipeline.stages
        self.place = Placement(
            pipeline, index,
            up=self.peers[stages[index - 1].name] if index > 0 else None,
            down=self.peers[stages[index + 1].name] if index + 1 < len(stages) else None,
        )
        self.inputs.close()
        self.inputs = selectors.DefaultSelector()
        for source in (self.parent, self.place.up, self.place.down):
            if source is not None:
                self.inputs.register(source, selectors.EVENT_READ)
        threads = self.compute(set_threads, stages[index].threads, cores, torch_loaded=uses_torch(self.runner))
        self.parent.send(("configured", threads, getattr(self.runner, "bytes_per_token", 0)))

    def on_prompt(self, job: Job) -> None:
        assert self.place is not None
        self.job, self.closing, self.steps = job, False, []
        self.traffic.clear()
        stage = Stage(self.place.pipeline, self.place.index, len(job.prompt), job.budget, job.eos, job.prompt,
                      ends=self.ends)
        self.ends = None
        begin(self.runner, job, self.place)
        self.skipping = skipping(stage, self.runner)
        self._generate(stage)
        if not stage.is_target:
            while not self.closing:
                self._take(self.parent, stage)
        self._drain(stage)
        stage.settle()
        self.send(stage)
        outcome = Outcome(job.run, asdict(stage.close()), self.steps, list(stage.sequence), self._ended())
        self.parent.send(("closed", outcome))

    def on_stops(self, stops: Stops) -> None:
        """Be ready to end the next prompt at one of them, with the tokenizer loaded before its clock starts."""
        self.ends = stops.ends()
        self.parent.send(("stops", self.ends.ended))

    def on_measure(self, context: int, widths: tuple[int, ...], text: list[int], sampling: Sampling | None) -> None:
        """Time steps of these widths on a cache of ``context`` tokens (0: each is a prefill), choices included.

        Once primed, waits for ``("go", windows)``: in each ``(start_at, stop_at)`` it goes round until
        ``stop_at``, at least one step; with 0 each width once.
        """
        prompt = (text * (1 + context // len(text)))[:context]
        sampler = sampler_for(self.runner, Draws(sampling) if sampling else None, prompt)
        self.compute(prime, self.runner, prompt, text, sampler)
        self.parent.send(("primed",))
        _, windows = self.parent.recv()
        records: list[StepRecord] = []
        for start_at, stop_at in windows:
            time.sleep(max(0.0, start_at - time.perf_counter()))
            for width in widths if stop_at == 0 else cycle(widths):
                records += self.compute(measure, self.runner, prompt, width, text, sampler)
                if time.perf_counter() >= stop_at > 0:
                    break
        self.parent.send(("measured", records))

    def on_pulse(self, run: int) -> None:
        """A sign of life, between two steps or between two prompts."""
        self.parent.send(("pulse", run, Pulse(len(self.steps), **self.traffic)))

    def on_clock(self) -> None:
        """What time it is here, for a parent on another host."""
        self.parent.send(("clock", time.perf_counter()))

    def on_probe(self) -> None:
        self.parent.send(("probed", self.compute(probe, self.runner)))

    def on_teacher_force(self, prompt: list[int], answer: list[int], draws: Draws | None) -> None:
        self.parent.send(("choices", self.compute(forced, self.runner, self.stage, prompt, answer, draws)))

    # -- one prompt -----------------------------------------------------------------------------

    def _generate(self, stage: Stage) -> None:
        assert self.job is not None
        told = 0
        while not stage.done and not self.closing:
            self._drain(stage)
            step = stage.next_step()
            self.send(stage)
            if self.closing:
                return
            if step is None:
                self.inputs.select()
                continue
            self._run_step(stage, step)
            if self.job.stream and stage.is_target and len(stage.sequence) > told:
                self.parent.send(("text", stage.sequence[told:]))
                told = len(stage.sequence)
        self.send(stage)

    def _run_step(self, stage: Stage, step: Step) -> None:
        assert self.job is not None
        self.skipping.before_step(stage, step, self)
        before = len(stage.sequence)
        start = time.perf_counter()
        try:
            tokens = list(step.proposal) if step.proposal else self.compute(self.runner.run, stage.sequence, step)
        except Exception as error:
            raise StepFailed(f"in {step.kind} at position {step.position}: {said(error)}") from error
        end = time.perf_counter()
        accepted = stage.finish(step, tokens)
        self.steps.append(StepRecord(
            prompt=self.job.number, stage=stage.index, kind=step.kind, start_s=start - self.job.clock,
            duration_s=end - start, position=step.position, context=step.cached,
            width=step.width or len(tokens), drafts=len(step.drafts), accepted=accepted,
            emitted=len(stage.sequence) - before, epoch=step.epoch, rolled_back=step.rolled_back,
        ))
        self.skipping.after_step(stage, step, self)

    def timed(self, kind: str, step: Step, work: Callable[[], T], *, rows: range | None = None) -> T:
        """Work between steps; see skipping.Desk."""
        assert self.job is not None
        assert self.place is not None
        start = time.perf_counter()
        found = self.compute(work)
        self.steps.append(StepRecord(
            prompt=self.job.number, stage=self.place.index, kind=kind, start_s=start - self.job.clock,
            duration_s=time.perf_counter() - start, position=step.position,
            context=rows.start if rows else step.cached, width=len(rows or ()), drafts=0, accepted=0, emitted=0,
            epoch=step.epoch))
        return found

    def _ended(self) -> float:
        last = self.steps[-1] if self.steps else None
        return (last.start_s or 0.0) + last.duration_s if last else 0.0

    # -- messages -------------------------------------------------------------------------------

    def _drain(self, stage: Stage) -> None:
        while ready := self.inputs.select(0):
            for key, _ in ready:
                self._take(key.fileobj, stage)

    def _take(self, source: Any, stage: Stage) -> None:
        assert self.job is not None
        try:
            message = source.recv()
        except (EOFError, ConnectionResetError):
            raise self._link_lost(source) from None
        if source is self.parent:
            if message[0] == "exit":
                raise SystemExit(*message[1:])
            if message[0] == "pulse":
                self.on_pulse(message[1])
            self.closing = self.closing or message == ("close", self.job.run)
            return
        run, body = message
        if run != self.job.run:
            return
        assert self.place is not None
        self.traffic["from_up" if source is self.place.up else "from_down"] += 1
        if isinstance(body, Entries):
            self.skipping.receive(body)
        else:
            stage.receive(body)

    def send(self, stage: Stage) -> None:
        assert self.place is not None
        self.skipping.before_send(stage, self)
        up, down = stage.take_outbox()
        for verdict in up:
            self._post(self.place.up, verdict)
        if down is not None:
            self._post(self.place.down, down)

    def tell_upstream(self, message: Entries) -> None:
        assert self.place is not None
        self._post(self.place.up, message)

    def _post(self, neighbour: Connection | None, body: Any) -> None:
        assert neighbour is not None
        assert self.job is not None
        assert self.place is not None
        self.traffic["to_up" if neighbour is self.place.up else "to_down"] += 1
        try:
            neighbour.send_bytes(pickle.dumps((self.job.run, body)))
        except (BrokenPipeError, ConnectionResetError):
            raise self._link_lost(neighbour) from None

    def _link_lost(self, end: Connection) -> Exception:
        if end is self.parent or self.place is None:
            return EOFError()
        stages, i = self.place.pipeline.stages, self.place.index
        return LinkLost(f"lost its link to stage {stages[i - 1 if end is self.place.up else i + 1].name!r}")


def begin(runner: Any, job: Job, place: Placement) -> None:
    if isinstance(runner, ScriptedRunner):
        assert job.agreement is not None
        runner.begin_replay(job.agreement, place.index, job.number, block=place.pipeline.stages[place.index].block)
    elif uses_torch(runner):
        runner.begin(job.prompt, sampler_for(runner, job.draws, job.prompt))
        runner.run_number = job.run
    else:
        runner.begin(job.prompt)


def sampler_for(runner: Any, draws: Draws | None, prompt: Sequence[int]) -> Any:
    """What chooses for a runner that computes; None = greedy."""
    if draws is None or not uses_torch(runner):
        return None
    from .sampler import sampler_of

    return sampler_of(draws.sampling, prompt, number=draws.number, eos=draws.eos)


def set_threads(threads: int, cores: Sequence[int], *, torch_loaded: bool) -> int:
    """Pin this process and set its thread budget; returns the effective number of threads."""
    if cores and hasattr(os, "sched_setaffinity"):
        # Every thread by itself: those that OpenMP has begun keep the cores that they began on.
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)
    if not torch_loaded:
        return 1
    import torch

    torch.set_num_threads(threads)
    return int(torch.get_num_threads())


def make_runner(stage: StageSpec, script: Script | Wrong | None, vocabulary: int | None) -> Any:
    if isinstance(script, Script):
        return script.runner()
    if stage.block:
        return PromptLookup(stage.max_ngram)
    from .torch_runner import TorchRunner

    runner = TorchRunner(stage, vocabulary)
    return WrongRunner(runner) if script else runner


def skipping_runner(seat: Seat, vocabulary: int | None) -> Any:
    """Of one of the two who share memory: a layer-skipping drafter, or a stage that may draft with one."""
    from .clasp.runner import ClaspRunner, FullRunner

    if not seat.stage.clasp:
        return FullRunner(seat.stage, vocabulary, seat.shared)
    return ClaspRunner(seat.stage, FullRunner(seat.stage.whole, vocabulary), seat.shared[seat.stage.name])


@dataclass
class Seat:
    """One stage of a process, and the ends of its pipes."""

    stage: StageSpec
    script: Script | Wrong | None
    parent: Connection
    peers: dict[str, Connection]
    shared: dict[str, Shared] = field(default_factory=dict)
    """By the name of a layer-skipping drafter in a process of its own: it finds its verifier's entries there."""


def main(seats: list[Seat], vocabulary: int | None) -> None:
    """Entry point of a process.

    seats : one stage; or a model and, after it, the layer-skipping drafters that share its weights, each in a
        thread of its own.  They only ever work in turn, and one more thread computes for all: OpenMP keeps a pool of
        threads for every thread that computes, and a second pool on the same cores more than doubles the time of
        an int8 step (measured with two threads: 26 ms for 11 ms).
    """
    import signal

    # Ctrl-C reaches the whole process group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first, *others = seats
    with reporting(first.parent):
        if not others:
            runner = (skipping_runner(first, vocabulary) if first.shared
                      else make_runner(first.stage, first.script, vocabulary))
            Worker(first.stage, first.parent, first.peers, runner).serve()
            return
        from .clasp.runner import ClaspRunner, FullRunner

        with ThreadPoolExecutor(1) as compute:
            full = compute.submit(FullRunner, first.stage, vocabulary, first.shared).result()
            for seat in others:
                drafter = compute.submit(ClaspRunner, seat.stage, full).result()
                threading.Thread(target=_serve, args=(seat, drafter, compute), daemon=True).start()
            Worker(first.stage, first.parent, first.peers, full, pool=compute).serve()


def _serve(seat: Seat, runner: Any, compute: ThreadPoolExecutor) -> None:
    with reporting(seat.parent):
        Worker(seat.stage, seat.parent, seat.peers, runner, pool=compute).serve()
        return
    os._exit(0)  # as any stage that failed, which has said so: the parent must not wait for it


@contextmanager
def reporting(parent: Connection) -> Iterator[None]:
    """Tell the parent of what goes wrong."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except LinkLost as error:
        report(parent, "link", str(error))
    except InputError as error:
        report(parent, "input", str(error))
    except Exception as error:
        text = str(error) if isinstance(error, StepFailed) else f"with {said(error)}"
        place = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
        report(parent, "failure", f"{text} [{os.path.basename(place.filename)}:{place.lineno}]")


def said(error: BaseException) -> str:
    """An error in words: running out of memory, for one, may come without any."""
    text, kind = str(error), type(error).__name__
    return text if text and type(error) is RuntimeError else f"{kind}: {text}" if text else kind


def report(parent: Connection, kind: str, text: str) -> None:
    try:
        parent.send(("error", kind, text))
    except (BrokenPipeError, OSError):
        return
