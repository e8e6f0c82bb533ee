"""What happened: a header, one record a step, one a finished prompt.  JSON Lines, append-only.

A killed run leaves a readable file: whole records are kept, a torn last line is reported with its
number, and a prompt counts only once its ``prompt_end`` is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .errors import InputError
from .spec import PipelineSpec

TRACE_VERSION = 1
Origin = Literal["measured", "simulated", "emulated", "imported"]
NO_PROMPT = -1  # of steps that were timed outside a generation
BETWEEN_STEPS = frozenset({"optimise", "give", "take"})
"""Kinds of record that are no pass of a model: what layer skipping does between steps (messages.Entries)."""
ORIGINS = ("measured", "simulated", "emulated", "imported")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one stage.

    start_s : since the request; None where an import has durations only
    includes_wait : whether duration_s covers waiting too (imports)
    position : generated tokens held before the step
    context : tokens in the cache before the step
    width : tokens in the forward, or cache rows of a ``give`` or ``take``; drafts: how many of them were drafts
    """

    prompt: int
    stage: int
    kind: str
    start_s: float | None
    duration_s: float
    position: int
    context: int
    width: int
    drafts: int
    accepted: int
    emitted: int
    epoch: int
    includes_wait: bool = False
    rolled_back: bool = False


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One finished prompt.

    total_s : from the request to its last token, prefill included; ttft_s : to its first token
    counters : per stage, see protocol.Counters
    carried : of its tokens, those that an attempt that failed had decided already (execute/retry.py); their steps
        are in no record, their time is in total_s
    clocks : of a run on several hosts, for every stage but the first: what was added to its clock to give the first
        one's, before the prompt and after it, and the uncertainty of the two (execute/clocks.py); start_s and total_s
        are by the first stage's clock
    near_tie_margin : target's top-2 margin per emitted token where it was recorded
    """

    prompt: int
    name: str
    prompt_length: int
    tokens: list[int]
    total_s: float
    ttft_s: float
    counters: list[dict[str, int]]
    category: str = ""
    repeat: int = 0
    margins: list[float] | None = None
    carried: int = 0
    clocks: list[dict[str, float]] | None = None


@dataclass
class Trace:
    """Header and records of one run.

    probes : single steps that each stage took alone just before and just after a prompt, as a yardstick
        of the machine's speed there; they are part of no prompt's time
    """

    origin: str
    pipeline: dict[str, Any]
    seed: int = 0
    host: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    prompts: list[PromptRecord] = field(default_factory=list)
    probes: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise InputError("trace.origin", f"must be one of {', '.join(ORIGINS)}", self.origin)

    @property
    def num_cores(self) -> int:
        """Cores that its computing stages used, together or in turn; emulated stages have one each."""
        spec = PipelineSpec.from_dict(self.pipeline)
        return len(spec.stages) if self.origin == "emulated" else spec.num_cores

    def header(self) -> dict[str, Any]:
        return {"type": "header", "version": TRACE_VERSION, "origin": self.origin, "pipeline": self.pipeline,
                "seed": self.seed, "host": self.host, "versions": self.versions, "options": self.options}

    def add(self, prompt: PromptRecord, steps: Iterable[StepRecord], probes: Iterable[StepRecord] = ()) -> None:
        self.steps += steps
        self.prompts.append(prompt)
        self.probes += probes

    def only(self, prompts: Iterable[int]) -> Trace:
        """The same run with some of its prompts."""
        keep = set(prompts)
        return Trace(self.origin, self.pipeline, self.seed, self.host, self.versions, self.options,
                     [step for step in self.steps if step.prompt in keep],
                     [prompt for prompt in self.prompts if prompt.prompt in keep],
                     [probe for probe in self.probes if probe.prompt in keep])


class TraceWriter:
    """Appends a prompt at a time; the file is whole after each, also after one that found no room.

    Raises OSError with the file's name.  An existing file is first cut to its last whole prompt, so that what
    a killed run left behind neither tears the file nor counts twice.
    """

    def __init__(self, path: str | Path, trace: Trace) -> None:
        self.path = Path(path)
        fresh = not self.path.exists() or _cut_to_whole(self.path) == 0
        # Without a buffer of its own: what a full disk refuses must not be tried again as the file is closed.
        self._file = self.path.open("ab", buffering=0)
        if fresh:
            self._write([trace.header()])

    def append_steps(self, steps: Iterable[StepRecord]) -> None:
        """Steps that belong to no prompt: timings of a calibration."""
        self._write({"type": "step", **asdict(step)} for step in steps)

    def append(self, prompt: PromptRecord, steps: Iterable[StepRecord], probes: Iterable[StepRecord] = ()) -> None:
        records: list[dict[str, Any]] = [{"type": "step", **asdict(step)} for step in steps]
        records += [{"type": "probe", **asdict(probe)} for probe in probes]
        records.append({"type": "prompt_end", **asdict(prompt)})
        self._write(records)

    def _write(self, records: Iterable[dict[str, Any]]) -> None:
        data = memoryview("".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode())
        whole = self._file.tell()
        try:
            while data:
                data = data[self._file.write(data):]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(whole)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_to_whole(path: Path) -> int:
    """Cut a trace behind its last record that is not part of an unfinished prompt; returns its size."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    while end:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        try:
            record = json.loads(data[begin:end])
        except ValueError:
            record = {}
        if record.get("type") in ("header", "prompt_end") or record.get("prompt") == NO_PROMPT:
            break
        end = begin
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return end


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a whole trace, replacing the file."""
    Path(path).unlink(missing_ok=True)
    by_prompt: dict[int, list[StepRecord]] = {}
    for step in trace.steps:
        by_prompt.setdefault(step.prompt, []).append(step)
    with TraceWriter(path, trace) as writer:
        writer.append_steps(by_prompt.get(NO_PROMPT, []))
        for prompt in trace.prompts:
            probes = [probe for probe in trace.probes if probe.prompt == prompt.prompt]
            writer.append(prompt, by_prompt.get(prompt.prompt, []), probes)


def load_trace(path: str | Path) -> tuple[Trace, str | None]:
    """Read a trace.

    Returns
    -------
    trace : whole records only; steps of a prompt without its ``prompt_end`` are left out
    warning : what was torn, with its line number; None when the file was whole
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(str(path), f"must be a readable file ({error.strerror})") from None
    trace: Trace | None = None
    warning = None
    pending: list[StepRecord] = []
    probes: list[StepRecord] = []
    # Every record ends with a newline, so what follows the last one is torn even if it parses.
    torn = lines.pop()
    if torn:
        warning = f"{path}:{len(lines) + 1}: the last line is torn and was left out"
    for number, record in _records(path, lines):
        kind = record.pop("type", None)
        if trace is None:
            trace = _header(path, kind, record)
        elif kind == "step":
            step = _record(StepRecord, record, path, number)
            (trace.steps if step.prompt == NO_PROMPT else pending).append(step)
        elif kind == "probe":
            probes.append(_record(StepRecord, record, path, number))
        elif kind == "prompt_end":
            prompt = _record(PromptRecord, record, path, number)
            own = [[step for step in found if step.prompt == prompt.prompt] for found in (pending, probes)]
            trace.add(prompt, *own)
            pending, probes = ([step for step in found if step.prompt != prompt.prompt] for found in (pending, probes))
        else:
            raise InputError(f"{path}:{number}: type", "must be step, probe or prompt_end", kind)
    if trace is None:
        raise InputError(str(path), "must begin with a trace header", mend="is this a pipespec trace?")
    return trace, warning


