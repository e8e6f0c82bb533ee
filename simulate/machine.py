"""What prompts run on: a clock, the steps that compute now, and whose turn it is at each stage.

A stage runs one step at a time, of whichever prompt.  A prompt asks for a stage when it has a step to run there, and
decides on that step anew when its turn has come.  A step is never interrupted; between steps, seconds of turnaround
included, the stage picks among the prompts that ask.  To change from one prompt to another costs nothing.  With one
prompt alone there is nobody to pick among, and nothing here takes an event of its own.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import simpy

from pipespec_model.errors import InputError
from pipespec_model.profile import Profile
from pipespec_model.spec import PipelineSpec

NS = 1_000_000_000
ARRIVAL = 0  # SimPy priorities: arrivals first, then step ends by stage
STEP_END = 1

Discipline = Literal["oldest", "rotation"]
"""Whom a stage picks: the prompt that came first, or the one that it has not served for longest."""


def to_ns(seconds: float) -> int:
    return round(seconds * NS)


class Computing:
    """The steps that run now, each at the rate that the set of them allows."""

    def __init__(self, env: simpy.Environment, keys: list[str], profile: Profile) -> None:
        self._env = env
        self._keys = keys
        self._profile = profile
        self._rates: dict[frozenset[int], dict[int, float]] = {}
        self._work_left: dict[int, float] = {}
        self._done: dict[int, simpy.Event] = {}
        self._alarm: dict[int, simpy.Event] = {}
        self._rate: dict[int, float] = {}  # at which its alarm was set
        self._since = 0

    def run(self, stage: int, work_ns: int) -> simpy.Event:
        """An event that fires when ``work_ns`` of undisturbed computing is done."""
        self._advance()
        self._work_left[stage] = float(work_ns)
        self._done[stage] = simpy.Event(self._env)
        self._rate.pop(stage, None)
        self._reschedule()
        return self._done[stage]

    def _current(self) -> dict[int, float]:
        now = frozenset(self._work_left)
        if now not in self._rates:
            rates = self._profile.rates(frozenset(self._keys[stage] for stage in now))
            self._rates[now] = {stage: rates[self._keys[stage]] for stage in now}
        return self._rates[now]

    def _advance(self) -> None:
        elapsed = self._env.now - self._since
        if elapsed:
            for stage, rate in self._current().items():
                self._work_left[stage] -= elapsed * rate
        self._since = self._env.now

    def _reschedule(self) -> None:
        for stage, rate in self._current().items():
            if self._rate.get(stage) == rate:
                continue
            self._rate[stage] = rate
            alarm = simpy.Event(self._env)
            alarm._ok, alarm._value = True, None
            assert alarm.callbacks is not None
            alarm.callbacks.append(lambda event, stage=stage: self._ring(stage, event))
            self._alarm[stage] = alarm
            left = max(0, round(self._work_left[stage] / rate))
            self._env.schedule(alarm, priority=STEP_END + stage, delay=left)

    def _ring(self, stage: int, alarm: simpy.Event) -> None:
        if self._alarm.get(stage) is not alarm:
            return  # rescheduled since
        self._advance()
        del self._work_left[stage], self._alarm[stage]
        done = self._done.pop(stage)
        if self._work_left:
            self._reschedule()
        done.succeed()


class Customer(Protocol):
    """A prompt, as far as a stage knows it."""

    prompt: int
    wake: list[simpy.Event]

    def rouse(self, i: int) -> None: ...


class Machine:
    """The stages of one pipeline, for one prompt or for many.

    Per stage: ``_holder`` whose step it is, ``_asking`` who has a step to run (whoever holds is not among them),
    ``_ready_ns`` the end of the last turnaround, ``_served`` the serial of a prompt's last step.
    """

    def __init__(self, pipeline: PipelineSpec, profile: Profile, *, discipline: Discipline = "oldest",
                 env: simpy.Environment | None = None) -> None:
        if discipline not in get_args(Discipline):
            raise InputError("--discipline", f"must be one of {', '.join(get_args(Discipline))}", discipline)
        self.env = env or simpy.Environment(initial_time=0)
        self.computing = Computing(self.env, [profile.rate_key(stage) for stage in pipeline.stages], profile)
        self.computed_last: int | None = None
        self._rotation = discipline == "rotation"
        k = len(pipeline.stages)
        self._holder: list[Customer | None] = [None] * k
        self._asking: list[dict[int, Customer]] = [{} for _ in range(k)]
        self._ready_ns = [0] * k
        self._served: list[dict[int, int]] = [{} for _ in range(k)]
        self._serial = 0

    def ask(self, i: int, prompt: Customer) -> simpy.Event | None:
        """Take stage ``i``, or None of it: the event to wait for before asking again."""
        self._asking[i][prompt.prompt] = prompt
        if self._holder[i] is None and self._next(i) is prompt:
            if self.env.now < self._ready_ns[i]:
                return self.env.timeout(self._ready_ns[i] - self.env.now)
            self._holder[i] = self._asking[i].pop(prompt.prompt)
            return None
        # A message that arrives meanwhile ends the wait too: an answer need not wait for a turn.
        prompt.wake[i] = simpy.Event(self.env)
        self._call(i)
        return prompt.wake[i]

    def release(self, i: int, prompt: Customer, turnaround_ns: int) -> int:
        """The step is over; returns when the next may begin.  Nobody is called before its prompt has said whether
        it goes on (ask or leave)."""
        self._holder[i] = None
        self._ready_ns[i] = self.env.now + turnaround_ns
        self._serial += 1
        self._served[i][prompt.prompt] = self._serial
        return self._ready_ns[i]

    def leave(self, i: int, prompt: Customer) -> None:
        """Nothing to do there for now."""
        self._asking[i].pop(prompt.prompt, None)
        self._call(i)

    def _call(self, i: int) -> None:
        if self._holder[i] is None and self._asking[i]:
            self._next(i).rouse(i)

    def _next(self, i: int) -> Customer:
        asking = self._asking[i]
        if self._rotation:
            return asking[min(asking, key=lambda number: (self._served[i].get(number, 0), number))]
        return asking[min(asking)]
