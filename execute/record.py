"""Each stage's own choices along the target's text; where it was sampled, how probable the target's token was for it.

Probabilities are of draws with the noise that all stages share (docs/losslessness.md), given the token that the target
drew: the law of what a verification accepts, whatever the seed.  1 − TV of the two distributions is kept beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipespec_model.agreement import NO_PROPOSAL, Agreement
from pipespec_model.coupling import best_agreement, same_draw
from pipespec_model.errors import InputError
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec, StageSpec

from .fleet import Fleet
from .forced import Draws, Forced
from .prompts import Prompt

DIGITS = 6  # of a probability in a profile: its file stays small


@dataclass(frozen=True)
class Drawn:
    """A text of the target; draws : how it was drawn, None = greedy"""

    prompt: Prompt
    answer: Sequence[int]
    draws: Draws | None = None


def draws_of(prompt: Prompt, sampling: Sampling | None, number: int) -> Draws | None:
    return Draws(sampling, number, prompt.eos) if sampling else None


def check_recordable(pipeline: PipelineSpec, sampling: Sampling | None) -> None:
    """Refuse sampling where a stage's choices along a sampled text are not recorded."""
    for i, stage in enumerate(pipeline.stages):
        if stage.clasp and sampling is not None and not sampling.plain:
            raise InputError(sampling.first_set, "must be absent where a drafter skips layers "
                             f"(stages.{i}, {stage.name})", getattr(sampling, sampling.first_set),
                             "its choices are recorded along greedy text alone")


def record_agreement(fleet: Fleet, pipelines: Sequence[PipelineSpec], texts: Sequence[Drawn], *, max_new_tokens: int,
                     probabilities: bool = False) -> list[Agreement]:
    """Each distinct stage's choice at each position of the target's ``texts``.

    A stage whose choices are the target's by definition is not run again.

    probabilities : also those of sampled texts; they are what is simulated from then.  Without them, what was drawn is
    """
    target = pipelines[0].target
    stages: dict[str, StageSpec] = {}
    for pipeline in pipelines:
        for stage in pipeline.stages:
            stages.setdefault(stage.choice_key, stage)
    stages.pop(target.choice_key, None)
    out = []
    for text in texts:
        prompt, length = text.prompt, len(text.answer)
        rows = [fleet.teacher_force(stage.name, prompt.tokens, text.answer, text.draws) for stage in stages.values()]
        tokens = np.array([*(row.choices for row in rows), text.answer], dtype=np.int64).reshape(len(rows) + 1, length)
        chances = overlaps = None
        if probabilities and text.draws is not None and text.draws.sampling.temperature:
            own = fleet.teacher_force(target.name, prompt.tokens, text.answer, text.draws)
            chances, overlaps = np.ones((2, *tokens.shape))
            for i, row in enumerate(rows):
                chances[i], overlaps[i] = chance_and_overlap(own, row, text.answer)
        out.append(Agreement(prompt.name, len(prompt.tokens), (*stages, target.choice_key), tokens,
                             prompt.category, max_new_tokens, prompt.eos, tuple(prompt.tokens), chances, overlaps))
    return out


def chance_and_overlap(target: Forced, stage: Forced, answer: Sequence[int]) -> NDArray[np.float64]:
    """``[2, position]``: P(the stage draws the token too | the target does), and 1 − TV.  A stage that does not draw
    proposes its one choice with probability 1."""
    assert target.log_probabilities is not None
    out = np.empty((2, len(answer)))
    for position, token in enumerate(answer):
        p = np.exp(target.log_probabilities[position].astype(float))
        if stage.log_probabilities is None:
            choice = stage.choices[position]
            out[:, position] = choice == token, 0.0 if choice == NO_PROPOSAL else p[choice]
        else:
            q = np.exp(stage.log_probabilities[position].astype(float))
            out[:, position] = same_draw(p, q, token), best_agreement(p, q)
    return np.clip(out, 0.0, 1.0).round(DIGITS)
