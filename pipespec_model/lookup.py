"""Prompt lookup: propose what followed the last occurrence of the current n-gram.

A pure function of the text so far, so the simulator runs it as the executor does, and its choice at a
position can be recorded like any other stage's.  A block of proposals is the same function applied to
its own output.
"""

from __future__ import annotations

from collections.abc import Sequence

from .agreement import NO_PROPOSAL
from .messages import Step


class PromptLookup:
    """A drafter without a model.

    max_ngram : longest suffix that is looked for; shorter ones down to min_ngram follow
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        self.max_ngram = max(max_ngram, min_ngram)
        self.min_ngram = min_ngram
        self._tokens: list[int] = []
        # For every n-gram: where the token after it lies, newest last, so that a rollback can undo.
        self._after: dict[tuple[int, ...], list[int]] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens, self._after = [], {}
        self._prompt = list(prompt)

    def forget(self, length: int) -> None:
        """The index follows the text at the next call."""

    def run(self, sequence: Sequence[int], step: Step) -> list[int]:
        return self.propose(sequence, step.limit)

    def propose(self, sequence: Sequence[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens that continue prompt + sequence; none without a match."""
        self._become([*self._prompt, *sequence])
        out: list[int] = []
        while len(out) < limit:
            token = self._next()
            if token == NO_PROPOSAL:
                break
            out.append(token)
            self._push(token)
        return out

    def choice(self, text: Sequence[int]) -> int:
        """The proposal after ``text``; NO_PROPOSAL without a match."""
        self._become(text)
        return self._next()

    def _next(self) -> int:
        tokens = self._tokens
        for n in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            places = self._after.get(tuple(tokens[-n:]))
            if places:
                return tokens[places[-1]]
        return NO_PROPOSAL

    def _become(self, text: Sequence[int]) -> None:
        """Make the index that of ``text``, touching only what differs."""
        same = 0
        for have, want in zip(self._tokens, text, strict=False):
            if have != want:
                break
            same += 1
        while len(self._tokens) > same:
            self._pop()
        for token in text[same:]:
            self._push(token)

    def _ngrams_before(self, place: int) -> list[tuple[int, ...]]:
        return [tuple(self._tokens[place - n : place]) for n in range(self.min_ngram, self.max_ngram + 1) if place >= n]

    def _push(self, token: int) -> None:
        place = len(self._tokens)
        self._tokens.append(token)
        for ngram in self._ngrams_before(place):
            self._after.setdefault(ngram, []).append(place)

    def _pop(self) -> None:
        place = len(self._tokens) - 1
        for ngram in self._ngrams_before(place):
            self._after[ngram].pop()
        self._tokens.pop()
