"""``pipespec simulate estimate``: step times and memory of a model on a device, before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipespec_model.cli import print_json
from pipespec_model.devices import device, runtime
from pipespec_model.errors import InputError
from pipespec_model.profile import load_profile, save_profile
from pipespec_model.roofline import Estimate, with_estimate
from pipespec_model.shape import read_shape


def estimate_command(
    config: Annotated[Path, typer.Argument(help="config.json of a model, or its folder")],
    device_: Annotated[str, typer.Option("--device", help="a100-80gb, h100, h200, l40s, rtx-4090, or a file")],
    bits: Annotated[float, typer.Option(help="per weight of the layers, scales included")] = 16.0,
    runtime_: Annotated[str, typer.Option("--runtime", help="eager, compiled, ideal, or a file")] = "eager",
    widths: Annotated[str, typer.Option(help="tokens a step")] = "1,2,4,8,16",
    contexts: Annotated[str, typer.Option(help="tokens in the cache")] = "0,1024,8192",
    name: Annotated[str | None, typer.Option(help="stage name in the profile; without it, the folder's")] = None,
    out: Annotated[Path | None, typer.Option(help="profile to write, or to add this model to")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """ESTIMATE a model's step times and memory from its config; acceptance is yours to give or sweep."""
    made = Estimate(read_shape(config), device(device_), runtime(runtime_), bits)
    longest = _numbers("--contexts", contexts, 0)
    result = made.to_dict(_numbers("--widths", widths, 1), longest)
    if out is not None:
        known = load_profile(out) if out.exists() else None
        folder = config if config.is_dir() else config.parent
        save_profile(with_estimate(known, name or folder.resolve().name, made, context=max(longest)), out)
    if json_:
        print_json(result)
    else:
        _show(result)


def _numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise InputError(option, f"must be whole numbers >= {least} with commas between", text)
    return found


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = result["step_s"]
    widths = list(dict.fromkeys(row["width"] for row in rows))
    table = Table(title=f"ESTIMATE, not measured: {result['device']}, {result['bits']:g} bits; milliseconds a step")
    table.add_column("context", justify="right")
    for width in widths:
        table.add_column(f"{width} token{'s' * (width > 1)}", justify="right")
    for start in range(0, len(rows), len(widths)):
        row = rows[start:start + len(widths)]
        table.add_row(str(row[0]["context"]), *(f"{1e3 * cell['seconds']:.2f}" for cell in row))
    memory = {key: value / 1e9 for key, value in result["memory_bytes"].items()}
    number = result["devices_needed"]
    console = Console()
    console.print(table)
    console.print(f"memory {memory['weights']:.1f} GB of weights, {memory['cache']:.2f} of cache, "
                  f"{memory['activations']:.2f} of activations; a device has {memory['device']:.0f}: "
                  + ("it fits" if result["fits"] else f"{number} devices, and no step gets shorter by it"))
    console.print(f"alone {result['autoregressive_tokens_per_s']:.1f} tokens per second; estimated from: "
                  f"{result['sources']['device']}; {result['sources']['runtime']}", highlight=False)
