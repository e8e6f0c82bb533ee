"""report.html, report.json and report.csv from one dictionary.

The page is self-contained: no script, no font, no request.  Every text that comes from outside is
escaped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from pipespec_model.trace import Trace

from . import figures

CSV_COLUMNS = (
    "name", "strategy", "stages", "lookahead", "handshake", "devices", "threads", "origin", "num_prompts",
    "num_tokens", "measured_tokens_per_s", "timing_error_percent", "measured_mean_acceptance_length",
    "predicted_mean_acceptance_length", "speedup", "speedup_same_devices", "identical_prompts",
    "near_tie_prompts", "noise_percent",
)


def write_report(data: dict[str, Any], out: Path, *, simulated: Trace, measured: Trace) -> None:
    """Write the three files; ``simulated`` and ``measured`` are the timeline pair."""
    (out / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    _write_csv(data["rows"], out / "report.csv")
    real = [row for row in data["rows"] if row["origin"] == "measured"]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)
    environment.filters |= {"signed": signed, "span": span}
    template = environment.from_string(
        resources.files("validate").joinpath("report.html.j2").read_text(encoding="utf-8"))
    bars = figures.throughput_bars(real)
    (out / "throughput.svg").write_text(bars, encoding="utf-8")
    page = template.render(
        data=data, real=real, emulated=[row for row in data["rows"] if row["origin"] == "emulated"],
        describe=figures.describe, headline=headline(data, real), why=[(row, why(row)) for row in data["rows"]],
        bars=bars, scatter=figures.scatter(data["rows"]),
        timelines=figures.timelines(simulated, measured), timeline_of=timeline_caption(measured),
    )
    (out / "report.html").write_text(page, encoding="utf-8")


def _write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*CSV_COLUMNS, "predicted_tokens_per_s", "predicted_low", "predicted_high",
                         "measured_low", "measured_high", "error_percent", "renewal_error_percent",
                         "closed_form_error_percent"])
        for row in rows:
            flat = [_cell(row[name]) for name in CSV_COLUMNS]
            writer.writerow([
                *flat, row["predicted_tokens_per_s"]["simulation"], *(row["predicted_interval"] or ("", "")),
                *(row["measured_interval"] or ("", "")), row["error_percent"]["simulation"],
                *(_cell(row["error_percent"][name]) for name in ("renewal", "closed_form"))])


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return ";".join(str(item) for item in value) if isinstance(value, list) else value


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f}%".replace("-", "−")


def span(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.1f} to {interval[1]:.1f}"


def headline(data: dict[str, Any], real: Sequence[dict[str, Any]]) -> list[str]:
    """What the run says, in sentences."""
    out = []
    if real:
        best = max(real, key=lambda row: row["measured_tokens_per_s"])
        pipelined = [row for row in real if row["strategy"] == "pipelined"]
        text = f"Fastest here: {figures.describe(best)}, {best['measured_tokens_per_s']:.1f} tokens per second"
        out.append(text + (f", {best['speedup']:.2f}× one-core autoregressive decoding." if best["speedup"] else "."))
        if pipelined:
            top = max(pipelined, key=lambda row: row["measured_tokens_per_s"])
            if top["speedup"] and top["speedup_same_devices"]:
                verdict = "so on this machine the pipeline pays" if top["speedup_same_devices"] > 1 else (
                    "so on this machine the same cores are better used without a pipeline")
                out.append(f"The best pipeline, {figures.describe(top)}, reaches {top['speedup']:.2f}× one-core "
                           f"autoregressive decoding and {top['speedup_same_devices']:.2f}× the best other use of the "
                           f"same cores, {verdict}.")
        error = data["timing_mape_percent"].get("measured")
        noise = data["noise_floor_percent"]
        floor = f" Two repeats of one run differ by {noise:.1f}%." if noise is not None else ""
        out.append(f"The simulator's model of time was off by {error:.1f}% on average "
                   f"({data['timing_worst_percent']['measured']:.1f}% at worst).{floor}")
    rows = data["rows"]
    same = sum(row["identical_prompts"] + row.get("identical_calibration_prompts", 0) for row in rows)
    checked = len(data["calibration_prompts"])
    total = sum(row["num_prompts"] + checked * ("identical_calibration_prompts" in row) for row in rows)
    near = sum(row["near_tie_prompts"] + row.get("near_tie_calibration_prompts", 0) for row in rows)
    rest = f"; {near} differ first where the two best tokens were a near-tie" if near else ""
    out.append(f"{same} of {total} generated texts equal plain decoding token for token{rest}.")
    return out


def why(row: dict[str, Any]) -> str:
    """Where a row's timing error comes from, in words."""
    error = row["timing_error_percent"]
    noise = row["noise_percent"] or 0.0
    if abs(error) <= max(noise, 1.0):
        return f"Within the run's own noise ({noise:.1f}% between repeats)." if noise else "No visible error."
    parts = []
    for item in row["step_times"]:
        weight = item["measured_count"] * item["measured_s"]
        off = item["measured_s"] / item["replayed_s"] - 1
        parts.append((abs(off) * weight, item, off))
    if not parts:
        return "No steps to compare."
    _, item, off = max(parts, key=lambda part: part[0])
    if abs(off) < 0.01:
        return "Step times agree within 1%; the stages waited for each other for longer or shorter than replayed."
    more = "longer" if off > 0 else "shorter"
    text = (f"Mostly {item['stage']}'s {item['kind']} steps: {item['measured_s'] * 1e3:.1f} ms in the run, "
            f"{abs(off) * 100:.0f}% {more} than replayed ({item['replayed_s'] * 1e3:.1f} ms)")
    odd = max(row["step_times"], key=_count_excess)
    if _count_excess(odd) > 2:
        text += (f"; and {odd['stage']} took {odd['measured_count']:.0f} {odd['kind']} steps where the replay has "
                 f"{odd['replayed_count']}")
    return text + "."


def _count_excess(item: dict[str, Any]) -> float:
    """Steps by which a count differs, beyond a tenth of it."""
    return abs(item["measured_count"] - item["replayed_count"]) - 0.1 * item["replayed_count"]


def timeline_caption(trace: Trace) -> str:
    names = ",".join(stage["name"] for stage in trace.pipeline["stages"])
    return f"{trace.pipeline['strategy']} {{{names}}}, prompt {trace.prompts[0].name}"
