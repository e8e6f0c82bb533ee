"""Prompts: the built-in sets, text lines, Spec-Bench and HumanEval/GSM8K-like JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pipespec_model.errors import InputError

from .zoo import BUILT_IN, FAMILY

Half = Literal["calibration", "evaluation"]
# Keys under which known data sets keep the text: ours, HumanEval, GSM8K.
_TEXT_KEYS = ("text", "prompt", "question")


@dataclass(frozen=True)
class Prompt:
    """A prompt in words and, once encoded, in tokens."""

    name: str
    text: str
    category: str = ""
    half: Half = "evaluation"
    tokens: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()


def built_in(half: Half | None = None, *, model: str = BUILT_IN) -> list[Prompt]:
    """The 24 prompts of this project: six categories, the same mix in both halves.

    model : the target; the built-in family, which only continues text, has prompts of its own
    """
    file = "family/prompts.jsonl" if model in FAMILY else "prompts.jsonl"
    text = resources.files("execute").joinpath(file).read_text(encoding="utf-8")
    prompts = [Prompt(**json.loads(line)) for line in text.splitlines()]
    return [prompt for prompt in prompts if half is None or prompt.half == half]


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read a file; its prompts are dealt alternately into calibration and evaluation.

    Raises InputError naming the file and line of what cannot be used.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(str(path), "must be an existing file", mend="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"must be a readable text file ({error})") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if path.suffix == ".jsonl":
            if line.strip():
                prompts.append(_from_json(line, f"{path}:{number}", number))
        elif line.strip():
            prompts.append(Prompt(f"line-{number}", line.strip()))
        else:
            raise InputError(f"{path}:{number}", "must not be an empty prompt", mend="remove the line")
    if not prompts:
        raise InputError(str(path), "must hold at least one prompt")
    names = [prompt.name for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(str(path), "must name every prompt differently", twice)
    return deal(prompts)


def deal(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Alternate halves within each category, so that both have the same mix; categories begin with
    either half in turn, so that one prompt each is dealt too."""
    seen: dict[str, int] = {}
    out = []
    for prompt in prompts:
        turn = seen[prompt.category] = seen.get(prompt.category, len(seen) % 2) + 1
        half: Half = "calibration" if turn % 2 else "evaluation"
        out.append(Prompt(prompt.name, prompt.text, prompt.category, half))
    return out


def _from_json(line: str, where: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(where, f"must be one JSON object ({error})") from None
    if not isinstance(record, dict):
        raise InputError(where, "must be one JSON object", type(record).__name__)
    name = str(record.get("question_id", record.get("task_id", record.get("name", f"line-{number}"))))
    turns = record.get("turns")
    if isinstance(turns, list) and turns:
        text: Any = turns[0]
    else:
        text = next((record[key] for key in _TEXT_KEYS if key in record), None)
    if not isinstance(text, str) or not text.strip():
        raise InputError(where, f"must hold a non-empty text under 'turns' or one of {', '.join(_TEXT_KEYS)}")
    return Prompt(name, text, str(record.get("category", "")))


def encode(prompts: Sequence[Prompt], tokenizer: Any, eos: tuple[int, ...] | None = None) -> list[Prompt]:
    """Token ids by the tokenizer's chat template where it has one.

    eos : the end-of-sequence ids to stop at; None = the tokenizer's own
    """
    eos = eos_ids(tokenizer) if eos is None else eos
    out = []
    for prompt in prompts:
        if not prompt.text.strip():
            raise InputError(f"prompt {prompt.name!r}", "must not be empty")
        if getattr(tokenizer, "chat_template", None):
            encoded = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=True)
            ids = encoded["input_ids"]
        else:
            ids = tokenizer(prompt.text)["input_ids"]
        out.append(Prompt(prompt.name, prompt.text, prompt.category, prompt.half,
                          tuple(int(i) for i in ids), eos))
    return out


def eos_ids(source: Any) -> tuple[int, ...]:
    """Of a tokenizer or a generation config, either of which may name none, one or several."""
    one = getattr(source, "eos_token_id", None)
    if one is None:
        return ()
    return tuple(one) if isinstance(one, list | tuple) else (int(one),)
