"""What a layer-skipping drafter chooses along a given answer: the walk that it would take.

Its choice depends on how far the last committed token is, for behind it lie entries of its own making.
So the answer is walked as a synchronous pair would: some drafts, the first wrong one ends them, the
full model commits the answer up to there, and the layers are chosen anew when that is due.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipespec_model.agreement import NO_PROPOSAL

from .optimise import token_at
from .runner import ClaspRunner

BLOCK = 4  # drafts between two commitments


@torch.inference_mode()
def own_choices(runner: ClaspRunner, prompt: Sequence[int], answer: Sequence[int], *, block: int = BLOCK) -> list[int]:
    """The drafter's choice at each position of ``answer``; NO_PROPOSAL where its threshold stops it."""
    full, cache = runner.full.prefill, runner.full.prefill.new_cache()
    text, first, due = [*prompt, *answer], len(prompt), 0
    runner.begin(prompt)
    logits = full.forward(prompt, 0, 1, cache)
    committed, out = first, list[int]()
    while len(out) < len(answer):
        held = len(out)
        if first + held - 1 > committed:
            states: list[torch.Tensor] = []
            full.forward(text[committed : first + held - 1], committed, 1, cache, states=states)
            token = token_at(full, cache, states, start=committed, position=first + held - 2)
            committed = first + held - 1
            if held >= due:
                runner.choose(token)
                due = held + runner.stage.layer_opt_interval
        for position in range(held, min(held + block + 1, len(answer))):
            if position:
                row = first + position - 1
                logits = runner.draft.forward([text[row]], row, 1, cache, skip=runner.skips)
            out.append(_choice(runner, logits[0, : runner.vocabulary], told=position == 0))
            if out[-1] != answer[position]:
                break
    runner.begin(())  # the walk had a cache of its own: the runner has read no prompt
    return out


def _choice(runner: ClaspRunner, logits: torch.Tensor, *, told: bool) -> int:
    """told : the full model's own, no draft that the threshold could stop"""
    return int(logits.argmax()) if told or not runner.stops(logits) else NO_PROPOSAL
