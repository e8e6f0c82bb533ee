"""The study: its formulas, its probes against independent forwards, and the command on a tiny model."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import word_tokenizer
from tiny_layers import make

from execute.clasp.apart import judged
from execute.clasp.layerwise import layered
from execute.clasp.optimise import cosine_of
from execute.clasp.probes import CACHES, against_all, by_cache, every_set, next_tokens, read
from execute.clasp.tables import DISTANCES, over_prompts, overlap, persistence
from execute.clasp.verdict import beside, best_lookahead, break_even, draft_cost, speed_up
from execute.skips import SkipSet, read_skips
from pipespec_model.closed_form import synchronous_speedup
from pipespec_model.errors import InputError
from pipespec_model.trace import PromptRecord, StepRecord


def test_formula_is_the_synchronous_one_without_a_choice_of_layers() -> None:
    """With v = 1 and no optimiser it is Leviathan's speed-up; with nothing skipped it never pays."""
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for lookahead in (1, 4):
            assert speed_up(alpha, lookahead, 0.25) == pytest.approx(synchronous_speedup(alpha, lookahead, 0.25))
            assert speed_up(alpha, lookahead, draft_cost(0.0, 0.2)) <= 1.0 + 1e-12


def test_break_even_is_where_the_best_lookahead_pays_nothing() -> None:
    """Just above it some lookahead pays, just below none does; a draft as dear as a step never pays."""
    costs = {"verify": 1.1, "optimise": 1.2}
    needed = break_even(0.5, **costs)
    assert needed is not None
    assert best_lookahead(needed + 1e-3, 0.5, **costs)[1] > 1 > best_lookahead(needed - 1e-3, 0.5, **costs)[1]
    assert break_even(1.0) is None


def test_beside_each_other_a_free_drafter_that_is_always_right_fills_every_window() -> None:
    """Drafts for nothing and always right: a step of w tokens emits w; never right: nothing gained, nothing lost."""
    lookahead, pays = beside(1.0, 1e-6, [1.0, 1.1, 1.2, 1.3])
    assert pays == pytest.approx(4 / 1.3, rel=0.01)
    assert beside(0.0, 0.5, [1.0, 1.0, 1.0])[1] == pytest.approx(1.0, rel=0.01)
    assert beside(0.8, 0.5, [1.0] * 4)[1] > beside(0.8, 0.5, [1.0] * 4, optimise=2.0)[1]
    assert lookahead <= 3


def test_probe_of_scattered_positions_is_a_forward_of_each() -> None:
    """Each position sees the full model's entries before it, and its own."""
    decoder = layered(make("Llama"))
    text = read(decoder, list(range(5, 15)), list(range(20, 30)))
    skips, positions = SkipSet.layers({1, 4}), [11, 14, 17]
    right, near = next_tokens(text, positions, skips)
    with torch.inference_mode():
        for position, was_right, value in zip(positions, right, near, strict=True):
            cache = decoder.new_cache()
            decoder.forward(text.tokens[:position], 0, 1, cache)
            logits = decoder.forward([text.tokens[position]], position, 1, cache, skip=skips)
            assert was_right == (int(logits[0].argmax()) == text.tokens[position + 1])
            assert value == pytest.approx(cosine_of(text.token(position), skips), abs=1e-5)


def test_with_every_layer_it_does_not_matter_who_computed_the_cache() -> None:
    """Nothing skipped: all choices are right on each kind of cache; with layers skipped, the probe of the first kind is
    that of scattered positions, and the last that of a model without these layers."""
    decoder = layered(make("Llama"))
    prompt, answer = list(range(5, 15)), list[int]()
    for _ in range(12):
        with torch.inference_mode():
            logits = decoder.forward([*prompt, *answer], 0, 1, decoder.new_cache())
        answer.append(int(logits.argmax()))
    text = read(decoder, prompt, answer)
    assert by_cache(text, SkipSet()) == {kind: [True] * 11 for kind in CACHES}
    skips = SkipSet.layers({1, 4})
    found = by_cache(text, skips)
    assert found["verifier"] == next_tokens(text, range(10, 21), skips)[0]
    with torch.inference_mode():
        alone = decoder.forward([*prompt, *answer[:5]], 0, 1, decoder.new_cache(), skip=skips)
    assert found["own"][4] == (int(alone.argmax()) == answer[5])


def step(stage: int, kind: str, start_s: float, position: int, *, context: int = 0, width: int = 1, drafts: int = 0,
         accepted: int = 0) -> StepRecord:
    return StepRecord(0, stage, kind, start_s, 0.5, position, context, width, drafts, accepted, 0, 0)


