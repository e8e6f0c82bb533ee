"""What is configured: stages, the links between them, and how they work together.

A spec holds no latency and no acceptance: the executor cannot be told how fast it is.  Stages are
numbered from the drafter (0) to the target (k-1); link i joins stage i to stage i+1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from .errors import InputError, shown

MOST_ALIASED_VALUES = 100_000
Strategy = Literal["autoregressive", "speculative", "pipelined"]
Handshake = Literal["overlapped", "blocking"]
S = TypeVar("S", bound=BaseModel)
AUTO = -1
"""A lookahead that is still to be chosen; written ``auto``."""


class Spec(BaseModel):
    """Frozen, and unknown keys are an error: an option that is parsed and never used is a trap."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class StageSpec(Spec):
    """One stage: what proposes or verifies tokens, and what it runs on.

    ``model`` is a Hugging Face id, a local folder, a GGUF file or a name from the built-in zoo.
    ``drafter: prompt-lookup`` needs only that model's tokenizer: it proposes what followed the last
    occurrence of the current n-gram.  ``drafter: hybrid`` does so where an n-gram of ``max_ngram`` tokens
    occurred before, and asks its model elsewhere.  ``device: cpu:1`` is core 1, which stages may share.
    ``drafter: clasp`` is the next stage's model with layers skipped, those that the last accepted token can best
    do without; in a chain it shares that stage's process and weights, in a pipeline it has its own.

    num_skipped_layers : M of CLaSp; kept_layers : layers that are never skipped
    layer_opt_interval : LOI, tokens between two choices of the layers
    draft_exit_threshold : DET; drafting stops where the drafter's best token is less probable (0: never)
    """

    name: str = Field(min_length=1)
    model: str = Field(min_length=1)
    drafter: Literal["model", "prompt-lookup", "hybrid", "clasp"] = "model"
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    quantize: Literal["int8", "4bit", "8bit"] | None = None
    threads: int = Field(default=1, ge=1)
    cores: tuple[int, ...] | None = None
    max_ngram: int = Field(default=3, ge=2)
    num_skipped_layers: int = Field(default=0, ge=0)
    layer_opt_interval: int = Field(default=64, ge=1)
    draft_exit_threshold: float = Field(default=0.0, ge=0, lt=1)
    kept_layers: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _skips_layers(self) -> StageSpec:
        own = {"num_skipped_layers", "layer_opt_interval", "draft_exit_threshold", "kept_layers"}
        # A resolved pipeline names every default: only what is not one was asked for.
        changed = sorted(key for key in own & self.model_fields_set
                         if getattr(self, key) != type(self).model_fields[key].default)
        if changed and not self.clasp:
            raise ValueError(f"{changed[0]} must be absent without drafter clasp")
        return self

    @property
    def clasp(self) -> bool:
        return self.drafter == "clasp"

    @property
    def whole(self) -> StageSpec:
        """Of a layer-skipping drafter: the same stage with every layer."""
        own = {"drafter", "quantize", "num_skipped_layers", "layer_opt_interval", "draft_exit_threshold", "kept_layers"}
        return type(self)(**self.model_dump(exclude=own))

    @property
    def block(self) -> bool:
        """Whether one draft step may yield several tokens."""
        return self.drafter == "prompt-lookup"

    @property
    def choice_key(self) -> str:
        """What decides this stage's tokens: two stages with one key choose alike."""
        if self.block:
            return f"prompt-lookup-{self.max_ngram}"
        if self.clasp:
            kept = "".join(f"+{layer}" for layer in self.kept_layers)
            return f"{self._skipping_key}-{self.layer_opt_interval}-{self.draft_exit_threshold:g}{kept}"
        return self._model_key + (f"+lookup-{self.max_ngram}" if self.hybrid else "")

    @property
    def time_key(self) -> str:
        """What decides this stage's step times: a hybrid's are its model's, a layer-skipping one's do not depend
        on which layers it skips."""
        key = self.choice_key if self.block else self._skipping_key if self.clasp else self._model_key
        return f"{key}|{self.device}|{self.threads}t"

    @property
    def place_key(self) -> str:
        """The time key and the cores, once placed: one core of a machine may be slower than another."""
        return self.time_key + (f"|cores {','.join(map(str, self.cores))}" if self.cores else "")

    @property
    def _model_key(self) -> str:
        return f"{self.model}|{self.dtype}|{self.quantize or 'none'}"

    @property
    def _skipping_key(self) -> str:
        return f"{self._model_key}+clasp-{self.num_skipped_layers}"

    @property
    def hybrid(self) -> bool:
        return self.drafter == "hybrid"

    @property
    def core(self) -> int | None:
        """The core that ``device`` names, if it names one."""
        kind, _, number = self.device.partition(":")
        return int(number) if kind == "cpu" and number.isdigit() else None


def _lookahead(value: Any) -> Any:
    if value == "auto":
        return AUTO
    if isinstance(value, int) and value < 0:
        raise ValueError(f"must be >= 0 or auto, got {value}")
    return value


