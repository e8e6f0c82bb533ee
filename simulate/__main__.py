"""``pipespec simulate``: one pipeline's throughput with intervals; a timeline to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pipespec_model.cli import make_folder, print_json, run
from pipespec_model.errors import InputError
from pipespec_model.profile import Profile, recorded
from pipespec_model.spec import PipelineSpec, dump_pipeline, load_pipeline
from pipespec_model.trace import load_trace, save_trace

from .bench import bench_command
from .choose import chosen
from .estimate import estimate_command
from .figures import figures
from .plan_command import plan_command
from .run import agreements_for, read_profile, replication_prompts, simulate
from .sweep_command import sweep_command
from .timeline import save_chrome_trace, save_timeline
from .traffic_command import traffic_command

app = typer.Typer(add_completion=False, no_args_is_help=True)
ProfileFile = Annotated[Path, typer.Option(help="profile.json of a calibration, or one written by hand")]


@app.command("run")
def run_command(
    pipeline: Annotated[Path, typer.Argument(help="pipeline YAML")],
    profile: ProfileFile,
    num_prompts: Annotated[int, typer.Option(min=1, help="synthetic prompts a replication (recorded: all)")] = 16,
    num_tokens: Annotated[int, typer.Option(min=1, help="tokens a synthetic prompt")] = 256,
    replications: Annotated[int, typer.Option(min=1)] = 5,
    seed: Annotated[int, typer.Option()] = 0,
    engine: Annotated[str, typer.Option(help="events, or analytic: a formula, in milliseconds")] = "events",
    out: Annotated[Path | None, typer.Option(help="folder for trace, profile source and resolved pipeline")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Throughput, speed-up, acceptance and use of each stage, with 90% intervals over replications."""
    if engine not in ("events", "analytic"):
        raise InputError("--engine", "must be events or analytic", engine)
    known = read_profile(profile)
    spec = chosen(load_pipeline(pipeline), known)
    if engine == "analytic":
        _answer(analytic(spec, known, num_tokens), json_)
        return
    traces, plain = [], []
    for number in range(seed, seed + replications):
        prompts = replication_prompts(spec, known, num_prompts=num_prompts, num_tokens=num_tokens, seed=number)
        traces.append(simulate(spec, known, prompts, seed=number))
        # The same texts, by the target alone.
        target = [agreement.select([spec.target.choice_key]) for agreement in prompts]
        plain.append(simulate(PipelineSpec.alone(spec.target), known, target, seed=number))
    result = figures(spec, traces, plain)
    if out is not None:
        make_folder(out)
        dump_pipeline(spec, out / "pipeline.yaml")
        save_trace(traces[0], out / "trace.jsonl")
    if json_:
        print_json(result)
    else:
        _show(result)


def analytic(spec: PipelineSpec, profile: Profile, num_tokens: int) -> dict[str, Any]:
    """The formula's figures, without prefill; step times are taken in the middle of a prompt's tokens."""
    from pipespec_model.predict import predict  # compiles

    prompts = recorded(profile, spec)
    middles = [a.prompt_length + a.num_tokens / 2 for a in prompts] or [num_tokens / 2]
    context = int(np.mean(middles))
    said, alone = (predict(item, profile, context=context) for item in (spec, PipelineSpec.alone(spec.target)))
    return {"pipeline": spec.label, "strategy": spec.strategy, "lookahead": [link.lookahead for link in spec.links],
            "model": said.model, "tokens_per_s": said.tokens_per_s, "speedup": said.tokens_per_s / alone.tokens_per_s,
            "mean_acceptance_length": said.mean_acceptance_length}


