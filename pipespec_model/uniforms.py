"""Counter-based uniforms: every random number is a pure function of what it is for.

The engines draw nothing of their own.  ``uniform(seed, prompt, stage, purpose, index)`` is the same
number whoever asks, in whichever order, on however many workers, so runs can be compared event by
event and what-if rows differ by nothing but the question.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators"), applied once per field.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# Purposes: what a uniform is for.  Numbers are part of the replay format; never renumber.
STEP_TIME = 1
ON_PATH = 2
OFF_PATH = 3
TOKEN = 4
MACHINE = 5
ARRIVAL = 6
SAMPLE = 7
SAME_DRAW = 8


def mix(state: int, field: int) -> int:
    """Fold one integer field into a 64-bit state."""
    z = ((state ^ (field & MASK)) + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=256)  # the prompts at hand; with room for thousands a long run fills it, which looks like a leak
def _purpose(seed: int, prompt: int, stage: int, purpose: int) -> int:
    return mix(mix(mix(mix(0, seed), prompt), stage), purpose)


def word(seed: int, prompt: int, stage: int, purpose: int, *index: int) -> int:
    """A 64-bit word, the integer behind :func:`uniform`."""
    state = _purpose(seed, prompt, stage, purpose)
    for field in index:
        state = mix(state, field)
    return state


def uniform(seed: int, prompt: int, stage: int, purpose: int, *index: int) -> float:
    """A number in [0, 1) with 53 random bits.

    >>> uniform(0, 1, 2, STEP_TIME, 3) == uniform(0, 1, 2, STEP_TIME, 3)
    True
    >>> uniform(0, 1, 2, STEP_TIME, 3) == uniform(0, 1, 2, STEP_TIME, 4)
    False
    """
    return (word(seed, prompt, stage, purpose, *index) >> 11) * (1.0 / (1 << 53))


def uniforms_along(seed: int, prompt: int, stage: int, purpose: int, count: int) -> NDArray[np.float64]:
    """:func:`uniform` at the indices 0 … ``count`` − 1.

    >>> float(uniforms_along(0, 1, 2, SAME_DRAW, 4)[3]) == uniform(0, 1, 2, SAME_DRAW, 3)
    True
    """
    index: Any = np.arange(count, dtype=np.uint64)
    words: Any = mix(_purpose(seed, prompt, stage, purpose), index)
    return np.asarray((words >> np.uint64(11)) * (1.0 / (1 << 53)))
