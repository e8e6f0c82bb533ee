"""``pipespec validate``: hold the prediction against the measurement on this machine."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

if __name__ == "__main__" and sys.argv[1:2] == ["published"]:  # it never loads torch, which the imports below do
    from validate.published.__main__ import main as published

    published(sys.argv[2:])

from execute.host import assign_cores, available_cores
from execute.loading import DTYPES, end_of_sequence, load_tokenizer
from execute.processes import processes_for
from execute.prompts import Prompt, built_in, encode, load_prompts
from execute.record import check_recordable
from execute.sampling_options import (
    DRAW,
    MinNewTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    sampling_of,
)
from execute.zoo import BUILT_IN, FAMILY, built_in_folder
from pipespec_model.cli import print_json, progress_bar, run
from pipespec_model.errors import InputError
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec, load_pipeline
from pipespec_model.trace import Trace
from simulate.run import simulate

from .compare import replay_set
from .page import write_page
from .report import write_report
from .rows import Row, family_rows, real_rows
from .run import Group, Settings, emulated_group, finish, free_space, open_folder, run_group, weight

app = typer.Typer(add_completion=False)


@app.command()
def validate(
    pipeline: Annotated[Path | None, typer.Argument(help="pipeline YAML; without it the built-in rows")] = None,
    prompts: Annotated[Path | None, typer.Option(help="text, or JSON Lines of Spec-Bench, HumanEval, GSM8K")] = None,
    out: Annotated[Path, typer.Option(help="output folder; an interrupted run goes on there")] = Path("pipespec-out"),
    model: Annotated[str | None, typer.Option(help="Hugging Face id, folder, GGUF file or built-in name")] = None,
    family: Annotated[str | None, typer.Option(help="tiny: three small models that need no network")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16")] = None,
    full: Annotated[bool, typer.Option("--full", help="all rows, prompts and 64 tokens: 40 minutes")] = False,
    all_rows: Annotated[bool, typer.Option("--all-rows", help="all rows, few prompts: a quarter of an hour")] = False,
    temperature: Temperature = DRAW.temperature,
    top_k: TopK = DRAW.top_k,
    top_p: TopP = DRAW.top_p,
    min_p: MinP = DRAW.min_p,
    repetition_penalty: RepetitionPenalty = DRAW.repetition_penalty,
    min_new_tokens: MinNewTokens = DRAW.min_new_tokens,
    seed: Seed = DRAW.seed,
    tolerance: Annotated[float | None, typer.Option(help="exit 1 if the mean timing error is above this, in %")] = None,
    page: Annotated[Path | None, typer.Option(help="also write the table as a Markdown page there")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the report as one JSON document on stdout")] = False,
) -> int:
    """Calibrate on one half of the prompts, predict, measure on the other half, and report."""
    begun = time.monotonic()
    sampling = sampling_of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens, seed=seed).or_none
    # Read before a model is fetched: a fault in it is known in a moment.
    given = load_prompts(prompts) if prompts else None
    rows = chosen_rows(pipeline, model, family, dtype, extra=full or all_rows)
    rows = recordable(rows, sampling, given=pipeline is not None)
    target = rows[0].pipeline.target
    tiny = target.model in FAMILY
    chosen = given or built_in(model=target.model)
    calibration, evaluation = halves(chosen)
    # A short run times few prompts; the forecast rests on all of the calibration half.
    few = not full and prompts is None
    rounds = (4 if tiny else 6) if few else len(calibration)
    evaluation = first_of_each_category(evaluation) if few else evaluation
    tokens = 64 if full else 48 if tiny else 24
    settings = Settings(
        model=target.model, dtype=target.dtype, max_new_tokens=tokens, repeats=2, full=full,
        emulated_prompts=12 if full else 6, emulated_tokens=48 if full else 24,
        calibration_prompts=[p.name for p in calibration], evaluation_prompts=[p.name for p in evaluation],
        prompts_sha256=hashlib.sha256("\0".join(p.text for p in chosen).encode()).hexdigest(),
        rows=[{"name": row.name, "pipeline": row.pipeline.to_dict()} for row in rows],
        sampling=sampling.to_dict() if sampling else None)
    open_folder(out, settings)
    free_space(out)
    tokenizer = load_tokenizer(target.model)
    eos = end_of_sequence(target.model, tokenizer)
    groups = [Group(rows, processes_for({row.name: row.pipeline for row in rows}), encode(calibration, tokenizer, eos),
                    encode(evaluation, tokenizer, eos), tokens, settings.repeats, rounds, full, sampling=sampling)]
    if pipeline is None and (full or not tiny):
        groups.append(emulated_group(settings.emulated_prompts, settings.emulated_tokens, extra=full or all_rows))
    bar, advance = progress_bar(sum(weight(group) for group in groups))
    with bar:
        for group in groups:
            run_group(group, out, advance)
    data = finish(groups, settings, time.monotonic() - begun)
    shown = timeline_row(groups[0].rows)
    write_report(data, out, simulated=replayed(groups[0], shown), measured=groups[0].traces[shown.name])
    if page is not None:
        drawn = "".join(f" --{name.replace('_', '-')} {value:g}" for name, value in (sampling or DRAW).given.items())
        write_page(data, page,
                   "pipespec validate" + " --full" * full + " --all-rows" * all_rows + drawn + f" --page {page}")
    if json_:
        print_json(data)
    else:
        summary(data, out)
    error = data["timing_mape_percent"].get("measured")
    return 1 if tolerance is not None and error is not None and error > tolerance else 0


def chosen_rows(pipeline: Path | None, model: str | None, family: str | None, dtype: str | None, *,
                extra: bool) -> list[Row]:
    """What the options ask for.  Without any, the built-in language model's rows, or the tiny family's where
    that model cannot be fetched."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError("--dtype", f"must be one of {', '.join(DTYPES)}", dtype)
    if pipeline and (model or dtype):
        raise InputError("--model and --dtype", "must not be given with a pipeline file", mend="write them in the file")
    if family not in (None, "tiny"):
        raise InputError("--family", "must be tiny", family)
    if family and (pipeline or model):
        raise InputError("--family", "must not be given with a pipeline file or --model")
    num_cores = len(available_cores())
    if pipeline:
        rows = custom_rows(load_pipeline(pipeline))
    elif family or not (model or built_in_there()):
        rows = family_rows(dtype or "float32", num_cores, extra=extra)
    else:
        rows = real_rows(model or BUILT_IN, dtype or "float32", num_cores, extra=extra)
    for row in rows:
        assign_cores(row.pipeline, scripted=False)
    return rows


