"""What a message between two stages takes on this machine, by three ways (docs/hosts.md).

    python scripts/link_latency.py [--rounds 2000]

Two processes hand one message of 16 drafts back and forth: over a pipe, as stages of one machine do; over a link of
execute/link.py on loopback, as ranks do; and by torch.distributed's gloo, length first and then bytes, the best case
for it: both ends do nothing but wait for the next message.  Prints the median and the 99th percentile of half a
round, in microseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from execute.link import Link
from pipespec_model.messages import Drafts

MESSAGE = pickle.dumps((1, Drafts(3, 70, 120, tuple(range(40_000, 40_016)), False, 60)))


def ends(other: Any) -> tuple[Callable[[bytes], None], Callable[[], bytes]]:
    """How to send and how to receive."""
    if isinstance(other, Connection):
        return other.send_bytes, other.recv_bytes
    return gloo(*other)


def gloo(rank: int, file: str) -> tuple[Callable[[bytes], None], Callable[[], bytes]]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)

    def send(data: bytes) -> None:
        distributed.send(torch.tensor([len(data)]), 1 - rank)
        distributed.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 1 - rank)

    def receive() -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        distributed.recv(length, 1 - rank)
        data = torch.empty(int(length), dtype=torch.uint8)
        distributed.recv(data, 1 - rank)
        return bytes(data.numpy())

    return send, receive


def echo(other: Any, rounds: int) -> None:
    send, receive = ends(other)
    for _ in range(rounds):
        send(receive())


def time_one(ours: Any, theirs: Any, rounds: int) -> np.ndarray:
    """Microseconds of half a round, without the first tenth."""
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(theirs, rounds), daemon=True)
    process.start()
    send, receive = ends(ours)
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        send(MESSAGE)
        receive()
        seconds.append(time.perf_counter() - begun)
    process.join()
    return 0.5e6 * np.array(seconds[rounds // 10:])


def link_pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        out = socket.create_connection(listener.getsockname())
        back, _ = listener.accept()
    for end in (out, back):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(out), Link(back)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        ways = {"pipe": multiprocessing.Pipe(), "link on loopback": link_pair(),
                "gloo": ((0, f"{folder}/gloo"), (1, f"{folder}/gloo"))}
        print(f"{len(MESSAGE)} bytes, {rounds} rounds; median and 99th percentile in µs")
        for name, (ours, theirs) in ways.items():
            found = time_one(ours, theirs, rounds)
            print(f"{name:18}{np.median(found):8.0f}{np.percentile(found, 99):8.0f}")


if __name__ == "__main__":
    main()
