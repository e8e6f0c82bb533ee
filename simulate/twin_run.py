"""Cases one after the other, without Python in between: the compiled engine's entry, and how it is kept on disk."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipespec_model import agreement, messages, uniforms

from . import twin_events, twin_layout, twin_memory, twin_messages, twin_pair, twin_stage, twin_time, twin_tokens
from .twin_events import run_prompt, settle
from .twin_layout import (
    CASE,
    COUNTERS,
    MESSAGE,
    PLAN,
    PROMPT,
    QUEUE,
    READY,
    SPEC,
    STAGE,
    WORLD,
    spec_at,
    stage_at,
)
from .twin_memory import compiled, integer_at
from .twin_pair import BY_EVENTS, constant_ns, run_short, way_of
from .twin_time import is_constant
from .twin_tokens import PURPOSES, fill_words

STAGE_WORDS = STAGE.itemsize // 8
FIRST_COUNTER = list(STAGE.names or ()).index(COUNTERS[0])
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

    @classmethod
    def joined(cls, parts: Sequence[Tables]) -> Tables:
        """One after the other: places move by what lies before them, except those that say there is none (-1)."""
        moved = {"first_stage": "spec", "rates": "numbers", "acceptance": "numbers", "step": "numbers",
                 "prefill": "numbers", "rows": "rows", "eos": "eos", "plan": "plan", "prompt": "prompt",
                 "slowness": "numbers"}
        made = {name: np.concatenate([getattr(part, name) for part in parts]) for name in cls._fields}
        shift = {name: np.cumsum([0] + [len(getattr(part, name)) for part in parts[:-1]]) for name in cls._fields}
        for table in ("plan", "spec", "prompt", "case"):
            sizes = [len(getattr(part, table)) for part in parts]
            for name in made[table].dtype.names or ():
                if name in moved:
                    by = np.repeat(shift[moved[name]], sizes)
                    made[table][name] += np.where(made[table][name] < 0, 0, by)
        return cls(**made)


class Scratch(NamedTuple):
    """Working memory, used again by every case: a WORLD, and what its addresses point to."""

    world: NDArray[Any]
    stages: NDArray[np.int64]
    queues: NDArray[np.int64]
    messages: NDArray[np.int64]
    branches: NDArray[np.int64]
    tips: NDArray[np.int64]
    runs: NDArray[np.int64]
    made_up: NDArray[np.int64]
    proposal: NDArray[np.int64]
    words: NDArray[np.uint64]
    slowness: NDArray[np.float64]

    @classmethod
    def of(cls, num_stages: int, ring: int) -> Scratch:
        """Rings for ``ring`` tokens, as many messages and twice as many branches, a power of two."""
        k, slots = num_stages, 2 * num_stages * (ring + 1)

        def integers(size: int) -> NDArray[np.int64]:
            return np.zeros(size, np.int64)

        return cls(np.zeros(1, WORLD), integers(k * _words(STAGE)), integers(2 * k * _words(QUEUE)),
                   integers(slots * _words(MESSAGE)), integers(2 * ring * ring), integers(2 * ring),
                   integers(k), integers(k * ring), integers(ring), np.zeros(k * len(PURPOSES), np.uint64), np.ones(k))


def _words(record: np.dtype[Any]) -> int:
    return record.itemsize // 8


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


@compiled
def begin(w: Any, t: Tables, x: Scratch, number: int) -> None:
    """Clear the scratch and put every stage before its first event."""
    case = t.case[number]
    plan, prompt = t.plan[case.plan], t.prompt[case.prompt]
    k, ring = plan.num_stages, len(x.proposal)
    w.num_stages, w.chain, w.blocking, w.spread = k, plan.chain, plan.blocking, plan.spread
    w.num_rates, w.rates, w.acceptance = plan.num_rates, plan.rates, plan.acceptance
    w.neighbour_rate = plan.neighbour_rate
    w.prompt_length, w.budget, w.num_tokens = prompt.prompt_length, prompt.budget, prompt.num_tokens
    w.end_tokens, w.num_eos, w.goes_on_rate = prompt.eos, prompt.num_eos, prompt.goes_on_rate
    w.now = w.since = w.in_flight = w.frontier = w.problem = w.num_events = w.computing = w.num_branches = 0
    w.order, w.first_token_ns, w.computed_last = k, -1, -1
    w.made_up = prompt.rows < 0
    if w.made_up:
        w.rows, w.row_mask, w.row_stride = x.made_up.ctypes.data, ring - 1, ring
    else:
        w.rows, w.row_mask, w.row_stride = t.rows.ctypes.data + 8 * prompt.rows, -1, prompt.num_tokens
    w.specs = t.spec.ctypes.data + plan.first_stage * t.spec.itemsize
    x.stages[: k * STAGE_WORDS] = 0
    x.queues[:] = 0
    x.runs[:] = 0
    fill_words(w, case.seed, case.number)
    for i in range(k):
        x.slowness[i] = 1.0 if case.slowness < 0 else t.numbers[case.slowness + i]
        s, start_ns = stage_at(w.stages, i), spec_at(w.specs, i).start_ns
        s.has_turn = i == 0 or not plan.chain
        s.length_down = plan.blocking != 0 and plan.chain == 0
        s.done = prompt.budget <= 0
        constant = is_constant(w.numbers, spec_at(w.specs, i).step)
        s.usual_ns = constant_ns(w, i, False, False) if constant else -1
        s.mode, s.due, s.ready, s.priority, s.order = READY, start_ns, start_ns, 1, i


@compiled
def connect(w: Any, t: Tables, x: Scratch, log: Any) -> None:
    """Addresses that are the same for every case."""
    w.stages, w.queues, w.messages = x.stages.ctypes.data, x.queues.ctypes.data, x.messages.ctypes.data
    w.branches, w.tips = x.branches.ctypes.data, x.tips.ctypes.data
    w.runs, w.proposal, w.words = x.runs.ctypes.data, x.proposal.ctypes.data, x.words.ctypes.data
    w.slowness, w.numbers, w.eos = x.slowness.ctypes.data, t.numbers.ctypes.data, t.eos.ctypes.data
    w.log, w.log_size = log.ctypes.data, len(log)
    w.ring_mask = w.slot_mask = len(x.proposal) - 1
    w.branch_mask = len(x.tips) - 1


@compiled
def book(w: Any, number: int, out: Outcome) -> None:
    k = w.num_stages
    target = stage_at(w.stages, k - 1)
    figures = out.figures[number]
    figures[0], figures[1] = w.now + spec_at(w.specs, k - 1).finish_ns, max(w.first_token_ns, 0)
    figures[2], figures[3], figures[4] = target.length, w.problem, w.num_events
    for i in range(k):
        out.busy_ns[number, i] = stage_at(w.stages, i).busy_ns
        for j in range(NUM_COUNTERS):
            out.counters[number, i, j] = integer_at(w.stages, i * STAGE_WORDS + FIRST_COUNTER + j)


@cache
def engine() -> Any:
    """The entry ``(tables, scratch, numbers of cases, outcome, log, shortcuts)``: compiled at its first call, or
    loaded.  With a log there must be no shortcuts."""
    sources = digest_of([twin_layout, twin_memory, twin_tokens, twin_time, twin_messages, twin_stage, twin_events,
                         twin_pair, agreement, messages, uniforms])

    def run_numbered(t: Tables, x: Scratch, chosen: Any, out: Outcome, log: Any, shortcuts: bool) -> int:
        w = x.world[0]
        connect(w, t, x, log)
        for number in chosen:
            begin(w, t, x, number)
            way = way_of(w) if shortcuts else BY_EVENTS
            if way == BY_EVENTS:
                run_prompt(w, len(log) > 0)
                settle(w)
            else:
                run_short(w, way)
            book(w, number, out)
        return sources and len(chosen)

    return njit(run_numbered, cache=True, nogil=True, error_model="numpy")


def digest_of(modules: list[ModuleType]) -> int:
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
    no_tokens = np.zeros(0, np.int64)
    empty = Tables(np.zeros(0, PLAN), np.zeros(0, SPEC), np.zeros(0, PROMPT), np.zeros(0, CASE), np.zeros(0), no_tokens,
                   no_tokens)
    run(empty, Scratch.of(1, 1), no_tokens, Outcome.of(0, 1), np.zeros((0, 4), np.int64), True)
    return None if sum(run.stats.cache_hits.values()) else time.perf_counter() - start