def _records(path: Path, lines: list[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is not allowed")

    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line, parse_constant=no_constant)
        except ValueError as error:
            raise InputError(f"{path}:{number}", f"must be one JSON object ({error})") from None
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number}", "must be one JSON object", type(record).__name__)
        yield number, record


def _header(path: Path, kind: object, record: dict[str, Any]) -> Trace:
    if kind != "header":
        raise InputError(f"{path}:1", "must be a trace header", kind, "is this a pipespec trace?")
    version = record.pop("version", None)
    if not isinstance(version, int) or isinstance(version, bool):
        raise InputError(f"{path}:1: version", f"must be the number {TRACE_VERSION}", version)
    if version > TRACE_VERSION:
        raise InputError(f"{path}:1: version", f"must be <= {TRACE_VERSION}", version, "update pipespec")
    if version < 1:
        raise InputError(f"{path}:1: version", "must be >= 1", version)
    try:
        return Trace(**record)
    except TypeError as error:
        raise InputError(f"{path}:1", f"holds a wrong or missing field ({error})") from None


def _record(cls: type, record: dict[str, Any], path: Path, number: int) -> Any:
    names = {item.name for item in fields(cls)}
    unknown = sorted(set(record) - names)
    if unknown:
        raise InputError(f"{path}:{number}: {unknown[0]}", "is not a known field")
    try:
        made = cls(**record)
    except TypeError as error:
        raise InputError(f"{path}:{number}", f"lacks a field ({error})") from None
    for item in fields(cls):
        value = getattr(made, item.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{path}:{number}: {item.name}", "must be finite", value)
        if not _is(value, str(item.type)):
            raise InputError(f"{path}:{number}: {item.name}", f"must be {item.type}", value)
    return made


def _is(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a field's type, as the record writes it."""
    if kind.endswith(" | None"):
        return value is None or _is(value, kind.removesuffix(" | None"))
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is(item, kind[5:-1]) for item in value)
    if kind.startswith("dict[str, "):
        return isinstance(value, dict) and all(_is(item, kind[10:-1]) for item in value.values())
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is {"int": int, "str": str, "bool": bool}[kind]
