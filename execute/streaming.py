"""Text as it is decided: stop strings, and printing that never takes a character back.

Assumes that the target never takes a token back, and a tokenizer whose text only grows with its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "�"  # how a tokenizer writes the first bytes of a character


class StopStrings:
    """Whether a text has just reached one of some strings, wherever tokens and blocks divide them.

    strings : none of them empty
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._longest = max(len(text) for text in strings)

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether the text of ``tokens`` holds a stop string.

        Only the end is looked at: called for every token, this is true first for the one that completes the string.
        """
        count = self._longest + 8
        while True:
            text = decoded(self._tokenizer, tokens[-count:])
            # A token may have no text of its own; the first characters of a piece may be spoilt by the cut.
            if count >= len(tokens) or len(text) >= 2 * self._longest + 8:
                return any(string in text for string in self._strings)
            count *= 2


def before_stop(text: str, strings: Sequence[str]) -> str:
    """``text`` up to where the first of ``strings`` begins."""
    starts = [at for at in (text.find(string) for string in strings) if at >= 0]
    return text[: min(starts)] if starts else text


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


class Live:
    """Prints text as tokens arrive; holds back what may still change or belong to a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._shown = ""

    def __call__(self, tokens: list[int]) -> None:
        self._tokens += tokens
        text = decoded(self._tokenizer, self._tokens)
        if not text.endswith(UNFINISHED):
            self._show(self._certain(before_stop(text, self._stop)), end="")

    def end(self) -> None:
        self._show(before_stop(decoded(self._tokenizer, self._tokens), self._stop), end="\n")

    def _certain(self, text: str) -> str:
        """Without the longest end that a stop string begins with."""
        longest = max((len(string) - 1 for string in self._stop), default=0)
        for held in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-held:]) for string in self._stop):
                return text[:-held]
        return text

    def _show(self, text: str, *, end: str) -> None:
        print(text[len(self._shown) :], end=end, flush=True)
        self._shown = text
