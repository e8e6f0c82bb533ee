"""``pipespec execute``: generate text with a pipeline; calibrate one; bench several side by side."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from pipespec_model import metrics
from pipespec_model.cli import make_folder, print_json, progress_bar, run
from pipespec_model.errors import InputError, StageError
from pipespec_model.locking import locked
from pipespec_model.profile import save_profile
from pipespec_model.spec import PipelineSpec, load_pipeline
from pipespec_model.trace import save_trace

from . import bench_report
from .bench import MIN_REPEATS, bench, from_files, num_runs
from .built_in import contenders
from .calibrate import calibrate
from .clasp.command import study
from .fleet import Fleet, new_trace
from .host import place
from .hosts import Hosts, gather, refuse_ranks
from .kept import fingerprint, open_trace
from .loading import TRUST_PICKLE, end_of_sequence, load_tokenizer
from .peer import PEERS
from .processes import stages_apart
from .prompts import Prompt, built_in, encode, load_prompts
from .reading import ModelReader, tokenizer_of
from .rendezvous import JOIN_S, launched
from .retry import run_with_retries
from .sampling_options import (
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
from .stopping import Stops
from .streaming import Live, TextStream, text_of
from .vocabulary import common_vocabulary
from .watch import PATIENCE_S
from .zoo import BUILT_IN

app = typer.Typer(add_completion=False, no_args_is_help=True)
PipelineFile = Annotated[Path, typer.Argument(help="pipeline YAML, or a models.json list")]
TrustPickle = Annotated[bool, typer.Option("--trust-pickle", help="also load weights that may run code as they load")]
PromptFile = Annotated[Path | None, typer.Option(help="text lines, or JSON Lines of Spec-Bench, HumanEval, GSM8K")]


@app.command("run")
def run_command(
    pipeline: PipelineFile,
    prompt: Annotated[str | None, typer.Option(help="one prompt")] = None,
    prompts: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=0)] = 64,
    temperature: Temperature = DRAW.temperature,
    top_k: TopK = DRAW.top_k,
    top_p: TopP = DRAW.top_p,
    min_p: MinP = DRAW.min_p,
    repetition_penalty: RepetitionPenalty = DRAW.repetition_penalty,
    min_new_tokens: MinNewTokens = DRAW.min_new_tokens,
    seed: Seed = DRAW.seed,
    stop: Annotated[list[str] | None, typer.Option(help="text before which the answer ends; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the trace and the resolved pipeline")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep what --out holds of this run; make the rest")] = False,
    retry: Annotated[int, typer.Option(min=0, help="times a prompt is tried again from what it had decided")] = 0,
    patience: Annotated[float, typer.Option(help="seconds after which a silent stage counts as hung")] = PATIENCE_S,
    bind: Annotated[str | None, typer.Option(help="under torchrun: this host's address for the others")] = None,
    join_timeout: Annotated[float, typer.Option(help="under torchrun: seconds for every host to arrive")] = JOIN_S,
    trust_pickle: TrustPickle = False,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document instead of the text")] = False,
) -> None:
    """Generate: the text appears as the target decides it; the trace is written prompt by prompt.

    Under torchrun every rank is one stage, on its own host or not; the first one shows and writes it all.
    """
    trust(trust_pickle)
    hosts = gather(rank, bind=bind, join_s=join_timeout, patience_s=patience) if (rank := launched()) else None
    if hosts and retry:
        raise InputError("--retry", "must come without torchrun, which starts the stages", mend="use --resume")
    sampling = sampling_of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens, seed=seed)
    spec, chosen = _prepare(pipeline, _chosen(prompt, prompts), hosts)
    stops = Stops(tuple(stop or ()), ModelReader(spec.target.model))
    spec.require_lookaheads()  # before a model is loaded
    if retry and (sampling.temperature > 0 or sampling.min_new_tokens > 0):
        # Both count from the first token, which a new attempt does not know of.
        raise InputError("--retry", "must come without --temperature and --min-new-tokens", mend="use --resume")
    if resume and out is None:
        raise InputError("--resume", "must come with --out")
    with ExitStack() as stack:
        if out is not None:
            make_folder(out)
            stack.enter_context(locked(out))
        fleet = stack.enter_context(Fleet(spec.stages, vocabulary=common_vocabulary([spec]),
                                          apart=stages_apart([spec]), patience_s=patience, hosts=hosts))
        resolved = fleet.configure(spec)
        trace = new_trace(resolved, seed=sampling.seed, options={
            "max_new_tokens": max_new_tokens, "sampling": sampling.to_dict(), "stop": list(stops.strings),
            "prompts": fingerprint(chosen)})
        if hosts:
            trace.host["hosts"] = hosts.named
        writer = stack.enter_context(open_trace(out, resolved, trace, resume=resume)) if out is not None else None
        kept = {record.prompt: record for record in trace.prompts}
        for number, item in enumerate(chosen):
            show = None if json_ else Live(TextStream(stops.read, stops.strings))
            if number in kept:
                if show is not None:
                    show(kept[number].tokens)
            else:
                record, steps = run_with_retries(fleet, spec, item, max_new_tokens=max_new_tokens, retries=retry,
                                                 number=number, on_text=show, on_failure=_again,
                                                 sampling=sampling, stops=stops if stop else None)
                if writer is not None:
                    writer.append(record, steps)
                trace.prompts.append(record)  # its steps are on disk: a long run must not grow by them
            if show is not None:
                show.end()
    speed = metrics.tokens_per_s(trace.prompts)
    length = metrics.tokens_per_target_step(trace.prompts)
    if json_:
        texts = [{"prompt": p.name, "text": text_of(stops.read, p.tokens, stops.strings),
                  "tokens": p.tokens, "total_s": p.total_s, "ttft_s": p.ttft_s} for p in trace.prompts]
        print_json({"pipeline": resolved.to_dict(), "tokens_per_s": speed, "mean_acceptance_length": length,
                    "prompts": texts})
    elif speed is not None and length is not None:
        print(f"{speed:.1f} tokens per second, {length:.2f} tokens a target step", file=sys.stderr)
    links = range(len(spec.links))
    if any(metrics.link_figures(trace, i).drafted == 0 for i in links) and max_new_tokens > 2:
        print("warning: a drafter proposed nothing; the run was plain decoding", file=sys.stderr)


def trust(pickles: bool) -> None:
    """Let the stages' processes, which begin after this, load weights from a pickle."""
    if pickles:
        os.environ[TRUST_PICKLE] = "1"


