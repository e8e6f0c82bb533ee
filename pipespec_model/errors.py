"""The one error type for bad input: name, rule, value, mend.

Commands print its text as one line and exit with status 2.  Beside it only a failed stage and a
failed write end so; any other exception is a bug and shows its traceback.
"""

from __future__ import annotations

import reprlib

LONGEST = 1000  # characters of an error: a file can hold a name or a value of any size
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 160, 160, 40
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12


class InputError(ValueError):
    """Something the user gave is wrong.

    Parameters
    ----------
    name : what is wrong, as the user wrote it (``links.0.lookahead``, a path, an option)
    rule : what must hold (``must be >= 0``)
    value : what was given; ``None`` when the rule says it all
    mend : what to do about it; empty when the rule makes that plain
    """

    def __init__(self, name: str, rule: str, value: object = None, mend: str = "") -> None:
        text = f"{name} {rule}"
        if value is not None:
            text += f", got {shown(value)}"
        if mend:
            text += f": {mend}"
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - 303]} … {text[-300:]}")


def shown(value: object) -> str:
    """A value in one line of bounded length."""
    if isinstance(value, str | bytes | list | tuple | dict | set | frozenset | int):
        try:
            return _SHORT.repr(value)
        except ValueError:
            return "a number of thousands of digits"
    return str(value)[:160]


class StageError(RuntimeError):
    """A stage process failed: names the stage, the prompt and the cause."""
