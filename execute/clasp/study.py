"""``pipespec execute clasp-study``: does skipping layers pay on a model, and what would make it pay?

Parts, each kept in the output folder as soon as it is done: agreement and cosine by kind of skip set;
the dynamic programme against every set of reduced problems; how alike the sets of near tokens are; step
times; speed of real runs, with M, LOI and DET tuned on one half of the prompts and reported on the
other.  Intervals are percentile bootstraps over prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from execute.host import host, versions
from execute.loading import load_model
from execute.prompts import Prompt
from execute.skips import SkipSet, random_skips, uniform_skips, write_skips
from pipespec_model.errors import InputError
from pipespec_model.spec import StageSpec

from .layerwise import layered, layered_int8
from .optimise import optimise
from .probes import Text, against_all, by_cache, chosen, next_tokens, read

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the layers, skipped
FREE_LAYERS, REDUCED = 10, (3, 4, 5)
STATES = 24  # of the comparison with every set
RUN_OF_POSITIONS, FAR_POSITIONS = 12, 4  # probed in an answer: neighbours, and some further on


@dataclass(frozen=True)
class Settings:
    """What was held fixed."""

    model: str
    dtype: str
    max_new_tokens: int
    lookahead: int
    calibration_prompts: list[str]
    evaluation_prompts: list[str]


def open_study(out: Path, settings: Settings) -> None:
    """Make or resume the output folder; refuses one that holds another study."""
    mark, text = out / "study.json", json.dumps(asdict(settings), indent=1)
    out.mkdir(parents=True, exist_ok=True)
    if mark.exists() and mark.read_text(encoding="utf-8") != text:
        raise InputError(f"--out {out}", "must be empty or hold the same study", mend="give another folder")
    mark.write_text(text, encoding="utf-8")


def part(out: Path, name: str, make: Callable[[], Any]) -> Any:
    """A part's result, from disk where it is finished."""
    path = out / f"{name}.json"
    if not path.exists():
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(make(), indent=1, allow_nan=False), encoding="utf-8")
        scratch.replace(path)
    return json.loads(path.read_text(encoding="utf-8"))


