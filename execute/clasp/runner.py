"""A layer-skipping drafter and the stage that it drafts for, in one process, on one set of weights.

The verifier runs every layer and keeps the hidden states of its last pass.  When it has spoken, the
drafter copies the entries of the tokens that are now committed out of the verifier's cache: what it
attends to was then computed by the full model but for its own drafts.  Neither touches the model.
The prompt is read once: by the drafter, whose turn is first, with every layer, for both.

Losslessness does not depend on any of this: a draft is compared with the verifier's own choice, and
the verifier's cache holds nothing that a skipping pass has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from execute.decoders import InPlaceCache, LayeredDecoder
from execute.skips import SkipSet, uniform_skips
from execute.torch_runner import TorchRunner, crop_to
from pipespec_model.messages import Step
from pipespec_model.spec import StageSpec

from .layerwise import layered, layered_int8
from .optimise import Token, optimise, token_at


def copy_rows(source: InPlaceCache, into: InPlaceCache, start: int, end: int) -> None:
    """Copy the entries of tokens ``start`` … ``end`` − 1, every layer's."""
    into.make_room(end)
    if start < end:
        into.keys[:, start:end] = source.keys[:, start:end]
        into.values[:, start:end] = source.values[:, start:end]
    into.length = max(into.length, end)


def _one_decoder(model: Any, *, int8: bool) -> tuple[LayeredDecoder, LayeredDecoder]:
    assert not int8
    decoder = layered(model)
    return decoder, decoder


class FullRunner(TorchRunner):
    """The verifier: as any stage, and it keeps its states and takes over the prompt that its drafter has read.

    states : of the last pass, ``[width, hidden]``, before the first and after each layer
    states_from : position of that pass's first token
    """

    def __init__(self, stage: StageSpec, vocabulary: int | None = None) -> None:
        super().__init__(stage, vocabulary, _one_decoder)
        self.states: list[torch.Tensor] = []
        self.states_from = 0
        self.drafters: list[ClaspRunner] = []
        self._int8: LayeredDecoder | None = None

    def drafting(self, *, int8: bool) -> LayeredDecoder:
        """What its drafters run: these weights, or one quantised copy of them for all."""
        if not int8:
            found: LayeredDecoder = self.prefill
            return found
        self._int8 = self._int8 or layered_int8(self.model)
        return self._int8

    @torch.inference_mode()
    def logits(self, sequence: Sequence[int], step: Step) -> torch.Tensor:
        start = step.cached
        for drafter in self.drafters if start == 0 and self.run_number is not None else ():
            if drafter.offered == self.run_number:
                # The last token of the prompt goes through here too: its logits decide the first token.
                start = self.prompt_length - 1
                copy_rows(drafter.cache, self.cache, 0, start)
        crop_to(self.cache, start)
        feed = [*self._prompt, *sequence][start:] + list(step.drafts)
        self.states, self.states_from = [], start
        logits = self.prefill.forward(feed, start, len(step.drafts) + 1, self.cache, states=self.states)
        return logits if self.vocabulary is None else logits[:, : self.vocabulary]


class ClaspRunner:
    """The drafter.

    skips : what is left out now
    committed : tokens whose entries the full model computed
    num_verdicts : of how many verdicts it knows (protocol.Stage.num_verdicts)
    """

    def __init__(self, stage: StageSpec, full: FullRunner) -> None:
        self.stage, self.full = stage, full
        self.context_limit, self.vocabulary = full.context_limit, full.vocabulary
        self.draft = full.drafting(int8=stage.quantize == "int8")
        self._first = uniform_skips(self.draft.num_layers, stage.num_skipped_layers, stage.kept_layers)
        self.skips: SkipSet = self._first
        self.cosine: float | None = None
        self.run_number: int | None = None
        self.offered: int | None = None
        self._prompt: list[int] = []
        self.cache: Any = None
        self.committed = 0
        self.num_verdicts = 0
        full.drafters.append(self)

    @property
    def prompt_length(self) -> int:
        return len(self._prompt)

    def begin(self, prompt: Sequence[int]) -> None:
        self._prompt = list(prompt)
        self.cache = self.full.prefill.new_cache()
        self.committed, self.skips, self.cosine = 0, self._first, None
        self.run_number = self.offered = None
        self.num_verdicts = 0

    def forget(self, length: int) -> None:
        crop_to(self.cache, length)

    def run(self, sequence: Sequence[int], step: Step) -> list[int]:
        """As TorchRunner's; nothing where the best token is less probable than the draft exit threshold."""
        logits = self.logits(sequence, step)
        if step.kind == "draft" and self.stops(logits[-1]):
            return []
        return [int(x) for x in logits.argmax(-1).tolist()]

    def stops(self, logits: torch.Tensor) -> bool:
        """Whether the drafter is too unsure to go on.  It looks at nothing but its own distribution, so the
        number of drafts may depend on it and the text may not."""
        threshold = self.stage.draft_exit_threshold
        return threshold > 0 and float(logits.float().softmax(-1).max()) < threshold

    @torch.inference_mode()
    def logits(self, sequence: Sequence[int], step: Step) -> torch.Tensor:
        """``[len(drafts) + 1, vocab]``; the first pass of a prompt runs every layer."""
        keep = len(step.drafts) + 1
        text = [*self._prompt, *sequence]
        start = max(step.cached, self.committed)
        feed = [*text[start:], *step.drafts]
        if start == 0:
            logits = self.full.prefill.forward(feed, 0, keep, self.cache)
            self.committed, self.offered = len(self._prompt), self.run_number
        else:
            logits = self.draft.forward(feed, start, keep, self.cache, skip=self.skips)
        return logits if self.vocabulary is None else logits[:, : self.vocabulary]

    @torch.inference_mode()
    def take_over(self, num_held: int) -> None:
        """A round begins: copy what the verifier has committed.

        num_held : tokens of this stage, all committed; the newest is in no cache yet
        """
        end = self.prompt_length + num_held - 1
        copy_rows(self.full.cache, self.cache, min(self.committed, end), end)
        self.committed = end

    def optimise(self) -> None:
        """Choose the layers anew for the last token that the verifier committed."""
        full = self.full
        self.choose(token_at(full.prefill, full.cache, full.states, start=full.states_from,
                             position=self.committed - 1))

    def choose(self, token: Token) -> None:
        choice = optimise(token, self.stage.num_skipped_layers, self.stage.kept_layers)
        self.skips, self.cosine = choice.skips, choice.cosine
