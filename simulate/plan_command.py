"""``pipespec simulate plan``: the best pipeline for a number of devices, how sure that is, what to measure next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pipespec_model.cli import make_folder, print_json, progress_bar
from pipespec_model.fair import SERIAL_SHARE
from pipespec_model.spec import dump_pipeline, load_pipeline

from .run import read_profile

if TYPE_CHECKING:
    from .plan import Choice, Plan

FIGURES = {"per-device": ("tokens_per_s_per_device", "tokens/s\na device"),
           "energy": ("joules_per_token", "J a\ntoken"), "cost": ("cost_per_million_tokens", "cost of\n10⁶ tokens")}


def plan_command(
    profile: Annotated[Path, typer.Argument(help="profile.json of a calibration, or one written by hand")],
    devices: Annotated[int, typer.Option(help="accelerators, or cores, that may be held at once")],
    stages: Annotated[Path | None, typer.Option(help="pipeline YAML: what the names in the profile are")] = None,
    target: Annotated[str | None, typer.Option(help="model that must answer; default: what drafts for none")] = None,
    objective: Annotated[str, typer.Option(help="latency, per-device, energy or cost")] = "latency",
    memory: Annotated[float | None, typer.Option(help="GB of one device; the profile needs memory_bytes")] = None,
    serial_share: Annotated[float, typer.Option(help="share of a step that sharding does not shorten")] = SERIAL_SHARE,
    idle_watts: Annotated[float | None, typer.Option(help="of one device")] = None,
    busy_watts: Annotated[float | None, typer.Option(help="of one device")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="of one device")] = None,
    acceptance_sd: Annotated[float, typer.Option(help="how far assumed acceptance rates may be off")] = 0.03,
    time_sd: Annotated[float, typer.Option(help="how far step times may be off, relative")] = 0.05,
    num_tokens: Annotated[int, typer.Option(help="tokens of a synthetic text")] = 256,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for pipeline.yaml and plan.json")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Rank every pipeline that the profile's models allow, autoregressive and synchronous ones among them."""
    from .candidates import Catalogue, Limits  # numba loads when a plan is asked for
    from .doubt import Doubt
    from .plan import Aim, Effort, plan

    known = {stage.name: stage for stage in load_pipeline(stages).stages} if stages else {}
    limits = Limits(devices, memory * 1e9 if memory is not None else None, serial_share)
    aim = Aim(objective, idle_watts, busy_watts, price_per_hour)  # type: ignore[arg-type]
    catalogue = Catalogue(read_profile(profile), limits, known, target)
    bar, advance = progress_bar(1.0)
    with bar:
        found = plan(catalogue, aim, doubt=Doubt(acceptance_sd, time_sd),
                     effort=Effort(num_tokens=num_tokens, seed=seed), advance=advance)
    result = answer(found)
    if out is not None:
        _write(found, result, out)
    if json_:
        print_json(result)
    else:
        _show(found, result)


