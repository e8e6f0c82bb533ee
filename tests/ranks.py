"""One rank of a run on several hosts, as a process of its own: scripted stages, settings from one JSON argument.

``python tests/ranks.py SETTINGS`` with the variables that torchrun sets.  With ``store`` the ranks meet in a folder
instead of torchrun's store, which spares every process to load torch.  Settings: ``tokens``, ``patterns`` of the
drafters, ``step_s`` of each stage, ``runs`` as pairs of strategy and lookahead, ``out``; perhaps ``shift_s`` of a
rank's clock, ``strike`` (stage, kind and context of execute/injection.py) and the options of ``gather``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from conftest import chain, rows_of, table

from execute.fleet import Fleet, new_trace
from execute.hosts import gather
from execute.injection import Strike
from execute.prompts import Prompt
from execute.rendezvous import launched
from execute.scripted import Script
from pipespec_model.cli import fail, interrupted
from pipespec_model.errors import InputError, StageError
from pipespec_model.latency import Constant
from pipespec_model.trace import TraceWriter

PROMPT = Prompt("p", "", tokens=(1, 2, 3))


class Folder:
    """A store for ranks of one machine: a file a key."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def _file(self, key: str) -> Path:
        return self.path / key.replace("/", "-")

    def set(self, key: str, value: str) -> None:
        part = self._file(key).with_suffix(".part")
        part.write_text(value, encoding="utf-8")
        part.rename(self._file(key))

    def get(self, key: str) -> bytes:
        return self._file(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._file(key).exists() for key in keys)


def main(settings: dict[str, Any]) -> None:
    rank = launched()
    assert rank is not None
    if shift := settings.get("shift_s", {}).get(str(rank.number)):
        true = time.perf_counter
        time.perf_counter = lambda: true() + shift
    answer = list(range(100, 100 + settings["tokens"]))
    stages, agreement = table(rows_of(answer, *settings["patterns"]))
    scripts = [Script(Constant(seconds)) for seconds in settings["step_s"]]
    if "strike" in settings:
        victim, kind, context = settings["strike"]
        strike = Strike(kind, settings["step_s"][victim], context, Path(settings["out"]) / "mark")
        scripts[victim] = Script(strike)
    options = {name: settings[name] for name in ("bind", "join_s", "patience_s", "delay_s") if name in settings}
    store = Folder(settings["store"]) if "store" in settings else None
    try:
        hosts = gather(rank, store, script=scripts[rank.number], **options)
        with Fleet(stages, scripts={s.name: x for s, x in zip(stages, scripts, strict=True)}, hosts=hosts,
                   patience_s=settings.get("patience_s", 60.0)) as fleet:
            for number, (strategy, lookahead) in enumerate(settings["runs"]):
                pipeline = chain(strategy, stages, lookahead=lookahead)
                trace = new_trace(fleet.configure(pipeline), emulated=True)
                with TraceWriter(Path(settings["out"]) / f"{number}.jsonl", trace) as writer:
                    print(f"run {number}", flush=True)
                    writer.append(*fleet.run_prompt(pipeline, PROMPT, max_new_tokens=len(answer), agreement=agreement))
    except (InputError, StageError) as error:
        fail("ranks", str(error))
    except KeyboardInterrupt:
        interrupted("ranks")
    print("done", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(json.loads(sys.argv[1]))
