"""``pipespec simulate sweep``: what-if tables over any field of pipeline and profile."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipespec_model.cli import print_json, progress_bar
from pipespec_model.errors import InputError
from pipespec_model.spec import load_pipeline

from .run import read_profile
from .vary import axes_of, parse_vary

LARGE_SHARE = 0.5  # of the free memory


def sweep_command(
    pipeline: Annotated[Path, typer.Argument(help="pipeline YAML")],
    profile: Annotated[Path, typer.Option(help="profile.json of a calibration, or one written by hand")],
    vary: Annotated[list[str], typer.Option(help="FIELD=VALUES, again and again: links.*.acceptance_rate=0.5..0.9:9")],
    design: Annotated[str, typer.Option(help="grid, zip or lhs (Latin hypercube of --points)")] = "grid",
    points: Annotated[int | None, typer.Option(help="points of a Latin hypercube")] = None,
    num_prompts: Annotated[int, typer.Option(help="synthetic texts a replication")] = 1,
    num_tokens: Annotated[int, typer.Option(help="tokens a synthetic text")] = 1000,
    replications: Annotated[int, typer.Option(help="at least so many a point")] = 5,
    half_width: Annotated[float | None, typer.Option(help="until the 90% interval is ± this share")] = None,
    max_replications: Annotated[int, typer.Option(help="at most so many a point")] = 200,
    engine: Annotated[str, typer.Option(help="events, or analytic: the formula alone")] = "events",
    predicted: Annotated[bool, typer.Option("--predicted/--no-predicted", help="the formula's column")] = True,
    seed: Annotated[int, typer.Option()] = 0,
    jobs: Annotated[int, typer.Option(help="worker processes; -1: one a core")] = -1,
    dask: Annotated[str | None, typer.Option(help="address of a Dask scheduler, instead of --jobs")] = None,
    out: Annotated[Path, typer.Option(help="folder; a sweep that was killed goes on in it")] = Path("pipespec-sweep"),
    yes: Annotated[bool, typer.Option("--yes", help="do not ask about a sweep that may not fit into memory")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Vary any field of pipeline or profile; one row a configuration as Parquet and CSV."""
    from .points import Design  # pandas and scipy load when a sweep is asked for
    from .row import Effort
    from .sweep import Sweep, Workers, run_sweep

    effort = Effort(engine=engine, num_prompts=num_prompts, num_tokens=num_tokens, replications=replications,
                    half_width=half_width, max_replications=max_replications, seed=seed, predicted=predicted)
    asked = Design(axes_of([parse_vary(text) for text in vary]), design, points, seed)  # type: ignore[arg-type]
    made = Sweep(load_pipeline(pipeline), read_profile(profile), asked, effort)
    made.changes()
    _confirm(made.bytes_needed, len(asked), yes)
    bar, advance = progress_bar(len(asked))
    with bar:
        found = run_sweep(made, out=out, workers=Workers(jobs, dask), advance=lambda n: advance("points", n))
    if json_:
        print_json({"columns": list(found.columns), "num_rows": len(found), "table": str(out / "sweep.parquet"),
                    "best": _best(found)})
    else:
        _show(found, out)


def _confirm(needed: int, num_points: int, yes: bool) -> None:
    """Ask before a sweep that memory may not hold; where nobody can answer, refuse."""
    free = free_bytes()
    if yes or needed <= LARGE_SHARE * free:
        return
    said = f"{num_points:,} points need about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    if not sys.stdin.isatty():
        raise InputError("sweep", f"must fit into memory ({said})", mend="vary less, or insist with --yes")
    typer.confirm(f"{said}. Go on?", abort=True, err=True)


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    report = Path("/proc/meminfo")
    for line in report.read_text(encoding="ascii").splitlines() if report.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _best(found: Any) -> dict[str, Any]:
    top = found.loc[found["tokens_per_s"].idxmax()].dropna()
    return {key: value.item() if hasattr(value, "item") else value for key, value in top.items()}


def _show(found: Any, out: Path) -> None:
    best = _best(found)
    interval = f" ({best['speedup_low']:.2f} to {best['speedup_high']:.2f})" if "speedup_low" in best else ""
    bad = int(found["problem"].notna().sum()) if "problem" in found else 0
    print(f"{len(found):,} points" + (f", {bad:,} of them no pipeline (column problem)" if bad else ""))
    print(f"fastest: point {best['point']}, {best['tokens_per_s']:.1f} tokens per second, {best['speedup']:.2f}×"
          f"{interval} autoregressive")
    print(out / "sweep.parquet")
