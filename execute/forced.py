"""What a stage chooses along a given answer, one position at a time, whatever kind of stage it is.

Importing this loads no torch: a lookup needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipespec_model.lookup import PromptLookup
from pipespec_model.sampling import Sampling
from pipespec_model.spec import StageSpec


@dataclass(frozen=True)
class Draws:
    """How an answer was drawn.

    number : that its noise goes by (``Fleet.run_prompt``)
    """

    sampling: Sampling
    number: int = 0
    eos: tuple[int, ...] = ()


@dataclass
class Forced:
    """One entry a position.

    margins : of the choice over the next best, in logits or in what was added to them; none where there are no scores
    log_probabilities : ``[position, vocab]`` of what was drawn from; None where nothing was drawn
    """

    choices: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    log_probabilities: NDArray[np.float32] | None = None


def forced(runner: Any, stage: StageSpec, prompt: Sequence[int], answer: Sequence[int],
           draws: Draws | None = None) -> Forced:
    """draws : None = greedy.  A layer-skipping drafter's walk along an answer is a greedy one (``calibrate``
    refuses another)."""
    if isinstance(runner, PromptLookup):
        return Forced([runner.choice([*prompt, *answer[:position]]) for position in range(len(answer))])
    if stage.clasp:
        from .clasp.agreement import own_choices

        assert draws is None
        return Forced(own_choices(runner, prompt, answer))
    from .sampler import sampler_of
    from .torch_runner import teacher_forced

    sampler = sampler_of(draws.sampling, prompt, number=draws.number, eos=draws.eos) if draws else None
    return teacher_forced(runner, prompt, answer, sampler)