def recordable(rows: list[Row], sampling: Sampling | None, *, given: bool) -> list[Row]:
    """Those whose drafters' choices are recorded along sampled text; a pipeline that was given must be one."""
    if given:
        for row in rows:
            check_recordable(row.pipeline, sampling)
    return rows if sampling is None else [row for row in rows if not any(s.clasp for s in row.pipeline.stages)]


def built_in_there() -> bool:
    """Whether the built-in language model is here or can be fetched; says so where not."""
    try:
        built_in_folder()
    except InputError as error:
        print(f"{error}\nGoing on with the tiny family instead, as with --family tiny.", file=sys.stderr)
        return False
    return True


def custom_rows(spec: PipelineSpec) -> list[Row]:
    """The user's pipeline, and its target alone to compare with."""
    target = spec.target.model_copy(update={"threads": 1, "cores": None})
    alone = Row("autoregressive-1", PipelineSpec.alone(target), "the baseline")
    return [alone] if spec == alone.pipeline else [alone, Row("pipeline", spec, "the given pipeline")]


def halves(prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """To calibrate on, beginning with one prompt of every category, and to judge on."""
    out = [[prompt for prompt in prompts if prompt.half == half] for half in ("calibration", "evaluation")]
    if not out[0] or not out[1]:
        raise InputError("prompts", "must be at least 2: one to calibrate on, one to judge on", len(prompts))
    first = first_of_each_category(out[0])
    return first + [prompt for prompt in out[0] if prompt not in first], out[1]


def first_of_each_category(prompts: list[Prompt]) -> list[Prompt]:
    return list({prompt.category: prompt for prompt in reversed(prompts)}.values())[::-1]


def timeline_row(rows: list[Row]) -> Row:
    """The row that the report draws: the first pipelined one."""
    return next((row for row in rows if row.pipeline.strategy == "pipelined"), rows[-1])


def replayed(group: Group, row: Row) -> Trace:
    assert group.profile is not None
    assert group.evaluation_agreements is not None
    prompts = [p for p in group.traces[row.name].prompts if p.repeat == 0]
    return simulate(row.pipeline, group.profile, replay_set(row.pipeline, group.evaluation_agreements, prompts))


def summary(data: dict, out: Path) -> None:
    """A table for people, on stdout."""
    from rich.console import Console
    from rich.table import Table

    from .figures import describe
    from .report import headline, signed, span

    table = Table(title=f"{data['model']}, {data['dtype']}")
    table.add_column("strategy {stages}")
    for name in ("measured tok/s", "predicted tok/s", "difference", "90% forecast", "timing error"):
        table.add_column(name, justify="right")
    for row in data["rows"]:
        table.add_row(
            describe(row), f"{row['measured_tokens_per_s']:.1f}", f"{row['predicted_tokens_per_s']['simulation']:.1f}",
            signed(row["error_percent"]["simulation"]), span(row["predicted_interval"]),
            signed(row["timing_error_percent"]))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for sentence in headline(data, [row for row in data["rows"] if row["origin"] == "measured"]):
        console.print(sentence)
    console.print(f"Report: {out / 'report.html'}")


def main(args: list[str] | None = None) -> None:
    run(app, "pipespec validate", args)


if __name__ == "__main__":
    main()
