"""``pipespec simulate traffic``: does a pipeline still pay when prompts keep coming?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from pipespec_model.cli import make_folder, print_json, progress_bar
from pipespec_model.errors import InputError
from pipespec_model.spec import load_pipeline

from .choose import chosen
from .run import read_profile
from .vary import parse_values


def traffic_command(
    pipeline: Annotated[Path, typer.Argument(help="pipeline YAML")],
    profile: Annotated[Path, typer.Option(help="profile.json of a calibration, or one written by hand")],
    rate: Annotated[str | None, typer.Option(help="prompts a second: 0.5..4:8, or 0.5,1,2")] = None,
    arrivals: Annotated[Path | None, typer.Option(
        help="CSV: arrived_at, num_prefill_tokens, num_decode_tokens; default: Poisson arrivals")] = None,
    in_flight: Annotated[int | None, typer.Option(help="most prompts in a pipeline at once; default: all")] = None,
    discipline: Annotated[str, typer.Option(help="whom a stage picks: oldest (prompt first), or rotation")] = "oldest",
    num_prompts: Annotated[int, typer.Option(help="prompts a replication; of a trace the first ones")] = 100,
    num_tokens: Annotated[int, typer.Option(help="tokens a synthetic text, where no trace says")] = 64,
    replications: Annotated[int, typer.Option(help="runs with texts and arrivals of their own")] = 5,
    seed: Annotated[int, typer.Option()] = 0,
    jobs: Annotated[int, typer.Option(help="worker processes; -1: one a core")] = -1,
    out: Annotated[Path | None, typer.Option(help="folder for traffic.json, traffic.csv and the picture")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Throughput and latencies of many prompts in one pipeline, beside its target alone on the same traffic."""
    from .arrivals import load_arrivals
    from .load import Effort, Study, curves
    from .traffic import Policy

    policy = Policy(in_flight, discipline)  # type: ignore[arg-type]  # a Machine checks it
    effort = Effort(num_prompts, num_tokens, replications, seed)
    requests = load_arrivals(arrivals) if arrivals else None
    known = read_profile(profile)
    if requests is not None and len(requests) > num_prompts:
        typer.echo(f"the first {num_prompts:,} of {len(requests):,} prompts in {arrivals}; more with --num-prompts",
                   err=True)
        requests = requests[:num_prompts]
    study = Study(chosen(load_pipeline(pipeline), known), known, policy, effort,
                  None if requests is None else tuple(requests))
    rates = _rates(rate, study.own_rate)
    bar, advance = progress_bar(len(rates) * replications)
    with bar:
        rows = curves(study, rates, jobs=jobs, advance=lambda: advance("", 1))
    result = {"pipeline": study.pipeline.label, "strategy": study.pipeline.strategy, "in_flight": in_flight,
              "discipline": discipline, "arrivals": "poisson" if arrivals is None else str(arrivals),
              "num_prompts": len(requests) if requests else num_prompts, "replications": replications,
              "verdict": verdict(rows), "rows": rows}
    picture = None if out is None else _write(result, out)
    if json_:
        print_json(result)
    else:
        _show(result)
        if picture is not None:
            print(picture)


def _rates(text: str | None, own: float | None) -> list[float]:
    if text is None:
        if own is None:
            raise InputError("--rate", "must be given, or --arrivals", mend="e.g. --rate 0.5..4:8")
        return [own]
    found = parse_values("--rate", text)[0]
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InputError("--rate", "must be numbers > 0 of prompts a second", text)
    return sorted(float(value) for value in found)


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Against each other way: at which rates the pipeline's median time from request to end is the shorter one."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    by = {(row["rate"], row["way"]): row for row in rows}
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    said = []
    for other in ways[1:]:
        wins = [rate for rate in rates if _median(by[rate, ways[0]]) < _median(by[rate, other])]
        where = "at every rate" if len(wins) == len(rates) else "at no rate" if not wins else (
            f"at {_listed(wins)} prompts/s, not at {_listed([rate for rate in rates if rate not in wins])}")
        said.append(f"{ways[0]} answers sooner than {other} {where} (median from request to last token).")
    for way in ways:
        late = [rate for rate in rates if by[rate, way]["overloaded"]]
        if late:
            said.append(f"{way} does not keep up at {_listed(late)} prompts/s: there, waiting grows for as long as "
                        "the traffic lasts.")
    return said


def _median(row: dict[str, Any]) -> float:
    return float(row["e2e_s"]["p50"]["value"])


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)


def _write(result: dict[str, Any], out: Path) -> Path:
    import json

    import pandas as pd

    from .traffic_picture import draw

    make_folder(out)
    (out / "traffic.json").write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
    pd.DataFrame([_flat(row) for row in result["rows"]]).to_csv(out / "traffic.csv", index=False)
    return draw(result["rows"], out)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of figures as columns: ``ttft_s_p95``, ``ttft_s_p95_low``, ``ttft_s_p95_high``."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        figures = {key: value} if not isinstance(value, dict) or "value" in value else {
            f"{key}_{name}": inner for name, inner in value.items()}
        if key == "stages":
            figures = {f"stage_{i}_busy": stage["busy"] for i, stage in enumerate(value)}
        for name, figure in figures.items():
            if isinstance(figure, dict):
                low, high = figure["interval"] or (None, None)
                out |= {name: figure["value"], f"{name}_low": low, f"{name}_high": high}
            else:
                out[name] = figure
    return out


def _show(result: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def stacked(row: dict[str, Any], name: str, scale: float = 1.0) -> str:
        return "\n".join(_text(figure, scale) for figure in row[name].values())

    for way in dict.fromkeys(row["way"] for row in result["rows"]):
        table = Table(title=f"{way}, {result['replications']} replications, 90% intervals", box=box.SIMPLE_HEAD,
                      leading=1, pad_edge=False, collapse_padding=True)
        for head in ("prompts/s", "tokens/s", "", "to first\ntoken, s", "ms\na token", "to the\nend, s", "busy, %"):
            table.add_column(head, justify="right")
        for row in result["rows"]:
            if row["way"] == way:
                late = "\noverloaded" if row["overloaded"] else ""
                table.add_row(
                    f"{row['rate']:.3g}", _text(row["tokens_per_s"]) + late,
                    "median\n95%\n99%", stacked(row, "ttft_s"), stacked(row, "tpot_s", 1e3), stacked(row, "e2e_s"),
                    "\n".join(f"{stage['name']} {100 * stage['busy']['value']:.0f}" for stage in row["stages"]))
        Console().print(table)
    for line in result["verdict"]:
        print(line)


def _text(figure: dict[str, Any], scale: float = 1.0) -> str:
    """Value ± half its interval, which says how many digits are worth showing.

    >>> _text({"value": 96.94, "interval": [81.2, 112.7]})
    '97±16'
    """
    if figure["value"] is None:
        return "–"
    low, high = figure["interval"] or (figure["value"],) * 2
    half = (high - low) / 2 * scale
    if half < 1e-3:
        return f"{figure['value'] * scale:.3g}"
    digits = min(1 if figure["value"] * scale >= 10 else 2, max(0, 1 - math.floor(math.log10(half))))
    return f"{figure['value'] * scale:.{digits}f}±{half:.{digits}f}"
