"""The importer of published result files, on files that our own simulator wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_files import LARGE, MEDIUM, SMALL, run_data, truth, write_run

from pipespec_model import metrics
from pipespec_model.errors import InputError
from pipespec_model.trace import load_trace, save_trace
from validate.published.files import read_file, read_folder


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return run_data("chain", [SMALL, LARGE], 5, truth(num_prompts=2, num_tokens=40))


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    """Strategy, models, label, lengths and totals survive; the target's ends add up to the output."""
    made = truth(num_prompts=3, num_tokens=60)
    file = read_file(write_run(tmp_path, "async-chain", [SMALL, MEDIUM, LARGE], 4, made))
    assert (file.strategy, file.label, file.models) == ("pipelined", 4, [s.name for s in (SMALL, MEDIUM, LARGE)])
    assert [prompt.num_tokens for prompt in file.prompts] == [a.num_tokens for a in made]
    assert file.stages[2].device == "cuda:2,cuda:3"
    for prompt in file.prompts:
        assert [len(steps) for steps in prompt.step_s[1:]] == [len(counts) for counts in prompt.emitted]
        assert prompt.ends()[-1] < prompt.num_tokens
    link = file.pipeline(4).links[0]
    assert (link.lookahead, link.max_window, file.pipeline(0).links[0].lookahead) == (3, 99, 0)


@pytest.mark.parametrize(("strategy", "stages"), [("greedy", [LARGE]), ("chain", [SMALL, LARGE]),
                                                  ("async-chain", [SMALL, MEDIUM, LARGE])])
def test_a_file_becomes_a_trace(tmp_path: Path, strategy: str, stages: list[Any]):
    """Origin imported, no start times, the published time per token; and it survives the disk."""
    file = read_file(write_run(tmp_path, strategy, stages, 3 * (len(stages) > 1), truth(num_prompts=2, num_tokens=30)))
    trace = file.to_trace()
    assert (trace.origin, {step.start_s for step in trace.steps}) == ("imported", {None})
    rate = metrics.tokens_per_s(trace.prompts)
    assert rate is not None
    assert 1e3 / rate == pytest.approx(file.ms_per_token)
    last = len(stages) - 1
    assert next(s.position for s in trace.steps if s.stage == last and s.prompt == 0) == 1
    assert any(step.includes_wait for step in trace.steps) == (strategy == "async-chain")
    save_trace(trace, tmp_path / "trace.jsonl")
    assert load_trace(tmp_path / "trace.jsonl")[0].steps == trace.steps


def drop(*path: Any) -> Callable[[Any], None]:
    def damage(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]
    return damage


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    def damage(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value
    return damage


METRICS = ("results", 0, "metrics")


@pytest.mark.parametrize(("damage", "message"), [
    (drop("metadata"), "metadata must be there"),
    (drop("results"), "results must be there"),
    (put([], "results"), "results must hold at least one prompt"),
    (put("beam", "metadata", "strategy"), "strategy must be one of greedy, chain, async-chain, got 'beam'"),
    (put("8", "metadata", "lookahead"), "lookahead must be there as a int"),
    (put(-1, "metadata", "lookahead"), "lookahead must be 0 to 100, got -1"),
    (put([{"path": "a"}], "metadata", "model_configs"), "model_configs must fit strategy chain, got 1 models"),
    (put([{"path": "a"}, {"path": "x/a"}], "metadata", "model_configs"), "must name different models"),
    (put("int3", "metadata", "model_configs", 0, "dtype"), "model_configs.0 dtype must be"),
    (put(0, "results", 1, "sample_index"), "must hold each sample_index once"),
    (drop(*METRICS, "model_times"), "model_times must be there"),
    (put([[0.1]], *METRICS, "model_times"), "must fit 2 models, got 1 and 1 lists"),
    (drop(*METRICS, "model_times", 1, 0), r"accepted_tokens\.0 must have an entry a step of stage 1"),
    (put("soon", *METRICS, "model_times", 0, 0), r"model_times\.0 must be seconds >= 0, got 'soon'"),
    (put(-0.1, *METRICS, "total_time"), "total_time must be seconds >= 0"),
    (put(0.5, *METRICS, "total_time"), "total_time must be at least"),
    (put(9, *METRICS, "accepted_tokens", 0, 0), "tokens_generated must agree with the"),
    (put(99, *METRICS, "tokens_generated"), "tokens_generated must agree"),
    (put(0, *METRICS, "accepted_tokens", 0, 0), "must be a list of token counts >= 1"),
    (put([{"timestamp": 0}], "results", 0, "gpustats"), "gpustats must hold gpu_powers"),
])
def test_a_damaged_file_is_refused_by_name_and_field(tmp_path: Path, data: dict[str, Any],
                                                     damage: Callable[[Any], None], message: str):
    """Missing, foreign and inconsistent fields each name the file, the field and the rule; the undamaged
    file is read."""
    damaged = json.loads(json.dumps(data))
    assert read_file(write(tmp_path / "chain_whole.json", damaged)).label == 5
    damage(damaged)
    with pytest.raises(InputError, match=message) as caught:
        read_file(write(tmp_path / "chain_x.json", damaged))
    assert str(caught.value).startswith("chain_x.json")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, data: dict[str, Any], share: float):
    """Cut anywhere, a file is never read in part."""
    text = json.dumps(data)
    (tmp_path / "chain_x.json").write_text(text[: int(share * len(text))], encoding="utf-8")
    with pytest.raises(InputError, match=r"chain_x\.json must be whole JSON"):
        read_file(tmp_path / "chain_x.json")


def test_not_a_number_is_refused(tmp_path: Path, data: dict[str, Any]):
    """NaN is no time."""
    text = json.dumps(data).replace('"total_time": ', '"total_time": NaN, "was": ', 1)
    (tmp_path / "chain_x.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="NaN is not a number"):
        read_file(tmp_path / "chain_x.json")


def test_a_folder_goes_on_without_what_it_refuses(tmp_path: Path, data: dict[str, Any]):
    """One good file among damaged and foreign ones is used, and each of the others is named."""
    write(tmp_path / "good.json", data)
    write(tmp_path / "foreign.json", [1, 2])
    (tmp_path / "cut.json").write_text("{", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("not JSON", encoding="utf-8")
    files, refused = read_folder(tmp_path)
    assert [file.name for file in files] == ["good.json"]
    assert sorted(refused) == ["cut.json", "foreign.json"]


def test_a_folder_without_any_is_an_error(tmp_path: Path):
    """Nothing to read, or no folder, is one clear error."""
    with pytest.raises(InputError, match="must hold result files of the published code"):
        read_folder(tmp_path)
    with pytest.raises(InputError, match="must be a readable folder"):
        read_folder(tmp_path / "nowhere")
