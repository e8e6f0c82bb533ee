"""What hosts are joined by: a link that never waits and takes nothing foreign, a delay, and clocks held together."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import chain, stage, table

from execute.clocks import Alignment, Reading, read
from execute.delay import delayed
from execute.forced import Draws
from execute.hosts import Hosts
from execute.link import Link, loads
from execute.reading import ModelReader
from execute.rendezvous import Joined, Machine, Rank, address_towards, greeting, join, launched
from execute.stopping import Stops
from execute.watch import Pulse
from execute.worker import Job, Outcome
from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError, StageError
from pipespec_model.messages import Drafts, Entries, Verdict
from pipespec_model.sampling import Sampling
from pipespec_model.trace import StepRecord


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    return a, b


# -- messages ---------------------------------------------------------------------------------------

STEP = StepRecord(0, 1, "verify", 0.5, 0.1, 3, 6, 2, 1, 1, 2, 0)


def test_every_message_of_the_protocol_arrives_as_it_was() -> None:
    """Commands, answers and what neighbours say survive the way, arrays of tokens among them."""
    stages, agreement = table([[1, 2], [1, 2]])
    pipeline = chain("pipelined", stages)
    job = Job(1, 0, 2.5, (1, 2), 9, frozenset({7}), draws=Draws(Sampling(temperature=0.5)))
    messages = [
        (3, Drafts(1, 2, 3, (4, 5), False, 6)), (3, Verdict(1, 2, 3, (4,), True, 5)), (3, Entries(0, 4, (1, 2))),
        ("configure", pipeline, 1, (0, 1)), ("prompt", job), ("seat", stages[0], {1: "s1"}, None),
        ("pulse", 1, Pulse(1, 2, 3)), ("closed", Outcome(1, {"steps": 2}, [STEP], [1, 2], 0.6)), ("exit", 0),
        ("stops", Stops(("end",), ModelReader("m")))]
    a, b = map(Link, pair())
    with a, b:
        for message in messages:
            a.send(message)
            assert b.recv() == message
        a.send(("prompt", replace(job, agreement=agreement)))
        arrived = b.recv()[1].agreement
    assert isinstance(arrived, Agreement)
    assert np.array_equal(arrived.tokens, agreement.tokens)


@pytest.mark.parametrize("foreign", [os.system, os.getcwd, eval, Link, Agreement.select, np.load])
def test_a_message_can_call_nothing(foreign: object) -> None:
    """Whatever names a function, or a class that is no part of the protocol, is refused before it is made."""
    with pytest.raises(pickle.UnpicklingError, match="is no part of a message"):
        loads(pickle.dumps(foreign))


def test_a_crafted_message_does_not_run() -> None:
    """The usual attack on a pickle, a class that reduces to a call, calls nothing."""
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return os.putenv, ("PIPESPEC_ATTACKED", "1")

    with pytest.raises(pickle.UnpicklingError, match=r"putenv is no part of a message"):
        loads(pickle.dumps(Attack()))


# -- links ------------------------------------------------------------------------------------------


def test_sending_never_waits_for_a_reader() -> None:
    """Far more than the kernel buffers is sent before anything is read, and arrives whole and in order."""
    a, b = map(Link, pair())
    with a, b:
        blocks = [(i, (i,) * 50_000) for i in range(100)]
        sender = threading.Thread(target=lambda: [a.send(block) for block in blocks], daemon=True)
        sender.start()
        sender.join(timeout=30)
        assert not sender.is_alive()
        a.send("last")
        assert [b.recv() for _ in blocks] == blocks
        assert b.recv() == "last"


def test_a_link_that_ends_says_so_on_both_sides() -> None:
    """A closed peer is the end of the stream for a reader, and soon a broken pipe for a writer."""
    def send_on(link: Link) -> None:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            link.send("anything")

    a, b = map(Link, pair())
    with a:
        b.close()
        with pytest.raises(EOFError):
            a.recv()
        with pytest.raises(BrokenPipeError):
            send_on(a)


def test_a_torn_message_is_a_broken_connection() -> None:
    """A peer that goes in the middle of a message is lost like any other, not a message."""
    raw, end = pair()
    with raw, Link(end) as link:
        raw.sendall((100).to_bytes(4, "big") + b"half")
        raw.close()
        with pytest.raises(ConnectionResetError):
            link.recv()


def test_a_delay_holds_what_arrives_and_keeps_its_order() -> None:
    """Nothing is there before its time, everything is afterwards, and what is sent goes at once."""
    a, b = pair()
    with Link(a) as far, Link(delayed(b, 0.15)) as near:
        sent = time.monotonic()
        for i in range(5):
            far.send(i)
        assert [near.recv() for _ in range(5)] == list(range(5))
        assert time.monotonic() - sent >= 0.15
        near.send("back")
        assert far.recv() == "back"
        far.close()
        with pytest.raises(EOFError):
            near.recv()


# -- clocks -----------------------------------------------------------------------------------------


def test_a_clock_is_found_within_the_stated_uncertainty() -> None:
    """Whatever the way there and back takes, and however unevenly: the true offset is never outside, and the
    quickest round decides how sure it is."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        now, truth = [100.0], float(rng.normal(scale=1000))
        ways = rng.exponential(0.02, size=(100, 2))
        rounds = iter(ways)
        seen: list[float] = []

        def ask(now: list[float] = now, truth: float = truth, rounds=rounds, seen: list[float] = seen) -> float:
            there, back = next(rounds)
            now[0] += there
            answer = now[0] - truth
            now[0] += back
            seen.append(there + back)
            return answer

        found = read(ask, clock=lambda now=now: now[0])
        assert abs(found.offset_s - truth) <= found.uncertainty_s + 1e-9
        assert found.uncertainty_s == pytest.approx(min(seen) / 2)


