"""Many prompts in one pipeline: a stage that would wait for one of them works on another.

Each prompt is a ``PromptRun``, with the rules and the event log that it has alone; they share a ``Machine``, where one
step at a time runs at a stage (batch 1).  Prompts that find ``in_flight`` others in the pipeline wait outside, first
come first served; a place is free once nothing is done for its prompt any more, a drafter's last step included.
Several copies of a pipeline share the traffic by sending each prompt to the one with fewest.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import simpy

from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.profile import Profile
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import PromptRecord, StepRecord

from .engine import Event, PromptRun
from .machine import Discipline, Machine, to_ns


@dataclass(frozen=True)
class Policy:
    """How prompts share a pipeline.

    in_flight : most prompts in it at once; None = all that have come
    discipline : whom a stage picks among prompts with a step to run, see ``machine.Discipline``
    copies : pipelines of this kind, each with stages of its own
    """

    in_flight: int | None = None
    discipline: Discipline = "oldest"
    copies: int = 1

    def __post_init__(self) -> None:
        for name, value in (("--in-flight", self.in_flight), ("copies", self.copies)):
            if value is not None and value < 1:
                raise InputError(name, "must be >= 1", value)


@dataclass(frozen=True)
class Served:
    """One prompt's way through the traffic.

    arrived_ns : its request; times of ``record`` and ``steps`` count from there
    admitted_ns : when it was let into the pipeline
    log : its events in time of the whole run, as ``PromptRun.log``; None where none were asked for
    """

    arrived_ns: int
    admitted_ns: int
    record: PromptRecord
    steps: list[StepRecord]
    log: list[Event] | None


class _Copy:
    """One pipeline with those who want into it."""

    def __init__(self, machine: Machine, in_flight: int | None) -> None:
        self.machine = machine
        self.places = None if in_flight is None else simpy.Resource(machine.env, in_flight)
        self.present = 0


@dataclass(frozen=True)
class Traffic:
    """Prompts and when they come.

    prompts : rows in the order of the pipeline's stages, first arrival first
    times_s : arrivals in seconds, one a prompt, not decreasing
    """

    prompts: Sequence[Agreement]
    times_s: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.times_s) or not self.prompts:
            raise InputError("traffic", "must have a time for each prompt, and at least one prompt",
                             f"{len(self.times_s)} times, {len(self.prompts)} prompts")
        if list(self.times_s) != sorted(self.times_s) or self.times_s[0] < 0:
            raise InputError("traffic.times_s", "must be >= 0 and not decrease")

    def run(self, pipeline: PipelineSpec, profile: Profile, policy: Policy | None = None, *, seed: int = 0,
            spread: bool = True, logged: bool = False) -> list[Served]:
        """Serve all prompts to their ends; in the order of arrival.

        seed, spread : as of ``PromptRun``
        """
        policy = policy or Policy()
        env = simpy.Environment(initial_time=0)
        copies = [_Copy(Machine(pipeline, profile, discipline=policy.discipline, env=env), policy.in_flight)
                  for _ in range(policy.copies)]
        found: list[Served | None] = [None] * len(self.prompts)

        def request(number: int) -> Generator[simpy.Event, None, None]:
            arrived = to_ns(self.times_s[number])
            yield env.timeout(arrived)
            copy = min(copies, key=lambda item: item.present)
            copy.present += 1
            place = copy.places.request() if copy.places else None
            if place is not None:
                yield place
            admitted = env.now
            run = PromptRun(pipeline, profile, self.prompts[number], seed=seed, prompt=number, spread=spread,
                            log=[] if logged else None, machine=copy.machine, requested_ns=arrived)
            yield from run.among_others()
            copy.present -= 1
            if copy.places:
                copy.places.release(place)
            found[number] = Served(arrived, admitted, run.close(), run.steps, run.log)

        for number in range(len(self.prompts)):
            env.process(request(number))
        env.run()
        return [item for item in found if item is not None]
