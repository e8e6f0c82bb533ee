"""A pipeline whose stages are on several hosts, as the fleet on the first one sees it; and what the others do.

The first rank is the parent of all stages: its own is a process that it starts, the other ranks' are there already,
one a rank, and are told what they are over their connection.  From then on they differ from a local stage in two
things: nobody here can see their process, only that its connection has ended, and their clock is another.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pipespec_model.errors import InputError
from pipespec_model.spec import PipelineSpec, StageSpec

from . import worker
from .clocks import Alignment, Reading, read
from .host import place
from .link import Link
from .rendezvous import JOIN_S, Joined, Rank, Store, join, launched, open_store
from .scripted import Script
from .watch import PATIENCE_S
from .worker import Job, Outcome, Worker

FRESH_S = 1.0  # after which clocks are compared again
GRACE_S = 2.0  # for a last word, once the run is over
LOST_S = 1.0  # a stage that lost its neighbour may say so before the neighbour's own connection ends
FAILED = 2


@dataclass
class Hosts:
    """The first rank's view.  Stage i of the pipeline is rank i."""

    joined: Joined
    names: list[str] = field(default_factory=list)  # of the stages, by rank
    _readings: dict[str, Reading] = field(default_factory=dict)
    _before: dict[str, Reading] = field(default_factory=dict)

    def check(self, stages: Sequence[StageSpec]) -> None:
        """Raise InputError where stages and ranks do not match."""
        count = self.joined.rank.count
        if len(stages) != count:
            raise InputError("number of ranks", f"must be {len(stages)}, one a stage", count,
                             "it is nodes times processes a node, in torchrun's words")
        for stage in stages:
            if stage.clasp:
                raise InputError(f"stage {stage.name!r} with drafter clasp", "must be on one host with its verifier",
                                 mend="it takes that stage's cache through shared memory")

    def seat(self, stages: Sequence[StageSpec], vocabulary: int | None) -> dict[str, Link]:
        """Tell every other rank which stage it is; returns the connections by stage."""
        self.check(stages)
        self.names = [stage.name for stage in stages]
        for rank, link in self.joined.control.items():
            beside = {other: self.names[other] for other in (rank - 1, rank + 1) if other < len(stages)}
            link.send(("seat", stages[rank], beside, vocabulary))
        return {self.names[rank]: link for rank, link in self.joined.control.items()}

    def place(self, pipeline: PipelineSpec, *, scripted: bool) -> PipelineSpec:
        """The pipeline with every stage's cores filled in, those of its own host."""
        machines = self.joined.machines
        placed: dict[str, StageSpec] = {}
        for name in dict.fromkeys(machine.name for machine in machines.values()):
            ranks = [rank for rank in range(len(pipeline.stages)) if machines[rank].name == name]
            cores = sorted({core for rank in ranks for core in machines[rank].cores})
            part = pipeline.model_copy(update={"stages": tuple(pipeline.stages[rank] for rank in ranks)})
            placed |= {stage.name: stage for stage in place(part, scripted=scripted, cores=cores).stages}
        return pipeline.model_copy(update={"stages": tuple(placed[stage.name] for stage in pipeline.stages)})

    @property
    def neighbour(self) -> dict[str, Link]:
        """The first stage's connection to the next one; the process that is that stage takes it over."""
        return {self.names[rank]: link for rank, link in self.joined.neighbours.items()}

    @property
    def named(self) -> dict[str, str]:
        """Each stage's host."""
        return {name: self.joined.machines[rank].name for rank, name in enumerate(self.names)}

    def where(self, name: str) -> str:
        rank = self.names.index(name)
        return f"on rank {rank} ({self.joined.machines[rank].name})"

    def lost(self, connections: Mapping[str, Connection], gone: Collection[str], told: Collection[str]) -> str | None:
        """The stage whose end came first, as far as connections show it.

        gone : those whose connection has ended; told : those that said that they end because of another
        """
        deadline = time.monotonic() + LOST_S
        while not (first := [name for name in self.names[1:] if name in gone and name not in told]):
            left = deadline - time.monotonic()
            others = {id(end): name for name, end in connections.items() if name in self.names[1:] and name not in gone}
            ready = connection.wait([connections[name] for name in others.values()], max(0.0, left))
            if not ready:
                return None
            for end in ready:
                try:
                    assert isinstance(end, Connection)
                    end.recv()
                except (EOFError, ConnectionResetError):
                    gone = {*gone, others[id(end)]}
        return first[0]

    # -- clocks -----------------------------------------------------------------------------------

    def compare_clocks(self, ask: Callable[[str], float]) -> None:
        """Before a prompt; what was read just after the one before still holds."""
        now = time.perf_counter()
        for name in self.names[1:]:
            last = self._readings.get(name)
            self._before[name] = last if last and now - last.at_s < FRESH_S else read(partial(ask, name))

    def request(self, name: str, job: Job) -> Job:
        """The same request by the clock of a stage."""
        if name not in self._before:
            return job
        return replace(job, clock=job.clock - self._before[name].offset_s)

    def align(self, outcomes: Sequence[Outcome], asked_s: float, ask: Callable[[str], float],
              ) -> tuple[list[Outcome], list[dict[str, float]]]:
        """After a prompt: what every stage told, by this clock, and how the clocks stood."""
        out, notes = [outcomes[0]], []
        for i, (name, outcome) in enumerate(zip(self.names[1:], outcomes[1:], strict=True), 1):
            self._readings[name] = read(partial(ask, name))
            found = Alignment(self._before[name], self._readings[name])
            out.append(found.outcome(outcome, asked_s))
            notes.append(found.to_dict(i))
        return out, notes


