"""The discrete-event model: the stages of a pipeline as SimPy processes.

Each stage drives the same state machine as the executor (pipespec_model.protocol) and takes its
tokens from a replay and its step times from a profile; the engine itself decides nothing and draws
nothing.  Time is integer nanoseconds.  What happens at one instant happens in this order: messages
arrive (in the order they were sent), then steps end (drafter first).

A step that has begun runs to its end: a rollback is seen after it.  A step progresses at a rate that
depends on the set of stages computing (profile contention); every start and end reschedules the
others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field

import simpy

from pipespec_model.agreement import NO_PROPOSAL, Agreement, Replay
from pipespec_model.layer_choice import LayerCalendar
from pipespec_model.lookup import PromptLookup
from pipespec_model.messages import Drafts, Step, Verdict
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.protocol import Stage
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import PromptRecord, StepRecord
from pipespec_model.uniforms import MACHINE, STEP_TIME, uniform

from .machine import ARRIVAL, NS, Machine, to_ns

Event = tuple[int, int, str, int]
"""(time in ns, stage, what happened, position): the complete log that engines are compared by."""


@dataclass
class PromptRun:
    """One prompt through a pipeline; :meth:`run` returns its records.

    agreement : what its stages choose; drawn from its probabilities where it has them
    prompt : its number, in the order of arrival where several share a machine
    spread : draw step times, and how slow the machine is, from their distributions; False = their means
    slowness : by stage, how many times slower than undisturbed the machine is; None = the profile's
    machine : what it runs on, shared with other prompts (simulate.traffic); None = one of its own
    requested_ns : when it was asked for; records count from there
    """

    pipeline: PipelineSpec
    profile: Profile
    agreement: Agreement
    seed: int = 0
    prompt: int = 0
    spread: bool = True
    slowness: Sequence[float] | None = None
    log: list[Event] | None = None
    machine: Machine | None = None
    requested_ns: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    first_token_ns: int | None = None
    over: bool = False  # the target has ended, and nobody begins another step
    ended_ns: int | None = None
    free_ns: int = 0  # until then something is done for this prompt, as far as is known

    def __post_init__(self) -> None:
        self.pipeline.require_lookaheads()
        self.agreement = self.agreement.drawn(self.seed, self.prompt)
        specs = self.pipeline.stages
        # Annotated, so that what follows need not ask whether there is one.
        self.on: Machine = self.machine or Machine(self.pipeline, self.profile)
        self.env, self.computing = self.on.env, self.on.computing
        budget, eos = self.agreement.budget, frozenset(self.agreement.eos)
        self.stages = [
            Stage(self.pipeline, i, self.agreement.prompt_length, budget, eos, self.agreement.prompt_tokens)
            for i in range(len(specs))
        ]
        self.latency = [self.profile.stage_latency(spec) for spec in specs]
        self.blocks = [spec.block for spec in specs]
        self.costs = [self.profile.stage_costs(spec, self.pipeline.strategy) for spec in specs]
        chain = self.pipeline.strategy == "speculative"
        self.turn_rates = [self.profile.turn_rate(specs, spec) if chain else 1.0 for spec in specs]
        if self.slowness is None:
            # One draw for all stages: what disturbs a machine disturbs most of its cores.
            draw = uniform(self.seed, self.prompt, 0, MACHINE) if self.spread else None
            self.slowness = [self.profile.slowness_at(spec, draw) for spec in specs]
        self.replay = Replay(self.agreement, self.seed, self.prompt, self.profile.neighbour_rate)
        self.lookups = {i: PromptLookup(spec.max_ngram) for i, spec in enumerate(specs)
                        if spec.block and self.agreement.prompt_tokens}
        for lookup in self.lookups.values():
            lookup.begin(self.agreement.prompt_tokens)
        self.inbox: list[list[Drafts | Verdict]] = [[] for _ in specs]
        self.in_flight: list[tuple[int, Drafts | Verdict]] = []
        self.wake = [simpy.Event(self.env) for _ in specs]
        self.num_steps = [0] * len(specs)
        self.calendars = {i: LayerCalendar(spec.layer_opt_interval) for i, spec in enumerate(specs)
                          if spec.clasp and chain}
        # Of a verifier that hands its entries to a layer-skipping drafter in a process of its own.
        self.giving = {i: LayerCalendar(specs[i - 1].layer_opt_interval) for i in range(len(specs))
                       if self.pipeline.hands_over(i)}
        self.to_take: set[int] = set()

    # -- the stage loop, the same for every position ------------------------------------------

    def _stage_loop(self, i: int) -> Generator[simpy.Event, None, None]:
        stage, costs = self.stages[i], self.costs[i]
        yield self.env.timeout(to_ns(costs.start_s))
        while not (stage.done or self.over):
            self._receive(i)
            step = stage.next_step()
            self._send(i)
            if step is None:
                self.on.leave(i, self)
                yield self._message(i)
                continue
            if (wait := self.on.ask(i, self)) is not None:
                # Decide when the turnaround is over or other prompts are done, with what arrives meanwhile.
                yield wait
                continue
            if i in self.calendars and self.calendars[i].due(stage):
                yield from self._between(i, "optimise", costs.optimise_s, step)
            if i in self.to_take:
                self.to_take.discard(i)
                yield from self._between(i, "take", costs.take_s, step)
            tokens = self._tokens(i, step)
            start = self.env.now
            self._note(i, f"start {step.kind}", step.position)
            yield self.computing.run(i, self._work_ns(i, step, len(tokens)))
            self._note(i, "end", step.position)
            self._finish(i, step, tokens, start)
            if i in self.giving and not stage.done and step.kind != "prefill":  # the drafter reads the prompt itself
                yield from self._hand_over(i, step)
            # What a waiting neighbour is told leaves now: its hand-over covers the whole gap.
            self.free_ns = max(self.free_ns, self.on.release(i, self, to_ns(costs.turnaround_s)))
        self._send(i)
        self.on.leave(i, self)

    def _hand_over(self, i: int, step: Step) -> Generator[simpy.Event, None, None]:
        """Entries first, then the verdict that makes use of them, and only then what takes long."""
        yield from self._between(i, "give", self.costs[i].give_s, step)
        self._send(i)
        if self.giving[i].grown(len(self.stages[i].sequence)):
            yield from self._between(i, "optimise", self.costs[i].optimise_s, step)

    def _between(self, i: int, kind: str, seconds: float, step: Step) -> Generator[simpy.Event, None, None]:
        """What layer skipping does between steps (trace.BETWEEN_STEPS)."""
        assert self.slowness is not None
        start = self.env.now
        yield self.computing.run(i, to_ns(seconds * self.slowness[i] / self._turn_rate(i)))
        self.steps.append(StepRecord(
            prompt=self.prompt, stage=i, kind=kind, start_s=(start - self.requested_ns) / NS,
            duration_s=(self.env.now - start) / NS, position=step.position, context=step.cached, width=0, drafts=0,
            accepted=0, emitted=0, epoch=step.epoch))

    def _tokens(self, i: int, step: Step) -> list[int]:
        sequence = self.stages[i].sequence
        if step.kind == "lookup":
            return list(step.proposal)
        if i in self.lookups:
            return self.lookups[i].run(sequence, step)
        if self.blocks[i]:
            return self.replay.propose(i, sequence, step.limit)
        choices = self.replay.choices(i, sequence, step.drafts)
        # Of a stage with a model: the draft exit threshold stopped it.
        return [] if step.kind == "draft" and choices == [NO_PROPOSAL] else choices

    def _work_ns(self, i: int, step: Step, num_tokens: int) -> int:
        if step.kind == "lookup":
            return 0  # its microseconds are part of the turnaround
        latency: StageLatency = self.latency[i]
        width, cached = num_tokens if self.blocks[i] else step.width, step.cached
        reads = step.kind == "prefill" and self.pipeline.reads_prompt(i)
        if step.kind == "prefill" and not reads:
            cached = self.agreement.prompt_length - 1
            width -= cached
        model = latency.prefill if reads and latency.prefill else latency.step
        if self.spread:
            draw = uniform(self.seed, self.prompt, i, STEP_TIME, self.num_steps[i])
            seconds = model.sample_s(width, cached, draw)
        else:
            seconds = model.mean_s(width, cached)
        self.num_steps[i] += 1
        assert self.slowness is not None
        seconds *= self.slowness[i] / self._turn_rate(i)
        return to_ns(seconds + (self.costs[i].rollback_s if step.rolled_back else 0.0))

    def _turn_rate(self, i: int) -> float:
        """Of a chain's step: slower where another stage has computed since this one's last."""
        rate = 1.0 if self.on.computed_last in (None, i) else self.turn_rates[i]
        if not self.blocks[i]:
            self.on.computed_last = i
        return rate

    def _finish(self, i: int, step: Step, tokens: list[int], start: int) -> None:
        stage = self.stages[i]
        before = len(stage.sequence)
        accepted = stage.finish(step, tokens)
        now = self.env.now
        width = step.width or len(tokens)
        self.steps.append(StepRecord(
            prompt=self.prompt, stage=i, kind=step.kind, start_s=(start - self.requested_ns) / NS,
            duration_s=(now - start) / NS, position=step.position, context=step.cached, width=width,
            drafts=len(step.drafts),
            accepted=accepted, emitted=len(stage.sequence) - before, epoch=step.epoch,
            rolled_back=step.rolled_back,
        ))
        if stage.is_target and self.first_token_ns is None:
            self.first_token_ns = now - self.requested_ns

    # -- messages -----------------------------------------------------------------------------

    def _receive(self, i: int) -> None:
        arrived, self.inbox[i] = self.inbox[i], []
        for message in arrived:
            self.stages[i].receive(message)

    def _send(self, i: int) -> None:
        up, down = self.stages[i].take_outbox()
        for verdict in up:
            self._post(i, i - 1, verdict)
        if down is not None:
            self._post(i, i + 1, down)

    def _post(self, sender: int, receiver: int, message: Drafts | Verdict) -> None:
        self._note(sender, "send up" if receiver < sender else "send down", len(self.stages[sender].sequence))
        entry = (receiver, message)
        self.in_flight.append(entry)
        arrival = simpy.Event(self.env)
        arrival._ok, arrival._value = True, None
        assert arrival.callbacks is not None
        arrival.callbacks.append(lambda _: self._arrive(entry))
        delay = to_ns(self.costs[receiver].handover_s)
        self.env.schedule(arrival, priority=ARRIVAL, delay=delay)

    def _arrive(self, entry: tuple[int, Drafts | Verdict]) -> None:
        receiver, message = entry
        if entry not in self.in_flight:
            return  # booked when the prompt was settled
        self.in_flight.remove(entry)
        self.inbox[receiver].append(message)
        if isinstance(message, Verdict) and receiver + 1 in self.giving:
            self.to_take.add(receiver)
        self._note(receiver, "arrive", len(self.stages[receiver].sequence))
        self.rouse(receiver)

    def _message(self, i: int) -> simpy.Event:
        self.wake[i] = simpy.Event(self.env)
        return self.wake[i]

    def rouse(self, i: int) -> None:
        """Let a stage that waits look again at what there is to do."""
        if not self.wake[i].triggered:
            self.wake[i].succeed()

    def _note(self, stage: int, what: str, position: int) -> None:
        if self.log is not None:
            self.log.append((self.env.now, stage, what, position))

    # -- the whole prompt -----------------------------------------------------------------------

    def run(self) -> tuple[PromptRecord, list[StepRecord]]:
        """Run alone, to the end of the target's last step."""
        self.env.run(until=self._begin()[-1])
        return self.close(), self.steps

    def among_others(self) -> Generator[simpy.Event, None, None]:
        """A process that ends when nothing is done for the prompt any more: a drafter's last step is not cut short,
        and seconds between steps and after the end count too."""
        loops = self._begin()
        yield loops[-1]
        self.over, self.ended_ns = True, self.env.now
        self.free_ns = max(self.free_ns, self.ended_ns + to_ns(self.costs[-1].finish_s))
        for i in range(len(self.stages)):
            self.rouse(i)
        yield simpy.AllOf(self.env, loops)
        yield self.env.timeout(max(0, self.free_ns - self.env.now))

    def _begin(self) -> list[simpy.Process]:
        return [self.env.process(self._stage_loop(i)) for i in range(len(self.stages))]

    def close(self) -> PromptRecord:
        """The record of a prompt whose target has ended, all messages booked."""
        ended = self.env.now if self.ended_ns is None else self.ended_ns
        end_s = (ended - self.requested_ns + to_ns(self.costs[-1].finish_s)) / NS
        self._settle()
        target = self.stages[-1]
        return PromptRecord(
            prompt=self.prompt, name=self.agreement.prompt, prompt_length=self.agreement.prompt_length,
            tokens=list(target.sequence), total_s=end_s, ttft_s=(self.first_token_ns or 0) / NS,
            counters=[asdict(stage.close()) for stage in self.stages], category=self.agreement.category,
        )

    def _settle(self) -> None:
        """Let every message that is still on its way arrive, target first, so that nothing a drafter
        proposed stays unaccounted for."""
        for i in range(len(self.stages) - 1, -1, -1):
            waiting = self.inbox[i] + [message for receiver, message in self.in_flight if receiver == i]
            self.in_flight = [entry for entry in self.in_flight if entry[0] != i]
            self.inbox[i] = []
            for message in waiting:
                self.stages[i].receive(message)
            self.stages[i].settle()
            for verdict in self.stages[i].take_outbox()[0]:
                self.in_flight.append((i - 1, verdict))
