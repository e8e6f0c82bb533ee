"""What the commands share: one line for bad input, JSON apart from words, exit codes.

0 done; 1 the result misses its stated tolerance; 2 bad input, one line on stderr; 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer

from .errors import InputError, StageError

INTERRUPTED = 130
# Newer typer carries its own copy of click, older ones import it: take the class from typer.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def run(app: typer.Typer, name: str, args: list[str] | None = None) -> NoReturn:
    """Run a command; never shows a traceback for what the user can mend."""
    try:
        code = app(args=args, prog_name=name, standalone_mode=False)
    except (InputError, StageError) as error:
        fail(name, str(error))
    except (typer.Abort, KeyboardInterrupt):
        interrupted(name)
    except USAGE_ERROR as error:
        fail(name, error.format_message())
    except OSError as error:
        # A disk that fills up while results are written; what was finished is on it.
        fail(name, f"{error.filename or 'output'}: {error.strerror}")
    if code == INTERRUPTED:  # typer has seen the Ctrl-C itself
        interrupted(name)
    raise SystemExit(code if isinstance(code, int) else 0)


def fail(name: str, text: str) -> NoReturn:
    one_line = " ".join(text.split())
    print(f"{name}: {one_line}", file=sys.stderr)
    raise SystemExit(2)


def interrupted(name: str) -> NoReturn:
    print(f"{name}: interrupted; what was finished is kept", file=sys.stderr)
    raise SystemExit(INTERRUPTED)


def make_folder(out: Path) -> None:
    """Make an output folder; InputError where that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}", f"must be a writable folder ({error.strerror})") from None


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, allow_nan=False))


def progress_bar(total: float) -> tuple[Any, Callable[[str, float], None]]:
    """A progress display on stderr with time left, and a function ``(what begins, what ended)``."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(),
                   TextColumn("left  {task.description}"), console=console, disable=not console.is_terminal)
    task = bar.add_task("", total=total)
    last = [""]

    def advance(text: str, done: float) -> None:
        bar.update(task, description=text, advance=done)
        if not console.is_terminal and text != last[0]:
            print(text, file=sys.stderr, flush=True)
            last[0] = text

    return bar, advance
