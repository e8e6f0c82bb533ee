"""Prompts are read from the formats that the field uses; what cannot be used names its line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import word_tokenizer

from execute.prompts import Prompt, built_in, encode, eos_ids, load_prompts
from pipespec_model.errors import InputError


def test_built_in_halves_have_the_same_mix() -> None:
    """Both halves hold as many prompts of each category, and no prompt is in both."""
    calibration, evaluation = built_in("calibration"), built_in("evaluation")
    assert Counter(p.category for p in calibration) == Counter(p.category for p in evaluation)
    assert len({p.category for p in calibration}) == 6
    assert len({p.name for p in built_in()}) == len(calibration) + len(evaluation) == 24
    assert not {p.text for p in calibration} & {p.text for p in evaluation}


def test_text_lines(tmp_path: Path) -> None:
    """A line is a prompt; lines are dealt alternately into the two halves."""
    (tmp_path / "p.txt").write_text("one\n two \nthree\n", encoding="utf-8")
    prompts = load_prompts(tmp_path / "p.txt")
    assert [p.text for p in prompts] == ["one", "two", "three"]
    assert [p.half for p in prompts] == ["calibration", "evaluation", "calibration"]


@pytest.mark.parametrize(("record", "name", "text"), [
    ({"question_id": 81, "category": "writing", "turns": ["first", "second"]}, "81", "first"),
    ({"task_id": "HumanEval/0", "prompt": "def f():"}, "HumanEval/0", "def f():"),
    ({"question": "How many?", "answer": "3"}, "line-1", "How many?"),
    ({"name": "mine", "text": "hello", "category": "chat"}, "mine", "hello"),
])
def test_json_lines_of_known_sets(tmp_path: Path, record: dict, name: str, text: str) -> None:
    """Spec-Bench, HumanEval, GSM8K and this project's own lines are understood."""
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(record) + "\n\n", encoding="utf-8")
    (prompt,) = load_prompts(path)
    assert (prompt.name, prompt.text, prompt.category) == (name, text, record.get("category", ""))


def test_halves_alternate_within_a_category(tmp_path: Path) -> None:
    """Each category is split evenly, however the file is ordered."""
    path = tmp_path / "p.jsonl"
    lines = [{"text": f"t{i}", "category": "ab"[i >= 4]} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    split = Counter((p.category, p.half) for p in load_prompts(path))
    assert set(split.values()) == {2}


@pytest.mark.parametrize(("name", "content", "said"), [
    ("p.txt", b"one\n\nthree\n", r"p\.txt:2 must not be an empty prompt: remove the line"),
    ("p.txt", b"", r"p\.txt must hold at least one prompt"),
    ("p.jsonl", b"\n", r"p\.jsonl must hold at least one prompt"),
    ("p.jsonl", b'{"text": "a"}\n{"text": ', r"p\.jsonl:2 must be one JSON object"),
    ("p.jsonl", b"[1]\n", r"p\.jsonl:1 must be one JSON object, got 'list'"),
    ("p.jsonl", b'{"title": "a"}\n', r"p\.jsonl:1 must hold a non-empty text under 'turns' or one of text, prompt"),
    ("p.jsonl", b'{"text": " "}\n', r"p\.jsonl:1 must hold a non-empty text"),
    ("p.jsonl", b'{"turns": [3]}\n', r"p\.jsonl:1 must hold a non-empty text"),
    ("p.txt", b"\xff\xfe", r"p\.txt must be a readable text file"),
])
def test_what_cannot_be_used_names_its_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    """Each fault names file, line and rule."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        load_prompts(tmp_path / name)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    """A path that is not there, or not a file, is an error naming it."""
    with pytest.raises(InputError, match=r"none\.txt must be an existing file: check the path"):
        load_prompts(tmp_path / "none.txt")
    with pytest.raises(InputError, match="must be a readable text file"):
        load_prompts(tmp_path)


def test_encoding_uses_the_chat_template_where_there_is_one() -> None:
    """With a chat template the ids are those of the templated text, without one those of the text; plain
    lists of ints either way."""
    tokenizer = word_tokenizer()
    (plain,) = encode([Prompt("p", "w5 w6")], tokenizer)
    assert plain.tokens == (5, 6)
    assert plain.eos == ()
    tokenizer.chat_template = "w1 {{ messages[0]['content'] }} {% if add_generation_prompt %}w2{% endif %}"
    (chat,) = encode([Prompt("p", "w5 w6")], tokenizer)
    assert chat.tokens == (1, 5, 6, 2)
    assert all(type(token) is int for token in chat.tokens)


def test_empty_prompt_is_refused_when_encoded() -> None:
    """A prompt of blanks never reaches a model."""
    with pytest.raises(InputError, match="prompt 'p' must not be empty"):
        encode([Prompt("p", "  ")], word_tokenizer())


@pytest.mark.parametrize(("ids", "expected"), [(None, ()), (0, (0,)), (7, (7,)), ([7, 9], (7, 9))])
def test_end_ids(ids: object, expected: tuple[int, ...]) -> None:
    """None, one or several end-of-sequence ids; id 0 is one like any other."""

    class Tokenizer:
        eos_token_id = ids

    assert eos_ids(Tokenizer()) == expected


def test_one_prompt_a_category_still_makes_two_halves(tmp_path: Path) -> None:
    """Categories begin with either half in turn, so neither half stays empty."""
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"task_id": "t{i}", "prompt": "x", "category": "c{i}"}}\n' for i in range(3)))
    assert {prompt.half for prompt in load_prompts(path)} == {"calibration", "evaluation"}


def test_two_prompts_of_one_name_are_refused(tmp_path: Path) -> None:
    """Results are kept by prompt name, so a name must be there once."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"task_id": "t", "prompt": "x"}\n{"task_id": "t", "prompt": "y"}\n')
    with pytest.raises(InputError, match="must name every prompt differently, got 't'"):
        load_prompts(path)
