"""Result files of the public PipeSpec code (github.com/BradMcDanel/pipespec), one a run.

``metadata`` says which models ran on which devices and with which lookahead, ``results`` holds one entry
a prompt: total time, tokens, the recorded time of each step of each stage, the tokens that each
verification emitted, and power samples of every GPU.  No prompt, no output and no start time is recorded.

What the format leaves out or says otherwise than one would think:

* The total time includes every stage's prefill, the recorded steps do not.  The first prompt of a file
  carries the warm-up of its processes.
* Of a synchronous chain the middle stage's recorded time covers its verification and its own drafting.
* A pipelined verifier's recorded time includes its wait for the answer of its upstream, and its last
  verification, the one that finds the end, is not recorded.
* Of a greedy run a recorded step ends when the work has been handed to the device; the wait for the
  device falls between the steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec_model.errors import InputError
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec, Strategy, checked
from pipespec_model.trace import PromptRecord, StepRecord, Trace

STRATEGIES: dict[str, Strategy] = {"greedy": "autoregressive", "chain": "speculative", "async-chain": "pipelined"}
MAX_WINDOW = 99
"""Most drafts that the published code verifies at once."""
BUFFER_TOKENS = 4096
"""Its drafters never wait; this is its limit on new tokens."""
UNKNOWN = -1
"""Position or width of a step that the file does not tell."""


@dataclass(frozen=True)
class PublishedPrompt:
    """One prompt's record.

    total_s : prefill included; num_tokens : of the output
    step_s : per stage, seconds of its recorded steps
    emitted : per link, tokens that each recorded verification emitted, its own one included
    power_w : ``[sample][gpu]``, of every GPU of the host
    """

    index: int
    total_s: float
    num_tokens: int
    step_s: tuple[tuple[float, ...], ...]
    emitted: tuple[tuple[int, ...], ...]
    power_w: tuple[tuple[float, ...], ...]

    @property
    def unrecorded_s(self) -> float:
        """What lies between and before the recorded steps, were they taken in turn: prefill first of all."""
        return self.total_s - sum(sum(steps) for steps in self.step_s)

    def ends(self) -> list[int]:
        """Tokens held by the target after each recorded step of its own; the first token came of prefill."""
        held, out = 1, []
        for count in self.emitted[-1]:
            held += count
            out.append(held)
        return out


@dataclass(frozen=True)
class PublishedFile:
    """One run.  ``label`` is the lookahead that the file states (the published L)."""

    name: str
    strategy: Strategy
    stages: tuple[StageSpec, ...]
    label: int
    num_samples: int
    prompts: tuple[PublishedPrompt, ...]

    @property
    def target(self) -> StageSpec:
        return self.stages[-1]

    @property
    def models(self) -> list[str]:
        return [stage.name for stage in self.stages]

    @property
    def ms_per_token(self) -> float:
        """As published: ratio of totals, first prompt and prefill included."""
        return 1e3 * sum(p.total_s for p in self.prompts) / sum(p.num_tokens for p in self.prompts)

    def pipeline(self, published_lookahead: int) -> PipelineSpec:
        """The pipeline as the published code ran it, with another L or its own."""
        return published_pipeline(self.strategy, self.stages, published_lookahead)

    def to_trace(self) -> Trace:
        """The run as a trace of origin ``imported``.

        Token ids are positions: no text is recorded.  Start times are null; positions are those of the
        target's steps, other stages' and all widths that are not recorded are -1.
        """
        trace = Trace("imported", self.pipeline(self.label).to_dict(),
                      options={"file": self.name, "published_lookahead": self.label})
        for prompt in self.prompts:
            drafter_s = sum(prompt.step_s[0])
            before_s = prompt.total_s - drafter_s if self.strategy == "pipelined" else prompt.unrecorded_s
            trace.add(
                PromptRecord(prompt=prompt.index, name=f"prompt-{prompt.index}", prompt_length=0,
                             tokens=list(range(1, prompt.num_tokens + 1)), total_s=prompt.total_s,
                             ttft_s=max(0.0, before_s), counters=[]),
                self._steps(prompt))
        return trace

    def _steps(self, prompt: PublishedPrompt) -> Iterator[StepRecord]:
        last = len(self.stages) - 1
        for stage, times in enumerate(prompt.step_s):
            emitted = prompt.emitted[stage - 1] if stage else (1,) * len(times)
            held = 1
            for seconds, count in zip(times, emitted, strict=True):
                verifies = stage > 0
                yield StepRecord(
                    prompt=prompt.index, stage=stage, kind="verify" if verifies else "decode" if last == 0 else "draft",
                    start_s=None, duration_s=seconds, position=held if stage == last else UNKNOWN, context=UNKNOWN,
                    width=UNKNOWN if verifies else 1, drafts=UNKNOWN if verifies else 0, accepted=count - 1,
                    emitted=count, epoch=0, includes_wait=verifies and self.strategy == "pipelined")
                held += count


def published_pipeline(strategy: Strategy, stages: Sequence[StageSpec], published_lookahead: int) -> PipelineSpec:
    """L of the published code is one more than the drafts that must wait; 0 and 1 are one."""
    link = LinkSpec(lookahead=max(published_lookahead - 1, 0), buffer_tokens=BUFFER_TOKENS, max_window=MAX_WINDOW)
    return PipelineSpec(stages=tuple(stages), links=(link,) * (len(stages) - 1), strategy=strategy,
                        handshake="blocking")


def read_folder(folder: Path) -> tuple[list[PublishedFile], dict[str, str]]:
    """Every ``*.json`` of a folder.

    Returns
    -------
    files, by name; and why the others were refused, by name

    Raises InputError where the folder cannot be read or no file can be used.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise InputError(str(folder), f"must be a readable folder ({error.strerror})") from None
    files, refused = [], {}
    for path in paths:
        try:
            files.append(read_file(path))
        except InputError as error:
            refused[path.name] = str(error)
    if not files:
        why = f": {next(iter(refused.values()))}" if refused else ""
        raise InputError(str(folder), f"must hold result files of the published code, greedy_*.json and others{why}")
    return files, refused