def gather(rank: Rank, store: Store | None = None, *, bind: str | None = None, join_s: float = JOIN_S,
           patience_s: float = PATIENCE_S, delay_s: float = 0.0, script: Script | None = None) -> Hosts:
    """Meet the other ranks.  Returns on the first one; any other serves until the run is over, and ends with its
    status.

    store : None = torchrun's
    script : of this rank's stage, where it replays instead of computing
    The rest as of :func:`rendezvous.join`.
    """
    joined = join(rank, store or open_store(rank, join_s), bind=bind, join_s=join_s, patience_s=patience_s,
                  delay_s=delay_s)
    if rank.number:
        serve(joined, script)
    # torchrun ends all its ranks when one of them has failed; which it was is still to be said.
    signal.signal(signal.SIGTERM, lambda *_: threading.Timer(GRACE_S, os._exit, [128 + signal.SIGTERM]).start())
    return Hosts(joined)


def refuse_ranks(command: str) -> None:
    """Raise InputError where torchrun has started several of what should be one process."""
    if launched():
        raise InputError(command, "must be started by itself, not by torchrun", mend="only execute run has ranks")


# -- the other ranks --------------------------------------------------------------------------------


class Ended(BaseException):
    """This process was told to end; no ``except Exception`` takes it for a fault of its step."""


def serve(joined: Joined, script: Script | None = None) -> NoReturn:
    """Be the stage that the first rank says, quietly, until it ends or is gone."""
    control = joined.control[0]
    over = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides what becomes of it
    signal.signal(signal.SIGTERM, _told_to_end)
    threading.Thread(target=_end_with, args=(control, over), daemon=True).start()
    try:
        status = _serve(control, joined, script)
    except Ended:
        worker.report(control, "link", "was told to end (SIGTERM)")
        status = _last_word(control)
    over.set()
    raise SystemExit(status)


def _serve(control: Link, joined: Joined, script: Script | None) -> int:
    try:
        with worker.reporting(control):
            verb, *args = control.recv()
            if verb == "seat":
                stage, beside, vocabulary = args
                runner = worker.make_runner(stage, script, vocabulary)
                peers = {beside[rank]: link for rank, link in joined.neighbours.items()}
                Worker(stage, control, dict(peers), runner).serve()
            return args[0]
    except SystemExit as end:
        return int(end.code or 0)
    return _last_word(control)


def _told_to_end(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def _last_word(control: Link) -> int:
    """The status of the run, once this stage has failed or the first rank is gone.  A connection that is closed
    before all is read takes with it what was sent."""
    try:
        while control.poll(GRACE_S):
            verb, *args = control.recv()
            if verb == "exit":
                return int(args[0])
    except (EOFError, ConnectionResetError):
        pass
    return FAILED


def _end_with(control: Link, over: threading.Event) -> None:
    """However long a step may take, the process ends soon after the connection to the first rank."""
    hangup = select.poll()
    hangup.register(control.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
    hangup.poll()
    if not over.wait(GRACE_S):
        os._exit(FAILED)