class Probing:
    """The parts that need one model in this process.

    prompts : encoded, both halves
    """

    def __init__(self, settings: Settings, prompts: Sequence[Prompt], out: Path) -> None:
        self.settings, self.prompts, self.out = settings, prompts, out
        model = load_model(StageSpec(name="study", model=settings.model, dtype=settings.dtype))
        self.decoder = layered(model)
        self.int8 = layered_int8(model) if settings.dtype == "float32" else None
        self.layers = self.decoder.num_layers
        self.skipped = sorted({max(1, round(share * self.layers)) for share in SHARES})
        self.texts: dict[str, Text] = {}

    def run(self, tick: Callable[[str], None]) -> dict[str, Any]:
        found: dict[str, Any] = {"host": host(), "versions": versions(), "num_layers": self.layers}
        for name, make in (("answers", self.answers), ("sets", self.sets), ("agreement", self.agreement),
                           ("hindsight", self.hindsight), ("caches", self.caches), ("reduced", self.reduced),
                           ("times", self.times)):
            tick(f"study: {name}")
            found[name] = part(self.out, name, make)
            if name == "answers":
                self.texts = {p.name: read(self.decoder, p.tokens, found[name][p.name]) for p in self.prompts}
            elif name == "sets":
                self.chosen = found[name]
        found["agreement"] += found.pop("hindsight")
        for count in self.skipped:
            write_skips(self.fixed(count), self.out / f"skip_layers-{count}.json")
        return found

    @torch.inference_mode()
    def answers(self) -> dict[str, list[int]]:
        out = {}
        for prompt in self.prompts:
            cache, text = self.decoder.new_cache(), list(prompt.tokens)
            feed, answer = text, list[int]()
            while len(answer) < self.settings.max_new_tokens:
                start = cache.get_seq_length()
                answer.append(int(self.decoder.forward(feed, start, 1, cache)[0].argmax()))
                feed = answer[-1:]
                if answer[-1] in prompt.eos:
                    break
            out[prompt.name] = answer
        return out

    def positions(self, name: str) -> list[int]:
        """Whose next token is asked for: a run of neighbours, and some further on; none of the first tokens."""
        text = self.texts[name]
        begin, end = text.first + 2, len(text.tokens) - 1
        far = range(end - FAR_POSITIONS, end)
        return sorted({p for p in (*range(begin, begin + RUN_OF_POSITIONS), *far) if begin <= p < end})

    def sets(self) -> list[dict[str, Any]]:
        """What the programme chooses at each position, for each number of layers."""
        return [{"prompt": name, "half": self._half(name), "position": position - text.first, "skipped": count,
                 "layers": list(chosen(text, position, count).whole)}
                for name, text in self.texts.items() for position in self.positions(name) for count in self.skipped]

    def _half(self, name: str) -> str:
        return "calibration" if name in self.settings.calibration_prompts else "evaluation"

    def fixed(self, count: int) -> SkipSet:
        """The layers that the programme skips most often on the calibration prompts."""
        often = np.zeros(self.layers)
        for entry in self.chosen:
            if entry["half"] == "calibration" and entry["skipped"] == count:
                often[entry["layers"]] += 1
        return SkipSet.layers(int(index) for index in np.argsort(-often, kind="stable")[:count])

    def agreement(self) -> list[dict[str, Any]]:
        """Per evaluation prompt, number of layers and kind: how many next tokens were right, mean cosine."""
        out = []
        for number, name in enumerate(self.settings.evaluation_prompts):
            text, positions = self.texts[name], self.positions(name)
            mine = {(e["position"] + text.first, e["skipped"]): e["layers"] for e in self.chosen if e["prompt"] == name}
            for count in self.skipped:
                rng = np.random.default_rng((number, count))
                apart = {"dp": [SkipSet.layers(mine[position, count]) for position in positions],
                         "random": [random_skips(self.layers, count, rng=rng) for _ in positions]}
                for kind in (*apart, "fixed", "uniform"):
                    if kind in apart:
                        each = [next_tokens(text, [p], s) for p, s in zip(positions, apart[kind], strict=True)]
                        right, near = [r[0] for r, _ in each], [n[0] for _, n in each]
                    else:
                        common = self.fixed(count) if kind == "fixed" else uniform_skips(self.layers, count)
                        right, near = next_tokens(text, positions, common)
                    out.append({"prompt": name, "skipped": count, "kind": kind, "num_right": sum(right),
                                "num": len(right), "cosine": float(np.mean(near))})
        return out

    def hindsight(self) -> list[dict[str, Any]]:
        """The same where the programme is given the states of the very token that is drafted from: no drafter has
        them, but they tell how much of what is missed is due to the sets of neighbouring tokens being different."""
        out = []
        for name, count in product(self.settings.evaluation_prompts, self.skipped):
            text, positions = self.texts[name], self.positions(name)
            each = [next_tokens(text, [p], chosen(text, p, count, hindsight=True)) for p in positions]
            right, near = [r[0] for r, _ in each], [n[0] for _, n in each]
            out.append({"prompt": name, "skipped": count, "kind": "hindsight", "num_right": sum(right),
                        "num": len(right), "cosine": float(np.mean(near))})
        return out

    def caches(self) -> list[dict[str, Any]]:
        """Per evaluation prompt, number of layers and kind of cache: how many of a fixed set's choices were right."""
        return [{"prompt": name, "skipped": count, "cache": kind, "num_right": sum(right), "num": len(right)}
                for name in self.settings.evaluation_prompts for count in self.skipped
                for kind, right in by_cache(self.texts[name], self.fixed(count)).items()]

    def reduced(self) -> list[dict[str, Any]]:
        """The programme against every set of FREE_LAYERS layers in the middle."""
        free = range((self.layers - FREE_LAYERS) // 2, (self.layers + FREE_LAYERS) // 2)
        out = []
        for name, text in list(self.texts.items())[: STATES]:
            for position in self.positions(name)[:: max(1, len(self.positions(name)) * len(self.texts) // STATES)][:3]:
                out += [{"prompt": name, **entry} for entry in against_all(text.token(position), list(free), REDUCED)]
        return out

    @torch.inference_mode()
    def times(self) -> dict[str, float]:
        """Median seconds of single passes after about 100 tokens, in turns so that all see the same machine."""
        text = max(self.texts.values(), key=lambda found: len(found.tokens))
        at, feed, cache = len(text.tokens), text.tokens[:1], self.decoder.new_cache()
        self.decoder.forward(text.tokens, 0, 1, cache)
        one = partial(self.decoder.forward, feed, at, 1, cache)
        tasks: dict[str, Callable[[], Any]] = {
            f"full-{w}": partial(self.decoder.forward, feed * w, at, w, cache) for w in range(1, 9)}
        tasks["head"] = partial(one, skip=SkipSet.layers(range(self.layers)))
        for count in self.skipped:
            tasks[f"draft-{count}"] = partial(one, skip=uniform_skips(self.layers, count))
            tasks[f"optimise-{count}"] = partial(optimise, text.token(at - 1), count)
        if self.int8 is not None:
            for count in (0, *self.skipped):
                skips = uniform_skips(self.layers, count)
                tasks[f"int8-{count}"] = partial(self.int8.forward, feed, at, 1, cache, skip=skips)
        return _medians(tasks)


def _medians(tasks: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(found)) for name, found in seconds.items()}