def _answer(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    print(f"{result['strategy']} {result['pipeline']}, {result['model']}: {result['tokens_per_s']:.1f} tokens per "
          f"second, {result['speedup']:.2f}× autoregressive, "
          f"{result['mean_acceptance_length']:.2f} tokens a target step")


@app.command("resolve")
def resolve_command(
    pipeline: Annotated[Path, typer.Argument(help="pipeline YAML with lookahead: auto")],
    profile: ProfileFile,
    out: Annotated[Path, typer.Option(help="file to write")] = Path("pipeline.resolved.yaml"),
) -> None:
    """Choose every ``auto`` lookahead by simulation and write the pipeline that ``execute`` can run."""
    dump_pipeline(chosen(load_pipeline(pipeline), read_profile(profile)), out)
    print(out)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    def text(figure: dict[str, Any], scale: float = 1.0, digits: int = 2) -> str:
        if figure["value"] is None:
            return "–"
        half = 0.0 if figure["interval"] is None else (figure["interval"][1] - figure["interval"][0]) / 2
        return f"{figure['value'] * scale:.{digits}f} ± {half * scale:.{digits}f}"

    console = Console()
    table = Table(title=f"{result['strategy']} {result['pipeline']}, {result['replications']} replications, "
                        "90% intervals")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("tokens per second", text(result["tokens_per_s"], digits=1))
    table.add_row("speed-up over autoregressive", text(result["speedup"]))
    table.add_row("tokens a target step", text(result["mean_acceptance_length"]))
    table.add_row("time to first token, ms", text(result["ttft_s"], 1e3, 1))
    for link in result["links"]:
        table.add_row(f"acceptance rate {link['link']}", text(link["acceptance_rate"]))
    for stage in result["stages"]:
        for key in ("busy", "waiting", "wasted"):
            table.add_row(f"{stage['name']} {key}, %", text(stage[key], 100.0, 1))
    console.print(table)


@app.command("trace")
def trace_command(
    pipeline: Annotated[Path | None, typer.Argument(help="pipeline YAML, to simulate")] = None,
    profile: Annotated[Path | None, typer.Option(help="profile for the simulation")] = None,
    trace: Annotated[Path | None, typer.Option(help="a measured (or any) trace instead")] = None,
    prompt: Annotated[int, typer.Option(min=0, help="which prompt to draw")] = 0,
    num_tokens: Annotated[int, typer.Option(min=1, help="draw until the target has so many")] = 16,
    out: Annotated[Path, typer.Option(help="output folder")] = Path("pipespec-trace"),
) -> None:
    """Draw a timeline (PNG, SVG) and write Chrome-trace JSON, which opens in Perfetto."""
    if (trace is None) == (pipeline is None) or (pipeline is not None and profile is None):
        raise InputError("trace", "must be given as PIPELINE with --profile, or as --trace FILE")
    if trace is not None:
        shown, warning = load_trace(trace)
        if warning:
            typer.echo(f"warning: {warning}", err=True)
    else:
        assert pipeline is not None
        assert profile is not None
        known = read_profile(profile)
        spec = chosen(load_pipeline(pipeline), known)
        shown = simulate(spec, known, agreements_for(spec, known, num_prompts=4, num_tokens=128, seed=0))
    make_folder(out)
    for name in ("timeline.png", "timeline.svg"):
        save_timeline([shown], out / name, prompt=prompt, num_tokens=num_tokens)
    save_chrome_trace(shown, out / "trace.chrome.json")
    save_trace(shown, out / "trace.jsonl")
    print(out / "timeline.png")


@app.command("plot")
def plot_command(
    table: Annotated[Path, typer.Argument(help="folder, Parquet or CSV of a sweep")],
    out: Annotated[Path | None, typer.Option(help="folder for the pictures; default: beside the table")] = None,
) -> None:
    """Draw what a sweep's table shows: maps with the break-even line, speed-up curves, devices, use of stages."""
    from .pictures import draw_all  # matplotlib and pandas load when a picture is asked for
    from .store import load_table

    out = out or (table if table.is_dir() else table.parent)
    make_folder(out)
    for path in draw_all(load_table(table), out):
        print(path)


app.command("sweep")(sweep_command)
app.command("estimate")(estimate_command)
app.command("plan")(plan_command)
app.command("traffic")(traffic_command)
app.command("bench")(bench_command)


def main(args: list[str] | None = None) -> None:
    run(app, "pipespec simulate", args)


if __name__ == "__main__":
    main()
