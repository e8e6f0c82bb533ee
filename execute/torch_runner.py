"""A stage with a model: one forward a step, batch 1.

The runner keeps the key-value cache of what the stage holds.  Before each step it cuts the cache to
the length that the protocol says is still valid; nothing else ever shortens it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pipespec_model.errors import InputError
from pipespec_model.messages import Step
from pipespec_model.spec import StageSpec

from .decoders import InPlaceCache, decoders
from .forced import Forced
from .loading import load_model
from .sampler import Sampler, check_finite


def crop_to(cache: Any, length: int) -> None:
    """Cut every layer of ``cache`` to ``length`` tokens.

    transformers' own ``crop`` takes the number of tokens to *remove*, negated; a positive number
    raises and 0 does nothing, so the target length is turned into that here and nowhere else.
    """
    held = cache.get_seq_length()
    if not 0 <= length <= held:
        raise ValueError(f"cache length must be in [0, {held}], got {length}")
    if length < held:
        cache.crop(length - held)


def chosen(logits: torch.Tensor, sequence: Sequence[int], step: Step, sampler: Sampler | None) -> list[int]:
    """A token for each row of logits ``[len(drafts) + 1, vocab]``: the best one, or what the sampler says."""
    if sampler is not None:
        return sampler.choose(logits, sequence, step.drafts)
    best = logits.max(-1)
    check_finite(best.values, len(sequence))
    return [int(x) for x in best.indices.tolist()]


class TorchRunner:
    """Runs one stage's model.

    vocabulary : logits beyond this are padding and are never chosen
    make : what makes the two decoders of a model (``decoders``)
    """

    run_number: int | None = None
    """Of the request at hand (worker.Job.run), if it is one."""

    def __init__(self, stage: StageSpec, vocabulary: int | None = None,
                 make: Callable[..., tuple[Any, Any]] = decoders) -> None:
        if stage.quantize not in (None, "int8"):
            raise InputError(f"stages[{stage.name}].quantize", "must be 'int8' or absent here", stage.quantize)
        if stage.quantize == "int8" and stage.dtype != "float32":
            raise InputError(f"stages[{stage.name}].dtype", "must be float32 with quantize int8", stage.dtype)
        if stage.quantize == "int8" and not stage.device.startswith("cpu"):
            raise InputError(f"stages[{stage.name}].device", "must be cpu with quantize int8", stage.device)
        self.model = model = load_model(stage)
        self.context_limit = getattr(model.config, "max_position_embeddings", None)
        # A quantised stage reads the prompt with its float weights and shares the cache.
        self.prefill, self.step = make(model, int8=stage.quantize == "int8")
        self.vocabulary = vocabulary
        self._prompt: list[int] = []
        self._sampler: Sampler | None = None
        self.cache: Any = None

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt at hand; 0 before the first."""
        return len(self._prompt)

    def begin(self, prompt: Sequence[int], sampler: Sampler | None = None) -> None:
        """sampler : what chooses; None = greedy"""
        self._prompt, self.run_number, self._sampler = list(prompt), None, sampler
        if isinstance(self.cache, InPlaceCache):
            self.forget(0)  # its memory is used again: a new one for every prompt would scatter the heap
        else:
            self.cache = self.prefill.new_cache()

    def forget(self, length: int) -> None:
        """Drop what the cache holds beyond ``length`` tokens."""
        crop_to(self.cache, length)

    def run(self, sequence: Sequence[int], step: Step) -> list[int]:
        """The stage's choices after the last held token and after each draft."""
        return chosen(self.logits(sequence, step), sequence, step, self._sampler)

    @torch.inference_mode()
    def logits(self, sequence: Sequence[int], step: Step) -> torch.Tensor:
        """``[len(drafts) + 1, vocab]``: the logits that decide this step."""
        crop_to(self.cache, step.cached)
        text = [*self._prompt, *sequence]
        feed = [*text[step.cached :], *step.drafts]
        decoder = self.prefill if step.cached == 0 else self.step
        logits = decoder.forward(feed, step.cached, len(step.drafts) + 1, self.cache)
        if self.vocabulary is not None:
            logits = logits[:, : self.vocabulary]
        return logits


def teacher_forced(runner: TorchRunner, prompt: Sequence[int], answer: Sequence[int],
                   sampler: Sampler | None = None) -> Forced:
    """What the stage would choose at each position of ``answer`` given its prefix, one token a step, as a drafter
    does.

    sampler : what chooses; None = greedy
    """
    runner.begin(prompt, sampler)
    out, logs = Forced(), []
    for position in range(len(answer)):
        cached = 0 if position == 0 else len(prompt) + position - 1
        step = Step("decode", position, cached, 1, (), 1, 0, False)
        logits = runner.logits(answer[:position], step)[-1:]
        scores = (logits.float() if sampler is None else sampler.scores(logits, answer[:position], ()))[0]
        ids = torch.arange(len(scores), device=scores.device)
        values = scores
        if sampler is not None and sampler.sampling.temperature:
            logs.append(scores.double().log_softmax(-1).float().cpu().numpy())
            ids, values = sampler.noisy(scores, position)
        top = values.topk(min(2, len(values)))
        out.choices.append(int(ids[top.indices[0]]))
        out.margins.append(float(top.values[0] - top.values[1]) if len(values) > 1 else float("inf"))
    if logs:
        out.log_probabilities = np.array(logs)
    return out
