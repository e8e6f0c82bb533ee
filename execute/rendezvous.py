"""How the processes of a run find each other on several hosts: one rank a stage, the drafter's first.

``torchrun`` gives every process its number, how many there are, and the address of a small store that all can read
and write.  Through it they learn each other's addresses and a secret; every rank then has a connection to the first
one, which leads, and to the ranks of its neighbours.

Nothing listens on more than one address: the loopback address where the first rank's is one, otherwise the address
from which this host reaches the first rank's, or what ``bind`` says.  A connection that does not show the secret is
closed; the secret keeps strangers and other runs out, and is no safer than the store.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from pipespec_model.errors import InputError, StageError

from .delay import delayed
from .host import available_cores, versions
from .link import Link, keep_alive

JOIN_S = 60.0
GREETING_S = 2.0
MOST_GREETING = 1 << 16  # bytes
LOOK_S = 0.02
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """This process: number ``number`` of ``count``; the store is at ``address``, ``port``."""

    number: int
    count: int
    address: str
    port: int
    attempt: str = "0"  # torchrun may start all ranks again, with the store of before


class Store(Protocol):
    """What ``torch.distributed`` calls a store, as far as it is needed."""

    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Machine:
    """A rank's host: its name, and the cores that the rank may use."""

    name: str
    cores: tuple[int, ...]


@dataclass
class Joined:
    """The connections of one rank, by the rank at the other end.

    control : to the first rank, or on that one to every other
    machines : of every rank; known to the first one
    """

    rank: Rank
    control: dict[int, Link] = field(default_factory=dict)
    neighbours: dict[int, Link] = field(default_factory=dict)
    machines: dict[int, Machine] = field(default_factory=dict)


