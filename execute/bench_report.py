"""The figures of a bench, and how they are told.

Every repeat counts, on either side.  Intervals are 90% bootstrap intervals over prompts; of a ratio with
the same prompts drawn for both sides.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipespec_model import metrics
from pipespec_model.sampling import Sampling
from pipespec_model.trace import PromptRecord

from .bench import Contender
from .host import host, versions

DRAWS = 4000
Interval = tuple[float, float]


def document(contenders: Sequence[Contender], *, max_new_tokens: int, repeats: int,
             sampling: Sampling | None = None) -> dict[str, Any]:
    """What ``--json`` prints."""
    base = next(c for c in contenders if not c.twin_of and c.asked.strategy == "autoregressive")
    ratios = []
    for top, bottom in pairs(contenders):
        ratio, interval = throughput_ratio(top.by_prompt, bottom.by_prompt)
        ratios.append({"name": f"{told(top)} / {told(bottom)}", "ratio": ratio, "interval": interval})
    return {"rows": [row(contender, base) for contender in contenders], "ratios": ratios, "host": host(),
            "versions": versions(), "num_prompts": len(base.by_prompt), "max_new_tokens": max_new_tokens,
            "repeats": repeats, "sampling": sampling.to_dict() if sampling else None}


def row(contender: Contender, base: Contender) -> dict[str, Any]:
    """One contender's figures; speed-ups and texts are against ``base``, our autoregressive decoding.  Where text is
    sampled the peer draws other ones, so only its repeats could be compared: nothing is said of them."""
    prompts, baseline = contender.by_prompt, base.by_prompt
    trace, stages = contender.trace, contender.trace.pipeline["stages"]
    speedup, speedup_interval = throughput_ratio(prompts, baseline)
    drawn = bool(contender.twin_of and (trace.options.get("sampling") or {}).get("temperature"))
    differences = {} if drawn else first_differences(trace.prompts, baseline)
    rng = np.random.default_rng(1)
    return {
        "name": contender.name, "title": contender.title, "side": contender.side,
        "strategy": contender.asked.strategy, "stages": [stage["name"] for stage in stages],
        "lookahead": [link.lookahead for link in contender.asked.links],
        "handshake": None if contender.twin_of else contender.asked.handshake,
        "threads": [stage["threads"] for stage in stages], "devices": [stage["device"] for stage in stages],
        "cores": contender.trace.num_cores, "dtype": contender.asked.target.dtype,
        "num_tokens": sum(len(p.tokens) for p in prompts),
        "tokens_per_s": metrics.tokens_per_s(prompts),
        "interval": metrics.bootstrap_interval(prompts, metrics.throughput, rng=rng),
        "mean_tokens_per_s": metrics.mean_tokens_per_s(prompts),
        "mean_interval": metrics.bootstrap_interval(prompts, lambda n, s: (n / s).mean(-1), rng=rng),
        "speedup": speedup, "speedup_interval": speedup_interval,
        "mean_speedup": float(np.mean(_rates(prompts) / _rates(baseline))),
        "identical_prompts": None if drawn else len(prompts) - len(differences), "first_differences": differences,
        "mean_acceptance_length": _tokens_a_step(contender),
    }


def _tokens_a_step(contender: Contender) -> float | None:
    """Of the peer, which tells of no steps, by its target's forwards."""
    if not contender.twin_of:
        return metrics.mean_acceptance_length(contender.trace)
    done = contender.trace.prompts
    return metrics.ratio(sum(len(p.tokens) for p in done),
                         sum(counters.get("target_steps", 0) for p in done for counters in p.counters))


def throughput_ratio(top: Sequence[PromptRecord], bottom: Sequence[PromptRecord]) -> tuple[float, Interval | None]:
    """Ratio of two throughputs on the same prompts, and its paired interval; None for one prompt."""
    assert [p.name for p in top] == [p.name for p in bottom]
    sides = [(np.array([len(p.tokens) for p in side], dtype=float), np.array([p.total_s for p in side]))
             for side in (top, bottom)]

    def ratio(pick: NDArray[Any]) -> NDArray[Any]:
        above, below = (metrics.throughput(tokens[pick], seconds[pick]) for tokens, seconds in sides)
        return np.asarray(above / below)

    everything = np.arange(len(top))
    if len(top) < 2:
        return float(ratio(everything)), None
    drawn = ratio(np.random.default_rng(1).integers(0, len(top), size=(DRAWS, len(top))))
    low, high = np.quantile(drawn, [0.05, 0.95])
    return float(ratio(everything)), (float(low), float(high))