def _again(error: StageError, kept: int) -> None:
    print(f"{error}; again from token {kept}", file=sys.stderr, flush=True)


@app.command("calibrate")
def calibrate_command(
    pipeline: PipelineFile,
    prompts: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=4)] = 32,
    temperature: Temperature = DRAW.temperature,
    top_k: TopK = DRAW.top_k,
    top_p: TopP = DRAW.top_p,
    min_p: MinP = DRAW.min_p,
    repetition_penalty: RepetitionPenalty = DRAW.repetition_penalty,
    min_new_tokens: MinNewTokens = DRAW.min_new_tokens,
    seed: Seed = DRAW.seed,
    out: Annotated[Path, typer.Option(help="output folder")] = Path("pipespec-profile"),
    trust_pickle: TrustPickle = False,
    json_: Annotated[bool, typer.Option("--json", help="print the profile as JSON")] = False,
) -> None:
    """Measure step times, contention, costs and agreement of a pipeline; write profile.json.

    With sampling options, agreement is the probability of drawing the target's token, at each position of its text.
    """
    refuse_ranks("calibrate")
    trust(trust_pickle)
    sampling = sampling_of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens, seed=seed)
    spec, chosen = _prepare(pipeline, load_prompts(prompts) if prompts else None)
    make_folder(out)
    alone = PipelineSpec.alone(spec.target)
    wanted = [alone] if spec == alone else [alone, spec]
    bar, advance = progress_bar(8.0 * (len(chosen) + 1))
    with bar, Fleet(spec.stages, vocabulary=common_vocabulary([spec]), apart=stages_apart([spec])) as fleet:
        profile, traces = calibrate(fleet, wanted, chosen, max_new_tokens=max_new_tokens, sampling=sampling.or_none,
                                    tick=lambda text: advance(text, 8.0))
    save_profile(profile, out / "profile.json")
    for number, trace in enumerate(traces):
        save_trace(trace, out / f"calibration-{number:03d}.jsonl")
    if json_:
        print_json(profile.to_dict())
    else:
        print(out / "profile.json")


BENCH_DTYPES = ("float32", "bfloat16")


