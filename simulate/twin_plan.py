"""What the rules ask about a plan, and the kind of plan for which every answer is known when they are compiled.

A *direct* plan is an overlapped pipeline in which nothing takes time but steps: no chain, no requests, no lookup, no
contention, no hand-over and no turnaround.  Most sweeps are about these, so the rules are compiled twice from one
source: for a ``WORLD``, where each answer is a load and a branch, and for a ``DIRECT`` one, from which the compiler
strikes out whatever such a plan never does.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from .twin_layout import World, spec_at
from .twin_memory import compiled


def _general(typing_context: Any, w: Any) -> Any:
    answer = "direct" not in w.fields

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.boolean, answer)

    return types.boolean(w), build


general: Any = intrinsic(_general)
"""Of a world: whether its plan must be asked; False of a direct one, which is known from the record's type alone."""


@compiled
def is_direct(w: World) -> bool:
    """Whether a plan may be run as a ``DIRECT`` one."""
    found = w.num_stages > 1 and not (w.chain or w.blocking or w.num_rates or w.log_size)
    for i in range(w.num_stages):
        spec = spec_at(w.specs, i)
        found = found and spec.block == 0 and spec.turnaround_ns == 0 and spec.handover_ns == 0
    return found


@compiled
def chain(w: World) -> bool:
    return general(w) and w.chain != 0


@compiled
def blocking(w: World) -> bool:
    return general(w) and w.blocking != 0


@compiled
def contended(w: World) -> bool:
    """Whether steps that run at once slow each other."""
    return general(w) and w.num_rates != 0


@compiled
def looks_up(w: World, i: int) -> bool:
    """Whether the stage is a lookup."""
    return general(w) and spec_at(w.specs, i).block != 0


@compiled
def handover_ns(w: World, receiver: int) -> int:
    return spec_at(w.specs, receiver).handover_ns if general(w) else 0


@compiled
def turnaround_ns(w: World, i: int) -> int:
    return spec_at(w.specs, i).turnaround_ns if general(w) else 0