def test_drafts_are_told_apart_by_their_distance() -> None:
    """By hand, prompt of ten: in turn, the first draft of a round has distance 1; beside, what counts is the last entry
    taken; of a window only the drafts up to the first wrong one are judged."""
    prompt = PromptRecord(0, "p", 10, [], 1.0, 1.0, [])
    in_turn = [step(0, "prefill", 0, 0), step(0, "draft", 1, 1), step(1, "prefill", 2, 0, drafts=2, accepted=2),
               step(0, "draft", 3, 3), step(0, "draft", 4, 4), step(0, "draft", 5, 5),
               step(1, "verify", 6, 3, drafts=3, accepted=1)]
    assert list(judged(prompt, in_turn, pipelined=False)) == [(1, True), (1, True), (2, False)]
    beside = [step(0, "prefill", 0, 0), step(0, "draft", 1, 1), step(0, "draft", 2, 2),
              step(1, "verify", 3, 1, drafts=2, accepted=1), step(0, "draft", 3, 3),
              step(0, "take", 4, 2, context=10, width=2), step(0, "draft", 5, 3), step(0, "draft", 6, 4),
              step(1, "verify", 7, 3, drafts=2, accepted=2)]
    assert list(judged(prompt, beside, pipelined=True)) == [(1, True), (2, False), (1, True), (2, True)]


def test_every_set_is_each_set_by_itself() -> None:
    """The shared tree of partial sets gives each set's own similarity, and the programme's rank follows."""
    token = read(layered(make("Llama")), list(range(5, 15)), [3, 4, 5]).token(11)
    free = [1, 2, 3, 4]
    every = every_set(token, free, (2, 3))
    assert set(every) == {s for count in (2, 3) for s in combinations(free, count)}
    for skipped, value in every.items():
        assert value == pytest.approx(cosine_of(token, SkipSet.layers(skipped)), abs=1e-5)
    for entry in against_all(token, free, (2, 3)):
        assert entry["mean"] <= entry["best"]
        assert entry["cosine"] <= entry["best"] + 1e-6
        assert 1 <= entry["rank"] <= entry["num_sets"]


def test_overlap_falls_with_distance_when_sets_drift() -> None:
    """Sets that change by one layer every eight tokens: near ones are alike, far ones less, none by chance."""
    sets = [{"prompt": name, "position": p, "skipped": 4, "layers": [(p // 8 + i) % 30 for i in range(4)]}
            for name in ("a", "b") for p in range(40)]
    found = persistence(sets, 4)
    means = [float(np.mean([value for _, value in found[d]])) for d in DISTANCES if d in found and d != "other prompt"]
    assert means == sorted(means, reverse=True)
    assert overlap([1, 2], [2, 3]) == pytest.approx(1 / 3)


def test_interval_covers_the_mean_of_prompts_like_these() -> None:
    """A 90% interval over 40 prompts covers the true rate in 80% to 97% of 300 trials (false alarm < 1e-4:
    binomial about 0.89; three times the standard deviation of 1.8% lies inside)."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        rates = rng.beta(4, 2, size=40)
        low, high = over_prompts([(str(i), rate, 1.0) for i, rate in enumerate(rates)], draws=400)[1]
        inside += low <= 4 / 6 <= high
    assert 0.80 * 300 <= inside <= 0.97 * 300


def test_command_writes_its_page_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model: every part, figures, SWIFT files; a second call measures nothing again."""
    from execute import __main__ as command
    from execute.clasp import apart, speed, study

    monkeypatch.setattr(study, "SHARES", (0.1, 0.3, 0.5))
    monkeypatch.setattr(apart, "LOOKAHEADS", (1,))
    monkeypatch.setattr(apart, "REPEATS", 1)
    monkeypatch.setattr(study, "STATES", 4)
    monkeypatch.setattr(study, "RUN_OF_POSITIONS", 4)
    monkeypatch.setattr(study, "FREE_LAYERS", 6)
    monkeypatch.setattr(speed, "INTERVALS", (8,))
    monkeypatch.setattr(speed, "THRESHOLDS", (0.0,))
    monkeypatch.setattr(speed, "REPEATS", 1)
    make("Llama", num_hidden_layers=12).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    lines = [" ".join(f"w{(7 * line + 3 * i) % 90 + 1}" for i in range(6)) for line in range(4)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    args = ["clasp-study", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), "--out",
            str(tmp_path / "out"), "--max-new-tokens", "24"]
    with pytest.raises(SystemExit) as end:
        command.main(args)
    assert not end.value.code
    out = tmp_path / "out"
    data = json.loads((out / "clasp.json").read_text(encoding="utf-8"))
    assert all(row["identical_prompts"] == row["num_prompts"] for row in data["speed"]["evaluation-1"])
    if data["apart"]:  # two cores
        assert all(row["identical_prompts"] == row["num_prompts"] for row in data["apart"]["evaluation"])
        assert all(row["rows"] >= 1 for row in data["apart"]["handover"].values())
    assert "## What would make it pay" in (out / "clasp.md").read_text(encoding="utf-8")
    assert all((out / f"clasp-{name}.svg").stat().st_size > 1000 for name in ("agreement", "persistence", "speed"))
    assert len(read_skips(out / "skip_layers-6.json").whole) == 6
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")}
    with pytest.raises(SystemExit) as end:
        command.main(args)
    assert not end.value.code
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")} == before


def test_another_study_does_not_go_on_there(tmp_path: Path) -> None:
    """A folder with other settings is refused."""
    from execute.clasp.study import Settings, open_study

    open_study(tmp_path, Settings("m", "float32", 48, 3, ["a"], ["b"]))
    with pytest.raises(InputError, match="must be empty or hold the same study"):
        open_study(tmp_path, Settings("m", "float32", 32, 3, ["a"], ["b"]))