def answer(found: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    rows = [_row(found, i) for i in range(len(found.choices))]
    return {"objective": found.aim.objective, "num_candidates": found.num_candidates, "num_pruned": found.num_pruned,
            "verdict": verdict(found), "break_even_acceptance_rate": found.break_even,
            "measure_next": [{"what": name, "gain": gain} for name, gain in found.worth], "ranking": rows}


def _row(found: Plan, i: int) -> dict[str, Any]:
    choice = found.choices[i]
    candidate, speeds = choice.candidate, choice.tokens_per_s
    low, high = np.quantile(speeds, [0.05, 0.95]).tolist()
    rivals = [c.tokens_per_s for c in found.choices
              if c.candidate.pipeline.strategy != "pipelined" and c.candidate.devices <= candidate.devices]
    rival = max(rivals, key=lambda x: x.mean())
    one = next((c.tokens_per_s for c in found.choices
                if not c.candidate.pipeline.links and c.candidate.devices == 1), None)
    return {
        "rank": i + 1, "pipeline": candidate.label, "strategy": candidate.pipeline.strategy,
        "handshake": candidate.pipeline.handshake if candidate.pipeline.strategy == "pipelined" else None,
        "lookahead": [link.lookahead for link in candidate.pipeline.links], "devices": candidate.devices,
        "shards": list(candidate.shards), "executable": candidate.executable,
        "tokens_per_s": float(speeds.mean()), "tokens_per_s_interval": [low, high],
        "speedup": float((speeds / one).mean()) if one is not None else None,
        "speedup_same_devices": float((speeds / rival).mean()),
        **found.aim.figures(candidate, float(speeds.mean()), choice.busy),
        "probability_best": float(found.best_share[i]), "regret": float(found.regret[i])}


def verdict(found: Plan) -> str:
    """One sentence: what wins, by how much over what the same devices do without a pipeline, how surely."""
    best = found.choices[0]
    sure = f"best in {100 * found.best_share[0]:.0f}% of the worlds"
    plain = next((c for c in found.choices if c.candidate.pipeline.strategy != "pipelined"
                  and c.candidate.devices <= best.candidate.devices), None)
    if best.candidate.pipeline.strategy != "pipelined":
        piped = next((c for c in found.choices if c.candidate.pipeline.strategy == "pipelined"), None)
        beside = f"; the best pipeline, {piped.candidate.label}, reaches {_share(piped, best)} of it" if piped else ""
        return f"No pipeline pays here: {best.candidate.pipeline.strategy} {best.candidate.label} is {sure}{beside}."
    assert plain is not None
    return (f"Pipelined {best.candidate.label} is {sure}: {_share(best, plain)} of {plain.candidate.pipeline.strategy} "
            f"{plain.candidate.label}, the best without a pipeline on as many devices.")


def _share(one: Choice, other: Choice) -> str:
    ratios = one.values / other.values
    low, high = np.quantile(ratios, [0.05, 0.95])
    return f"{ratios.mean():.2f} ({low:.2f} to {high:.2f})"


def _write(found: Plan, result: dict[str, Any], out: Path) -> None:
    import json

    make_folder(out)
    (out / "plan.json").write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
    best = next((c.candidate for c in found.choices if c.candidate.executable), None)
    if best is not None:
        dump_pipeline(best.pipeline, out / "pipeline.yaml")


def _show(found: Plan, result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['num_candidates']:,} candidates, {result['num_pruned']:,} ruled out by a bound")
    figure = FIGURES.get(result["objective"])
    for head, justify in (("pipeline", "left"), ("γ", "right"), ("devices", "right"), ("tokens/s", "right"),
                          ("same\ndevices", "right"), *([(figure[1], "right")] if figure else []),
                          ("best", "right"), ("regret", "right")):
        table.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in result["ranking"]:
        low, high = row["tokens_per_s_interval"]
        how = row["strategy"] + (" blocking" if row["handshake"] == "blocking" else "")
        table.add_row(f"{how}\n{row['pipeline']}", ",".join(map(str, row["lookahead"])) or "–", str(row["devices"]),
                      f"{row['tokens_per_s']:.1f}\n{low:.1f} to {high:.1f}", f"{row['speedup_same_devices']:.2f}×",
                      *([f"{row[figure[0]]:.3g}"] if figure else []), f"{100 * row['probability_best']:.0f}%",
                      f"{100 * row['regret']:.1f}%")
    Console().print(table)
    print(result["verdict"])
    if found.break_even is not None:
        print(f"It beats the target alone on as many devices from an acceptance rate of {found.break_even:.2f} on.")
    gains = [item for item in result["measure_next"] if item["gain"] >= 0.0005]
    print("Measure next: " + "; ".join(f"{item['what']} (worth {100 * item['gain']:.1f}%)" for item in gains[:3])
          if gains else "Nothing that is uncertain here would change the choice.")
