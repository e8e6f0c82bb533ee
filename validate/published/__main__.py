"""``pipespec validate published DIR``: predict published PipeSpec runs from their greedy and synchronous files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipespec_model.cli import make_folder, print_json, progress_bar, run

from .figures import predicted_rows
from .files import read_folder
from .predict import Study
from .report import MODELS, headline, short, write_report

app = typer.Typer(add_completion=False)


@app.command()
def published(
    folder: Annotated[Path, typer.Argument(help="result files of the published code: greedy_, chain_, async-chain_")],
    out: Annotated[Path, typer.Option(help="folder for report.html, .json, .csv and the figures")] = Path(
        "pipespec-published"),
    other_rules: Annotated[bool, typer.Option(
        "--other-rules", help="also show what other rules for the drafter's step would have given")] = False,
    tolerance: Annotated[float | None, typer.Option(help="exit 1 if the mean error is above this, in %")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the report as one JSON document on stdout")] = False,
) -> int:
    """Calibrate on greedy and synchronous files, predict every other one, and report."""
    files, refused = read_folder(folder)
    make_folder(out)
    for why in refused.values():
        print(f"left out: {why}", file=sys.stderr)
    bar, advance = progress_bar(len(files))
    with bar:
        study = Study.of(files, refused)
        study.predict(advance, other_rules=other_rules)
    data = study.to_dict()
    write_report(data, out)
    if json_:
        print_json(data)
    else:
        summary(data, out)
    error = data["mape_percent"]
    return 1 if tolerance is not None and error is not None and error > tolerance else 0


def summary(data: dict, out: Path) -> None:
    """A table for people, on stdout."""
    from rich.console import Console
    from rich.table import Table

    from validate.report import signed

    table = Table()
    table.add_column("run")
    for name in ("measured ms/token", "predicted", "difference", "own drafter", *MODELS.values()):
        table.add_column(name, justify="right")
    for row in predicted_rows(data["rows"]):
        errors = row["error_percent_by_model"]
        table.add_row(short(row), f"{row['measured_ms_per_token']:.2f}", f"{row['predicted_ms_per_token']:.2f}",
                      signed(row["error_percent"]), signed(row["error_percent_own_drafter"]),
                      *(signed(errors[name]) for name in MODELS))
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    for sentence in headline(data):
        console.print(sentence)
    console.print(f"Report: {out / 'report.html'}")


def main(args: list[str] | None = None) -> None:
    run(app, "pipespec validate published", args)


if __name__ == "__main__":
    main()
