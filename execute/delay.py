"""A connection that hears its peer late, as if the network were longer.  For tests and for studies of slow links.

A thread stands between the socket and its user.  What the peer sends is held until it is due; what the user sends is
passed on at once, so that with both ends delayed each way takes ``delay_s``.  Nothing sleeps in the stage's loop,
and bytes keep their order.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque

CHUNK = 1 << 16


def delayed(end: socket.socket, delay_s: float) -> socket.socket:
    """The same connection with everything that arrives ``delay_s`` seconds later; takes ``end`` over."""
    if not delay_s:
        return end
    ours, theirs = socket.socketpair()
    threading.Thread(target=_relay, args=(end, ours, delay_s), daemon=True).start()
    return theirs


def _relay(peer: socket.socket, user: socket.socket, delay_s: float) -> None:
    """Until either side closes and what it sent has been passed on."""
    held: deque[tuple[float, bytes]] = deque()
    with peer, user, selectors.DefaultSelector() as inputs:
        inputs.register(peer, selectors.EVENT_READ)
        inputs.register(user, selectors.EVENT_READ)
        while True:
            due = held[0][0] - time.monotonic() if held else None
            for key, _ in inputs.select(due if due is None else max(0.0, due)):
                data = _read(key.fileobj)
                if key.fileobj is peer:
                    held.append((time.monotonic() + delay_s, data))
                    if not data:
                        inputs.unregister(peer)
                elif not (data and _passed_on(peer, data)):
                    return
            while held and held[0][0] <= time.monotonic():
                _, data = held.popleft()
                if not (data and _passed_on(user, data)):
                    return


def _read(end: object) -> bytes:
    assert isinstance(end, socket.socket)
    try:
        return end.recv(CHUNK)
    except OSError:
        return b""


def _passed_on(end: socket.socket, data: bytes) -> bool:
    try:
        end.sendall(data)
    except OSError:
        return False
    return True