def launched(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that torchrun, or whoever sets the same variables, gave this process; None for a run on its own."""
    if not all(environment.get(name) for name in VARIABLES) or environment["WORLD_SIZE"] == "1":
        return None
    try:
        number, count, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError:
        raise InputError("RANK, WORLD_SIZE and MASTER_PORT", "must be numbers") from None
    return Rank(number, count, environment["MASTER_ADDR"], port, environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def open_store(rank: Rank, join_s: float = JOIN_S, environment: Mapping[str, str] = os.environ) -> Store:
    """torchrun's store, or one that the first rank opens where there is none."""
    from torch.distributed import PrefixStore, TCPStore

    timeout = timedelta(seconds=join_s)
    serves = rank.number == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves:
        try:
            listener = socket.create_server((rank.address, rank.port), family=_family(rank.address))
        except OSError as error:
            raise InputError(f"MASTER_ADDR:MASTER_PORT {rank.address}:{rank.port}",
                             f"must be a free address of the first rank's host ({error.strerror})") from None
        store = TCPStore(rank.address, rank.port, rank.count, True, timeout, wait_for_workers=False,
                         master_listen_fd=listener.detach())
    else:
        _await_port(rank, join_s)
        store = TCPStore(rank.address, rank.port, rank.count, False, timeout, wait_for_workers=False)
    return PrefixStore(f"pipespec/{rank.attempt}", store)


def _await_port(rank: Rank, join_s: float) -> None:
    """Torch reports a store that is not there by a page of its own stack."""
    deadline = time.monotonic() + join_s
    while True:
        try:
            socket.create_connection((rank.address, rank.port), timeout=join_s).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise StageError(f"rank {rank.number}: the first rank's host at {rank.address}:{rank.port} did not "
                                 f"answer within {join_s:g} s ({error.strerror or error})") from None
            time.sleep(LOOK_S)
        else:
            return


def join(rank: Rank, store: Store, *, bind: str | None = None, join_s: float = JOIN_S, patience_s: float,
         delay_s: float = 0.0) -> Joined:
    """Meet the other ranks.  Raises StageError naming those that did not come within ``join_s`` seconds.

    bind : this host's address for the others
    patience_s : silence of another host that ends a connection to it
    delay_s : added to the way of every message from a neighbour
    """
    deadline = time.monotonic() + join_s
    address = bind or address_towards(rank.address)
    try:
        listener = socket.create_server((address, 0), family=_family(address))
    except OSError as error:
        raise InputError("--bind", f"must be an address of this host ({error.strerror})", address) from None
    joined = Joined(rank, machines={0: _here()} if rank.number == 0 else {})

    def keep(end: socket.socket, other: int, kind: str) -> None:
        keep_alive(end, patience_s)
        if kind == "control":
            joined.control[other] = Link(end)
        else:
            joined.neighbours[other] = Link(delayed(end, delay_s))

    with listener:
        if rank.number == 0:
            store.set("secret", secrets.token_hex(16))
        store.set(f"address/{rank.number}", json.dumps(listener.getsockname()[:2]))
        secret = _get(rank, store, "secret", deadline, join_s)
        for other, kind in ((0, "control"), (rank.number - 1, "neighbour")) if rank.number else ():
            where = json.loads(_get(rank, store, f"address/{other}", deadline, join_s))
            keep(_reach(rank, other, where, deadline, greeting(rank, kind, secret)), other, kind)
        wanted = {(other, "control") for other in range(1, rank.count)} if rank.number == 0 else set()
        if rank.number + 1 < rank.count:
            wanted.add((rank.number + 1, "neighbour"))
        while wanted:
            end, other, kind, machine = _accept(listener, secret, deadline, lambda: _missing(rank, wanted, join_s))
            if (other, kind) in wanted:
                wanted.discard((other, kind))
                joined.machines[other] = machine
                keep(end, other, kind)
    return joined


def address_towards(host: str) -> str:
    """This host's address on the way to ``host``; loopback where that is.  No packet is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = min(found, key=lambda item: item[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError("MASTER_ADDR", f"must be a host that can be found ({error.strerror})", host) from None


def _family(address: str) -> socket.AddressFamily:
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return socket.AF_INET
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def _here() -> Machine:
    return Machine(platform.node(), tuple(available_cores()))


def greeting(rank: Rank, kind: str, secret: str) -> bytes:
    """The first message on every connection."""
    here = _here()
    return json.dumps({"secret": secret, "rank": rank.number, "kind": kind, "name": here.name, "cores": here.cores,
                       "version": versions()["pipespec"]}).encode()


def _get(rank: Rank, store: Store, key: str, deadline: float, join_s: float) -> str:
    other = int(key.partition("/")[2] or 0)
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise StageError(f"rank {rank.number}: rank {other} did not arrive within {join_s:g} s")
        time.sleep(LOOK_S)
    return store.get(key).decode()


def _reach(rank: Rank, other: int, where: list[Any], deadline: float, hello: bytes) -> socket.socket:
    try:
        end = socket.create_connection((where[0], where[1]), timeout=max(deadline - time.monotonic(), LOOK_S))
        end.sendall(len(hello).to_bytes(4, "big") + hello)
    except OSError as error:
        raise StageError(f"rank {rank.number} cannot reach rank {other} at {where[0]}:{where[1]} "
                         f"({error.strerror or error}): give its host's address there with --bind") from None
    return end


def _accept(listener: socket.socket, secret: str, deadline: float, missing: Callable[[], str],
            ) -> tuple[socket.socket, int, str, Machine]:
    """The next connection that shows the secret: its socket, rank, kind and host."""
    while True:
        listener.settimeout(max(deadline - time.monotonic(), LOOK_S))
        try:
            end, _ = listener.accept()
        except TimeoutError:
            raise StageError(missing()) from None
        end.settimeout(GREETING_S)
        try:
            said = json.loads(_read(end, int.from_bytes(_read(end, 4), "big")))
            if not hmac.compare_digest(str(said["secret"]), secret):
                raise ValueError("another run's")
            other, kind, machine = int(said["rank"]), str(said["kind"]), Machine(said["name"], tuple(said["cores"]))
        except (OSError, ValueError, KeyError, TypeError):
            end.close()
            continue
        if said["version"] != versions()["pipespec"]:
            raise InputError(f"pipespec of rank {other}", f"must be version {versions()['pipespec']}, as here",
                             said["version"])
        return end, other, kind, machine


def _read(end: socket.socket, size: int) -> bytes:
    data, size = b"", min(size, MOST_GREETING)
    while len(data) < size and (more := end.recv(size - len(data))):
        data += more
    return data


def _missing(rank: Rank, wanted: set[tuple[int, str]], join_s: float) -> str:
    ranks = sorted({other for other, _ in wanted})
    word = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"rank {rank.number}: {word} did not arrive within {join_s:g} s: is the command running on every host?"
