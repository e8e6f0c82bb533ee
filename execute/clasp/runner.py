"""A layer-skipping drafter and the stage that it drafts for.

The verifier runs every layer and keeps the hidden states of its last pass.  When it has spoken, the
drafter copies the entries of the tokens that are now committed: what it attends to was then computed by
the full model but for its own drafts.  Neither touches the model.

In a synchronous chain both live in one process, on one set of weights: the entries come straight out of the
verifier's cache, and the prompt is read once, by the drafter, whose turn is first, with every layer, for
both.  In a pipeline each has a process, weights and a core of its own: each reads the prompt with every layer,
the entries come through shared memory (handover.py), and the verifier chooses the layers.

Losslessness does not depend on any of this: a draft is compared with the verifier's own choice, and
the verifier's cache holds nothing that a skipping pass has computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from execute.decoders import InPlaceCache, LayeredDecoder
from execute.sampler import Sampler
from execute.shared import Shared
from execute.skips import SkipSet, uniform_skips
from execute.torch_runner import TorchRunner, chosen, crop_to
from pipespec_model.messages import Entries, Step
from pipespec_model.spec import StageSpec

from .handover import bytes_per_token, copy_rows, entries_in
from .layerwise import layered, layered_int8
from .optimise import Choice, Token, optimise, token_at


def _one_decoder(model: Any, *, int8: bool) -> tuple[LayeredDecoder, LayeredDecoder]:
    assert not int8
    decoder = layered(model)
    return decoder, decoder


class FullRunner(TorchRunner):
    """The verifier: as any stage, and it keeps its states, takes over the prompt that a drafter of its process has
    read, and hands its entries to a drafter of another.

    states : of the last pass, ``[width, hidden]``, before the first and after each layer
    states_from : position of that pass's first token
    shared : memory by the name of the drafter that reads it
    """

    def __init__(self, stage: StageSpec, vocabulary: int | None = None, shared: Mapping[str, Shared] | None = None,
                 ) -> None:
        super().__init__(stage, vocabulary, _one_decoder)
        self.shared = dict(shared or {})
        self.entries: InPlaceCache | None = None
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


    def open(self, drafter: StageSpec, rows: int) -> None:
        """A prompt begins: entries of up to ``rows`` tokens will go to ``drafter``."""
        self.entries = entries_in(self.shared[drafter.name], self.cache, rows)

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.prefill.new_cache())

    @torch.inference_mode()
    def give(self, start: int, end: int) -> None:
        """Copy the entries of tokens ``start`` … ``end`` − 1 to where the drafter finds them."""
        assert self.entries is not None
        copy_rows(self.cache, self.entries, start, end)

    def choose(self, stage: StageSpec, position: int) -> Choice:
        """What ``stage`` should skip, by the token at ``position``, which the last pass has computed."""
        token = token_at(self.prefill, self.cache, self.states, start=self.states_from, position=position)
        return optimise(token, stage.num_skipped_layers, stage.kept_layers)


class ClaspRunner:
    """The drafter.

    full : its verifier; or, in a process of its own, who holds the weights and runs nothing
    shared : where the verifier's entries come from; None = straight out of its cache
    skips : what is left out now
    committed : tokens whose entries the full model computed
    num_verdicts : of how many verdicts it knows (protocol.Stage.num_verdicts)
    """

    def __init__(self, stage: StageSpec, full: FullRunner, shared: Shared | None = None) -> None:
        self.stage, self.full, self.shared = stage, full, shared
        self.context_limit, self.vocabulary = full.context_limit, full.vocabulary
        self.draft = full.drafting(int8=stage.quantize == "int8")
        self._first = uniform_skips(self.draft.num_layers, stage.num_skipped_layers, stage.kept_layers)
        self.skips: SkipSet = self._first
        self.cosine: float | None = None
        self.run_number: int | None = None
        self.offered: int | None = None
        self._prompt: list[int] = []
        self._sampler: Sampler | None = None
        self.cache: Any = None
        self.committed = 0
        self.num_verdicts = 0
        self._own_from = 0  # from here on its cache may hold what the skipping model computed; 0: nothing read yet
        self._changed = False  # of other layers since the last pass
        self._entries: InPlaceCache | None = None
        full.drafters.append(self)

    @property
    def prompt_length(self) -> int:
        return len(self._prompt)

    def begin(self, prompt: Sequence[int], sampler: Sampler | None = None) -> None:
        self._prompt, self._sampler = list(prompt), sampler
        self.cache = self.full.prefill.new_cache()
        self.committed, self.skips, self.cosine = 0, self._first, None
        self.run_number = self.offered = None
        self.num_verdicts = self._own_from = 0
        self._changed = False

    def open(self, rows: int) -> None:
        """A prompt begins: entries of up to ``rows`` tokens will come from the verifier's process."""
        assert self.shared is not None
        self._entries = entries_in(self.shared, self.cache, rows)

    def forget(self, length: int) -> None:
        crop_to(self.cache, length)

    def run(self, sequence: Sequence[int], step: Step) -> list[int]:
        """As TorchRunner's; nothing where the best token is less probable than the draft exit threshold."""
        logits = self.logits(sequence, step)
        if step.kind == "draft" and self.stops(logits[-1]):
            return []
        return chosen(logits, sequence, step, self._sampler)

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
        # A verifier may be ahead: the newest token goes through here whoever else has computed it.
        known = min(self.committed, len(text) - 1)
        # Drafts made with other layers have no entries for some that now run.
        start = known if self._changed else max(step.cached, known)
        self._changed = False
        if not self._own_from:
            logits = self.full.prefill.forward([*text, *step.drafts], 0, keep, self.cache)
            self._own_from = len(self._prompt)
            self.committed = max(self.committed, self._own_from)
            self.offered = self.run_number
        else:
            logits = self.draft.forward([*text[start:], *step.drafts], start, keep, self.cache, skip=self.skips)
            self._own_from = min(self._own_from, start)
        return logits if self.vocabulary is None else logits[:, : self.vocabulary]

    def receive(self, message: Entries) -> None:
        """The verifier says what it has handed over, or which layers to skip from now on."""
        if message.layers is not None:
            chosen = SkipSet.layers(message.layers)
            self._changed, self.skips = self._changed or chosen != self.skips, chosen
        self._own_from = min(self._own_from, message.start)
        self.committed = message.end

    def to_take(self, num_held: int) -> range:
        """Rows that the next step should first take out of the shared memory.

        num_held : tokens of this stage; its newest, and what the verifier has beyond it, is not among them
        """
        if not self._own_from:
            return range(0)
        return range(self._own_from, max(self._own_from, min(self.committed, self.prompt_length + num_held - 1)))

    @torch.inference_mode()
    def take(self, rows: range) -> None:
        assert self._entries is not None
        copy_rows(self._entries, self.cache, rows.start, rows.stop)
        self._own_from = rows.stop

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
        self._adopt(self.full.choose(self.stage, self.committed - 1))

    def choose(self, token: Token) -> None:
        self._adopt(optimise(token, self.stage.num_skipped_layers, self.stage.kept_layers))

    def _adopt(self, choice: Choice) -> None:
        self.skips, self.cosine = choice.skips, choice.cosine
