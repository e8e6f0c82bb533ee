"""Trace and profile files: round trips, torn ends, versions, unknown fields, numbers that are none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipespec_model.acceptance import IID, Hazard, Markov, Recorded
from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError
from pipespec_model.latency import Affine, Constant, Empirical, Roofline, Table
from pipespec_model.profile import Contention, Costs, Profile, StageLatency, load_profile, recorded, save_profile
from pipespec_model.sampling import Sampling
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import (
    NO_PROMPT,
    PromptRecord,
    StepRecord,
    Trace,
    TraceWriter,
    load_trace,
    save_trace,
)

SPEC = PipelineSpec.from_dict({"stages": [{"name": "small", "model": "a"}, {"name": "big", "model": "b"}]})


def step(prompt: int, **more: Any) -> StepRecord:
    first = StepRecord(prompt, 1, "verify", 0.1, 1 / 3, position=2, context=5, width=3, drafts=2, accepted=1, emitted=2,
                       epoch=1, rolled_back=True)
    return replace(first, **more)


def prompt(number: int) -> PromptRecord:
    return PromptRecord(number, f"p{number} ünïcode\n", 3, [1, 2, 3], 0.5, 0.1, [{"drafted": 2}, {"proposed": 2}],
                        category="code", repeat=1, margins=[0.1, 1e-17, 3.0])


def trace() -> Trace:
    made = Trace("measured", SPEC.to_dict(), 7, {"cpu": "x"}, {"torch": "2"}, {"spread": True, "n": None})
    for number in range(3):
        made.add(prompt(number), [step(number), step(number, stage=0, kind="draft", start_s=None)],
                 [step(number, kind="probe")])
    return made


def test_a_trace_survives_its_file(tmp_path):
    """Every field of header, steps and prompts comes back exactly, and a whole file gives no warning."""
    made = trace()
    made.steps.insert(0, step(NO_PROMPT, kind="measure"))
    save_trace(made, tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl") == (made, None)
    save_trace(made, tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl") == (made, None)


def test_a_trace_torn_at_any_byte_keeps_its_whole_prompts(tmp_path):
    """Cut within the last record, the file gives all whole prompts and a warning with the line number."""
    path = tmp_path / "t.jsonl"
    save_trace(trace(), path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    start = len(whole) - len(lines[-1])
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        found, warning = load_trace(path)
        assert found == trace().only([0, 1])
        if cut == start:
            assert warning is None
        else:
            assert warning == f"{path}:{len(lines)}: the last line is torn and was left out"


def test_a_torn_step_leaves_its_prompt_out(tmp_path):
    """A file that ends within a prompt's steps gives the prompts before it only."""
    path = tmp_path / "t.jsonl"
    save_trace(trace(), path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:-5])
    found, warning = load_trace(path)
    assert found == trace().only([0, 1])
    assert warning is not None
    assert f":{len(lines) - 1}:" in warning


def test_appending_goes_on_where_a_file_ended(tmp_path):
    """A second writer adds prompts and no second header."""
    path = tmp_path / "t.jsonl"
    made = trace()
    for number in range(3):
        with TraceWriter(path, made) as writer:
            writer.append(prompt(number), *([s for s in found if s.prompt == number]
                                            for found in (made.steps, made.probes)))
    assert load_trace(path) == (made, None)


