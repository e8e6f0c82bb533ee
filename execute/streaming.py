"""Printing text as it is decided.  Assumes that the target never takes a token back."""

from __future__ import annotations

from typing import Any


class Live:
    """Prints text as tokens arrive; holds back a piece that is not yet whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def __call__(self, tokens: list[int]) -> None:
        self._tokens += tokens
        text = self._text()
        if not text.endswith("�"):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text

    def end(self) -> None:
        print(self._text()[len(self._shown) :])
