"""What stages do between their steps where layers are skipped, timed as kinds of their own.

``optimise``: the layers are chosen anew, by the drafter at the start of a round of a chain, by the verifier after a
step of a pipeline.  ``give`` and ``take`` (pipelines): the verifier hands the entries that it has just committed to
its drafter, and the drafter takes them; ``width`` is how many rows, ``context`` how many come before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipespec_model.layer_choice import LayerCalendar
from pipespec_model.messages import Entries, Step
from pipespec_model.protocol import Stage
from pipespec_model.spec import StageSpec


class Desk(Protocol):
    """What a stage process does for its Skipping."""

    def compute(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do ``work`` where this process computes."""
        ...

    def timed(self, kind: str, step: Step, work: Callable[[], Any], *, rows: range | None = None) -> Any:
        """Do ``work`` and record it as ``kind``, at the position of ``step``."""
        ...

    def send(self, stage: Stage) -> None:
        """Send what the protocol has to say."""
        ...

    def tell_upstream(self, message: Entries) -> None: ...


class Skipping:
    """Of a stage that has no part in it; the others override what concerns them."""

    def before_step(self, stage: Stage, step: Step, desk: Desk) -> None: ...

    def after_step(self, stage: Stage, step: Step, desk: Desk) -> None: ...

    def before_send(self, stage: Stage, desk: Desk) -> None: ...

    def receive(self, message: Entries) -> None: ...


@dataclass
class InTurn(Skipping):
    """A drafter that shares its verifier's process; runner: a ClaspRunner."""

    runner: Any
    calendar: LayerCalendar

    def before_step(self, stage: Stage, step: Step, desk: Desk) -> None:
        """Before a round: take over what was committed; when due, choose the layers."""
        if stage.num_verdicts != self.runner.num_verdicts:
            self.runner.num_verdicts = stage.num_verdicts
            desk.compute(self.runner.take_over, len(stage.sequence))
        if self.calendar.due(stage):
            desk.timed("optimise", step, self.runner.optimise)


@dataclass
class Taking(Skipping):
    """A drafter in a process of its own; runner: a ClaspRunner."""

    runner: Any

    def receive(self, message: Entries) -> None:
        self.runner.receive(message)

    def before_step(self, stage: Stage, step: Step, desk: Desk) -> None:
        if rows := self.runner.to_take(len(stage.sequence)):
            desk.timed("take", step, lambda: self.runner.take(rows), rows=rows)


@dataclass
class Giving(Skipping):
    """The verifier of such a drafter; runner: a FullRunner.

    given : rows that the drafter was told of, from the prompt's end on
    """

    runner: Any
    drafter: StageSpec
    calendar: LayerCalendar
    given: int = 0

    def after_step(self, stage: Stage, step: Step, desk: Desk) -> None:
        """Entries first, then the verdict that makes use of them, and only then what takes long."""
        # The drafter has read the prompt itself.
        start, self.given = max(step.cached, stage.prompt_length), stage.cached
        if stage.done or start == self.given:
            return
        desk.timed("give", step, lambda: self.runner.give(start, self.given), rows=range(start, self.given))
        desk.tell_upstream(Entries(start, self.given))
        desk.send(stage)
        if step.kind != "prefill" and self.calendar.grown(len(stage.sequence)):
            choice = desk.timed("optimise", step, lambda: self.runner.choose(self.drafter, self.given - 1))
            desk.tell_upstream(Entries(self.given, self.given, choice.skips.whole))

    def before_send(self, stage: Stage, desk: Desk) -> None:
        """Rolled back by its own downstream: what was given beyond that is void."""
        held = max(stage.cached, stage.prompt_length)
        if held < self.given:
            self.given = held
            desk.tell_upstream(Entries(self.given, self.given))


def skipping(stage: Stage, runner: Any) -> Skipping:
    """What a stage has to do there; runners of a pipeline are made ready for its prompt."""
    specs, i = stage.pipeline.stages, stage.index
    rows = stage.prompt_length + stage.budget
    if stage.pipeline.hands_over(i):
        runner.open(specs[i - 1], rows)
        return Giving(runner, specs[i - 1], LayerCalendar(specs[i - 1].layer_opt_interval), stage.prompt_length)
    if not specs[i].clasp or stage.is_target:
        return Skipping()
    if stage.synchronous:
        return InTurn(runner, LayerCalendar(specs[i].layer_opt_interval))
    runner.open(rows)
    return Taking(runner)
