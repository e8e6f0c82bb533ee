"""A bench runs every contender on every prompt in turns, and its figures are ratios of what was measured."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import chain, stage

from execute import built_in
from execute.bench import Contender, Keeper, from_files, measure, rotated
from execute.bench_report import document, first_differences, pairs, row, sentence, throughput_ratio
from execute.peer import Peer, Twin, generation_options, has_twin
from execute.processes import processes_for
from execute.prompts import Prompt
from pipespec_model.__main__ import main
from pipespec_model.errors import InputError, StageError
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import PromptRecord, StepRecord, Trace, load_trace

BUDGET = 12
PROMPTS = [Prompt(name, name, tokens=tokens) for name, tokens in (("a", (5, 8, 11, 14)), ("b", (7, 3, 7, 3, 7)))]
ALONE = PipelineSpec.alone(stage("full"))


def record(name: str, tokens: list[int], total_s: float, *, number: int = 0, repeat: int = 0) -> PromptRecord:
    return PromptRecord(number, name, 3, tokens, total_s, 0.1, [{"drafted": 0}], repeat=repeat)


@dataclass
class Fake:
    """Takes no time; remembers who ran what.  stop_after : runs before a Ctrl-C."""

    stop_after: int | None = None
    ran: list[tuple[str, str, int]] = field(default_factory=list)

    def run_prompt(self, pipeline: PipelineSpec, prompt: Prompt, *, max_new_tokens: int, number: int = 0,
                   repeat: int = 0, **_: Any) -> tuple[PromptRecord, list[StepRecord]]:
        if len(self.ran) == self.stop_after:
            raise KeyboardInterrupt
        self.ran.append((pipeline.target.name, prompt.name, repeat))
        return record(prompt.name, [1] * max_new_tokens, 1.0, number=number, repeat=repeat), []


def contender(name: str, pipeline: PipelineSpec = ALONE, *prompts: PromptRecord, runs: Any = None,
              twin_of: str = "") -> Contender:
    trace = Trace("measured", pipeline.to_dict(), prompts=list(prompts))
    return Contender(name, pipeline, runs or Fake(), trace, twin_of)


# -- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 11])
def test_rotation_covers_all_orders(count: int) -> None:
    """In as many turns as there are contenders each stands in every place once; their cycle stays."""
    items = list(range(count))
    orders = [rotated(items, turn) for turn in range(count)]
    assert all(sorted(order[place] for order in orders) == items for place in range(count))
    assert all((b - a) % count == 1 % count for order in orders for a, b in pairwise(order))


def test_contenders_take_turns_after_a_warm_up_that_does_not_count() -> None:
    """For repeat, for prompt, for contender; the first prompt of each is not in its trace."""
    fake = Fake()
    both = [contender(name, PipelineSpec.alone(stage(name)), runs=fake) for name in ("x", "y")]
    measure(both, PROMPTS, {"max_new_tokens": 2, "repeats": 3}, keeper=Keeper(None, both), advance=lambda *_: None)
    assert fake.ran[:2] == [("x", "a", 0), ("y", "a", 0)]
    assert fake.ran[2:6] == [("x", "a", 0), ("y", "a", 0), ("y", "b", 0), ("x", "b", 0)]
    assert len(fake.ran) == 2 + 2 * 3 * 2
    assert [(p.name, p.repeat) for p in both[0].trace.prompts] == [(n, r) for r in range(3) for n in "ab"]


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    """Every run that ended before the Ctrl-C is on disk, on either side, in whole files."""
    fake = Fake(stop_after=6)
    both = [contender("ours", runs=fake), contender("theirs", runs=fake, twin_of="ours")]
    with pytest.raises(KeyboardInterrupt), Keeper(tmp_path, both) as keeper:
        measure(both, PROMPTS, {"max_new_tokens": 2, "repeats": 3}, keeper=keeper, advance=lambda *_: None)
    trace, torn = load_trace(tmp_path / "traces" / "ours.jsonl")
    assert torn is None
    assert [p.name for p in trace.prompts] == ["a", "b"]
    lines = [json.loads(line) for line in (tmp_path / "peer.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["contender"], line["prompt"], line["tokens"]) for line in lines] == [
        ("theirs", "a", [1, 1]), ("theirs", "b", [1, 1])]


def test_repeats_of_a_prompt_are_drawn_alike() -> None:
    """With sampling every contender is given the settings, and each repeat of a prompt the same number."""
    seen: list[tuple[str, int | None, Any]] = []

    class Drawing(Fake):
        def run_prompt(self, pipeline: PipelineSpec, prompt: Prompt, **options: Any) -> Any:
            seen.append((prompt.name, options.get("drawn_as"), options["sampling"]))
            return record(prompt.name, [1], 1.0), []

    sampling = Sampling(temperature=0.8)
    both = [contender(name, runs=Drawing(), twin_of=of) for name, of in (("x", ""), ("y", "x"))]
    measure(both, PROMPTS, {"max_new_tokens": 2, "repeats": 3}, keeper=Keeper(None, both), advance=lambda *_: None,
            sampling=sampling)
    assert {(name, number) for name, number, _ in seen[2:]} == {("a", 0), ("b", 1)}
    assert all(given == sampling for *_, given in seen)


# -- figures --------------------------------------------------------------------------------------


def test_figures_are_those_computed_by_hand() -> None:
    """Mean of repeats: (4 + 2) tokens in (½ (1.5 + 0.5) + 2) s against 6 in (2 + 2) s; a pair of prompts drawn twice
    is aa, ab, ba or bb, so the interval spans what the two prompts say alone."""
    base = contender("base", ALONE, record("a", [1, 2, 3, 4], 2.0), record("b", [5, 6], 2.0, number=1))
    fast = contender("fast", ALONE, record("a", [1, 2, 3, 4], 1.5), record("b", [5, 7], 2.0, number=1),
                     record("a", [1, 2, 3, 4], 0.5, number=2, repeat=1))
    found = row(fast, base)
    assert (found["tokens_per_s"], found["mean_tokens_per_s"]) == (2.0, 2.5)
    assert found["speedup"] == pytest.approx(2.0 / 1.5)
    assert found["mean_speedup"] == pytest.approx((2.0 + 1.0) / 2)
    assert found["interval"] == found["mean_interval"] == (1.0, 4.0)
    assert found["speedup_interval"] == (1.0, 2.0)
    assert (found["identical_prompts"], found["first_differences"]) == (1, {"b": 1})


def test_a_contender_with_itself_is_exactly_one() -> None:
    """The same prompts are drawn on both sides: no width is left."""
    prompts = [record(str(i), [1] * (3 + i), 0.7 + 0.31 * i, number=i) for i in range(7)]
    assert throughput_ratio(prompts, prompts) == (1.0, (1.0, 1.0))


def test_one_prompt_has_no_interval() -> None:
    """A single prompt says nothing of another."""
    prompts = [record("a", [1, 2], 1.0)]
    assert throughput_ratio(prompts, prompts) == (1.0, None)


def test_first_difference_is_the_earliest_of_all_repeats() -> None:
    """A text that is cut short differs where it ends; equal texts are not listed."""
    made = [record("a", [1, 2, 9], 1.0), record("a", [1, 8, 3], 1.0, repeat=1), record("b", [4], 1.0),
            record("c", [6], 1.0)]
    answers = [record("a", [1, 2, 3], 1.0), record("b", [4, 5], 1.0), record("c", [6], 1.0)]
    assert first_differences(made, answers) == {"a": 1, "b": 1}


def test_what_is_divided_by_what() -> None:
    """Ours by its twin, pipelined by synchronous of the same stages, overlapped by blocking."""
    int8 = (stage("int8"), stage("full"))
    prompts = record("a", [1, 2], 1.0), record("b", [1], 1.0, number=1)
    specs = {"alone": ALONE, "sync": chain("speculative", int8), "piped": chain("pipelined", int8),
             "blocked": chain("pipelined blocking", int8)}
    made = [contender(name, spec, *prompts) for name, spec in specs.items()]
    made.append(contender("theirs", ALONE, *prompts, twin_of="alone"))
    assert [(a.name, b.name) for a, b in pairs(made)] == [
        ("alone", "theirs"), ("piped", "sync"), ("piped", "blocked")]
    data = document(made, max_new_tokens=2, repeats=3)
    assert sentence(data["ratios"][0]) == ("Our autoregressive {full}: 1.00 times as fast as transformers' generate() "
                                           "(90% interval 1.00 to 1.00).")


# -- what is offered ------------------------------------------------------------------------------


def test_built_in_contenders_use_the_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores: eight contenders with one thread, three with two; the lookahead is the synchronous int8's."""
    monkeypatch.setattr("execute.host.available_cores", lambda: [0, 1])
    one = built_in.contenders("m", "bfloat16", threads=1, lookahead=5)
    assert len(one) == 8
    assert one["speculative-int8"].links[0].lookahead == 5
    assert [one[f"pipelined-int8-{i}-blocking"].links[0].lookahead for i in (0, 1)] == [0, 1]
    assert sorted(name for name, spec in one.items() if has_twin(spec)) == [
        "autoregressive", "speculative-int8", "speculative-lookup"]
    two = built_in.contenders("m", "float32", threads=2, lookahead=3)
    assert list(two) == ["autoregressive", "speculative-int8", "speculative-lookup"]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_files_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """Two targets, one stage name with two meanings, two files of one name."""
    pair = "stages:\n- {{name: d, model: {0}}}\n- {{name: t, model: {1}}}\n"
    one = write(tmp_path, "one", pair.format("x", "m"))
    with pytest.raises(InputError, match="two: target must be that of one, got 'n"):
        from_files([one, write(tmp_path, "two", pair.format("x", "n"))])
    with pytest.raises(InputError, match="must differ in name from the other pipelines, got 'one'"):
        from_files([one, one])
    specs = from_files([one, write(tmp_path, "three", pair.format("y", "m"))])
    assert list(specs) == ["autoregressive", "one", "three"]
    with pytest.raises(InputError, match="three: stage 'd' must be the same in all pipelines"):
        processes_for(specs)


