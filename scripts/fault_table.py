"""Ten kinds of fault, each many times, and what became of the run (docs/faults.md).

    python scripts/fault_table.py [--repetitions 20] [--kinds killed,hung] [--json FILE]

Every repetition is a process group of its own: a pipeline of three scripted stages, drawn by its number (strategy and
handshake, which stage, when), runs three prompts with a trace, and the second prompt meets the fault.  Passed means
all of: the stated outcome, within its time; every token that was shown is the answer's; no process of the group and
no new segment under /dev/shm is left; the trace holds the first prompt and nothing of a failed one; the run is taken
up where it ended and the whole answer is then on disk.  In every second repetition of a stage's fault the run
retries by itself instead.  Seconds count from the strike to what the user sees: the line on stderr, or the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import typer

from execute.fleet import Fleet, new_trace
from execute.injection import Strike, Unloadable, leave
from execute.prompts import Prompt
from execute.retry import run_with_retries
from execute.scripted import Script
from pipespec_model.agreement import Agreement
from pipespec_model.cli import run
from pipespec_model.errors import StageError
from pipespec_model.latency import Constant
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import TraceWriter, load_trace

STEP_S = 0.004
PATIENCE_S = 1.0
WITHIN_S = 5.0
GONE_S = 1.0  # Python's resource tracker ends after the process that it works for
BUDGETS = (8, 120, 8)
PROMPT_LENGTH = 3
STAGES = [StageSpec(name=f"s{i}", model=f"scripted-{i}") for i in range(3)]


@dataclass(frozen=True)
class Kind:
    """What is done and what must come of it.

    strike : of execute/injection.py; empty where the parent is struck
    said : the error's words, with {stage} and {prompt}; empty where no line is written
    harmless : of these strikes it may be that nothing comes: no line, and the whole answer
    status : of the process; None = killed
    """

    name: str
    strike: str
    outcome: str
    said: tuple[str, ...] = ()
    status: int | None = 2
    within_s: float = WITHIN_S
    retried: bool = True
    harmless: tuple[str, ...] = ()


IN_PROMPT = "while working on prompt '{prompt}'"
KINDS = [
    Kind("stage killed", "kill", "error naming the stage, its signal and the prompt",
         ("stage '{stage}' ended with exit code -9 (SIGKILL", IN_PROMPT)),
    Kind("stage hung", "hang", "error naming the stage and the prompt, within the patience",
         ("stage '{stage}' hangs", IN_PROMPT), within_s=PATIENCE_S),
    Kind("stage out of memory", "memory", "error naming the stage, the step, MemoryError and the prompt",
         ("stage '{stage}' failed in ", " at position ", "MemoryError", IN_PROMPT)),
    Kind("stage raises while loading", "load", "error naming the stage and the cause",
         ("stage '{stage}' failed with ValueError: the weights are damaged", "while loading"), retried=False),
    Kind("stage raises in a step", "raise", "error naming the stage, the step, the cause and the prompt",
         ("stage '{stage}' failed in ", " at position ", "the kernel could not be launched", IN_PROMPT)),
    Kind("parent killed", "", "every stage process ends by itself", status=None, retried=False),
    Kind("Ctrl-C", "", "one line, status 130", ("interrupted; what was finished is kept",), status=130, retried=False),
    Kind("disk full", "", "error naming the file and the cause; the trace is whole",
         ("trace.jsonl: No space left on device",), retried=False),
    Kind("stage slow, ten times", "slow", "no error, the same tokens", status=0, retried=False),
    # Messages are snapshots: unless it was the last one that somebody waits for, the next one makes up for it.
    Kind("message lost, or pipe closed", "lose", "error naming the two stages and the prompt, within the patience; or, "
         "where a later message made up for the lost one, no error and the same tokens",
         ("stage '", IN_PROMPT), within_s=PATIENCE_S, harmless=("lose",)),
]


@dataclass
class Case:
    """One repetition, drawn by kind and number."""

    kind: Kind
    number: int
    folder: Path
    spec: PipelineSpec = field(init=False)
    victim: str = field(init=False)
    context: int = field(init=False)
    strike: str = field(init=False)
    harmless: bool = field(default=False, init=False)  # as it turned out

    def __post_init__(self) -> None:
        draw = random.Random(f"{self.kind.name} {self.number}")
        strategy, handshake = draw.choice(
            [(s, h) for s in ("speculative", "pipelined") for h in ("overlapped", "blocking")])
        ahead = 3 if strategy == "speculative" else draw.choice([0, 1])
        link = LinkSpec(lookahead=ahead, buffer_tokens=6, max_window=4)
        self.spec = PipelineSpec(strategy=strategy, handshake=handshake, stages=tuple(STAGES), links=(link, link))
        self.victim = draw.choice(STAGES).name
        self.context = PROMPT_LENGTH + draw.randrange(16, 60)
        self.strike = "close" if self.kind.strike == "lose" and self.number % 4 == 3 else self.kind.strike

    @property
    def retries(self) -> int:
        return int(self.kind.retried and self.number % 2)

    @property
    def finishes(self) -> bool:
        """Whether the run comes to its end by itself."""
        return self.kind.status == 0 or self.harmless or bool(self.retries)

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    @property
    def trace(self) -> Path:
        return self.folder / "out" / "trace.jsonl"

    def scripts(self) -> dict[str, Script]:
        out: dict[str, Script] = {stage.name: Script(Constant(STEP_S)) for stage in STAGES}
        if self.strike == "load":
            out[self.victim] = Unloadable(Constant(STEP_S), mark=self.mark)
        elif self.strike:
            out[self.victim] = Script(Strike(self.strike, STEP_S, self.context, self.mark))
        return out


def answer(number: int) -> list[int]:
    return [1000 * number + i for i in range(BUDGETS[number])]


def prompts() -> list[tuple[Prompt, Agreement]]:
    """Each with its answer and drafters that are right three times of four and nine of ten."""
    out = []
    for number in range(len(BUDGETS)):
        target = np.array(answer(number))
        rows = [np.where(np.random.default_rng([number, row]).random(target.size) < rate, target, target + 500_000)
                for row, rate in enumerate((0.75, 0.9))]
        agreement = Agreement(f"p{number}", PROMPT_LENGTH, tuple(stage.choice_key for stage in STAGES),
                              np.array([*rows, target]))
        out.append((Prompt(f"p{number}", "", tokens=(1, 2, 3)), agreement))
    return out


# -- the run that meets the fault -----------------------------------------------------------------


def drive(kind: int, number: int, folder: Path) -> None:
    """In a process of its own."""
    case = Case(KINDS[kind], number, folder)
    with Fleet(STAGES, scripts=case.scripts(), patience_s=PATIENCE_S) as fleet:
        finish(case, fleet, case.retries)


def finish(case: Case, fleet: Fleet, retries: int = 0) -> None:
    """Run what the trace does not hold yet, and check every token as it is shown."""
    trace = new_trace(fleet.configure(case.spec), emulated=True)
    done = [record.prompt for record in load_trace(case.trace)[0].prompts] if case.trace.exists() else []
    with TraceWriter(case.trace, trace) as writer:
        for n, (prompt, agreement) in enumerate(prompts()):
            if n in done:
                continue
            shown: list[int] = []

            def show(tokens: list[int], n: int = n, shown: list[int] = shown) -> None:
                shown += tokens
                if shown != answer(n)[: len(shown)]:
                    raise SystemExit("a wrong token was shown")
                if n == 1 and len(shown) > 10 and not (case.folder / "under way").exists():
                    (case.folder / "under way").touch()

            made = run_with_retries(fleet, case.spec, prompt, max_new_tokens=BUDGETS[n], retries=retries, number=n,
                                    agreement=agreement, on_text=show, on_failure=tell)
            if case.kind.name == "disk full" and n == 1 and not case.mark.exists():
                leave(case.mark)
            writer.append(*made)


def tell(error: StageError, kept: int) -> None:
    print(f"{error}; again from token {kept}", file=sys.stderr, flush=True)


# -- what became of it ----------------------------------------------------------------------------


def examine(case: Case, spare: Fleet) -> tuple[list[str], float | None]:
    """Run one repetition; returns what is wrong with its outcome, and the seconds from the strike to an error."""
    before = segments()
    with room(case):
        process = subprocess.Popen(
            [sys.executable, __file__, "--drive", str(KINDS.index(case.kind)), str(case.number), str(case.folder)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            strike_parent(case, process)
            lines, seen = said_by(process)
            status = process.wait(timeout=60)
            case.harmless = case.strike in case.kind.harmless and not lines
            seconds = time_from_strike(case, process.pid, seen)
            wrong = judge(case, lines, status, seconds)
            if not all_gone(process.pid, GONE_S):
                wrong.append("a process is left")
        finally:
            for pid in group(process.pid):
                os.kill(pid, signal.SIGKILL)
        if segments() - before:
            wrong.append("a segment is left under /dev/shm")
        kept = case.trace.read_bytes() if case.trace.exists() else b""
    wrong += kept_and_resumed(case, kept, spare)
    return wrong, seconds


@contextmanager
def room(case: Case) -> Iterator[None]:
    """The output folder; for a full disk a file system that the second prompt's records do not fit."""
    out = case.trace.parent
    out.mkdir()
    if case.kind.name != "disk full":
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(out)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(out)], check=True)


