"""Stages on several hosts: the same tokens and the same trace as on one, by links that a network may end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import STRATEGIES, alive, chain, rows_of, table

from execute.__main__ import main
from pipespec_model.agreement import Agreement
from pipespec_model.latency import Constant
from pipespec_model.metrics import LinkFigures, booked_links, mean_acceptance_length
from pipespec_model.profile import Costs, Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import load_trace
from simulate.engine import PromptRun

HERE = Path(__file__).parent
NOTICED_S = 5.0
PATIENCE_S = 2.0
PLENTY = 3000  # tokens: no run gets so far before its fault


@dataclass
class Run:
    """The processes of a run, and what it left."""

    processes: list[subprocess.Popen[str]]
    out: Path

    def end(self, within_s: float = 60.0) -> list[int]:
        """Every rank's status."""
        deadline = time.monotonic() + within_s
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def said(self, rank: int = 0) -> tuple[str, str]:
        return self.processes[rank].stdout.read(), self.processes[rank].stderr.read()

    def since_strike(self) -> float:
        """Seconds from the fault until now."""
        return time.monotonic() - float((self.out / "mark").read_text(encoding="utf-8"))


def settings(out: Path, **more: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    (out / "store").mkdir(exist_ok=True)
    return {"out": str(out), "store": str(out / "store"), "tokens": 30, "patterns": ["110", "10"],
            "step_s": [0.002, 0.003, 0.005], "runs": [["pipelined", 0]], **more}


@contextmanager
def ranks(options: dict[str, Any], *, only: tuple[int, ...] | None = None, address: str = "127.0.0.1",
          inside: tuple[tuple[str, ...], ...] | None = None) -> Iterator[Run]:
    """Start the ranks as torchrun would; whatever is left of them at the end is killed.

    only : the ranks that are started; None = all
    inside : a command before each rank's own
    """
    count = len(options["step_s"])
    started = []
    for rank in range(count) if only is None else only:
        environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "RANK": str(rank),
                       "WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": "1"}
        started.append(subprocess.Popen(
            [*(inside[rank] if inside else ()), sys.executable, str(HERE / "ranks.py"), json.dumps(options)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        yield Run(started, Path(options["out"]))
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def until(what: Any, within_s: float = NOTICED_S) -> bool:
    deadline = time.monotonic() + within_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(what())


# -- runs -------------------------------------------------------------------------------------------


def test_the_run_is_that_of_one_machine_whatever_the_clocks_say(tmp_path: Path) -> None:
    """Three ranks, every strategy: the target's tokens, every draft accounted for, and one clock in the trace though
    each rank's own stands elsewhere: the shift is found to within the stated uncertainty."""
    runs = [[strategy, 0 if strategy.startswith("pipelined") else 3] for strategy in STRATEGIES]
    shift_s = {"1": 1234.5, "2": -77.0}
    with ranks(settings(tmp_path / "out", runs=runs, shift_s=shift_s)) as run:
        assert run.end() == [0, 0, 0]
        assert run.said(0)[0].splitlines()[-1] == "done"
        assert [run.said(rank) for rank in (1, 2)] == [("", ""), ("", "")]
    for number, (strategy, _) in enumerate(runs):
        trace, torn = load_trace(tmp_path / "out" / f"{number}.jsonl")
        assert torn is None
        record = trace.prompts[0]
        assert record.tokens == list(range(100, 130)), strategy
        assert mean_acceptance_length(trace) >= 1
        for link in booked_links(PipelineSpec.from_dict(trace.pipeline)):
            assert LinkFigures.of(*record.counters[link : link + 2]).conserved
        for clock in record.clocks:
            for found in (clock["before_s"], clock["after_s"]):
                assert abs(found + shift_s[str(int(clock["stage"]))]) <= clock["uncertainty_s"] < 0.1
        slack = max(clock["uncertainty_s"] for clock in record.clocks)
        ends = {stage: [s.start_s + s.duration_s for s in trace.steps if s.stage == stage] for stage in range(3)}
        assert record.total_s == pytest.approx(ends[2][-1])
        assert all(-slack <= step.start_s < record.total_s + slack for step in trace.steps)
        # What a stage verifies had been drafted: effects follow causes only on one clock.
        assert all(any(end <= step.start_s + 2 * slack for end in ends[step.stage - 1])
                   for step in trace.steps if step.drafts)


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    """Two ranks on loopback."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *command], env=environment, capture_output=True, text=True, timeout=120,
                          check=False)


@pytest.mark.parametrize("strike", [None, (1, "kill", 20)])
def test_under_torchrun(tmp_path: Path, strike: tuple[int, str, int] | None) -> None:
    """torchrun's variables and store are all it takes; the first rank alone speaks, and names a rank that was killed
    though torchrun at once ends the others."""
    options = settings(tmp_path / "out", step_s=[0.002, 0.005], patterns=["110"])
    del options["store"]
    if strike:
        options |= {"strike": strike, "tokens": PLENTY}
    done = torchrun(str(HERE / "ranks.py"), json.dumps(options))
    if strike is None:
        assert (done.returncode, done.stdout.splitlines()) == (0, ["run 0", "done"]), done.stderr
        assert load_trace(tmp_path / "out" / "0.jsonl")[0].prompts[0].tokens == list(range(100, 130))
    else:
        assert done.returncode == 1
        said = [line for line in done.stderr.splitlines() if line.startswith("ranks: ")]
        assert len(said) == 1, done.stderr
        assert said[0].startswith("ranks: stage 's1' on rank 1 (")
        assert said[0].endswith("is gone: its connection ended, while working on prompt 'p'")


@pytest.mark.full
def test_the_command_gives_the_text_of_one_machine(tmp_path: Path) -> None:
    """`execute run` with two models of the built-in family, started by torchrun and by itself: the same tokens,
    printed once, and a trace that says which host each stage was on."""
    file = tmp_path / "pipeline.yaml"
    file.write_text("strategy: pipelined\nstages: [{name: small, model: tiny-s}, {name: large, model: tiny-l}]\n"
                    "links: [{lookahead: 1}]\n", encoding="utf-8")
    command = ["execute", "run", str(file), "--prompt", "def read_lines(path):", "--max-new-tokens", "24", "--json"]
    apart = torchrun("-m", "pipespec_model", *command, "--out", str(tmp_path / "out"))
    assert apart.returncode == 0, apart.stderr
    together = subprocess.run([sys.executable, "-m", "pipespec_model", *command], capture_output=True, text=True,
                              cwd=HERE.parent, check=True)
    tokens = [json.loads(done.stdout)["prompts"][0]["tokens"] for done in (apart, together)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 24
    trace, _ = load_trace(tmp_path / "out" / "trace.jsonl")
    assert set(trace.host["hosts"]) == {"small", "large"}
    assert trace.prompts[0].clocks[0]["uncertainty_s"] > 0


@pytest.mark.parametrize("command", ["calibrate", "bench"])
def test_what_has_no_ranks_refuses_them(command: str, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """A calibration that torchrun starts twice would be two, on the same cores and in the same folder."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main([command, "pipeline.yaml"])
    assert capsys.readouterr().err == (
        f"pipespec execute: {command} must be started by itself, not by torchrun: only execute run has ranks\n")


# -- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "kind", "words"), [
    (1, "kill", "stage 's1' on rank 1 ({host}) is gone: its connection ended"),
    (2, "kill", "stage 's2' on rank 2 ({host}) is gone: its connection ended"),
    (0, "kill", "stage 's0' ended with exit code -9 (SIGKILL, perhaps for want of memory)"),
    (1, "raise", "the kernel could not be launched"),
    (1, "close", "lost its link to stage"),
    (2, "hang", "stage 's2' hangs: no sign of it for"),
])
def test_a_lost_rank_is_named_and_nobody_stays(tmp_path: Path, victim: int, kind: str, words: str) -> None:
    """Killed, failed, cut off or hung: one line that names stage, prompt and cause within seconds, every rank ends
    with the run's status, and none is left."""
    with ranks(settings(tmp_path / "out", tokens=PLENTY, strike=(victim, kind, 30), patience_s=PATIENCE_S)) as run:
        assert run.processes[0].wait(60) == 2
        assert run.since_strike() < NOTICED_S
        # A rank whose step never ends is given two seconds after that.
        statuses = run.end(NOTICED_S)
        assert statuses == [2, *(-9 if (victim, kind) == (rank, "kill") else 2 for rank in (1, 2))]
        _, error = run.said(0)
        assert words.format(host=os.uname().nodename) in error
        assert "while working on prompt 'p'" in error
        assert len(error.splitlines()) == 1
        assert [run.said(rank) for rank in (1, 2)] == [("", ""), ("", "")]


def test_every_rank_ends_with_the_first(tmp_path: Path) -> None:
    """When the first rank is killed its own stage and all other ranks end by themselves."""
    with ranks(settings(tmp_path / "out", tokens=PLENTY)) as run:
        assert run.processes[0].stdout.readline() == "run 0\n"
        own = children(run.processes[0].pid)
        assert own
        run.processes[0].kill()
        assert run.end(NOTICED_S) == [-9, 2, 2]
        assert until(lambda: not any(alive(pid) for pid in own))


def test_an_interrupt_ends_all_ranks_alike(tmp_path: Path, interruptible: None) -> None:
    """Ctrl-C, which torchrun passes to every rank: status 130 everywhere, and one line from the first."""
    with ranks(settings(tmp_path / "out", tokens=PLENTY)) as run:
        assert run.processes[0].stdout.readline() == "run 0\n"
        time.sleep(0.1)
        for process in run.processes:
            process.send_signal(signal.SIGINT)
        assert run.end(NOTICED_S) == [130, 130, 130]
        assert [run.said(rank)[1] for rank in range(3)] == ["ranks: interrupted; what was finished is kept\n", "", ""]


@pytest.mark.parametrize(("present", "words"), [
    ((0,), "rank 0: ranks 1, 2 did not arrive within 0.3 s: is the command running on every host?"),
    ((0, 2), "rank 0: rank 1 did not arrive within 0.3 s: is the command running on every host?"),
    ((1,), "rank 1: rank 0 did not arrive within 0.3 s"),
])
def test_a_rank_that_never_arrives_is_named(tmp_path: Path, present: tuple[int, ...], words: str) -> None:
    """Those that wait say for whom, within the time that was given."""
    with ranks(settings(tmp_path / "out", join_s=0.3), only=present) as run:
        assert all(status == 2 for status in run.end(20))
        assert run.said(0)[1] == f"ranks: {words}\n"


# -- the simulator ----------------------------------------------------------------------------------


def predicted(strategy: str, lookahead: int, step_s: list[float], pattern: str, tokens: int, delay_s: float) -> float:
    """Seconds of the same prompt in the simulator, which is told the delay as its hand-over."""
    stages, agreement = table(rows_of(list(range(100, 100 + tokens)), pattern))
    profile = Profile(latency={s.name: StageLatency(Constant(t)) for s, t in zip(stages, step_s, strict=True)},
                      costs={"*": Costs(handover_s=delay_s)})
    whole = Agreement(agreement.prompt, agreement.prompt_length, agreement.names, agreement.tokens, budget=tokens)
    return PromptRun(chain(strategy, stages, lookahead=lookahead), profile, whole).run()[0].total_s


# No multiples of each other or of the delays: where two events fall on one instant a real run is decided by
# microseconds, and with 20 and 50 ms a draft that comes 0.1 ms late costs a step (18% of the throughput at 5 ms).
STEP_S = [0.0213, 0.0517]
RUNS = [["pipelined", 0], ["pipelined", 2], ["speculative", 4], ["pipelined blocking", 2]]


@pytest.mark.bench
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05])
def test_the_simulator_knows_what_a_link_costs(tmp_path: Path, delay_s: float) -> None:
    """Given the link's delay, simulated throughput is within 5% of the measured one, for every strategy."""
    pattern, tokens = "1110110", 30
    options = settings(tmp_path / "out", runs=RUNS, step_s=STEP_S, patterns=[pattern], tokens=tokens, delay_s=delay_s)
    with ranks(options) as run:
        assert run.end(120) == [0, 0]
    for number, (strategy, lookahead) in enumerate(RUNS):
        measured = load_trace(tmp_path / "out" / f"{number}.jsonl")[0].prompts[0].total_s
        expected = predicted(strategy, lookahead, STEP_S, pattern, tokens, delay_s)
        print(f"| {1000 * delay_s:.0f} | {strategy} | {lookahead} | {tokens / measured:.2f} | "
              f"{tokens / expected:.2f} | {100 * (measured / expected - 1):+.1f}% |")
        assert tokens / expected == pytest.approx(tokens / measured, rel=0.05)


