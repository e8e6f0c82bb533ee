"""The protocol's state machine under every delivery order that its links allow.

Stub stages answer from a table of choices.  Each link delivers in order (FIFO), links interleave
freely, and a step may end at any moment.  Small cases are explored exhaustively; larger ones at
random, there also with messages doubled, delivered late, or lost.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipespec_model.agreement import Agreement, Replay
from pipespec_model.messages import Counters, Drafts, Step, Verdict
from pipespec_model.metrics import LinkFigures, booked_links
from pipespec_model.protocol import Stage
from pipespec_model.spec import PipelineSpec

LINK = {"lookahead": 0, "buffer_tokens": 2, "max_window": 2}


def pipeline(k: int, strategy: str = "pipelined", *, lookup: bool = False, handshake: str = "overlapped",
             **link: int) -> PipelineSpec:
    stages: list[dict[str, Any]] = [{"name": f"s{i}", "model": f"m{i}"} for i in range(k)]
    if lookup:
        stages[0]["drafter"] = "prompt-lookup"
    return PipelineSpec.from_dict({"strategy": strategy, "handshake": handshake, "stages": stages,
                                   "links": [LINK | link] * (k - 1)})


@dataclass
class World:
    """Stages, the messages on each directed link, and the step that each stage runs.

    Moves: ``("begin", i)``, ``("end", i)``, ``("deliver", sender, receiver)``.  A driver hands over
    messages between steps only, so nothing is delivered to a stage that computes.
    """

    replay: Replay
    stages: list[Stage]
    eos: frozenset[int] = frozenset()
    links: dict[tuple[int, int], list[Drafts | Verdict]] = field(default_factory=dict)
    running: dict[int, Step] = field(default_factory=dict)
    twice: bool = False

    @classmethod
    def of(cls, spec: PipelineSpec, rows: Sequence[Sequence[int]], *, eos: Sequence[int] = (),
           neighbour_rate: float = 0.5, twice: bool = False) -> World:
        agreement = Agreement("stub", 2, tuple(s.name for s in spec.stages), np.array(rows))
        stages = [Stage(spec, i, 2, agreement.budget, frozenset(eos)) for i in range(len(spec.stages))]
        return cls(Replay(agreement, neighbour_rate=neighbour_rate), stages, frozenset(eos), twice=twice)

    @property
    def answer(self) -> list[int]:
        row = self.replay.agreement.tokens[-1].tolist()
        ends = [i for i, token in enumerate(row) if token in self.eos]
        return row[: ends[0] + 1] if ends else row

    def moves(self) -> list[tuple[Any, ...]]:
        out: list[tuple[Any, ...]] = [("end", i) for i in self.running]
        out += [("deliver", *link) for link, waiting in self.links.items() if waiting and link[1] not in self.running]
        for i, stage in enumerate(self.stages):
            if i not in self.running and not stage.done:
                trial = copy_stage(stage)
                if trial.next_step() is not None or trial.take_outbox() != ([], None):
                    out.append(("begin", i))
        return out

    def make(self, move: tuple[Any, ...]) -> None:
        what, i, *rest = move
        if what == "begin":
            step = self.stages[i].next_step()
            if step is not None:
                self.running[i] = step
            self.send(i)
        elif what == "end":
            step = self.running.pop(i)
            stage = self.stages[i]
            block = stage.pipeline.stages[i].block
            stage.finish(step, self.replay.propose(i, stage.sequence, step.limit) if block
                         else self.replay.choices(i, stage.sequence, step.drafts))
            if stage.done:
                self.send(i)
        else:
            message = self.links[i, rest[0]].pop(0)
            for _ in range(2 if self.twice else 1):
                self.stages[rest[0]].receive(message)

    def send(self, i: int) -> None:
        up, down = self.stages[i].take_outbox()
        self.links.setdefault((i, i - 1), []).extend(up)
        if down is not None:
            self.links.setdefault((i, i + 1), []).append(down)

    def check(self) -> None:
        """Safety: what the target has committed is a prefix of the answer."""
        held = self.stages[-1].sequence
        assert held == self.answer[: len(held)]

    def settle(self) -> None:
        """After the target's end every message arrives, target first; then every draft is booked."""
        self.running.clear()
        for i in reversed(range(len(self.stages))):
            for sender in (i + 1, i - 1):
                while self.links.get((sender, i)):
                    self.make(("deliver", sender, i))
            self.stages[i].settle()
            self.send(i)
        counters = [{name: getattr(stage.close(), name) for name in stage.counters.__slots__} for stage in self.stages]
        for link in booked_links(self.stages[0].pipeline):
            assert LinkFigures.of(*counters[link : link + 2]).conserved

    def copy(self) -> World:
        return World(self.replay, [copy_stage(s) for s in self.stages], self.eos,
                     {link: list(waiting) for link, waiting in self.links.items() if waiting},
                     dict(self.running), self.twice)

    def key(self) -> tuple[Any, ...]:
        return (tuple(tuple(map(frozen, (getattr(stage, name) for name in SLOTS))) for stage in self.stages),
                frozenset((link, tuple(waiting)) for link, waiting in self.links.items() if waiting),
                frozenset(self.running.items()))


