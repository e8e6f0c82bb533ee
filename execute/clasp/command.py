"""The command line of the study (``pipespec execute clasp-study``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from execute.host import available_cores
from execute.loading import end_of_sequence, load_tokenizer
from execute.prompts import Prompt, built_in, encode, load_prompts
from pipespec_model.cli import print_json, progress_bar
from pipespec_model.errors import InputError

from . import apart, report, speed
from .study import Probing, Settings, open_study

LEAST_PROMPTS = 2  # of each half: an interval needs two


def study(
    model: Annotated[str, typer.Argument(help="Hugging Face id, folder, GGUF file or built-in name")],
    prompts: Annotated[Path | None, typer.Option(help="text lines, or JSON Lines; built-in ones without")] = None,
    out: Annotated[Path, typer.Option(help="output folder; an interrupted study goes on there")] = Path("clasp-study"),
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    max_new_tokens: Annotated[int, typer.Option(min=24)] = 48,
    lookahead: Annotated[int, typer.Option(min=1, max=8, help="drafts a round of the real runs")] = 3,
    json_: Annotated[bool, typer.Option("--json", help="print the results as one JSON document")] = False,
) -> None:
    """Layer skipping on a model: how good which layers are, what they cost, whether it pays."""
    if dtype not in ("float32", "bfloat16"):
        raise InputError("--dtype", "must be float32 or bfloat16", dtype)
    chosen = load_prompts(prompts) if prompts else built_in(model=model)
    tokenizer = load_tokenizer(model)
    encoded = encode(chosen, tokenizer, end_of_sequence(model, tokenizer))
    halves = [[p for p in encoded if p.half == half] for half in ("calibration", "evaluation")]
    if min(map(len, halves)) < LEAST_PROMPTS:
        raise InputError("--prompts", f"must hold at least {2 * LEAST_PROMPTS} prompts", len(encoded))
    calibration, evaluation = halves
    settings = Settings(model, dtype, max_new_tokens, lookahead, [p.name for p in calibration],
                        [p.name for p in evaluation])
    open_study(out, settings)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the probes are timed on one core; the runs' processes set their own
    try:
        bar, advance = progress_bar(12.0)
        with bar:
            tick = _ticker(advance)
            probing = Probing(settings, encoded, out)
            found: dict[str, Any] = {"settings": settings.__dict__, **probing.run(tick)}
            skipped = probing.skipped[:-2]  # the sparser half of the grid: beyond it agreement is too low to tune
            del probing
            tuning = first_of_each_category(calibration)
            found["speed"] = speed.run_all(model, dtype, skipped, tuning, evaluation, out, lookahead=lookahead,
                                           max_new_tokens=max_new_tokens, tick=tick)
            if len(available_cores()) > 1:
                found["apart"] = apart.run_all(found["speed"]["chosen"], apart.Prompts(tuning, evaluation), out,
                                               model=model, dtype=dtype, skipped=skipped, max_new_tokens=max_new_tokens,
                                               tick=tick)
    finally:
        torch.set_num_threads(before)
    data = report.summarise(found)
    report.write(data, out)
    if json_:
        print_json(data)
    else:
        print(out / "clasp.md")


def _ticker(advance: Any) -> Any:
    def tick(text: str) -> None:
        advance(text, 0.1)

    return tick


def first_of_each_category(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Enough to tune on: one a kind, and at least two."""
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        seen.setdefault(prompt.category, prompt)
    return list(seen.values()) if len(seen) >= LEAST_PROMPTS else list(prompts)
