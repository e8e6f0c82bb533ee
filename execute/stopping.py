"""Stop strings: the text ends before the first of them, wherever tokens and blocks begin and end.

The first is the one that is complete first, character by character; of several that one character completes, the
longest.  So the text depends on the text alone: not on its tokens, and not on the strategy that made them.

The target's process looks for them as it decides (:class:`Ends`): the run stops at the first token that completes one,
as it would at an end of sequence.  Drafters know nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipespec_model.errors import InputError

from .reading import Detokeniser, Reader


class Cut:
    """Lets text through up to the first stop string.

    Holds back the longest end of the text that some stop string begins with: every match lies within it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What of the text up to now may be shown and was not; nothing once it has stopped."""
        if not self._strings:
            return text
        shown = []
        for character in text if not self.stopped else "":
            self._held += character
            found = next((s for s in self._strings if self._held.endswith(s)), None)
            if found is not None:
                shown.append(self._held.removesuffix(found))
                self._held, self.stopped = "", True
                break
            free = next(i for i in range(len(self._held) + 1) if self._may_become_one(self._held[i:]))
            shown.append(self._held[:free])
            self._held = self._held[free:]
        return "".join(shown)

    def end(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _may_become_one(self, text: str) -> bool:
        return not text or any(s.startswith(text) for s in self._strings)


@dataclass(frozen=True)
class Stops:
    """Where a prompt's text ends.

    strings : the text ends before the first of them
    read : tokens to text ; goes to the target's process, so it must survive pickling
    decided : tokens of the text that an earlier attempt had decided and that the prompt now ends with
    """

    strings: tuple[str, ...]
    read: Reader
    decided: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if "" in self.strings:
            raise InputError("stop", "must not be empty text", mend="leave it out")

    def ends(self) -> Ends:
        return Ends(self)


class Ends:
    """Hears every token that the target decides, in order, and says whether the text ends with it."""

    def __init__(self, stops: Stops) -> None:
        self._pieces, self._cut = Detokeniser(stops.read), Cut(stops.strings)
        self.ended = any(self(token) for token in stops.decided)

    def __call__(self, token: int) -> bool:
        self._cut.add(self._pieces.add(token))
        return self._cut.stopped