SLOTS = [name for name in Stage.__slots__ if name not in ("pipeline", "eos")]


def frozen(value: Any) -> Any:
    if isinstance(value, Counters):
        return tuple(getattr(value, name) for name in Counters.__slots__)
    return tuple(value) if isinstance(value, list) else value


def copy_stage(stage: Stage) -> Stage:
    new = copy.copy(stage)
    new.sequence, new.counters = list(stage.sequence), copy.copy(stage.counters)
    new._outbox_up = list(stage._outbox_up)
    return new


def explore(world: World, most: int = 60_000) -> int:
    """Every reachable state: safe, and stuck only when the target is done.  Returns how many."""
    seen, todo = {world.key()}, [world]
    while todo:
        state = todo.pop()
        state.check()
        if state.stages[-1].done:
            assert state.stages[-1].sequence == state.answer
            state.settle()
            continue
        moves = state.moves()
        assert moves, f"nobody can move and the target is not done: {state.key()}"
        for move in moves:
            after = state.copy()
            after.make(move)
            key = after.key()
            if key not in seen:
                seen.add(key)
                todo.append(after)
        assert len(seen) <= most, "the case is too large to explore"
    return len(seen)


@pytest.mark.parametrize(("broken", "spec"), [
    ("_announce_if_stuck", pipeline(2, lookup=True, lookahead=2)),
    ("_tell_upstream", pipeline(2, "speculative", lookahead=2)),
])
def test_the_exploration_can_fail(monkeypatch, broken: str, spec: PipelineSpec):
    """Negative control: a stage that never says *final*, or never tells its verdict, gets stuck."""
    monkeypatch.setattr(Stage, broken, lambda self, **_: None)
    with pytest.raises(AssertionError, match="nobody can move"):
        explore(World.of(spec, [[1, -1, -1, -1], RIGHT]))


RIGHT, WRONG = [1, 2, 3, 4], [9, 9, 9, 9]
both_handshakes = pytest.mark.parametrize("handshake", ["overlapped", "blocking"])


@both_handshakes
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("drafter", [RIGHT, WRONG, [9, 2, 3, 9], [1, 9, 3, 4], [1, 2, 9, 4]])
def test_two_stages_under_every_order(drafter: list[int], lookahead: int, twice: bool, handshake: str):
    """Two pipelined stages, every interleaving, each message once or twice: safe, never stuck, every
    draft booked."""
    assert explore(World.of(pipeline(2, lookahead=lookahead, handshake=handshake), [drafter, RIGHT],
                            twice=twice)) > 20


@both_handshakes
@pytest.mark.parametrize(("first", "second", "twice"), [
    (RIGHT[:3], RIGHT[:3], True), (WRONG[:3], RIGHT[:3], False), (WRONG[:3], RIGHT[:3], True),
    (RIGHT[:2], WRONG[:2], True), ([8, 8, 8], WRONG[:3], True), ([1, 8, 3], [1, 2, 9], True),
])
def test_three_stages_and_two_rollbacks_under_every_order(first: list[int], second: list[int], twice: bool,
                                                          handshake: str):
    """Rollbacks of both links in quick succession, in every order with the drafts that they overtake."""
    spec = pipeline(3, buffer_tokens=1, max_window=1, handshake=handshake)
    assert explore(World.of(spec, [first, second, RIGHT[: len(first)]], twice=twice)) > 50


