"""The one error type for bad input: name, rule, value, mend.

Commands print its text as one line and exit with status 2.  Beside it only a failed stage and a
failed write end so; any other exception is a bug and shows its traceback.
"""

from __future__ import annotations


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
            text += f", got {value!r}" if isinstance(value, str) else f", got {value}"
        if mend:
            text += f": {mend}"
        super().__init__(text)


class StageError(RuntimeError):
    """A stage process failed: names the stage, the prompt and the cause."""