def test_events_between_two_readings_follow_the_drift() -> None:
    """A clock that gains 1 ms in 10 s: events at every moment come out where they were, to the microsecond."""
    rate, start = 1 + 1e-4, 500.0

    def there(here: float) -> float:
        return start + rate * (here - 20.0)

    alignment = Alignment(*(Reading(at, at - there(at), 0.0) for at in (20.0, 30.0)))
    asked = 21.0
    stage_clock = asked - alignment.before.offset_s
    moments = [asked + 0.5 * i for i in range(16)]
    steps = [replace(STEP, start_s=there(moment) - stage_clock, duration_s=0.0) for moment in moments]
    told = Outcome(1, {}, steps, [], steps[-1].start_s)
    aligned = alignment.outcome(told, asked)
    assert [step.start_s for step in aligned.steps] == pytest.approx([m - asked for m in moments], abs=1e-6)
    assert aligned.ended_s == aligned.steps[-1].start_s
    raw = [abs(step.start_s - (moment - asked)) for step, moment in zip(steps, moments, strict=True)]
    assert max(raw) > 5e-4  # what the mapping mends


# -- who may come in --------------------------------------------------------------------------------


class Keys:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n", (1 << 31).to_bytes(4, "big"),
                                   greeting(Rank(1, 2, "127.0.0.1", 1), "control", "wrong")])
def test_a_stranger_is_shown_out(hello: bytes) -> None:
    """A connection that does not know the secret is closed, and those that do are still waited for; everything
    listens on loopback alone."""
    store, rank = Keys(), Rank(0, 2, "127.0.0.1", 1)
    failed: list[str] = []

    def lead() -> None:
        try:
            join(rank, store, join_s=0.4, patience_s=5)
        except StageError as error:
            failed.append(str(error))

    thread = threading.Thread(target=lead)
    thread.start()
    while "address/0" not in store.values:
        time.sleep(0.01)
    host, port = store.get("address/0").decode().strip("[]").replace('"', "").split(", ")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(len(hello).to_bytes(4, "big") + hello if hello.startswith(b"{") else hello)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    thread.join()
    assert failed == ["rank 0: rank 1 did not arrive within 0.4 s: is the command running on every host?"]


def test_the_environment_decides() -> None:
    """Without torchrun's variables, or with one process, a run is on its own; nonsense in them is bad input."""
    given = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert launched({}) is None
    assert launched({**given, "WORLD_SIZE": "1"}) is None
    assert launched({name: value for name, value in given.items() if name != "MASTER_ADDR"}) is None
    assert launched(given) == Rank(1, 3, "10.0.0.1", 29500)
    with pytest.raises(InputError, match="RANK, WORLD_SIZE and MASTER_PORT must be numbers"):
        launched({**given, "RANK": "first"})
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(InputError, match="--bind must be an address of this host"):
        join(Rank(0, 2, "127.0.0.1", 1), Keys(), bind="192.0.2.1", join_s=0.1, patience_s=1)


# -- places -----------------------------------------------------------------------------------------


def joined(*machines: Machine) -> Hosts:
    rank = Rank(0, len(machines), "127.0.0.1", 1)
    return Hosts(Joined(rank, machines=dict(enumerate(machines))))


def test_stages_get_cores_of_their_own_host() -> None:
    """Two stages of one host share its cores out; one of another host has that one's, whatever their numbers."""
    a, b = Machine("a", (0, 1, 2)), Machine("b", (0, 1))
    stages = [stage("s0"), stage("s1", threads=2), stage("s2", threads=2)]
    placed = joined(a, a, b).place(chain("pipelined", stages), scripted=False)
    assert [item.cores for item in placed.stages] == [(2,), (0, 1), (0, 1)]
    with pytest.raises(InputError, match="must sum to <= 2 cores, got 4"):
        joined(a, b, b).place(chain("pipelined", stages), scripted=False)


def test_ranks_and_stages_must_match() -> None:
    """One rank a stage; a drafter that lives on its verifier's cache cannot be elsewhere."""
    hosts = joined(Machine("a", (0,)), Machine("b", (0,)))
    with pytest.raises(InputError, match="number of ranks must be 3, one a stage, got 2"):
        hosts.check([stage("s0"), stage("s1"), stage("s2")])
    with pytest.raises(InputError, match="stage 'c' with drafter clasp must be on one host with its verifier"):
        hosts.check([stage("c", drafter="clasp"), stage("t")])
