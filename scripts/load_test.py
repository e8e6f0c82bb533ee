"""Does a long run grow?  Memory, descriptors and threads of every process, and segments of shared memory, by prompt.

    python scripts/load_test.py [--prompts 2000] [--model-prompts 300] [--json FILE] [--figure FILE]

Two runs, each with a trace on disk: three scripted stages without step time, strategies and budgets in turn; and
``pipespec execute run`` with tiny-s drafting for tiny-l, watched from outside.  A sample is taken every so many
prompts.  Growth of resident memory is judged after the first tenth, which warms up: the slope (Theil and Sen's, which
one step of the allocator does not tilt) with its 95% interval, and the last tenth's median against the first's.
Segments are the entries of /dev/shm that were not there before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import theilslopes

from execute.fleet import Fleet, new_trace
from execute.prompts import Prompt
from execute.scripted import Script
from pipespec_model.agreement import Agreement
from pipespec_model.latency import Constant
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import TraceWriter

WARM_UP = 0.1
PAGE = os.sysconf("SC_PAGE_SIZE")
LINK = LinkSpec(lookahead=2, buffer_tokens=6, max_window=4)


@dataclass(frozen=True)
class Sample:
    """Of one process after ``prompts`` prompts.  rss : bytes."""

    process: str
    prompts: int
    rss: int
    descriptors: int
    threads: int
    segments: int


def sample(process: str, pid: int, prompts: int, before: set[str]) -> Sample:
    here = Path(f"/proc/{pid}")
    return Sample(process, prompts, int((here / "statm").read_text(encoding="ascii").split()[1]) * PAGE,
                  len(os.listdir(here / "fd")), len(os.listdir(here / "task")), len(segments() - before))


def segments() -> set[str]:
    """Of shared memory, apart from what other libraries' workers make."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("joblib", "loky", "sem."))}


# -- scripted stages ------------------------------------------------------------------------------


def scripted(num_prompts: int, every: int) -> list[Sample]:
    stages = [StageSpec(name=f"s{i}", model=f"scripted-{i}") for i in range(3)]
    specs = [PipelineSpec(strategy=strategy, handshake=handshake, stages=tuple(stages), links=(LINK, LINK))
             for strategy in ("pipelined", "speculative") for handshake in ("overlapped", "blocking")]
    before, found = segments(), []
    with (tempfile.TemporaryDirectory() as folder,
          Fleet(stages, scripts={s.name: Script(Constant(0.0)) for s in stages}) as fleet,
          TraceWriter(Path(folder) / "trace.jsonl", new_trace(fleet.configure(specs[0]), emulated=True)) as writer):
        pids = {"parent": os.getpid(), **{name: int(p.pid or 0) for name, p in fleet.processes.items()}}
        for number in range(num_prompts):
            budget = 8 + number % 17
            prompt = Prompt(f"p{number}", "", tokens=tuple(range(3 + number % 5)))
            writer.append(*fleet.run_prompt(
                specs[number % 4], prompt, max_new_tokens=budget, number=number, on_text=lambda _: None,
                agreement=replayed(number, len(prompt.tokens), budget, stages)))
            if (number + 1) % every == 0:
                found += [sample(name, pid, number + 1, before) for name, pid in pids.items()]
    return found


def replayed(number: int, prompt_length: int, budget: int, stages: Sequence[StageSpec]) -> Agreement:
    """Drafters that are right three times of four and nine of ten."""
    rng = np.random.default_rng(number)
    target = np.arange(budget) + 1000
    rows = [np.where(rng.random(budget) < rate, target, target + 500_000) for rate in (0.75, 0.9)]
    return Agreement(f"p{number}", prompt_length, tuple(s.choice_key for s in stages), np.array([*rows, target]))


# -- models, by the command -----------------------------------------------------------------------


