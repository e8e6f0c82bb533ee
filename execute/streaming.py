"""Text as it is decided, up to the first stop string.

Assumes that tokens are never taken back; then no character is either: reading.py and stopping.py say what is held
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .reading import Detokeniser, Reader
from .stopping import Cut


class TextStream:
    """A prompt's text, ended before the first stop string.

    add(tokens) -> what may be shown now; end() -> the rest, once the prompt has ended.  All of it together does not
    depend on how the text was cut into tokens or tokens into calls.
    """

    def __init__(self, read: Reader, stop: Sequence[str] = ()) -> None:
        self._pieces, self._cut = Detokeniser(read), Cut(stop)

    def add(self, tokens: Iterable[int]) -> str:
        return "".join(self._cut.add(self._pieces.add(token)) for token in tokens)

    def end(self) -> str:
        return self._cut.add(self._pieces.end()) + self._cut.end()


def text_of(read: Reader, tokens: Iterable[int], stop: Sequence[str] = ()) -> str:
    """The whole text of an answer, as a stream would have shown it."""
    stream = TextStream(read, stop)
    return stream.add(tokens) + stream.end()


class Live:
    """Prints a stream as tokens arrive."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def __call__(self, tokens: Iterable[int]) -> None:
        print(self._stream.add(tokens), end="", flush=True)

    def end(self) -> None:
        print(self._stream.end())