Lookahead = Annotated[int, BeforeValidator(_lookahead),
                      PlainSerializer(lambda value: "auto" if value == AUTO else value)]


class LinkSpec(Spec):
    """Between stage i and i+1.

    lookahead : drafts that must wait before the verifier starts (0 = never wait); ``auto`` = what the
        simulator finds best, chosen before the run
    buffer_tokens : drafts that may be undecided at once; a drafter that is this far ahead waits
    max_window : most drafts in one verification
    """

    lookahead: Lookahead = 0
    buffer_tokens: int = Field(default=16, ge=1)
    max_window: int = Field(default=16, ge=1)

    @model_validator(mode="after")
    def _reachable(self) -> LinkSpec:
        if self.lookahead > min(self.buffer_tokens, self.max_window):
            raise ValueError(
                f"lookahead must be <= min(buffer_tokens, max_window) = "
                f"{min(self.buffer_tokens, self.max_window)}, got {self.lookahead}"
            )
        return self


class PipelineSpec(Spec):
    """A pipeline of k stages and k-1 links."""

    stages: tuple[StageSpec, ...] = Field(min_length=1)
    links: tuple[LinkSpec, ...] = ()
    strategy: Strategy = "pipelined"
    handshake: Handshake = "overlapped"

    @model_validator(mode="before")
    @classmethod
    def _default_links(cls, data: Any) -> Any:
        if isinstance(data, dict) and "links" not in data and isinstance(data.get("stages"), list | tuple):
            data = {**data, "links": [{} for _ in data["stages"][1:]]}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> PipelineSpec:
        k = len(self.stages)
        if self.strategy == "autoregressive" and k != 1:
            raise ValueError(f"stages must be 1 for strategy autoregressive, got {k}")
        if self.strategy != "autoregressive" and k < 2:
            raise ValueError(
                f"stages must be >= 2 for strategy {self.strategy}, got {k}: "
                "add a drafter, or use strategy autoregressive"
            )
        if len(self.links) != k - 1:
            raise ValueError(f"links must have one entry per neighbouring pair ({k - 1}), got {len(self.links)}")
        if len({stage.name for stage in self.stages}) != k:
            raise ValueError(f"stage names must differ, got {[stage.name for stage in self.stages]}")
        # The published chain does run with no drafts at all: its L = 1.
        if (self.strategy == "speculative" and self.handshake == "overlapped"
                and any(link.lookahead == 0 for link in self.links)):
            raise ValueError(
                "lookahead must be >= 1 for strategy speculative, got 0: a synchronous drafter drafts "
                "exactly lookahead tokens a round"
            )
        for i, stage in enumerate(self.stages):
            if stage.clasp and k > 1:
                self._check_clasp(i)
            elif not stage.clasp and stage.drafter != "model" and (i or k == 1):
                raise ValueError(f"stages.{i}.drafter must be 'model': only a first drafter may be a lookup")
        return self

    def _check_clasp(self, i: int) -> None:
        stage, where = self.stages[i], f"stages.{i}"
        if i + 1 == len(self.stages):
            raise ValueError(f"{where}.drafter must be 'model': the target runs every layer")
        if self.strategy == "speculative" and self.handshake != "overlapped":
            raise ValueError(f"{where}.drafter clasp must have handshake overlapped with strategy speculative")
        verifier = self.stages[i + 1]
        shared = ("device", "threads", "cores") if self.strategy == "speculative" else ()
        for key in ("model", "dtype", *shared):
            if getattr(stage, key) != getattr(verifier, key):
                raise ValueError(f"{where}.{key} must be that of the stage it drafts for "
                                 f"({getattr(verifier, key)}), got {getattr(stage, key)}")
        if verifier.clasp or verifier.quantize is not None:
            raise ValueError(f"stages.{i + 1} must run the whole model, not quantised: a clasp stage takes its states")
        if i and stage.draft_exit_threshold:
            raise ValueError(f"{where}.draft_exit_threshold must be 0 behind another drafter: what that drafted is "
                             "verified whole")

    @property
    def target(self) -> StageSpec:
        return self.stages[-1]

    @property
    def label(self) -> str:
        """The field's notation, drafter first: ``{lookup,int8,full}``."""
        return "{" + ",".join(stage.name for stage in self.stages) + "}"

    @property
    def num_cores(self) -> int:
        """Cores that its computing stages use, together or in turn, once they have their places."""
        return len({core for stage in self.stages if not stage.block and stage.device.startswith("cpu")
                    for core in stage.cores or ()})

    @property
    def probed_at_once(self) -> bool:
        """Whether its stages are probed (trace.Trace.probes) while the others are: as they run, but not where
        two share a core, which a probe would hardly show how they share."""
        held = [core for stage in self.stages if not stage.block for core in stage.cores or ()]
        return self.strategy == "pipelined" and len(held) == len(set(held))

    def reads_prompt(self, i: int) -> bool:
        """Whether stage ``i`` reads the prompt itself; a layer-skipping drafter reads it for its model too, in a
        chain."""
        return not (i and self.stages[i - 1].clasp and self.strategy == "speculative")

    def hands_over(self, i: int) -> bool:
        """Whether stage ``i`` hands its cache entries to a layer-skipping drafter in a process of its own."""
        return i > 0 and self.stages[i - 1].clasp and self.strategy == "pipelined"

    def with_lookaheads(self, lookaheads: Sequence[int]) -> PipelineSpec:
        links = zip(self.links, lookaheads, strict=True)
        return self.model_copy(update={"links": tuple(
            link.model_copy(update={"lookahead": number}) for link, number in links)})

    def require_lookaheads(self) -> None:
        """Raise InputError where a lookahead is still to be chosen."""
        for i, link in enumerate(self.links):
            if link.lookahead == AUTO:
                raise InputError(f"links.{i}.lookahead", "must be a number here", "auto", (
                    "choose it with pipespec simulate resolve PIPELINE --profile FILE"))

    @classmethod
    def alone(cls, stage: StageSpec) -> PipelineSpec:
        """Autoregressive decoding by one stage."""
        return cls(strategy="autoregressive", stages=(stage,))

    @classmethod
    def from_dict(cls, data: Any) -> PipelineSpec:
        """Validate; raises InputError naming field, rule and value."""
        return checked(cls, data, "pipeline")


