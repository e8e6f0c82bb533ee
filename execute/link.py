"""A connection to a process on another host: what a pipe is on one machine.

``Link`` is a ``multiprocessing`` connection over a TCP socket, so that the stage loop and the parent treat the two
alike: it can be waited for with others, holds whole messages, and ends when its other end does.  Three things differ.

* Sending never waits: what the kernel's buffer has no room for goes to a thread that sends it in order.
* Every failure of the network is a ConnectionResetError, silence among them (``keep_alive``).
* Only what the protocol knows is taken: a message can make the classes of ``MAY_ARRIVE`` and plain values, nothing
  else, and call nothing.

Assumes that both ends run the same version of this package.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
import threading
from collections import deque
from multiprocessing import connection, reduction
from typing import Any

import numpy as np

from pipespec_model.agreement import Agreement
from pipespec_model.messages import Drafts, Entries, Verdict
from pipespec_model.sampling import Sampling
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import StepRecord

from .forced import Draws
from .reading import ModelReader
from .stopping import Stops
from .watch import Pulse
from .worker import Job, Outcome

PROBES = 4  # of an idle peer within the second half of the patience
STALLED_S = 4  # in the middle of a message

_ARRAY = np.empty(0, dtype=np.int64)
_KINDS: tuple[Any, ...] = (
    Drafts, Entries, Verdict, Job, Outcome, Pulse, StepRecord, Agreement, Sampling, Draws, Stops, ModelReader,
    PipelineSpec, StageSpec, LinkSpec,
    frozenset, np.ndarray, np.dtype, _ARRAY.__reduce_ex__(4)[0], _ARRAY.__reduce_ex__(5)[0])
MAY_ARRIVE = {(kind.__module__, kind.__qualname__): kind for kind in _KINDS}


class Link(connection.Connection):
    """One end; takes the socket over."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", STALLED_S, 0))
        # A description of its own, so that the thread may send while the other end of this one is waited for.
        self._out = end.dup()
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._broken = False
        super().__init__(end.detach())

    def recv(self) -> Any:
        """The next message; raises EOFError where the other end has closed."""
        self.poll(None)  # reading gives up where a message stalls, not where none has begun
        return loads(self.recv_bytes())

    def _recv(self, size: int, read: Any = os.read) -> io.BytesIO:
        try:
            return super()._recv(size, read)  # type: ignore[misc]
        except EOFError:
            raise
        except OSError as error:
            # Reading stops short of a whole message at the end of the stream too.
            raise ConnectionResetError(*error.args) from None

    def _send(self, data: Any, write: Any = None) -> None:
        with self._lock:
            if self._broken:
                raise BrokenPipeError
            sent = 0 if self._waiting else self._send_now(data)
            if sent == len(data):
                return
            self._waiting.append(bytes(data[sent:]))
            if len(self._waiting) == 1:
                threading.Thread(target=self._send_rest, daemon=True).start()

    def _send_now(self, data: Any) -> int:
        try:
            return self._out.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._broken = True
            raise BrokenPipeError(*error.args) from None

    def _send_rest(self) -> None:
        while True:
            try:
                self._out.sendall(self._waiting[0], socket.MSG_NOSIGNAL)
            except OSError:
                self._broken = True
                return
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def close(self) -> None:
        self._out.close()
        super().close()


def keep_alive(end: socket.socket, patience_s: float) -> None:
    """Have the kernel ask an idle peer for a sign of life: a host that answers nothing for ``patience_s`` is gone,
    whether or not something was sent to it."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": max(1, round(patience_s / 2)), "TCP_KEEPINTVL": max(1, round(patience_s / 2 / PROBES)),
               "TCP_KEEPCNT": PROBES, "TCP_USER_TIMEOUT": round(1000 * patience_s)}
    for name, value in options.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return MAY_ARRIVE[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a message") from None


def loads(data: bytes | memoryview) -> Any:
    """A message from another host; raises pickle.UnpicklingError for what is none."""
    return _Reader(io.BytesIO(data)).load()


def _reduce(link: Link) -> tuple[Any, ...]:
    return _received, (reduction.DupFd(link.fileno()),)


def _received(handle: Any) -> Link:
    return Link(socket.socket(fileno=handle.detach()))


reduction.register(Link, _reduce)