@pytest.mark.parametrize(("args", "said"), [
    (["--peer", "vllm"], "--peer must be transformers, got 'vllm'"),
    (["--repeats", "2"], "--repeats must be >= 3, got 2"),
    (["--max-new-tokens", "0"], "--max-new-tokens must be >= 1, got 0"),
    (["--dtype", "float8"], "--dtype must be one of float32, bfloat16, got 'float8'"),
    (["--threads", "0"], "--threads must be >= 1, got 0"),
    (["--threads", "999"], "cores here, got 999"),
    (["--lookahead", "0"], "--lookahead must be in 1..16, got 0"),
    (["--limit", "0"], "--limit must be >= 1, got 0"),
    (["--prompts", "EMPTY"], "must hold at least one prompt"),
    (["p.yaml", "--dtype", "float32"], "must not be given with a pipeline file: write them in the file"),
])
def test_bad_input_is_one_line(args: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, nothing on stdout, one line that names field, rule and value."""
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(SystemExit) as end:
        main(["execute", "bench", *(str(empty) if arg == "EMPTY" else arg for arg in args)])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert said in err


# -- the real thing -------------------------------------------------------------------------------


def test_assistant_drafts_the_lookahead_every_round(tiny: dict[str, Path], plain_greedy: Any) -> None:
    """With the target as its own drafter every draft is right: 12 tokens in 12 / (3 + 1) target forwards."""
    from execute.loading import load_model

    same = stage("same", tiny["target"])
    target = load_model(stage("target", tiny["target"]))
    twin = Twin(chain("speculative", (same, stage("target", tiny["target"])), lookahead=3), target)
    widths: list[int] = []
    target.register_forward_pre_hook(lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]),
                                     with_kwargs=True)
    tokens, seconds = twin.generate(PROMPTS[0].tokens, (), BUDGET)
    assert tokens == plain_greedy(PROMPTS[0].tokens, BUDGET)
    assert seconds > 0
    assert widths == [4 + 3, 4, 4]


def test_twin_draws_by_seed_and_number(tiny: dict[str, Path]) -> None:
    """One seed and number, one text; another of either, another text.  A drafter that is its own target is never
    refused, and the forwards are counted."""
    from execute.loading import load_model

    same, target = stage("same", tiny["target"]), stage("target", tiny["target"])
    model = load_model(target)
    alone = Twin(PipelineSpec.alone(target), model)
    pair = Twin(chain("speculative", (same, target), lookahead=3), model)
    texts = [alone.generate(PROMPTS[0].tokens, (), BUDGET, number=number,
                            sampling=Sampling(temperature=1.0, seed=seed))[0]
             for seed, number in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert alone.forwards == BUDGET
    assert len({*map(tuple, texts)}) == 3
    assert texts[0] == texts[3]
    text, _ = pair.generate(PROMPTS[0].tokens, (), BUDGET, sampling=Sampling(temperature=1.0))
    assert len(text) == BUDGET
    assert pair.forwards == 3


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"min_new_tokens": 4}, {"temperature": 0.7},
                                     {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_twin_is_given_every_option(options: dict[str, Any]) -> None:
    """What is set is there under generate()'s name, with its value; what does not draw has no option of drawing."""
    found = generation_options(Sampling(**options))
    assert found["do_sample"] is bool(options.get("temperature"))
    assert {name: found[name] for name in options} == options
    drawing = {"temperature", "top_k", "top_p"} if "temperature" in options else set()
    assert set(found) == {"do_sample", *options, *drawing}


def test_bench_of_sampled_text(tiny: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ours draw one text whatever the strategy, in every repeat; of the peer's texts nothing is claimed but their
    tokens a step; the settings are in the document and in the traces."""
    near, target = (f"{{name: {name}, model: {tiny[name]}}}" for name in ("near", "target"))
    file = write(tmp_path, "near", f"strategy: speculative\nstages: [{near}, {target}]\nlinks: [{{lookahead: 3}}]\n")
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("w5 w8 w11 w14\nw7 w3 w7 w3 w7\n", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["execute", "bench", str(file), "--prompts", str(prompts), "--max-new-tokens", str(BUDGET), "--peer",
              "transformers", "--temperature", "0.8", "--top-p", "0.95", "--seed", "1", "--out", str(out), "--json"])
    said = capfd.readouterr()
    assert end.value.code == 0, said.err
    data = json.loads(said.out)
    assert data["sampling"] == Sampling(temperature=0.8, top_p=0.95, seed=1).to_dict()
    rows = {line["name"]: line for line in data["rows"]}
    assert [line["identical_prompts"] for line in rows.values()] == [2, 2, None, None]
    lengths = {name: line["mean_acceptance_length"] for name, line in rows.items()}
    assert lengths["transformers-autoregressive"] == lengths["autoregressive"] == 1.0
    assert min(lengths["near"], lengths["transformers-near"]) > 1.2
    assert load_trace(out / "traces" / "near.jsonl")[0].options["sampling"] == data["sampling"]


def test_peer_that_fails_or_dies_is_named(tiny: dict[str, Path]) -> None:
    """A failure and a kill are errors that name the peer and the prompt, at once."""
    alone = PipelineSpec.alone(stage("target", tiny["target"]))
    with Peer([alone]) as peer:
        assert peer.process is not None
        peer.run_prompt(alone, PROMPTS[0], max_new_tokens=2)
        peer.process.kill()
        with pytest.raises(StageError, match=r"peer 'transformers' ended with exit code -9, while .* prompt 'b'"):
            peer.run_prompt(alone, PROMPTS[1], max_new_tokens=2)
    with Peer([alone]) as peer, pytest.raises(StageError, match="peer 'transformers' failed: IndexError"):
        peer.run_prompt(alone, Prompt("wrong", "", tokens=(100_000,)), max_new_tokens=2)


def test_bench_of_tiny_models(tiny: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ours and the peer's, from files: every text is our autoregressive decoding's; everything is kept."""
    near, target = (f"{{name: {name}, model: {tiny[name]}}}" for name in ("near", "target"))
    lookup = f"{{name: lookup, drafter: prompt-lookup, model: {tiny['target']}}}"
    text = "strategy: speculative\nstages: [{0}, {1}]\nlinks: [{{lookahead: 3}}]\n"
    files = [write(tmp_path, "near", text.format(near, target)), write(tmp_path, "lookup", text.format(lookup, target)),
             write(tmp_path, "piped", f"stages: [{lookup}, {target}]\n")]
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("w5 w8 w11 w14\nw7 w3 w7 w3 w7\nw1 w2\n", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["execute", "bench", *map(str, files), "--prompts", str(prompts), "--max-new-tokens", str(BUDGET),
              "--limit", "2", "--peer", "transformers", "--out", str(out), "--json"])
    said = capfd.readouterr()
    assert end.value.code == 0, said.err
    data = json.loads(said.out)
    assert [(line["name"], line["side"]) for line in data["rows"]] == [
        ("autoregressive", "pipespec"), ("near", "pipespec"), ("lookup", "pipespec"), ("piped", "pipespec"),
        ("transformers-autoregressive", "transformers"), ("transformers-near", "transformers"),
        ("transformers-lookup", "transformers")]
    assert all(line["identical_prompts"] == data["num_prompts"] == 2 for line in data["rows"])
    assert all(line["num_tokens"] == 2 * BUDGET and line["cores"] == 1 for line in data["rows"])
    assert [ratio["ratio"] > 0 for ratio in data["ratios"]] == [True] * 4
    assert json.loads((out / "bench.json").read_text(encoding="utf-8")) == data
    with (out / "bench.csv").open(encoding="utf-8") as file:
        assert [line["name"] for line in csv.DictReader(file)] == [line["name"] for line in data["rows"]]
    for name in ("autoregressive", "near", "lookup", "piped"):
        assert len(load_trace(out / "traces" / f"{name}.jsonl")[0].prompts) == 2 * 3
    assert all(line.startswith(("starting", "warming", "repeat")) for line in said.err.splitlines())
