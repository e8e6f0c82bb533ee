"""Faults on purpose: a step time of a scripted stage that strikes when its context has grown to a given length.

For tests and for docs/faults.md.  What happens then is what would happen to a stage that computes: its process is
killed or stopped, its runner raises, its message does not arrive.  A ``mark`` is written at the strike and keeps the
stage, or the one that replaces it, from striking again.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .scripted import Script, ScriptedRunner

SLOWER = 10.0
SLOW_STEPS = 10
FOR_EVER_S = 1e6


@dataclass
class Strike:
    """A constant step time with one fault.

    kind : of KINDS
    context : tokens in the stage's cache from which on it strikes
    mark : the file that is written then, with ``time.monotonic()``
    """

    kind: str
    seconds: float
    context: int
    mark: Path
    _slow: int = field(default=0, init=False)

    def sample_s(self, width: int, context: int, draw: float) -> float:
        if context >= self.context and not self.mark.exists():
            leave(self.mark)
            self._slow = SLOW_STEPS if self.kind == "slow" else 0
            KINDS[self.kind]()
        self._slow = max(self._slow - 1, 0)
        return self.seconds * (SLOWER if self._slow else 1.0)


@dataclass(frozen=True)
class Unloadable(Script):
    """A stage that raises while it loads; ``mark`` as of a Strike."""

    mark: Path = Path(os.devnull)

    def runner(self) -> ScriptedRunner:
        leave(self.mark)
        raise ValueError("the weights are damaged")


def leave(mark: Path) -> None:
    mark.write_text(repr(time.monotonic()), encoding="utf-8")


def _fail() -> None:
    raise RuntimeError("the kernel could not be launched")


def _run_out_of_memory() -> None:
    raise MemoryError


def _end_by(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _at_next_message(act: Callable[[Connection], None]) -> Callable[[], None]:
    """Put ``act`` in the place of the next message to a neighbour; those to the parent go another way."""
    def strike() -> None:
        before = Connection.send_bytes

        def once(self: Connection, *_: Any, **__: Any) -> None:
            Connection.send_bytes = before  # type: ignore[method-assign]
            act(self)

        Connection.send_bytes = once  # type: ignore[method-assign,assignment]
    return strike


def _shut(link: Connection) -> None:
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


KINDS: dict[str, Callable[[], None]] = {
    "kill": _end_by(signal.SIGKILL), "stop": _end_by(signal.SIGSTOP), "hang": lambda: time.sleep(FOR_EVER_S),
    "raise": _fail, "memory": _run_out_of_memory, "slow": lambda: None,
    "lose": _at_next_message(lambda _: None), "close": _at_next_message(_shut),
}
