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
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any, Protocol

from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.lookup import PromptLookup
from pipespec_model.messages import Step
from pipespec_model.protocol import Stage
from pipespec_model.spec import PipelineSpec, StageSpec
from pipespec_model.trace import StepRecord

from .scripted import Script, ScriptedRunner, Wrong, WrongRunner
from .timing import measure, prime, probe, uses_torch


class Runner(Protocol):
    """What runs a stage's steps.  ``begin``: a new prompt.  ``run``: propose or verify (the sequence
    tells it what was accepted).  ``forget``: drop cached tokens beyond a length."""

    def run(self, sequence: Sequence[int], step: Step) -> list[int]: ...

    def forget(self, length: int) -> None: ...


@dataclass(frozen=True)
class Job:
    """One prompt for one stage.  ``run`` tells its messages from those of the prompt before; ``number``
    names it in the trace.  ``clock``: time.perf_counter() of the request; that clock is the
    machine's monotonic one, the same in every process of a host."""

    run: int
    number: int
    clock: float
    prompt: tuple[int, ...]
    budget: int
    eos: frozenset[int]
    stream: bool = False
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
    closing: bool = False
    steps: list[StepRecord] = field(default_factory=list)

    # -- commands -------------------------------------------------------------------------------

    def serve(self) -> None:
        self.parent.send(("ready", getattr(self.runner, "context_limit", None)))
        while True:
            verb, *args = self.parent.recv()
            if verb == "exit":
                return
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
        threads = set_threads(stages[index].threads, cores, torch_loaded=uses_torch(self.runner))
        self.parent.send(("configured", threads))

    def on_prompt(self, job: Job) -> None:
        assert self.place is not None
        self.job, self.closing, self.steps = job, False, []
        stage = Stage(self.place.pipeline, self.place.index, len(job.prompt), job.budget, job.eos, job.prompt)
        begin(self.runner, job, self.place)
        self._generate(stage)
        if not stage.is_target:
            while not self.closing:
                self._take(self.parent, stage)
        self._drain(stage)
        stage.settle()
        self._send(stage)
        outcome = Outcome(job.run, asdict(stage.close()), self.steps, list(stage.sequence), self._ended())
        self.parent.send(("closed", outcome))

    def on_measure(self, context: int, widths: tuple[int, ...], text: list[int]) -> None:
        """Time steps of these widths on a cache of ``context`` tokens (0: each is a prefill).

        Once primed, waits for ``("go", windows)``: in each ``(start_at, stop_at)`` it goes round until
        ``stop_at``, at least one step; with 0 each width once.
        """
        prompt = (text * (1 + context // len(text)))[:context]
        prime(self.runner, prompt, text)
        self.parent.send(("primed",))
        _, windows = self.parent.recv()
        records: list[StepRecord] = []
        for start_at, stop_at in windows:
            time.sleep(max(0.0, start_at - time.perf_counter()))
            for width in widths if stop_at == 0 else cycle(widths):
                records += measure(self.runner, prompt, width, text)
                if time.perf_counter() >= stop_at > 0:
                    break
        self.parent.send(("measured", records))

    def on_probe(self) -> None:
        self.parent.send(("probed", probe(self.runner)))

    def on_teacher_force(self, prompt: list[int], answer: list[int]) -> None:
        if isinstance(self.runner, PromptLookup):
            text = list(prompt)
            choices = []
            for token in answer:
                choices.append(self.runner.choice(text))
                text.append(token)
            self.parent.send(("choices", choices, []))
            return
        from .torch_runner import teacher_forced

        self.parent.send(("choices", *teacher_forced(self.runner, prompt, answer)))

    # -- one prompt -----------------------------------------------------------------------------

    def _generate(self, stage: Stage) -> None:
        assert self.job is not None
        told = 0
        while not stage.done and not self.closing:
            self._drain(stage)
            step = stage.next_step()
            self._send(stage)
            if self.closing:
                return
            if step is None:
                self.inputs.select()
                continue
            self._run_step(stage, step)
            if self.job.stream and stage.is_target and len(stage.sequence) > told:
                self.parent.send(("text", stage.sequence[told:]))
                told = len(stage.sequence)
        self._send(stage)

    def _run_step(self, stage: Stage, step: Step) -> None:
        assert self.job is not None
        before = len(stage.sequence)
        start = time.perf_counter()
        try:
            tokens = list(step.proposal) if step.proposal else self.runner.run(stage.sequence, step)
        except Exception as error:
            raise RuntimeError(f"in {step.kind} at position {step.position}: {error}") from error
        end = time.perf_counter()
        accepted = stage.finish(step, tokens)
        self.steps.append(StepRecord(
            prompt=self.job.number, stage=stage.index, kind=step.kind, start_s=start - self.job.clock,
            duration_s=end - start, position=step.position, context=step.cached,
            width=step.width or len(tokens), drafts=len(step.drafts), accepted=accepted,
            emitted=len(stage.sequence) - before, epoch=step.epoch, rolled_back=step.rolled_back,
        ))

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
        message = source.recv()
        if source is self.parent:
            if message[0] == "exit":
                raise SystemExit(0)
            self.closing = self.closing or message == ("close", self.job.run)
            return
        run, body = message
        if run == self.job.run:
            stage.receive(body)

    def _send(self, stage: Stage) -> None:
        assert self.place is not None
        assert self.job is not None
        up, down = stage.take_outbox()
        for verdict in up:
            assert self.place.up is not None
            self.place.up.send_bytes(pickle.dumps((self.job.run, verdict)))
        if down is not None:
            assert self.place.down is not None
            self.place.down.send_bytes(pickle.dumps((self.job.run, down)))


def begin(runner: Any, job: Job, place: Placement) -> None:
    if isinstance(runner, ScriptedRunner):
        assert job.agreement is not None
        runner.begin_replay(job.agreement, place.index, job.number, block=place.pipeline.stages[place.index].block)
    else:
        runner.begin(job.prompt)


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
        return ScriptedRunner(script)
    if stage.block:
        return PromptLookup(stage.max_ngram)
    from .torch_runner import TorchRunner

    runner = TorchRunner(stage, vocabulary)
    return WrongRunner(runner) if script else runner


def main(stage: StageSpec, script: Script | Wrong | None, vocabulary: int | None, parent: Connection,
         peers: dict[str, Connection]) -> None:
    """Entry point of the process."""
    import signal

    # Ctrl-C reaches the whole process group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Worker(stage, parent, peers, make_runner(stage, script, vocabulary)).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # a neighbour or the parent is gone; the parent, if alive, sees which
    except InputError as error:
        _report(parent, "input", str(error))
    except Exception as error:
        _report(parent, "failure", f"{error} [{traceback.format_exc(limit=-2).strip().splitlines()[-1]}]")


def _report(parent: Connection, kind: str, text: str) -> None:
    try:
        parent.send(("error", kind, text))
    except (BrokenPipeError, OSError):
        return