@both_handshakes
@pytest.mark.parametrize("end", [0, 1, 2])
@pytest.mark.parametrize("drafter", [RIGHT, WRONG, [1, 9, 3, 4], [3, 3, 3, 3]])
def test_end_of_sequence_and_rollback_together_under_every_order(drafter: list[int], end: int, handshake: str):
    """An end of sequence that a drafter proposes too early, misses, or reaches while it is rolled back:
    the answer ends at the target's own."""
    for spec in (pipeline(2, handshake=handshake), pipeline(2, lookahead=2, handshake=handshake),
                 pipeline(2, "speculative", lookahead=2, handshake=handshake)):
        assert explore(World.of(spec, [drafter, RIGHT], eos=[RIGHT[end]])) > 5


@both_handshakes
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("pattern", [RIGHT, WRONG, [1, 9, 3, 4]])
def test_a_synchronous_chain_under_every_order(k: int, pattern: list[int], handshake: str):
    """A chain's turn is never lost, whichever order its messages take."""
    spec = pipeline(k, "speculative", lookahead=2, handshake=handshake)
    explore(World.of(spec, [pattern] * (k - 1) + [RIGHT], twice=k < 4))


@both_handshakes
@pytest.mark.parametrize("strategy", ["speculative", "pipelined"])
@pytest.mark.parametrize("drafter", [[-1] * 4, [1, -1, 3, 4], [1, 2, -1, -1], [9, -1, -1, 4]])
def test_a_drafter_that_stops_early_never_blocks_the_target(drafter: list[int], strategy: str, handshake: str):
    """A lookup that finds nothing says *final*, and the target does not wait for it for ever."""
    explore(World.of(pipeline(2, strategy, lookup=True, lookahead=2, handshake=handshake), [drafter, RIGHT]))


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    k, n = rng.choice([2, 3, 4, 5]), rng.choice([1, 2, 6, 14])
    strategy = rng.choice(["speculative", "pipelined"])
    buffer, window = rng.choice([1, 2, 5]), rng.choice([1, 2, 5])
    spec = pipeline(k, strategy, lookup=rng.random() < 0.3, buffer_tokens=buffer, max_window=window,
                    handshake=rng.choice(["overlapped", "blocking"]),
                    lookahead=rng.randint(strategy == "speculative", min(buffer, window)))
    rate, answer = rng.choice([0.0, 0.5, 0.9, 1.0]), list(range(1, n + 1))
    rows = [[t if rng.random() < rate else 100 * (i + 1) for t in answer] for i in range(k - 1)]
    return World.of(spec, [*rows, answer], eos=rng.choice([(), (n // 2 + 1,)]), neighbour_rate=rate)


def play(world: World, rng: random.Random, *, repeated: float, lost: float) -> World:
    """Random moves until nobody can move or the target is done."""
    history: list[tuple[int, Drafts | Verdict]] = []
    for _ in range(20_000):
        moves = world.moves()
        if world.stages[-1].done or not moves:
            break
        move = rng.choice(moves)
        if move[0] == "deliver":
            history.append((move[2], world.links[move[1], move[2]][0]))
        if move[0] == "deliver" and rng.random() < lost:
            world.links[move[1], move[2]].pop(0)
        else:
            world.make(move)
        if history and rng.random() < repeated:
            receiver, message = rng.choice(history)
            if receiver not in world.running:
                world.stages[receiver].receive(message)
        world.check()
    return world


@given(st.integers(0, 10**9))
@example(7434)  # a middle stage that was rolled back agrees with less than it held
@example(609235334)
@settings(max_examples=150, deadline=None)
def test_messages_doubled_or_late_change_nothing(seed: int):
    """Any older message may be delivered again at any time: the answer is reached all the same, and
    every draft is booked."""
    world = play(random_world(seed), random.Random(seed), repeated=0.3, lost=0.0)
    assert world.stages[-1].done
    assert world.stages[-1].sequence == world.answer
    world.settle()


@given(st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_a_lost_message_never_misleads(seed: int):
    """Messages are snapshots: without some of them a stage may wait, but commits nothing wrong."""
    world = play(random_world(seed), random.Random(seed), repeated=0.1, lost=0.2)
    assert world.stages[-1].sequence == world.answer[: len(world.stages[-1].sequence)]


def drafter_and_target() -> tuple[Stage, Stage]:
    spec = pipeline(2, buffer_tokens=4, max_window=4)
    return Stage(spec, 0, 2, 8), Stage(spec, 1, 2, 8)


def run(stage: Stage, *choices: int) -> tuple[list[Verdict], Drafts | None]:
    step = stage.next_step()
    assert step is not None
    stage.finish(step, choices)
    return stage.take_outbox()


def test_a_draft_that_arrives_after_its_rollback_is_stale_and_counted():
    """A draft made before a rejection was known carries the old epoch: dropped, counted, no effect."""
    drafter, target = drafter_and_target()
    run(target, 1)
    run(drafter, 1)
    first = run(drafter, 9)[1]
    late = run(drafter, 7)[1]
    assert first == Drafts(epoch=0, serial=2, start=0, tokens=(1, 9), final=False)
    assert late == Drafts(epoch=0, serial=3, start=0, tokens=(1, 9, 7), final=False)
    target.receive(first)
    assert target.drafts == (9,)
    (verdict,), _ = run(target, 2, 0)
    assert verdict == Verdict(epoch=1, serial=2, start=0, tokens=(1, 2), turn=True)
    target.receive(late)
    assert (target.counters.stale, target.drafts) == (1, ())
    drafter.receive(verdict)
    assert (drafter.sequence, drafter.counters.cut, drafter.counters.kept) == ([1, 2], 2, 1)
    fresh = run(drafter, 3)[1]
    assert fresh == Drafts(epoch=1, serial=4, start=2, tokens=(3,), final=False, answers=2)
    target.receive(fresh)
    target.receive(fresh)
    assert (target.counters.stale, target.drafts) == (2, (3,))


def test_an_older_verdict_is_stale_and_counted():
    """Verdicts are taken in the order they were sent: one that is overtaken changes nothing."""
    drafter, target = drafter_and_target()
    run(drafter, 5)
    (older,), _ = run(target, 1)
    (newer,), _ = run(target, 2)
    drafter.receive(newer)
    drafter.receive(older)
    assert (drafter.sequence, drafter.counters.stale) == ([1, 2], 1)


def test_the_bonus_token_is_never_drafted_again():
    """After a full acceptance the drafter keeps what agrees with the bonus token and goes on behind it."""
    drafter, target = drafter_and_target()
    run(target, 1)
    run(drafter, 1)
    target.receive(run(drafter, 2)[1])
    run(drafter, 3)
    (verdict,), _ = run(target, 2, 3)
    drafter.receive(verdict)
    step = drafter.next_step()
    assert step is not None
    assert (step.position, step.cached, step.width, step.rolled_back) == (3, 2 + 2, 1, False)
    assert drafter.counters.kept == 3


def test_a_step_is_as_wide_as_what_is_not_cached():
    """Prefill feeds the prompt; a verification the last token and its drafts; after a full acceptance
    the drafter feeds its own last token and the bonus."""
    drafter, target = drafter_and_target()
    widths = []
    for stage, choice in ((drafter, 1), (drafter, 2), (target, 1)):
        step = stage.next_step()
        assert step is not None
        widths.append((step.kind, step.cached, step.width))
        stage.finish(step, [choice])
    assert widths == [("prefill", 0, 2), ("draft", 2, 1), ("prefill", 0, 2)]
    drafts = drafter.take_outbox()[1]
    assert drafts is not None
    target.receive(drafts)
    verify = target.next_step()
    assert verify is not None
    assert (verify.kind, verify.cached, verify.width, verify.drafts) == ("verify", 2, 2, (2,))
    target.finish(verify, [2, 3])
    drafter.receive(target.take_outbox()[0][-1])
    after = drafter.next_step()
    assert after is not None
    assert (after.cached, after.width) == (2 + 1, 2)
