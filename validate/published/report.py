"""The study as report.html, report.json and report.csv, and its figures as files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from validate.report import signed

from . import figures

CSV_COLUMNS = (
    "file", "strategy", "models", "labelled_lookahead", "inferred_lookahead", "num_prompts", "measured_ms_per_token",
    "predicted_ms_per_token", "error_percent", "error_percent_own_drafter", "error_percent_mean_over_prompts",
    "measured_verifications", "predicted_verifications", "measured_drafts", "predicted_drafts",
    "measured_joules_per_token", "predicted_joules_per_token", "used_for_calibration", "warnings",
)
MODELS = {"markov": "Markov", "iid": "i.i.d.", "renewal": "renewal", "closed_form": "closed form"}
"""Weaker models and their columns' names."""


def write_report(data: dict[str, Any], out: Path) -> None:
    """Write report.json, report.csv, report.html and one SVG file a figure into ``out``."""
    (out / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    _write_csv(data["rows"], out / "report.csv")
    rows = data["rows"]
    drawn = {"scatter": figures.scatter(rows) if figures.predicted_rows(rows) else None,
             "lookahead": figures.against_lookahead(rows), "lengths": figures.accepted_lengths(rows)}
    for name, picture in drawn.items():
        if picture:
            (out / f"{name}.svg").write_text(picture, encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)
    environment.filters |= {"signed": signed, "number": number, "span": span, "label": figures.label}
    template = environment.from_string(
        resources.files("validate.published").joinpath("report.html.j2").read_text(encoding="utf-8"))
    page = template.render(data=data, drawn=drawn, short=short, headline=headline(data), models=MODELS,
                           predicted=figures.predicted_rows(rows), names=figures.NAMES,
                           others=[row for row in rows if row["predicted_ms_per_token"] is None],
                           warned=[row for row in rows if row["warnings"]])
    (out / "report.html").write_text(page, encoding="utf-8")


def _write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*CSV_COLUMNS, *(f"error_percent_{name}" for name in MODELS)])
        for row in rows:
            writer.writerow([*(_cell(row[name]) for name in CSV_COLUMNS),
                             *(_cell(row["error_percent_by_model"].get(name)) for name in MODELS)])


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return "; ".join(str(item) for item in value) if isinstance(value, list) else value


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def span(interval: Sequence[float] | None, digits: int = 1) -> str:
    if interval is None:
        return "–"
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}".replace("-", "−")


def short(row: dict[str, Any]) -> str:
    """A run in the field's notation: ``pipelined {1B,8B} L=6``."""
    name = figures.NAMES.get(row["strategy"], row["strategy"])
    if row["strategy"] == "autoregressive":
        return f"{name} {figures.label(row['models'])}"
    return f"{name} {figures.label(row['models'])} L={row['inferred_lookahead']}"


def headline(data: dict[str, Any]) -> list[str]:
    """What the study says, in sentences."""
    out = []
    groups = data["by_strategy"]
    for kind, name in figures.NAMES.items():
        found = groups[kind]
        if found["mape_percent"] is not None:
            count = sum(row["strategy"] == kind and row["error_percent"] is not None for row in data["rows"])
            others = data["mape_percent_by_model"][kind]
            rest = ", ".join(f"{text} {others[key]:.1f}%" for key, text in (
                ("markov", "Markov acceptance"), ("iid", "i.i.d. acceptance"),
                ("renewal", "the renewal formula"), ("closed_form", "the closed form"))
                if others[key] is not None)
            out.append(f"{count} {name} runs, time per token: off by {found['mape_percent']:.1f}% on average, "
                       f"{found['worst_percent']:.1f}% at worst; with the same step times, {rest}.")
    own = data["own_drafter"]
    if own["mape_percent"] is not None:
        out.append(f"With each pipelined file's own drafter step time: {own['mape_percent']:.1f}% on average, "
                   f"{own['worst_percent']:.1f}% at worst: for one model it differs between files by up to 8%.")
    wrong = [row for row in data["rows"] if row["strategy"] == "pipelined" and row["inferred_lookahead"] is not None
             and row["inferred_lookahead"] != row["labelled_lookahead"]]
    for row in wrong:
        out.append(f"{row['file']} is labelled lookahead {row['labelled_lookahead']}; its windows are those of "
                   f"{row['inferred_lookahead']}.")
    exact = [row for row in data["rows"] if row.get("prompts_that_differ") is not None]
    if exact:
        prompts = sum(row["num_prompts"] for row in exact)
        missed = sum(len(row["prompts_that_differ"]) for row in exact)
        out.append(f"Synchronous runs, each predicted without its own file: the numbers of verifications and of drafts "
                   f"are exact on {prompts - missed} of {prompts} prompts.")
    gains = [(row["measured_ms_per_token"] / row["best_ms_per_token"], row) for row in data["what_if"]]
    if gains:
        gain, row = max(gains, key=lambda item: item[0])
        best = ",".join(map(str, row["best_lookahead"]))
        out.append(f"Most to be had: {row['file']}, {gain:.2f}× with the overlapped handshake and γ={best}.")
    return out