def strike_parent(case: Case, process: subprocess.Popen[str]) -> None:
    numbers = {"parent killed": signal.SIGKILL, "Ctrl-C": signal.SIGINT}
    if case.kind.name not in numbers:
        return
    while not (case.folder / "under way").exists() and process.poll() is None:
        time.sleep(0.002)
    leave(case.mark)
    if case.kind.name == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()


def said_by(process: subprocess.Popen[str]) -> tuple[list[str], float]:
    """The lines on stderr, and when the first came, or the end."""
    assert process.stderr is not None
    lines, seen = [], 0.0
    for line in process.stderr:
        seen = seen or time.monotonic()
        lines.append(line.rstrip("\n"))
    return lines, seen or time.monotonic()


def time_from_strike(case: Case, pid: int, seen: float) -> float | None:
    """Of a stage that is slow there is nothing to see; where the parent was killed the end of all is seen."""
    if case.kind.status is None:
        all_gone(pid, 2 * WITHIN_S)
        seen = time.monotonic()
    if case.kind.status == 0 or case.harmless or not case.mark.exists():
        return None
    return seen - float(case.mark.read_text(encoding="utf-8"))


def judge(case: Case, lines: list[str], status: int, seconds: float | None) -> list[str]:
    wrong = []
    expected = -signal.SIGKILL if case.kind.status is None else 0 if case.finishes else case.kind.status
    if status != expected:
        wrong.append(f"status {status}")
    if len(lines) != bool(case.kind.said and not case.harmless):
        wrong.append(f"{len(lines)} lines on stderr")
    text = lines[0] if lines else ""
    wanted = [part.format(stage=case.victim, prompt="p1") for part in case.kind.said if not case.harmless]
    wrong += [f"lacks {part!r}" for part in wanted if part not in text]
    if not case.mark.exists():
        wrong.append("was never struck")
    elif seconds is not None and seconds > case.kind.within_s:
        wrong.append(f"took {seconds:.2f} s")
    return [f"{item}: {text}" for item in wrong]


