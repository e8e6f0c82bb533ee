"""Cases one after the other, without Python in between: the entry of the compiled engine, and how it is kept on disk."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipespec_model import agreement, messages, uniforms

from . import twin_events, twin_layout, twin_stage, twin_time, twin_tokens
from .twin_events import run_prompt, settle
from .twin_layout import (
    CASE,
    CLOCK,
    COUNTERS,
    EXCLUDED,
    MESSAGE,
    PLAN,
    PROMPT,
    QUEUE,
    READY,
    SPEC,
    STAGE,
    WAIT,
    World,
)
from .twin_tokens import PURPOSES, fill_words

_FIRST_COUNTER = list(STAGE.names or ()).index(COUNTERS[0])
NUM_COUNTERS = len(COUNTERS)


class Tables(NamedTuple):
    """What cases are about (twin_layout): records, and the numbers, choices and end tokens that they point into."""

    plan: NDArray[Any]
    spec: NDArray[Any]
    prompt: NDArray[Any]
    case: NDArray[Any]
    numbers: NDArray[np.float64]
    rows: NDArray[np.int64]
    eos: NDArray[np.int64]


class Scratch(NamedTuple):
    """Working memory, used again by every case; the ``raw`` arrays are the same memory as integers, to be cleared."""

    clock: NDArray[Any]
    raw_clock: NDArray[np.int64]
    stage: NDArray[Any]
    raw_stage: NDArray[np.int64]
    queue: NDArray[Any]
    raw_queue: NDArray[np.int64]
    tail: NDArray[np.int64]
    draft_tail: NDArray[np.int64]
    run: NDArray[np.int64]
    made_up: NDArray[np.int64]
    message: NDArray[Any]
    message_tail: NDArray[np.int64]
    proposal: NDArray[np.int64]
    words: NDArray[np.uint64]
    slowness: NDArray[np.float64]

    @classmethod
    def of(cls, num_stages: int, ring: int) -> Scratch:
        """Rings for ``ring`` tokens and as many messages, a power of two."""
        def cleared(shape: tuple[int, ...], record: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
            raw = np.zeros((*shape, record.itemsize // 8), dtype=np.int64)
            return raw.view(record).reshape(shape), raw

        k = num_stages
        return cls(*cleared((1,), CLOCK), *cleared((k,), STAGE), *cleared((2, k), QUEUE),
                   np.zeros((k, ring), np.int64), np.zeros((k, ring), np.int64), np.zeros(k, np.int64),
                   np.zeros(k * ring, np.int64), np.zeros((2, k, ring + 1), MESSAGE),
                   np.zeros((2, k, ring + 1, ring), np.int64), np.zeros(ring, np.int64),
                   np.zeros((k, len(PURPOSES)), np.uint64), np.ones(k))


class Outcome(NamedTuple):
    """What came of each case: end, first token, tokens, problem (0: none) and events ``[case, 5]``; time computing
    in ns ``[case, stage]``; counters ``[case, stage, counter]``."""

    figures: NDArray[np.int64]
    busy_ns: NDArray[np.int64]
    counters: NDArray[np.int64]

    @classmethod
    def of(cls, num_cases: int, num_stages: int) -> Outcome:
        return cls(np.zeros((num_cases, 5), np.int64), np.zeros((num_cases, num_stages), np.int64),
                   np.zeros((num_cases, num_stages, NUM_COUNTERS), np.int64))


@njit
def begin(t: Tables, x: Scratch, number: int) -> None:
    """Clear the scratch and put every stage before its first event."""
    case = t.case[number]
    plan, prompt = t.plan[case.plan], t.prompt[case.prompt]
    k = plan.num_stages
    x.raw_clock[:] = 0
    x.raw_stage[:] = 0
    x.raw_queue[:] = 0
    x.run[:] = 0
    fill_words(x.words[:k], case.seed, case.number)
    clock = x.clock[0]
    clock.first_token_ns = -1
    clock.order = k
    for i in range(k):
        x.slowness[i] = 1.0 if case.slowness < 0 else t.numbers[case.slowness + i]
        s, start_ns = x.stage[i], t.spec[plan.first_stage + i].start_ns
        s.has_turn = i == 0 or not plan.chain
        s.length_down = plan.blocking != 0 and plan.chain == 0
        s.done = prompt.budget <= 0
        s.mode, s.due, s.ready, s.priority, s.order = READY, start_ns, start_ns, 1, i


@njit
def run_one(t: Tables, x: Scratch, number: int, out: Outcome, log: Any) -> None:
    begin(t, x, number)
    case = t.case[number]
    plan, prompt = t.plan[case.plan], t.prompt[case.prompt]
    k = plan.num_stages
    recorded = prompt.rows >= 0
    ring = x.tail.shape[1]
    w = World(plan, prompt, x.clock[0], t.spec[plan.first_stage : plan.first_stage + k], x.stage[:k],
              x.tail, x.draft_tail, x.run, t.rows if recorded else x.made_up, prompt.rows if recorded else 0,
              prompt.num_tokens if recorded else ring, -1 if recorded else ring - 1, x.queue, x.message,
              x.message_tail, x.proposal, x.words, t.numbers, t.eos, log, x.slowness)
    run_prompt(w, len(log) > 0)
    target = w.stage[k - 1]
    if target.mode == WAIT and not w.clock.problem:
        w.clock.problem = EXCLUDED
    figures = out.figures[number]
    figures[0], figures[1] = w.clock.now + plan.finish_ns, max(w.clock.first_token_ns, 0)
    figures[2], figures[4] = target.length, w.clock.num_events
    settle(w)
    figures[3] = w.clock.problem
    for i in range(k):
        out.busy_ns[number, i] = w.stage[i].busy_ns
        for j in range(NUM_COUNTERS):
            out.counters[number, i, j] = x.raw_stage[i, _FIRST_COUNTER + j]


@cache
def engine() -> Any:
    """The compiled entry ``(tables, scratch, numbers of cases, outcome, log)``; compiled at its first call, or loaded."""
    sources = _digest([twin_layout, twin_tokens, twin_time, twin_stage, twin_events, agreement, messages, uniforms])

    def run_numbered(t: Tables, x: Scratch, chosen: Any, out: Outcome, log: Any) -> int:
        for number in chosen:
            run_one(t, x, number, out, log)
        return sources and len(chosen)

    return njit(run_numbered, cache=True, nogil=True)


def _digest(modules: list[ModuleType]) -> int:
    """Of what is compiled in: numba's own check sees the entry's file alone, but a closure's values too."""
    text = b"".join(Path(module.__file__ or "").read_bytes() for module in modules)
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big") | 1


def prepare() -> float | None:
    """Make the engine ready; returns the seconds that compiling took, None where it was found on disk or is ready.

    numba keeps it beside this file, or in the user's cache folder where this one cannot be written to, or in
    ``NUMBA_CACHE_DIR``.
    """
    run = engine()
    if run.signatures:
        return None
    start = time.perf_counter()
    empty = Tables(*(np.zeros(0, record) for record in (PLAN, SPEC, PROMPT, CASE)), np.zeros(0), np.zeros(0, np.int64),
                   np.zeros(0, np.int64))
    run(empty, Scratch.of(1, 1), np.zeros(0, np.int64), Outcome.of(0, 1), np.zeros((0, 4), np.int64))
    return None if sum(run.stats.cache_hits.values()) else time.perf_counter() - start
