"""From tokens to text, a token at a time: a character that is out is never taken back.

A character of which a token has brought only some bytes waits for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Reader = Callable[[Sequence[int]], str]
"""Tokens to text, with U+FFFD for bytes that are no character (yet)."""
PARTIAL = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ModelReader:
    """Reads with a model's tokenizer, which each process loads when it first reads.  Special tokens are no text."""

    model: str

    def __call__(self, tokens: Sequence[int]) -> str:
        # Tidying spaces would change text that has been shown.
        return str(tokenizer_of(self.model).decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@cache
def tokenizer_of(model: str) -> Any:
    """Loaded once a process."""
    from .loading import load_tokenizer

    return load_tokenizer(model)


class Detokeniser:
    """A token at a time.  Decodes only the last few: those since the text last ended with a whole character, and, as
    some tokenizers treat a text's beginning in a way of their own, those of one such piece before."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._tokens: list[int] = []  # from the piece before
        self._whole = 0  # of them, those up to where the text last ended with a whole character
        self._given = 0  # characters of their text that are out

    def add(self, token: int) -> str:
        """The characters that are certain now."""
        self._tokens.append(token)
        text = self._read(self._tokens)
        certain = text.rstrip(PARTIAL)
        new = certain[self._given :]
        self._given += len(new)
        if new and certain == text:
            self._tokens = self._tokens[self._whole :]
            self._whole = len(self._tokens)
            self._given = len(self._read(self._tokens))
        return new

    def end(self) -> str:
        """The bytes at the end that stayed without a character."""
        return self._read(self._tokens)[self._given :]