def test_a_prompt_that_is_redone_has_its_steps_once(tmp_path):
    """Steps left by a killed run do not count once their prompt has been run again."""
    path = tmp_path / "t.jsonl"
    save_trace(trace(), path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    found, _ = load_trace(path)
    with TraceWriter(path, found) as writer:
        writer.append(prompt(2), *([s for s in made if s.prompt == 2] for made in (trace().steps, trace().probes)))
    assert load_trace(path) == (trace(), None)


def test_appending_to_a_torn_file_keeps_it_readable(tmp_path):
    """A writer that finds a torn last line does not glue the next record to it."""
    path = tmp_path / "t.jsonl"
    save_trace(trace(), path)
    path.write_bytes(path.read_bytes()[:-5])
    with TraceWriter(path, trace()) as writer:
        writer.append(prompt(2), *([s for s in made if s.prompt == 2] for made in (trace().steps, trace().probes)))
    assert [p.prompt for p in load_trace(path)[0].prompts] == [0, 1, 2]


def changed(path: Path, line: int, **fields: Any) -> None:
    """Rewrite one line (0 = header) with fields changed; None removes one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[line]) | fields
    lines[line] = json.dumps({key: value for key, value in record.items() if value is not None})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("line", "fields", "words"), [
    (0, {"version": None}, "t.jsonl:1: version must be the number 1"),
    (0, {"version": 2}, "t.jsonl:1: version must be <= 1, got 2: update pipespec"),
    (0, {"version": 0}, "t.jsonl:1: version must be >= 1, got 0"),
    (0, {"version": "1"}, "t.jsonl:1: version must be the number 1, got '1'"),
    (0, {"version": True}, "t.jsonl:1: version must be the number 1, got True"),
    (0, {"colour": 1}, "t.jsonl:1 holds a wrong or missing field"),
    (0, {"pipeline": None}, "t.jsonl:1 holds a wrong or missing field"),
    (0, {"origin": "guessed"}, "trace.origin must be one of measured, simulated, emulated, imported, got 'guessed'"),
    (0, {"type": "step"}, "t.jsonl:1 must be a trace header"),
    (1, {"colour": 1}, "t.jsonl:2: colour is not a known field"),
    (1, {"width": None}, "t.jsonl:2 lacks a field"),
    (1, {"duration_s": math.nan}, "t.jsonl:2 must be one JSON object (NaN is not allowed)"),
    (1, {"duration_s": -math.inf}, "t.jsonl:2 must be one JSON object (-Infinity is not allowed)"),
    (1, {"type": "note"}, "t.jsonl:2: type must be step, probe or prompt_end, got 'note'"),
    (3, {"colour": 1}, "t.jsonl:4: colour is not a known field"),
])
def test_a_wrong_trace_is_refused_with_its_line(tmp_path, line: int, fields: dict[str, Any], words: str):
    """Version missing, newer or no number, unknown or missing fields and NaN each have one outcome."""
    path = tmp_path / "t.jsonl"
    save_trace(trace(), path)
    changed(path, line, **fields)
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "{}\n", "[1]\n", "words\n", '{"type": "step"}\n', '{"type": "hea'])
def test_what_is_no_trace_is_bad_input(tmp_path, text: str):
    """An empty, foreign or header-less file is one clear error that names it."""
    (tmp_path / "t.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"t\.jsonl"):
        load_trace(tmp_path / "t.jsonl")
    with pytest.raises(InputError, match="must be a readable file"):
        load_trace(tmp_path / "none.jsonl")


def test_a_number_too_large_is_refused(tmp_path):
    """1e999 parses to infinity, and is refused by its field's name."""
    path = tmp_path / "t.jsonl"
    save_trace(trace(), path)
    path.write_text(path.read_text(encoding="utf-8").replace("0.3333333333333333", "1e999", 1), encoding="utf-8")
    with pytest.raises(InputError, match="duration_s must be finite"):
        load_trace(path)


def test_nan_is_never_written(tmp_path):
    """A step without a finite duration is an error where it is written."""
    with TraceWriter(tmp_path / "t.jsonl", trace()) as writer, pytest.raises(ValueError, match="JSON"):
        writer.append_steps([step(0, duration_s=math.nan)])


def profile() -> Profile:
    keys = [stage.time_key for stage in SPEC.stages]
    tokens = np.array([[1, 9], [1, 2]])
    return Profile(
        latency={keys[0]: StageLatency(Table((1, 2), (0.1, 1 / 3), 1e-5, 7, (0.9, 1.1)), Affine(0.1, 0.2, 0.3)),
                 "big": StageLatency(Empirical((0.1, 0.2))), "other": StageLatency(Roofline(1.0, 2.0, 3.0, 4.0))},
        acceptance={"small>big": IID(0.8), "x>y": Markov(0.9, 0.1), "y>z": Hazard((0.5,)),
                    "z>x": Recorded((True, False))},
        contention=(Contention({keys[0]: 0.5, keys[1]: 1 / 3}),), turns=(Contention({keys[1]: 0.9}),),
        costs={"*": Costs(0.1, 0.2, 0.3, 0.4, 0.5)}, timing_spread=0.01,
        slowness={"small": (1.0, 1.5)}, neighbour_rate=0.7, sampling=Sampling(temperature=0.8, top_p=0.95, seed=3),
        agreement=(Agreement("p", 3, tuple(s.choice_key for s in SPEC.stages), tokens, "code", 5, (2,),
                             same_draw=np.array([[0.9, 1 / 3], [1.0, 1.0]]), overlap=np.array([[0.8, 0.4], [1, 1]])),),
        origin="fitted", source="a run")


def test_a_profile_survives_its_file(tmp_path):
    """from_dict(to_dict(x)) is x, number by number, through JSON."""
    save_profile(profile(), tmp_path / "p.json")
    found = load_profile(tmp_path / "p.json")
    assert found.to_dict() == profile().to_dict()
    bare, again = (replace(p, agreement=()) for p in (profile(), found))
    assert bare == again
    kept = recorded(found, SPEC)[0]
    assert kept.tokens.tolist() == [[1, 9], [1, 2]]
    assert kept.same_draw is not None
    assert kept.same_draw.tolist() == [[0.9, 1 / 3], [1.0, 1.0]]


def test_a_profile_of_the_version_before_is_read_as_greedy():
    """Version 1 knew of no sampling: it is read, its tokens are what there is, and it is written as version 2."""
    old = {key: value for key, value in profile().to_dict().items() if key != "sampling"} | {"version": 1}
    old["agreement"] = [{key: value for key, value in entry.items() if key not in ("same_draw", "overlap")}
                        for entry in old["agreement"]]
    found = Profile.from_dict(old)
    assert found.sampling is None
    assert found.agreement[0].drawn(1, 2) is found.agreement[0]
    assert found.to_dict()["version"] == 2


def test_a_profile_by_hand_is_keyed_by_names(tmp_path):
    """A YAML profile may key latency, costs and acceptance by a stage's name, one model for all steps."""
    (tmp_path / "p.yaml").write_text("""
latency: {small: {kind: constant, seconds: 0.1}, big: {kind: constant, seconds: 0.4}}
acceptance: {small>big: {kind: iid, acceptance_rate: 0.8}}
costs: {big: {handover_s: 0.5}}
""", encoding="utf-8")
    found = load_profile(tmp_path / "p.yaml")
    assert [found.stage_latency(s) for s in SPEC.stages] == [StageLatency(Constant(0.1)), StageLatency(Constant(0.4))]
    assert found.pair(*SPEC.stages) == IID(0.8)
    assert [found.stage_costs(s, "pipelined").handover_s for s in SPEC.stages] == [0.0, 0.5]


def test_contention_by_hand_is_keyed_by_names_too():
    """A stage's name serves as the key of rates as it does of latencies."""
    by_name = Contention({"small": 0.5, "big": 0.8})
    found = Profile({"small": StageLatency(Constant(1.0))}, turns=(by_name,))
    assert [found.turn_rate(SPEC.stages, s) for s in SPEC.stages] == [0.5, 0.8]


def test_rates_of_a_set_that_was_not_measured_are_the_least_of_its_parts():
    """Measured sets are exact; a larger one gives each stage the smallest rate of its measured subsets."""
    made = Profile({}, contention=(Contention({"a": 0.5, "b": 0.8}), Contention({"a": 0.6, "c": 0.7})))
    assert made.rates(frozenset("a")) == {"a": 1.0}
    assert made.rates(frozenset("ab")) == {"a": 0.5, "b": 0.8}
    assert made.rates(frozenset("abc")) == {"a": 0.5, "b": 0.8, "c": 0.7}
    assert made.rates(frozenset("bc")) == {"b": 1.0, "c": 1.0}


ONE = {"a": {"kind": "constant", "seconds": 1}}


@pytest.mark.parametrize(("data", "words"), [
    ([1], "must hold a mapping, got 'list'"),
    ({}, "latency must hold at least one stage"),
    ({"latency": {}, "latencies": 1}, "latencies is not a known key"),
    ({"version": 3, "latency": ONE}, "version must be 1 or 2, got 3"),
    ({"version": "1", "latency": ONE}, "version must be 1 or 2, got '1'"),
    ({"latency": ONE, "sampling": {"top_q": 1}}, "sampling: top_q is not a known key"),
    ({"latency": {"a": {"kind": "constant", "seconds": -1}}}, "seconds must be a finite number >= 0, got -1"),
    ({"latency": {"a": {"prefill": None}}}, "cannot be read"),
    ({"latency": {"a": 1}}, "cannot be read"),
    ({"latency": ONE, "contention": [{"a": 1.5}]}, "must be in (0, 1], got 1.5"),
    ({"latency": ONE, "costs": {"a": {"start_s": -1}}}, "costs.start_s must be a finite number >= 0"),
    ({"latency": ONE, "costs": {"a": {"begin_s": 1}}}, "begin_s"),
    ({"latency": ONE, "acceptance": {"a>b": {"kind": "iid", "acceptance_rate": 2}}},
     "acceptance_rate must be in [0, 1], got 2"),
])
def test_a_bad_profile_is_refused_in_one_line(data: Any, words: str):
    """Every refusal of a profile names the field and the rule."""
    with pytest.raises(InputError) as caught:
        Profile.from_dict(data)
    assert words in str(caught.value)


@pytest.mark.parametrize(("latency", "words"), [
    ({"kind": "constant", "seconds": "fast"}, "seconds must be a finite number >= 0"),
    ({"kind": "constant", "seconds": math.inf}, "seconds must be"),
    ({"kind": "roofline", "weight_bytes": -1e9, "flops_per_token": 1, "bandwidth_bytes_per_s": 1, "flops_per_s": 1},
     "weight_bytes must be a finite number >= 0"),
])
def test_times_of_a_profile_are_finite_numbers(latency: dict[str, Any], words: str):
    """A time that is a word, infinite or negative is refused by its field's name."""
    with pytest.raises(InputError, match=words):
        Profile.from_dict({"latency": {"a": latency}})


@pytest.mark.parametrize("field", ["neighbour_rate", "timing_spread"])
@pytest.mark.parametrize("value", [-0.5, math.nan])
def test_rates_of_a_profile_are_checked(field: str, value: float):
    """A negative or undefined rate or spread is refused like any other number out of range."""
    with pytest.raises(InputError, match=field):
        Profile.from_dict({"latency": {"a": {"kind": "constant", "seconds": 1}}, field: value})


def test_what_a_profile_lacks_is_named_with_its_mend():
    """A stage or pair without an entry names itself and says what to add."""
    empty = Profile({"x": StageLatency(Constant(1.0))})
    with pytest.raises(InputError, match=r"profile\.latency\[small\] must be there: calibrate"):
        empty.stage_latency(SPEC.stages[0])
    with pytest.raises(InputError, match=r"profile\.acceptance\[small>big\] must be there: calibrate"):
        empty.pair(*SPEC.stages)
    assert empty.stage_costs(SPEC.stages[0], "pipelined") == Costs()


def test_a_stage_always_agrees_with_its_like():
    """Two stages that choose alike need no recorded pair: they agree with probability 1."""
    model = Profile({}).pair(SPEC.stages[0], SPEC.stages[0])
    assert model.mean_emitted(3) == 4.0