def read_file(path: Path) -> PublishedFile:
    """Read and check one file; raises InputError naming the field that is missing or inconsistent."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError) as error:
        raise InputError(path.name, f"must be whole JSON ({error})", mend="was it cut off?") from None
    where = f"{path.name}: "
    metadata, results = _key(data, "metadata", dict, where), _key(data, "results", list, where)
    strategy = STRATEGIES.get(str(metadata.get("strategy")))
    if strategy is None:
        raise InputError(where + "metadata.strategy", f"must be one of {', '.join(STRATEGIES)}",
                         metadata.get("strategy"))
    stages = tuple(_stage(entry, f"{where}metadata.model_configs.{i}")
                   for i, entry in enumerate(_key(metadata, "model_configs", list, where + "metadata.")))
    label = _key(metadata, "lookahead", int, where + "metadata.")
    if (len(stages) == 1) != (strategy == "autoregressive") or not stages:
        raise InputError(where + "metadata.model_configs",
                         f"must fit strategy {metadata['strategy']}, got {len(stages)} models")
    if label < 0 or label > MAX_WINDOW + 1:
        raise InputError(where + "metadata.lookahead", f"must be 0 to {MAX_WINDOW + 1}", label)
    if len({stage.name for stage in stages}) < len(stages):
        raise InputError(where + "metadata.model_configs", "must name different models", [s.name for s in stages])
    prompts = tuple(_prompt(entry, strategy, len(stages), label, f"{where}results.{i}")
                    for i, entry in enumerate(results))
    if not prompts:
        raise InputError(where + "results", "must hold at least one prompt")
    if len({prompt.index for prompt in prompts}) < len(prompts):
        raise InputError(where + "results", "must hold each sample_index once")
    return PublishedFile(path.name, strategy, stages, label, int(metadata.get("num_samples") or len(prompts)), prompts)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _key(data: Any, key: str, kind: type, where: str) -> Any:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(where + key, f"must be there as a {kind.__name__}", type(value).__name__,
                         "is this a result file of the published code?")
    return value


def _stage(entry: Any, where: str) -> StageSpec:
    path = _key(entry, "path", str, where + ".")
    devices = entry.get("devices") or ["cuda:0"]
    return checked(StageSpec, {
        "name": Path(path).name, "model": path, "device": ",".join([devices] if isinstance(devices, str) else devices),
        "dtype": entry.get("dtype") or "float16", "quantize": entry.get("quantize") or None}, where)


def _prompt(entry: Any, strategy: Strategy, k: int, label: int, where: str) -> PublishedPrompt:
    metrics = _key(entry, "metrics", dict, where + ".")
    where = f"{where}.metrics."
    num_tokens = _key(metrics, "tokens_generated", int, where)
    total_s = _seconds(metrics.get("total_time"), where + "total_time")
    if k == 1:
        step_s: tuple[tuple[float, ...], ...] = (_times(metrics.get("token_times"), where + "token_times"),)
        emitted: tuple[tuple[int, ...], ...] = ()
    else:
        step_s = tuple(_times(item, f"{where}model_times.{i}")
                       for i, item in enumerate(_key(metrics, "model_times", list, where)))
        emitted = tuple(_counts(item, f"{where}accepted_tokens.{i}")
                        for i, item in enumerate(_key(metrics, "accepted_tokens", list, where)))
        if len(step_s) != k or len(emitted) != k - 1:
            raise InputError(where + "model_times and accepted_tokens",
                             f"must fit {k} models, got {len(step_s)} and {len(emitted)} lists")
        for link, counts in enumerate(emitted):
            if len(counts) != len(step_s[link + 1]):
                raise InputError(f"{where}accepted_tokens.{link}", f"must have an entry a step of stage {link + 1}, "
                                 f"got {len(counts)} for {len(step_s[link + 1])} steps")
    held = 1 + (sum(emitted[-1]) if k > 1 else len(step_s[0]))
    whole = {"autoregressive": held == num_tokens, "speculative": held >= num_tokens,
             "pipelined": held <= num_tokens}[strategy]
    most = max(label, 1) + 1 if strategy == "speculative" and k == 2 else MAX_WINDOW + 2
    if num_tokens < 1 or not whole or any(count > most for counts in emitted for count in counts):
        raise InputError(where + "tokens_generated", f"must agree with the {held} tokens of the steps", num_tokens)
    # In turn, the steps fit into the total; in a pipeline each stage's do.
    spent = sum(map(sum, step_s)) if strategy != "pipelined" else sum(step_s[0])
    if spent > total_s * 1.01:
        raise InputError(where + "total_time", f"must be at least the {spent:.3f} s of its steps", total_s)
    power = entry.get("gpustats") or ()
    try:
        power_w = tuple(tuple(float(watt) for watt in sample["gpu_powers"]) for sample in power)
    except (KeyError, TypeError, ValueError):
        raise InputError(where.replace("metrics.", "gpustats"), "must hold gpu_powers in every sample") from None
    return PublishedPrompt(_key(entry, "sample_index", int, where.replace("metrics.", "")), total_s, num_tokens,
                           step_s, emitted, power_w)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(where, "must be seconds >= 0", value)
    return float(value)


def _times(value: Any, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise InputError(where, "must be a list of seconds", type(value).__name__)
    return tuple(_seconds(item, where) for item in value)


def _counts(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(n, int) and n >= 1 for n in value):
        raise InputError(where, "must be a list of token counts >= 1")
    return tuple(value)
