"""The validation page of one machine in Markdown: ``metric | measured | predicted | diff %``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .compare import percent
from .figures import describe
from .report import headline, signed


def write_page(data: dict[str, Any], path: Path, command: str) -> None:
    """command : what regenerates the page"""
    real = [row for row in data["rows"] if row["origin"] == "measured"]
    host = data["host"]
    lines = [
        "# Validation", "", f"Written by `{command}`; do not edit.", "",
        f"{data['model']}, {data['dtype']}, batch 1, {data['drawn']}; {len(data['evaluation_prompts'])} prompts × "
        f"{data['max_new_tokens']} tokens, predicted from {len(data['calibration_prompts'])} others.  "
        f"{host['cpu']}, {host['cores']} cores, torch {data['versions']['torch']}.", "",
        "*Forecast*: from the calibration prompts, on disk before the first measured step.  *Replayed*: with the "
        "evaluation prompts' own agreement and the machine as fast as single steps beside each run found it, which "
        "leaves the error of the model of time.", "",
        *(f"* {sentence}" for sentence in headline(data, real)),
    ]
    for row in data["rows"]:
        lines += ["", f"### {describe(row)}" + (" (emulated)" if row["origin"] == "emulated" else ""), "",
                  "| metric | measured | predicted | diff % |", "|---|--:|--:|--:|"]
        lines += [f"| {name} | {a:.{digits}f} | {b:.{digits}f} | {signed(percent(b, a))} |"
                  for name, a, b, digits in _metrics(row) if a and b]
        if row["predicted_interval"]:
            low, high = row["predicted_interval"]
            inside = "inside" if low <= row["measured_tokens_per_s"] <= high else "outside"
            lines += ["", f"90% forecast {low:.1f} to {high:.1f} tokens per second: measured {inside}."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _metrics(row: dict[str, Any]) -> Iterator[tuple[str, float | None, float | None, int]]:
    measured = row["measured_tokens_per_s"]
    yield "tokens per second, forecast", measured, row["predicted_tokens_per_s"]["simulation"], 1
    yield "tokens per second, replayed", measured, row["replayed_tokens_per_s"], 1
    yield "ms to the first token, replayed", 1e3 * row["ttft_s"], 1e3 * row["replayed_ttft_s"], 1
    if row["lookahead"]:
        length = row["measured_mean_acceptance_length"]
        yield "tokens a target step, forecast", length, row["predicted_mean_acceptance_length"], 2
        yield "tokens a target step, replayed", length, row["replayed_mean_acceptance_length"], 2
    for item in row["step_times"]:
        if item["measured_count"] >= 3 and item["measured_s"] >= 1e-4:
            yield (f"ms of a {item['kind']} step of {item['stage']}, replayed", 1e3 * item["measured_s"],
                   1e3 * item["replayed_s"], 1)