def models(num_prompts: int, every: int) -> list[Sample]:
    before, found = segments(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "p.yaml").write_text(
            "strategy: pipelined\nstages:\n- {name: tiny-s, model: tiny-s}\n- {name: tiny-l, model: tiny-l}\n",
            encoding="utf-8")
        lines = [f"def load_{number}(path, mode='r{number % 7}'):" for number in range(num_prompts)]
        (folder / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        with subprocess.Popen(
                [sys.executable, "-m", "pipespec_model", "execute", "run", str(folder / "p.yaml"), "--prompts",
                 str(folder / "prompts.txt"), "--max-new-tokens", "12", "--out", str(folder / "out")],
                stdout=subprocess.DEVNULL) as run:
            for done in finished(folder / "out" / "trace.jsonl", run, every):
                pids = dict(zip(("tiny-s", "tiny-l"), stages_of(run.pid), strict=True))
                found += [sample(name, pid, done, before) for name, pid in {"parent": run.pid, **pids}.items()]
        if run.returncode:
            raise SystemExit(f"the run ended with status {run.returncode}")
    return found


def finished(trace: Path, run: subprocess.Popen[bytes], every: int) -> Iterator[int]:
    """Prompts that have ended, each time that ``every`` more have, while the run goes on."""
    position, done, due = 0, 0, every
    while run.poll() is None:
        if trace.exists():
            with trace.open("rb") as file:
                file.seek(position)
                data = file.read()
            position += len(data)
            done += data.count(b'{"type": "prompt_end"')
            if done >= due:
                yield done
                due = done - done % every + every
        time.sleep(0.005)


def stages_of(parent: int) -> list[int]:
    """Stage processes of a run, in the order in which they were started."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ppid = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
                if int(ppid) == parent and b"spawn_main" in (entry / "cmdline").read_bytes():
                    out.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return sorted(out)


# -- what came of it ------------------------------------------------------------------------------


def growth(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row a process."""
    rows = []
    for name in dict.fromkeys(item.process for item in samples):
        own = [item for item in samples if item.process == name]
        late = [item for item in own if item.prompts >= WARM_UP * own[-1].prompts]
        slope, _, low, high = theilslopes([item.rss for item in late], [item.prompts for item in late])
        tenth = max(1, len(late) // 10)
        rows.append({
            "process": name, "prompts": own[-1].prompts, "rss_mib": own[-1].rss / 2**20,
            "rss_bytes_per_prompt": slope, "interval": [low, high],
            "rss_first_to_last_tenth_kib": float(np.median([s.rss for s in late[-tenth:]])
                                                 - np.median([s.rss for s in late[:tenth]])) / 1024,
            **{key: [min(values), max(values)] for key in ("descriptors", "threads", "segments")
               if (values := [getattr(item, key) for item in late])}})
    return rows


def picture(runs: dict[str, list[Sample]], path: Path) -> None:
    """Growth of resident memory, and descriptors, of each process by prompt, a column a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    plt.rcParams.update({"svg.hashsalt": "pipespec", "font.size": 11})
    colours, dashes = ("#000000", "#0072B2", "#D55E00", "#009E73"), ("-", "--", "-.", ":")
    figure, axes = plt.subplots(2, len(runs), figsize=(5.2 * len(runs), 5.4), squeeze=False, sharex="col")
    for column, (title, samples) in enumerate(runs.items()):
        for line, name in enumerate(dict.fromkeys(item.process for item in samples)):
            own = [item for item in samples if item.process == name]
            x = [item.prompts for item in own]
            warm = next(item.rss for item in own if item.prompts >= WARM_UP * own[-1].prompts)
            style = {"color": colours[line], "linestyle": dashes[line], "linewidth": 2,
                     "label": f"{name} ({own[-1].rss / 2**20:.0f} MiB)"}
            axes[0, column].plot(x, [(item.rss - warm) / 2**20 for item in own], **style)
            axes[1, column].plot(x, [item.descriptors for item in own], **style)
        axes[0, column].set_title(title)
        axes[1, column].set_xlabel("prompts that have ended")
        axes[0, column].legend(frameon=False)
        axes[1, column].set_ylim(0, 1.15 * axes[1, column].get_ylim()[1])
        axes[1, column].yaxis.set_major_locator(MaxNLocator(5, integer=True))
        for row in (0, 1):
            axes[row, column].spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("growth since warm-up, MiB")
    axes[1, 0].set_ylabel("open file descriptors")
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000, help="of the scripted run")
    parser.add_argument("--model-prompts", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    runs: dict[str, list[Sample]] = {}
    if options.prompts:
        runs["three scripted stages"] = scripted(options.prompts, max(1, options.prompts // 80))
    if options.model_prompts:
        runs["tiny-s drafts for tiny-l"] = models(options.model_prompts, max(1, options.model_prompts // 60))
    document = [{"run": name, "growth": growth(samples), "samples": [asdict(item) for item in samples]}
                for name, samples in runs.items()]
    for item in document:
        for row in item["growth"]:
            low, high = row["interval"]
            print(f"{item['run']}, {row['process']}: {row['rss_bytes_per_prompt']:.0f} bytes a prompt "
                  f"({low:.0f} to {high:.0f}), {row['rss_first_to_last_tenth_kib']:+.0f} KiB over {row['prompts']} "
                  f"prompts; descriptors {row['descriptors']}, threads {row['threads']}, segments {row['segments']}")
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        picture(runs, options.figure)


if __name__ == "__main__":
    main()