def checked(cls: type[S], data: Any, what: str) -> S:
    """``cls.model_validate`` with pydantic's report turned into one line."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise InputError(what, _first(error)) from None


def _first(error: ValidationError) -> str:
    item = error.errors()[0]
    field = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        if message.startswith("must "):
            return f"{field} {message}"
        return f"{field}: {message}" if field else message
    if item["type"] == "extra_forbidden":
        return f"{field} is not a known key: remove it or mend its spelling"
    rule = message.replace("Input should be", "must be").replace("Field required", "is required")
    rule = rule.replace("greater than or equal to", ">=").replace("less than or equal to", "<=")
    return f"{field} {rule}, got {shown(item['input'])}"


def load_pipeline(path: str | Path) -> PipelineSpec:
    """Read a pipeline from YAML, or from the published code's ``models.json`` list as it is."""
    data = read_document(path)
    if isinstance(data, list):
        data = _from_models_json(data, str(path))
    if not isinstance(data, dict):
        raise InputError(str(path), "must hold a mapping with the key 'stages'", type(data).__name__)
    return checked(PipelineSpec, data, str(path))


def read_document(path: str | Path) -> Any:
    """Read JSON or YAML by the file's name; raises InputError naming the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(str(path), "must be an existing file", mend="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"must be a readable text file ({error})") from None
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}", f"must be JSON ({error.msg})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InputError(where, f"must be YAML ({getattr(error, 'problem', None) or 'cannot be read'})") from None
    except RecursionError:
        raise InputError(str(path), "must not be nested so deeply") from None
    except ValueError as error:  # a number of thousands of digits, the 99th of a month
        raise InputError(str(path), f"must hold values that can be read ({error})") from None
    if path.suffix != ".json" and "*" in text:
        _check_size(data, path)
    return data


def _check_size(data: Any, path: Path) -> None:
    """Refuse aliases that multiply, or that hold themselves: what is small in a file must not fill the memory."""
    left, count = [data], 0
    while left:
        item = left.pop()
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        count += len(inner)
        if count > MOST_ALIASED_VALUES:
            raise InputError(str(path), f"must hold at most {MOST_ALIASED_VALUES:,} values, aliases written out")
        left += inner


def _from_models_json(entries: list[Any], path: str) -> dict[str, Any]:
    stages = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict) or "path" not in entry:
            raise InputError(f"{path}: {i}", "must be an object with the key 'path'", type(entry).__name__)
        unknown = set(entry) - {"path", "devices", "dtype", "quantize"}
        if unknown:
            raise InputError(f"{path}: {i}.{min(unknown)}", "is not a known key")
        if not isinstance(entry["path"], str):
            raise InputError(f"{path}: {i}.path", "must be text", entry["path"])
        devices = entry.get("devices") or ["cpu"]
        if not isinstance(devices, list):
            raise InputError(f"{path}: {i}.devices", "must be a list", devices)
        if len(devices) > 1:
            raise InputError(f"{path}: {i}.devices", "must name one device: a stage over several is not supported",
                             devices)
        stages.append({
            "name": Path(entry["path"]).name, "model": entry["path"], "device": devices[0],
            "dtype": entry.get("dtype") or "float32", "quantize": entry.get("quantize") or None,
        })
    return {"stages": stages, "strategy": "pipelined" if len(stages) > 1 else "autoregressive"}


def dump_pipeline(spec: PipelineSpec, path: str | Path) -> None:
    """Write the resolved configuration (every default filled in)."""
    Path(path).write_text(yaml.safe_dump(spec.to_dict(), sort_keys=False), encoding="utf-8")