def kept_and_resumed(case: Case, kept: bytes, spare: Fleet) -> list[str]:
    """What is on disk is whole and right; with the rest run now, it is all there."""
    (case.folder / "out").mkdir(exist_ok=True)
    if kept:
        case.trace.write_bytes(kept)
    wrong = []
    found = load_trace(case.trace) if kept else (None, None)
    if found[1] is not None:
        wrong.append(found[1])
    names = [record.name for record in found[0].prompts] if found[0] else []
    if names != (["p0", "p1", "p2"] if case.finishes else [] if case.strike == "load" else ["p0"]):
        wrong.append(f"the trace holds {names}")
    carried = sum(record.carried for record in found[0].prompts) if found[0] else 0
    if bool(carried) != bool(case.retries and not case.harmless):
        wrong.append(f"{carried} tokens were carried over a fault")
    finish(case, spare)
    trace, torn = load_trace(case.trace)
    if torn or not case.trace.read_bytes().startswith(kept):
        wrong.append("the trace was not gone on with")
    if [record.tokens for record in trace.prompts] != [answer(n) for n in range(len(BUDGETS))]:
        wrong.append("wrong tokens after all")
    return wrong


def all_gone(session: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while group(session) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not group(session)


def group(session: int) -> list[int]:
    """Processes of a session that run."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, found = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(found) == session and state != "Z":
                out.append(int(entry.name))
    return out


def segments() -> set[str]:
    """Of shared memory, apart from what joblib's workers elsewhere make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("joblib", "loky", "sem.loky"))}


def table(kinds: list[Kind], repetitions: int, report: Callable[[str], None]) -> list[dict[str, object]]:
    """One row a kind."""
    rows = []
    with Fleet(STAGES, scripts={stage.name: Script(Constant(0.0)) for stage in STAGES}) as spare:
        for kind in kinds:
            seconds, passed, harmless = [], 0, 0
            for number in range(repetitions):
                with tempfile.TemporaryDirectory() as folder:
                    case = Case(kind, number, Path(folder))
                    wrong, taken = examine(case, spare)
                passed += not wrong
                harmless += case.harmless
                seconds += [] if taken is None else [taken]
                for item in wrong:
                    report(f"{kind.name} {number}: {item}")
            rows.append({"kind": kind.name, "outcome": kind.outcome, "passed": passed, "of": repetitions,
                         "harmless": harmless,
                         "median_s": statistics.median(seconds) if seconds else None,
                         "worst_s": max(seconds, default=None)})
            report(show(rows[-1]))
    return rows


def show(row: dict[str, object]) -> str:
    times = [f"{row[key]:.2f}" if row[key] is not None else "–" for key in ("median_s", "worst_s")]
    harmless = f" ({row['harmless']} without harm)" if row["harmless"] else ""
    return f"| {row['kind']} | {row['outcome']} | {row['passed']}/{row['of']}{harmless} | {' | '.join(times)} |"


def main() -> None:
    if sys.argv[1:2] == ["--drive"]:
        app = typer.Typer(add_completion=False)
        app.command()(drive)
        run(app, "fault_table", sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--kinds", help="names, or their beginnings, with commas between")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = tuple(options.kinds.split(",")) if options.kinds else ("",)
    kinds = [kind for kind in KINDS if kind.name.startswith(wanted)]
    rows = table(kinds, options.repetitions, lambda text: print(text, flush=True))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(int(str(row['passed'])) for row in rows)} of {len(rows) * options.repetitions} as stated")


if __name__ == "__main__":
    main()