# -- two network namespaces -------------------------------------------------------------------------


def allowed(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two, joined by a cable: ``10.231.7.1`` and ``10.231.7.2``."""
    names = [f"pipespec-{os.getpid()}-{i}" for i in range(2)]
    if not allowed("ip", "netns", "add", names[0]):
        pytest.skip("network namespaces are not permitted here")
    try:
        subprocess.run(["ip", "netns", "add", names[1]], check=True)
        subprocess.run(["ip", "-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable",
                        "netns", names[1]], check=True)
        for i, name in enumerate(names):
            for what in (["addr", "add", f"10.231.7.{i + 1}/24", "dev", "cable"], ["link", "set", "cable", "up"],
                         ["link", "set", "lo", "up"]):
                subprocess.run(["ip", "-n", name, *what], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_two_hosts_that_lose_each_other(tmp_path: Path, namespaces: list[str]) -> None:
    """Each rank in a network of its own: it runs; when the cable is cut in mid-run, and no connection ends, both
    sides notice within the patience and end."""
    inside = tuple(("ip", "netns", "exec", name) for name in namespaces)
    two = {"step_s": [0.002, 0.005], "patterns": ["110"], "patience_s": PATIENCE_S}
    with ranks(settings(tmp_path / "out", **two), address="10.231.7.1", inside=inside) as run:
        assert run.end() == [0, 0]
    assert load_trace(tmp_path / "out" / "0.jsonl")[0].prompts[0].tokens == list(range(100, 130))
    with ranks(settings(tmp_path / "cut", tokens=PLENTY, **two), address="10.231.7.1", inside=inside) as run:
        assert run.processes[0].stdout.readline() == "run 0\n"
        time.sleep(0.3)
        subprocess.run(["ip", "-n", namespaces[0], "link", "set", "cable", "down"], check=True)
        assert run.end(PATIENCE_S + NOTICED_S) == [2, 2]
        _, error = run.said(0)
        assert "stage 's" in error
        assert "while working on prompt 'p'" in error
        assert run.said(1) == ("", "")


@pytest.mark.bench
def test_the_simulator_knows_a_slow_network(tmp_path: Path, namespaces: list[str]) -> None:
    """As with an added delay, on a network that the kernel slows down by 20 ms each way."""
    for name in namespaces:
        if not allowed("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", "root", "netem", "delay",
                       "20ms"):
            pytest.skip("this kernel has no netem")
    options = settings(tmp_path / "out", runs=[["pipelined", 0]], step_s=STEP_S, patterns=["1110110"])
    with ranks(options, address="10.231.7.1", inside=tuple(("ip", "netns", "exec", n) for n in namespaces)) as run:
        assert run.end(120) == [0, 0]
    measured = load_trace(tmp_path / "out" / "0.jsonl")[0].prompts[0].total_s - 0.02  # the request's own way
    assert predicted("pipelined", 0, STEP_S, "1110110", 30, 0.02) == pytest.approx(measured, rel=0.05)