def _rates(prompts: Sequence[PromptRecord]) -> NDArray[Any]:
    return np.array([len(p.tokens) / p.total_s for p in prompts])


def first_differences(prompts: Sequence[PromptRecord], answers: Sequence[PromptRecord]) -> dict[str, int]:
    """By prompt, where its text first leaves the baseline's, in any repeat; only of those that do.

    In half precision a near-tie of two tokens may fall either way; how late says how alike the texts are.
    """
    expected = {p.name: p.tokens for p in answers}
    found: dict[str, int] = {}
    for prompt in prompts:
        answer = expected[prompt.name]
        if prompt.tokens != answer:
            same = zip(prompt.tokens, answer, strict=False)
            at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(prompt.tokens), len(answer)))
            found[prompt.name] = min(at, found.get(prompt.name, at))
    return found


def pairs(contenders: Sequence[Contender]) -> list[tuple[Contender, Contender]]:
    """What a reader wants to see divided: ours by the peer's, pipelined by synchronous with the same
    stages, overlapped by blocking."""
    ours = [c for c in contenders if not c.twin_of]
    out = [(mine, other) for other in contenders for mine in ours if mine.name == other.twin_of]
    for c in ours:
        if c.asked.strategy == "pipelined" and c.asked.handshake == "overlapped":
            out += [(c, other) for other in ours
                    if other.asked.strategy == "speculative" and other.asked.label == c.asked.label]
    return out + [(c, other) for c in ours for other in ours if other.asked.handshake == "blocking"
                  and c.asked == other.asked.model_copy(update={"handshake": "overlapped"})]


def told(contender: Contender) -> str:
    """Whose it is, what, and on how much: ``our pipelined {int8,full} γ=0 on 2 cores``."""
    owner = "transformers'" if contender.twin_of else "our"
    cores = contender.trace.num_cores
    where = f" on {cores} core{'s' if cores > 1 else ''}" if cores else ""
    return f"{owner} {contender.title}{where}"


def sentence(ratio: dict[str, Any]) -> str:
    top, _, bottom = ratio["name"].partition(" / ")
    span = f" (90% interval {_span(ratio['interval'])})" if ratio["interval"] else ""
    return f"{top[0].upper()}{top[1:]}: {ratio['ratio']:.2f} times as fast as {bottom}{span}."


def _span(interval: Interval | None, digits: int = 2) -> str:
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}" if interval else "–"


def show(data: dict[str, Any], title: str) -> None:
    """The table, and the ratios in sentences, on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("contender")
    for name in ("cores", "tok/s", "90% interval", "mean tok/s", "speed-up", "90% interval", "tok/step", "same text"):
        table.add_column(name, justify="right")
    for line in data["rows"]:
        length, late = line["mean_acceptance_length"], min(line["first_differences"].values(), default=None)
        same = f"{line['identical_prompts']}/{data['num_prompts']}" + ("" if late is None else f", first at {late}")
        same = "–" if line["identical_prompts"] is None else same
        owner = "transformers " if line["side"] == "transformers" else ""
        table.add_row(
            owner + line["title"], str(line["cores"]), f"{line['tokens_per_s']:.1f}", _span(line["interval"], 1),
            f"{line['mean_tokens_per_s']:.1f}", f"{line['speedup']:.2f}×", _span(line["speedup_interval"]),
            "–" if length is None else f"{length:.2f}", same)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(table)
    for ratio in data["ratios"]:
        console.print(sentence(ratio), markup=False)


def write(data: dict[str, Any], out: Path) -> None:
    """``bench.json`` and ``bench.csv``."""
    (out / "bench.json").write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    with (out / "bench.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(data["rows"][0]))
        writer.writeheader()
        for line in data["rows"]:
            writer.writerow({key: _cell(value) for key, value in line.items()})


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{key}:{item}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