@app.command("bench")
def bench_command(
    pipelines: Annotated[list[Path] | None, typer.Argument(help="pipeline YAMLs; built-in ones without")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face id, folder, GGUF file or built-in name")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default) or bfloat16")] = None,
    threads: Annotated[int | None, typer.Option(help="of every stage (default 1)")] = None,
    lookahead: Annotated[int | None, typer.Option(help="of the synchronous int8 drafter (default 3)")] = None,
    prompts: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    repeats: Annotated[int, typer.Option(help="of each prompt")] = MIN_REPEATS,
    peer: Annotated[str | None, typer.Option(help="transformers: its generate(), assisted and lookup too")] = None,
    limit: Annotated[int | None, typer.Option(help="so many prompts, evenly spread")] = None,
    temperature: Temperature = DRAW.temperature,
    top_k: TopK = DRAW.top_k,
    top_p: TopP = DRAW.top_p,
    min_p: MinP = DRAW.min_p,
    repetition_penalty: RepetitionPenalty = DRAW.repetition_penalty,
    min_new_tokens: MinNewTokens = DRAW.min_new_tokens,
    seed: Seed = DRAW.seed,
    out: Annotated[Path | None, typer.Option(help="folder for traces, bench.json and bench.csv")] = None,
    trust_pickle: TrustPickle = False,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document instead of the table")] = False,
) -> None:
    """Strategies side by side on the same prompts, in turns; --peer transformers runs the library's own too."""
    refuse_ranks("bench")
    trust(trust_pickle)
    sampling = sampling_of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens, seed=seed).or_none
    if peer is not None and peer not in PEERS:
        raise InputError("--peer", f"must be {' or '.join(PEERS)}", peer)
    for name, value, least in (("--repeats", repeats, MIN_REPEATS), ("--max-new-tokens", max_new_tokens, 1)):
        if value < least:
            raise InputError(name, f"must be >= {least}", value)
    if pipelines and any(option is not None for option in (model, dtype, threads, lookahead)):
        raise InputError("--model, --dtype, --threads and --lookahead", "must not be given with a pipeline file",
                         mend="write them in the file")
    if dtype is not None and dtype not in BENCH_DTYPES:
        raise InputError("--dtype", f"must be one of {', '.join(BENCH_DTYPES)}", dtype)
    specs = from_files(pipelines) if pipelines else contenders(
        model or BUILT_IN, dtype or "float32", threads=1 if threads is None else threads,
        lookahead=3 if lookahead is None else lookahead)
    target = next(iter(specs.values())).target
    chosen = _spread(load_prompts(prompts) if prompts else built_in("evaluation", model=target.model), limit)
    tokenizer = load_tokenizer(target.model)
    encoded = encode(chosen, tokenizer, end_of_sequence(target.model, tokenizer))
    if out is not None:
        make_folder(out)
    bar, advance = progress_bar(num_runs(specs, len(encoded), repeats=repeats, peer=peer is not None))
    with bar:
        done = bench(specs, encoded, max_new_tokens=max_new_tokens, repeats=repeats, peer=peer is not None, out=out,
                     advance=advance, sampling=sampling)
    data = bench_report.document(done, max_new_tokens=max_new_tokens, repeats=repeats, sampling=sampling)
    if out is not None:
        bench_report.write(data, out)
    if json_:
        print_json(data)
    else:
        drawn = f", {sampling.said}" if sampling else ""
        bench_report.show(
            data, f"{target.model}, {target.dtype}, {len(encoded)} prompts × {max_new_tokens} tokens{drawn}")


app.command("clasp-study")(study)


def _spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    if limit < 1:
        raise InputError("--limit", "must be >= 1", limit)
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _prepare(path: Path, prompts: list[Prompt] | None, hosts: Hosts | None = None,
             ) -> tuple[PipelineSpec, list[Prompt]]:
    """None: built-in prompts for a calibration."""
    spec = load_pipeline(path)
    if hosts:
        hosts.check(spec.stages)
    (hosts.place if hosts else place)(spec, scripted=False)
    if prompts is None:
        prompts = built_in("calibration", model=spec.target.model)[::2]
    tokenizer = tokenizer_of(spec.target.model)
    return spec, encode(prompts, tokenizer, end_of_sequence(spec.target.model, tokenizer))


def _chosen(prompt: str | None, prompts: Path | None) -> list[Prompt]:
    if (prompt is None) == (prompts is None):
        raise InputError("--prompt or --prompts", "must be given, one of the two")
    return load_prompts(prompts) if prompts else [Prompt("prompt", prompt or "")]


def main(args: list[str] | None = None) -> None:
    run(app, "pipespec execute", args)


if __name__ == "__main__":
    main()
