"""A stage that dies, fails or cannot load ends the run at once, names itself and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import STRATEGIES, alive, chain, rows_of, stage, table, write_tiny_run

from execute.fleet import Fleet, new_trace
from execute.prompts import Prompt
from execute.scripted import Script
from pipespec_model.errors import InputError, StageError
from pipespec_model.latency import Constant
from pipespec_model.trace import TraceWriter, load_trace

ANSWER = list(range(100, 400))
PROMPT = Prompt("long", "", tokens=(1, 2, 3))
NOTICED_S = 5.0


def scripts(stages, seconds: float = 0.01, **fail_at: int) -> dict[str, Script]:
    return {s.name: Script(Constant(seconds), fail_at=fail_at.get(s.name)) for s in stages}


def all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("victim", ["s0", "s1", "s2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_stage_is_named_and_finished_prompts_are_kept(strategy: str, victim: str, tmp_path: Path) -> None:
    """SIGKILL in mid-run: an error naming stage and exit code within seconds, no orphan, whole records."""
    stages, agreement = table(rows_of(ANSWER, "110", "10"))
    pipeline = chain(strategy, stages)
    with Fleet(stages, scripts=scripts(stages)) as fleet:
        pids = [process.pid for process in fleet.processes.values()]
        trace = new_trace(fleet.configure(pipeline), emulated=True)
        with TraceWriter(tmp_path / "t.jsonl", trace) as writer:
            writer.append(*fleet.run_prompt(pipeline, PROMPT, max_new_tokens=8, agreement=agreement))
            timer = threading.Timer(0.2, fleet.processes[victim].kill)
            begun = time.monotonic()
            timer.start()
            with pytest.raises(StageError, match=f"stage '{victim}' ended with exit code -9 .*, while .* 'long'"):
                writer.append(*fleet.run_prompt(pipeline, PROMPT, max_new_tokens=300, number=1, agreement=agreement))
            timer.join()
            assert time.monotonic() - begun < NOTICED_S
    assert all_gone(pids, 0)
    kept, torn = load_trace(tmp_path / "t.jsonl")
    assert torn is None
    assert [p.tokens for p in kept.prompts] == [ANSWER[:8]]


@pytest.mark.parametrize("victim", ["s0", "s2"])
def test_killed_stage_is_named_when_the_parent_was_busy(victim: str) -> None:
    """The stage that was killed is named, not the neighbours that ended because of it."""
    stages, agreement = table(rows_of(ANSWER, "110", "10"))
    pipeline = chain("pipelined", stages)
    with Fleet(stages, scripts=scripts(stages)) as fleet:
        fleet.configure(pipeline)
        told = threading.Event()

        def busy(_: list[int]) -> None:
            if not told.is_set():
                told.set()
                fleet.processes[victim].kill()
                time.sleep(1.0)

        with pytest.raises(StageError, match=f"stage '{victim}' ended with exit code -9"):
            fleet.run_prompt(pipeline, PROMPT, max_new_tokens=300, agreement=agreement, on_text=busy)


@pytest.mark.parametrize("culprit", ["s0", "s1", "s2"])
def test_stage_that_raises_is_named(culprit: str) -> None:
    """An exception in a step is an error naming the stage, the step and the cause; nothing partial."""
    stages, agreement = table(rows_of(ANSWER, "110", "10"))
    with Fleet(stages, scripts=scripts(stages, 0.001, **{culprit: 5})) as fleet:
        pids = [process.pid for process in fleet.processes.values()]
        said = rf"stage '{culprit}' failed in \w+ at position \d+: scripted failure at step 5"
        with pytest.raises(StageError, match=said):
            fleet.run_prompt(chain("pipelined", stages), PROMPT, max_new_tokens=100, agreement=agreement)
    assert all_gone(pids, 0)


def test_stage_killed_between_prompts_is_named() -> None:
    """A stage that died while nothing ran is named at the next request."""
    stages, agreement = table(rows_of(ANSWER, "110"))
    pipeline = chain("pipelined", stages)
    with Fleet(stages, scripts=scripts(stages, 0.001)) as fleet:
        fleet.run_prompt(pipeline, PROMPT, max_new_tokens=8, agreement=agreement)
        fleet.processes["s1"].kill()
        fleet.processes["s1"].join()
        with pytest.raises(StageError, match="stage 's1' ended with exit code -9"):
            fleet.run_prompt(pipeline, PROMPT, max_new_tokens=8, agreement=agreement)


def test_failure_while_loading_is_bad_input(tmp_path: Path) -> None:
    """A model that cannot be loaded is reported as bad input naming stage and model, and all processes end."""
    stages, _ = table(rows_of(ANSWER, "1"))
    lost = stage("lost", tmp_path / "nowhere")
    fleet = Fleet([*stages, lost], scripts=scripts(stages))
    started = []
    with pytest.raises(InputError, match=r"stage 'lost': model '.*nowhere' cannot be loaded"):
        fleet.__enter__()
    started += [p.pid for p in fleet.processes.values()]
    assert not started


PARENT = """
import sys
from conftest import chain, rows_of, table
from execute.fleet import Fleet
from execute.prompts import Prompt
from execute.scripted import Script
from pipespec_model.latency import Constant

if __name__ == "__main__":
    stages, agreement = table(rows_of(list(range(100, 3000)), "110", "10"))
    scripts = {s.name: Script(Constant(0.01)) for s in stages}
    with Fleet(stages, scripts=scripts) as fleet:
        fleet.configure(chain("pipelined", stages))
        print(*(p.pid for p in fleet.processes.values()), flush=True)
        fleet.run_prompt(chain("pipelined", stages), Prompt("p", "", tokens=(1, 2, 3)), max_new_tokens=2900,
                         agreement=agreement)
"""


def test_stages_end_with_their_parent(tmp_path: Path) -> None:
    """When the parent is killed, every stage process ends within a few seconds."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    here = os.pathsep.join(str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1]))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": here}) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        time.sleep(0.3)
        parent.kill()
        parent.wait()
        assert all_gone(pids, NOTICED_S)


@pytest.mark.parametrize("moment", ["starting", "calibration round"])
def test_interrupt_ends_with_130(tiny, tmp_path: Path, interruptible: None, moment: str) -> None:
    """Ctrl-C, which reaches the whole process group, gives status 130, one line and no traceback."""
    command = [sys.executable, "-m", "pipespec_model", *write_tiny_run(tiny, tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as run:
        while not run.stderr.readline().startswith(moment):
            assert run.poll() is None
        time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)
        rest = run.stderr.read().splitlines()
        assert run.wait(timeout=20) == 130, rest
    # Before it, what had begun meanwhile.
    assert rest[-1] == "pipespec validate: interrupted; what was finished is kept"
    assert all(line.startswith(("calibrat", "recording", "measuring")) for line in rest[:-1])


@pytest.mark.parametrize("kinds", ["stage killed,stage hung", "stage out of memory,stage raises"])
def test_a_few_rows_of_the_fault_table(kinds: str) -> None:
    """Each kind has its stated outcome, once left alone and once with a retry from the committed prefix."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, str(root / "scripts" / "fault_table.py"), "--repetitions=2",
                           f"--kinds={kinds}"], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(root)})
    passed, _, of, *_ = done.stdout.splitlines()[-1].split()
    assert passed == of, done.stdout
