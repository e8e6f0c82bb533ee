"""``pipespec simulate bench``: how fast both engines are, on fixed cases, in one run.

What is timed is what a user asks for: pipeline and profile in, totals out, made-up choices and off-path draws
included; compiling is not, and is reported apart.  A case's figure is the median of its runs.  Both engines are given
the same pipeline, the compiled one more tokens of it.  A third row, ``simpy-bare``, says what SimPy itself would leave
of the time: one process that waits as many times as the case's SimPy model makes events, and no rule at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import simpy
import typer

from pipespec_model.acceptance import IID
from pipespec_model.agreement import Agreement, synthetic
from pipespec_model.cli import print_json
from pipespec_model.latency import Affine, Constant, LatencyModel
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec

from .engine import PromptRun
from .run import agreements_for

ENGINES = ("simpy-bare", "simpy", "compiled")
NUM_RUNS = 5


@dataclass(frozen=True)
class BenchCase:
    """A pipeline with its profile and what of it is run.

    prompts : recorded ones; none = made up as they go
    num_tokens : of a made-up prompt, by engine
    num_seeds : how often the recorded prompts are run, by engine
    """

    name: str
    pipeline: PipelineSpec
    profile: Profile
    prompts: tuple[Agreement, ...] = ()
    num_tokens: tuple[int, int] = (0, 0)
    num_seeds: tuple[int, int] = (1, 1)


def bench_cases(scale: float = 1.0) -> list[BenchCase]:
    """The fixed cases; ``scale`` shortens the compiled engine's share, for tests."""
    def long(count: int) -> int:
        return max(1, round(count * scale))

    spec, profile = _built([("draft", Constant(0.01)), ("target", Constant(0.1))], [0.8], [{"lookahead": 4}])
    two = BenchCase("two-stage-iid", spec, profile, num_tokens=(2000, long(20_000_000)))
    # The PipeSpec paper's models; the 4-bit target takes 120 ms for one token and 427 for 2 to 20.
    spec, profile = _built([("1B", Constant(0.0115)), ("8B", Constant(0.0215)), ("70B", Affine(0.12, 0.427, 0.0))],
                           [0.85, 0.9], [{"lookahead": 0}, {"lookahead": 4}])
    recorded = tuple(synthetic([stage.choice_key for stage in spec.stages], [IID(0.85), IID(0.9)], num_tokens=256,
                               seed=0, prompt=number) for number in range(4))
    three = BenchCase("three-stage-recorded", spec, profile, recorded, num_seeds=(1, long(400)))
    spec, profile = _built([(f"s{i}", Constant(0.005 * 2**i)) for i in range(5)], [0.8] * 4, [{}] * 4)
    five = BenchCase("five-stage-iid", spec, profile, num_tokens=(500, long(100_000)))
    return [two, three, five]


def _built(stages: Sequence[tuple[str, LatencyModel]], rates: Sequence[float],
           links: Sequence[dict[str, int]]) -> tuple[PipelineSpec, Profile]:
    names = [name for name, _ in stages]
    spec = PipelineSpec.from_dict({"stages": [{"name": name, "model": name} for name in names], "links": list(links)})
    pairs = [f"{a}>{b}" for a, b in pairwise(names)]
    return spec, Profile({name: StageLatency(model) for name, model in stages},
                         {pair: IID(rate) for pair, rate in zip(pairs, rates, strict=True)})


def run_simpy(case: BenchCase) -> int:
    """Tokens of the case's share of the SimPy model."""
    return sum(len(run.run()[0].tokens) for run in _simpy_runs(case))


def _simpy_runs(case: BenchCase, *, logged: bool = False) -> list[PromptRun]:
    prompts = case.prompts or agreements_for(case.pipeline, case.profile, num_prompts=1, num_tokens=case.num_tokens[0],
                                             seed=0)
    return [PromptRun(case.pipeline, case.profile, prompt, prompt=number, seed=seed, log=[] if logged else None)
            for seed in range(case.num_seeds[0]) for number, prompt in enumerate(prompts)]


def simpy_events(case: BenchCase) -> tuple[int, int]:
    """Events that the SimPy model logs, and events of SimPy's own that it makes for them."""
    runs = _simpy_runs(case, logged=True)
    for run in runs:
        run.run()
    return sum(len(run.log or ()) for run in runs), sum(next(run.env._eid) for run in runs)


def run_bare(num_events: int) -> None:
    """That many SimPy events, with nothing to do at any."""
    env = simpy.Environment()

    def ticks() -> Generator[simpy.Event, None, None]:
        for _ in range(num_events):
            yield env.timeout(1)

    env.process(ticks())
    env.run()


def run_compiled(case: BenchCase) -> tuple[int, int]:
    """Tokens and events of the case's share of the compiled engine."""
    from .compiled import encode, outcome_of  # loads numba, which a command's help does without

    figures = outcome_of(encode(case.pipeline, case.profile, num_prompts=1, num_tokens=case.num_tokens[1],
                                seeds=range(case.num_seeds[1]), agreements=case.prompts or None)).figures
    return int(figures[:, 2].sum()), int(figures[:, 4].sum())


def bench(cases: Sequence[BenchCase]) -> dict[str, Any]:
    """The document of ``--json``."""
    rows = []
    for case in cases:
        logged, made = simpy_events(case)
        tokens, seconds = _timed(run_simpy, case)
        _, bare_seconds = _timed(run_bare, made)
        rows.append(_row(case.name, "simpy-bare", tokens, made, bare_seconds))
        rows.append(_row(case.name, "simpy", tokens, logged, seconds))
        (tokens, events), seconds = _timed(run_compiled, case)
        rows.append(_row(case.name, "compiled", tokens, events, seconds))
    return {"cases": rows}


def _timed(run: Callable[[Any], Any], case: Any) -> tuple[Any, float]:
    seconds = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        result = run(case)
        seconds.append(time.perf_counter() - start)
    return result, median(seconds)


def _row(case: str, engine: str, tokens: int, events: int, seconds: float) -> dict[str, Any]:
    return {"case": case, "engine": engine, "tokens": tokens, "events": events,
            "tokens_per_s": tokens / seconds, "events_per_s": events / seconds}


def bench_command(
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Simulated tokens and events a second of both engines, and their ratio, on one core."""
    from .compiled import prepare

    typer.echo("compiled engine: loading, or compiling (once, about 20 s) …", err=True)
    seconds = prepare()
    typer.echo("compiled engine: " + ("found on disk" if seconds is None else f"compiled in {seconds:.1f} s"), err=True)
    result = bench(bench_cases())
    if json_:
        print_json(result)
    else:
        _show(result["cases"])


def _show(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"simulated a second, median of {NUM_RUNS} runs on one core")
    table.add_column("case", no_wrap=True)
    for name in ("tokens, bare SimPy", "SimPy", "compiled", "ratio", "events, SimPy", "compiled"):
        table.add_column(name, justify="right")
    for bare, slow, fast in zip(*(rows[i :: len(ENGINES)] for i in range(len(ENGINES))), strict=True):
        table.add_row(slow["case"], *(_short(row["tokens_per_s"]) for row in (bare, slow, fast)),
                      f"{fast['tokens_per_s'] / slow['tokens_per_s']:,.0f}×",
                      *(_short(row["events_per_s"]) for row in (slow, fast)))
    Console().print(table)


def _short(count: float) -> str:
    """Three digits and a prefix: ``82.4 M``."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}"
    return f"{count:.3g}"
