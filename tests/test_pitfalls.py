"""Faults that users of such systems reported, each with the small test that catches it.

Where the test of a pitfall is (no file named: here):

=======  ===========================================================================================
pitfall  test
=======  ===========================================================================================
4, 9,    test_pitfalls_sampling, which names the others' tests too
10, 12,
21
15       test_every_option_changes_an_event, test_every_stage_option_changes_a_record,
         test_a_runner_is_made_with_its_stage_s_options, test_the_header_echoes_every_option,
         test_effective_threads_are_echoed, test_a_run_that_proposed_nothing_warns;
         test_fleet_scripted.test_spec_echoes_effective_values,
         test_simulate_run.test_the_header_echoes_what_was_used, unknown keys: test_bad_input.test_pipeline_file
17       test_one_function_gives_every_throughput, test_a_baseline_against_itself_is_exactly_one,
         test_throughput_is_counted_from_ids, test_a_row_states_devices_and_threads;
         test_validate.test_speedups_compare_with_the_right_rows
18       test_steps_of_one_stage_follow_each_other, test_stages_share_one_clock,
         test_busy_is_at_most_wall; test_metrics.test_busy_is_a_share_of_the_wall_time
20       test_two_rollbacks_and_the_end_under_every_order, test_a_lookup_that_stops_in_a_chain_of_links,
         test_what_was_shown_is_never_taken_back; everything else of it in test_protocol and, with simulated
         time, test_simulate_engine.test_two_rollbacks_at_one_instant_*
22       test_nothing_partial_is_left_of_a_failed_prompt, test_the_first_cause_is_named_by_a_busy_parent;
         test_faults.test_stage_that_raises_is_named
23       test_a_child_is_pinned_and_counts_its_own_threads, test_effective_threads_are_echoed,
         test_threads_fit_the_cores_that_a_stage_names, test_every_thread_of_a_stage_is_pinned;
         test_host.*; speed-ups below 1: test_validate.test_speedups_compare_with_the_right_rows
26       test_a_profile_without_a_version_is_of_this_one, test_a_version_is_a_whole_number,
         test_nan_in_a_profile_names_its_field, test_a_field_of_another_type_is_refused;
         test_trace_profile.test_a_wrong_trace_is_refused_with_its_line, .test_nan_is_never_written,
         .test_a_number_too_large_is_refused, .test_a_bad_profile_is_refused_in_one_line
27       test_int8_chooses_in_teacher_forcing_as_in_generation, test_int8_weights_have_a_scale_a_channel,
         test_int8_reads_its_prompt_with_float_weights; test_torch_runner.test_int8_copy_shares_the_prompt_cache
29       test_several_new_tokens_on_a_cache, test_that_comparison_can_fail, test_positions_are_explicit,
         test_only_the_logits_asked_for_are_computed; test_loading.test_every_architecture_decodes_as_transformers_does
=======  ===========================================================================================
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_protocol as delivery
from conftest import CONTEXT, STRATEGIES, chain, drive, replays, rows_of, stage, table

from execute import host
from execute.fleet import Fleet, new_trace
from execute.host import place
from execute.prompts import Prompt
from execute.scripted import Script
from execute.worker import Worker, make_runner, set_threads
from pipespec_model import metrics
from pipespec_model.agreement import Agreement
from pipespec_model.errors import InputError, StageError
from pipespec_model.latency import Constant
from pipespec_model.messages import Step
from pipespec_model.profile import PROFILE_VERSION, Profile, StageLatency
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
from pipespec_model.trace import PromptRecord, StepRecord, Trace, TraceWriter, load_trace, save_trace
from simulate.engine import PromptRun
from simulate.run import forecast, simulate
from validate.compare import Prediction, compare, summarise
from validate.rows import Row

# torch is imported where it is used: the stage processes of this file import the file, not torch.

PROMPT = (5, 6, 7, 8)
LONG = Prompt("long", "", tokens=(1, 2, 3))
ANSWER = list(range(100, 130))
PATTERN = "1110100"


# -- 15: options that are parsed and never passed on ----------------------------------------------

LINK = {"lookahead": 1, "buffer_tokens": 4, "max_window": 3}
OPTIONS: dict[str, Any] = {"lookahead": 2, "buffer_tokens": 2, "max_window": 1, "handshake": "blocking",
                           "strategy": "speculative"}


def specified(**changed: Any) -> PipelineSpec:
    stages, _ = table(rows_of(ANSWER, PATTERN))
    link = {name: changed.pop(name, value) for name, value in LINK.items()}
    if link["buffer_tokens"] < link["max_window"]:
        link["max_window"] = LINK["max_window"]
    return PipelineSpec(stages=tuple(stages), links=(LinkSpec(**link),), **changed)


def executed(spec: PipelineSpec) -> list[Any]:
    _, agreement = table(rows_of(ANSWER, PATTERN))
    # An uneven schedule: in rotation no stage would ever be far ahead.
    return drive(spec, replays(agreement), LONG.tokens, len(ANSWER), rng=np.random.default_rng(1)).steps


def simulated(spec: PipelineSpec) -> list[Any]:
    _, agreement = table(rows_of(ANSWER, PATTERN))
    profile = Profile({"s0": StageLatency(Constant(0.001)), "s1": StageLatency(Constant(0.0043))})
    run = PromptRun(spec, profile, agreement, log=[])
    run.run()
    assert run.log is not None
    return run.log


@pytest.mark.parametrize("engine", [executed, simulated])
def test_every_option_changes_an_event(engine: Callable[[PipelineSpec], list[Any]]) -> None:
    """Each option of a link and of the pipeline changes what a run records, in either engine; an option
    that is new needs an entry here."""
    assert {*LinkSpec.model_fields, *PipelineSpec.model_fields} - {"stages", "links"} == set(OPTIONS)
    before = engine(specified())
    assert before == engine(specified())
    for name, value in OPTIONS.items():
        assert engine(specified(**{name: value})) != before, name


STAGE_OPTIONS: dict[str, Any] = {
    "name": "b", "model": "n", "drafter": "prompt-lookup", "device": "cpu:1", "dtype": "bfloat16", "quantize": "int8",
    "threads": 2, "cores": (2,), "max_ngram": 4, "num_skipped_layers": 3, "layer_opt_interval": 7,
    "draft_exit_threshold": 0.5, "kept_layers": (0,)}
SKIPPING = {"num_skipped_layers", "layer_opt_interval", "draft_exit_threshold", "kept_layers"}


@pytest.mark.parametrize("name", STAGE_OPTIONS)
def test_every_stage_option_changes_a_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option of a stage changes its name, what decides its tokens, what decides its times, or its
    cores; an option that is new needs an entry here."""
    monkeypatch.setattr(host, "available_cores", lambda: [0, 1, 2])
    clasp = name in SKIPPING
    drafter = "prompt-lookup" if name == "max_ngram" else "clasp" if clasp else "model"

    def told(**options: Any) -> tuple[Any, ...]:
        first = StageSpec(**{"name": "a", "model": "m", "drafter": drafter, **options})
        # A layer-skipping drafter has its verifier's model, and takes turns with it.
        target = StageSpec(name="t", model="m") if clasp else stage("t", threads=1)
        cores = host.assign_cores(chain("speculative" if clasp else "pipelined", [first, target]), scripted=False)
        return first.name, first.choice_key, first.time_key, cores

    assert set(STAGE_OPTIONS) == set(StageSpec.model_fields)
    assert told(**{name: STAGE_OPTIONS[name]}) != told()


def test_a_runner_is_made_with_its_stage_s_options(tiny) -> None:
    """The longest n-gram decides what a lookup stage proposes; dtype and quantisation what a model's
    weights and cache are."""
    import torch

    from execute.int8 import Int8Linear

    text = [1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3]
    proposed = []
    for longest in (2, 3):
        lookup = make_runner(stage("l", drafter="prompt-lookup", max_ngram=longest), None, None)
        lookup.begin(text)
        proposed.append(lookup.propose([], 1))
    assert proposed == [[8], [9]]
    half = make_runner(stage("h", tiny["near"], dtype="bfloat16"), None, 20)
    int8 = make_runner(stage("q", tiny["near"], quantize="int8"), None, None)
    assert half.prefill.new_cache().keys.dtype == torch.bfloat16
    assert half.vocabulary == 20
    assert all(isinstance(x, Int8Linear) for x in int8.step.linears)
    assert not any(isinstance(x, Int8Linear) for x in int8.prefill.linears)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three scripted stages; the target is the slowest."""
    stages, _ = table(rows_of(ANSWER, "1", "1"))
    with Fleet(stages, scripts={s.name: Script(Constant(x)) for s, x in zip(stages, STEP_S, strict=True)}) as running:
        yield running


STEP_S = (0.001, 0.0023, 0.0037)


def test_the_header_echoes_every_option(fleet: Fleet) -> None:
    """The header of a trace holds the value of every option that the run had, defaults included."""
    stages, _ = table(rows_of(ANSWER, PATTERN))
    for name, value in OPTIONS.items():
        spec = specified(**{name: value})
        header = new_trace(fleet.configure(spec), emulated=True, options={"max_new_tokens": 9}).header()
        echoed = header["pipeline"]
        assert (echoed["links"][0] | echoed)[name] == value
        assert set(echoed["stages"][0]) == set(StageSpec.model_fields)
        assert [s["cores"] for s in echoed["stages"]] == [host.available_cores()] * len(stages)
        assert header["options"] == {"max_new_tokens": 9}


class InProcess:
    """Stands in for a fleet: the same pipeline, run by ``drive`` with the tiny models."""

    runners: dict[str, Any]

    def __init__(self, stages: Sequence[StageSpec], vocabulary: int | None = None, **_: Any) -> None:
        self.team = [make_runner(s, None, None) if s.block else self.runners[s.name] for s in stages]

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def configure(self, spec: PipelineSpec) -> PipelineSpec:
        return spec

    def run_prompt(self, spec: PipelineSpec, prompt: Prompt, *, max_new_tokens: int, number: int,
                   on_text: Any, **_: Any) -> tuple[PromptRecord, list[StepRecord]]:
        for runner in self.team:
            runner.begin(prompt.tokens)
        done = drive(spec, self.team, prompt.tokens, max_new_tokens)
        steps = [StepRecord(number, spec.stages.index(spec.target), s.kind, 0.0, 0.1, s.position, s.cached, s.width,
                            len(s.drafts), accepted, accepted + 1, s.epoch) for s, accepted in done.steps[-1]]
        return PromptRecord(number, prompt.name, len(prompt.tokens), done.tokens, 2.0, 0.1, done.counters), steps


@pytest.fixture
def execute_run(tiny, runners, tmp_path: Path, monkeypatch, capsys) -> Callable[[str], tuple[dict[str, Any], str]]:
    """``pipespec execute run`` of {lookup, target} on one prompt: its JSON document, and stderr."""
    from execute import __main__ as command

    InProcess.runners = runners
    monkeypatch.setattr(command, "Fleet", InProcess)
    (tmp_path / "p.yaml").write_text(
        f"strategy: speculative\nstages:\n- {{name: lookup, model: {tiny['target']}, drafter: prompt-lookup}}\n"
        f"- {{name: target, model: {tiny['target']}}}\nlinks: [{{lookahead: 3}}]\n", encoding="utf-8")

    def run(prompt: str) -> tuple[dict[str, Any], str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command.main(["run", str(tmp_path / "p.yaml"), "--prompt", prompt, "--max-new-tokens", "6", "--json",
                          "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        assert end.value.code == 0, said.err
        return json.loads(said.out), said.err

    return run


def test_a_run_that_proposed_nothing_warns(execute_run, tmp_path: Path) -> None:
    """A speculative run without a single proposal says so on stderr; one with proposals does not; both
    leave the budget and the effective pipeline in their trace."""
    document, said = execute_run("w1 w2 w3 w4")
    text = list(itertools.pairwise([1, 2, 3, 4, *document["prompts"][0]["tokens"]]))
    assert len(text) == len(set(text)) == 9, "the text repeats itself: choose another prompt"
    assert said.strip().splitlines() == ["warning: a drafter proposed nothing; the run was plain decoding"]
    trace, _ = load_trace(tmp_path / "out" / "trace.jsonl")
    assert trace.options["max_new_tokens"] == 6
    assert trace.pipeline == document["pipeline"]
    assert trace.pipeline["links"] == [{"lookahead": 3, "buffer_tokens": 16, "max_window": 16}]
    _, said = execute_run("w1 w2 w3 w1 w2 w3 w1 w2")
    assert said == ""


# -- 17: two sides of a speed-up counted differently ----------------------------------------------


def measured(spec: PipelineSpec) -> tuple[Trace, list[Agreement], Profile]:
    """A simulated run that passes for a measured one."""
    names = tuple(s.choice_key for s in spec.stages)
    rows = rows_of(ANSWER, PATTERN)[2 - len(names) :]
    agreements = [Agreement(f"p{i}", 3, names, np.array(rows)[:, : 20 + i]) for i in range(4)]
    profile = Profile({"s0": StageLatency(Constant(0.001)), "s1": StageLatency(Constant(0.0043))},
                      agreement=tuple(agreements))
    trace = simulate(spec, profile, agreements)
    trace.origin, trace.pipeline = "measured", place(spec).to_dict()
    return trace, agreements, profile


def row_of(spec: PipelineSpec, trace: Trace, agreements: list[Agreement], profile: Profile) -> dict[str, Any]:
    none = Prediction({"closed_form": None, "renewal": None, "simulation": 1.0}, None, None)
    return compare(Row("row", spec), none, trace, profile=profile, agreements=agreements,
                   answers={a.prompt: a.tokens[-1].tolist() for a in agreements}, margins={})


ALONE = PipelineSpec.alone(table([ANSWER, ANSWER])[0][1])


def test_a_baseline_against_itself_is_exactly_one() -> None:
    """Measured against itself, and against an equal run, the baseline's speed-up is 1.00, not about 1;
    twice the tokens in the same time make it 2.00."""
    trace, agreements, profile = measured(ALONE)
    rows = [row_of(ALONE, trace, agreements, profile) for _ in range(2)]
    summarise(rows)
    assert [row["speedup"] for row in rows] == [1.0, 1.0]
    doubled = replace(trace, prompts=[replace(p, tokens=p.tokens * 2) for p in trace.prompts])
    rows = [rows[0], row_of(ALONE, doubled, agreements, profile)]
    summarise(rows)
    assert [row["speedup"] for row in rows] == [1.0, 2.0]


def test_throughput_is_counted_from_ids() -> None:
    """Throughput follows the ids in the trace's prompts, whatever the steps say they emitted."""
    spec = specified()
    trace, agreements, profile = measured(spec)
    before = row_of(spec, trace, agreements, profile)["measured_tokens_per_s"]
    boasting = replace(trace, steps=[replace(step, emitted=step.emitted + 3) for step in trace.steps])
    assert row_of(spec, boasting, agreements, profile)["measured_tokens_per_s"] == before
    fewer = replace(trace, prompts=[replace(p, tokens=p.tokens[:10]) for p in trace.prompts])
    after = row_of(spec, fewer, agreements, profile)["measured_tokens_per_s"]
    assert after == pytest.approx(before * 40 / sum(len(p.tokens) for p in trace.prompts))


def test_one_function_gives_every_throughput(monkeypatch: pytest.MonkeyPatch, execute_run) -> None:
    """With that one function replaced, execution, forecast, simulation and report all show its value."""
    from simulate.__main__ import figures

    trace, agreements, profile = measured(ALONE)
    monkeypatch.setattr(metrics, "tokens_per_s", lambda prompts: 1234.5)
    assert row_of(ALONE, trace, agreements, profile)["measured_tokens_per_s"] == 1234.5
    assert forecast(trace, profile, num_prompts=4).tokens_per_s == 1234.5
    shown = figures(ALONE, [trace], [trace])
    assert (shown["tokens_per_s"]["value"], shown["speedup"]["value"]) == (1234.5, 1.0)
    assert execute_run("w1 w2 w3 w4")[0]["tokens_per_s"] == 1234.5


def test_a_row_states_devices_and_threads() -> None:
    """Either side of a speed-up says what it ran on, from the trace and not from what was asked for."""
    spec = specified()
    trace, agreements, profile = measured(spec)
    trace.pipeline["stages"][1].update(threads=7, device="cpu:3")
    row = row_of(spec, trace, agreements, profile)
    assert (row["devices"], row["threads"]) == (["cpu", "cpu:3"], [1, 7])


# -- 18: timing that does not measure the work ----------------------------------------------------


@pytest.fixture(scope="module")
def timed_runs(fleet: Fleet) -> dict[str, tuple[PromptRecord, list[StepRecord], float]]:
    """One prompt of three processes a strategy, with the seconds that the parent saw."""
    stages, agreement = table(rows_of(ANSWER, "110", PATTERN))
    out = {}
    for strategy in STRATEGIES:
        spec = chain(strategy, stages)
        fleet.configure(spec)
        begun = time.perf_counter()
        record, steps = fleet.run_prompt(spec, LONG, max_new_tokens=len(ANSWER), agreement=agreement)
        out[strategy] = (record, steps, time.perf_counter() - begun)
    return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_of_one_stage_follow_each_other(timed_runs, strategy: str) -> None:
    """A stage's steps do not overlap, each holds at least the work that it did, the first and only the
    first is flagged as prefill, and up to the target's end no stage is busy longer than the wall time."""
    record, steps, seen_s = timed_runs[strategy]
    assert 0 < record.ttft_s < record.total_s <= seen_s
    for index in range(3):
        own = [step for step in steps if step.stage == index]
        assert [step.kind == "prefill" for step in own] == [True] + [False] * (len(own) - 1)
        assert all(step.start_s >= 0 and step.duration_s >= STEP_S[index] for step in own)
        assert all(a.start_s + a.duration_s <= b.start_s for a, b in itertools.pairwise(own))
        ends = [min(step.start_s + step.duration_s, record.total_s) for step in own]
        busy = sum(max(0.0, end - step.start_s) for step, end in zip(own, ends, strict=True))
        assert 0 < busy <= record.total_s


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stages_share_one_clock(timed_runs, strategy: str) -> None:
    """Across processes no effect comes before its cause: what is verified was drafted before, and a
    rollback follows the end of a step in which a later stage found a difference."""
    _, steps, _ = timed_runs[strategy]
    ended = {index: sorted((s.start_s + s.duration_s, s.position + s.emitted) for s in steps if s.stage == index)
             for index in range(3)}
    verified = [step for step in steps if step.drafts]
    assert len(verified) > 5
    for step in verified:
        held = [length for end, length in ended[step.stage - 1] if end <= step.start_s]
        assert max(held, default=0) >= step.position + step.drafts
    rejections = {index: [s.start_s + s.duration_s for s in steps if s.stage > index and s.emitted] for index in (0, 1)}
    rolled_back = [step for step in steps if step.rolled_back]
    assert rolled_back
    for step in rolled_back:
        assert min(rejections[step.stage]) <= step.start_s


def test_busy_is_at_most_wall() -> None:
    """No stage is busy for more than all of the wall time, though a drafter's last step may end after it."""
    counters = [{"drafted": 1, "cut": 0}, {"drafted": 0, "cut": 0}]
    late = StepRecord(0, 0, "draft", 0.0, 1.5, 0, 3, 1, 0, 0, 1, 0)
    record = PromptRecord(0, "p", 3, [1], 1.0, 1.0, counters)
    trace = Trace("measured", {"stages": [{"name": "d"}, {"name": "t"}]}, steps=[late], prompts=[record])
    assert metrics.stage_use(trace)[0]["busy"] <= 1.0


# -- 20: a stage acts on a stale accepted count ---------------------------------------------------


@delivery.both_handshakes
@pytest.mark.parametrize(("first", "second", "end"), [
    ([1, 9, 3], [1, 2, 9], 3), ([9, 9, 9], [9, 9, 9], 2), ([2, 2, 2], [1, 9, 3], 2), ([9, 9, 9], [3, 9, 3], 3),
])
def test_two_rollbacks_and_the_end_under_every_order(first: list[int], second: list[int], end: int,
                                                     handshake: str) -> None:
    """Rollbacks of two links and an end of sequence, true, early or missed, in every order and each
    message once or twice: the committed text is always a prefix of the answer, which ends at the end."""
    spec = delivery.pipeline(3, buffer_tokens=1, max_window=1, handshake=handshake)
    assert delivery.explore(delivery.World.of(spec, [first, second, [1, 2, 3]], eos=[end], twice=True)) > 100


@delivery.both_handshakes
@pytest.mark.parametrize("strategy", ["pipelined", "speculative"])
@pytest.mark.parametrize("first", [[-1, -1, -1], [1, -1, -1], [9, -1, 3]])
def test_a_lookup_that_stops_in_a_chain_of_links(first: list[int], strategy: str, handshake: str) -> None:
    """A drafter that stops early says *final* to a middle stage that is itself rolled back; nobody waits
    for ever, whatever the order."""
    spec = delivery.pipeline(3, strategy, lookup=True, buffer_tokens=1, max_window=1, lookahead=1, handshake=handshake)
    assert delivery.explore(delivery.World.of(spec, [first, [1, 9, 3], [1, 2, 3]], twice=True)) > 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_shown_is_never_taken_back(fleet: Fleet, strategy: str) -> None:
    """At every moment of a run of processes, what has been shown is a prefix of the answer."""
    stages, agreement = table(rows_of(ANSWER, "10", PATTERN))
    shown: list[int] = []

    def more(tokens: list[int]) -> None:
        shown.extend(tokens)
        assert shown == ANSWER[: len(shown)]

    fleet.run_prompt(chain(strategy, stages), LONG, max_new_tokens=20, agreement=agreement, on_text=more)
    assert shown == ANSWER[:20]


# -- 22: a partial commit after an error ----------------------------------------------------------


class Breaking:
    """A step time that lets the stage fail once its context holds ``context`` tokens: ``during`` a step, or
    ``after`` one, when it is booked and its messages have not left."""

    def __init__(self, when: str, context: int, width: int) -> None:
        self.when, self.context, self.width = when, context, width

    def sample_s(self, width: int, context: int, draw: float) -> float:
        if context >= self.context and width >= self.width:
            if self.when == "during":
                raise RuntimeError("broken during")
            Worker.send = broken_send  # in this stage's own process
        return 0.002


def broken_send(self: Worker, stage: Any) -> None:
    raise RuntimeError("broken after")


@pytest.mark.parametrize(("strategy", "culprit", "when", "width"), [
    ("pipelined", "s0", "after", 1), ("speculative", "s1", "during", 2), ("pipelined blocking", "s1", "after", 2),
    ("speculative", "s1", "after", 2),
], ids=["after draft", "in mid-verify", "after verify, blocking", "after verify"])
def test_nothing_partial_is_left_of_a_failed_prompt(strategy: str, culprit: str, when: str, width: int,
                                                    tmp_path: Path) -> None:
    """A stage that raises after its draft, in a verification or after it: an error naming the stage, and
    on disk whole prompts only."""
    stages, agreement = table(rows_of(ANSWER, "110"))
    scripts = {s.name: Script(Constant(0.002)) for s in stages}
    scripts[culprit] = Script(Breaking(when, context=3 + 9, width=width))
    spec = chain(strategy, stages)
    path = tmp_path / "t.jsonl"
    with Fleet(stages, scripts=scripts) as failing, TraceWriter(path, new_trace(failing.configure(spec))) as writer:
        writer.append(*failing.run_prompt(spec, LONG, max_new_tokens=8, agreement=agreement))
        whole = path.read_bytes()
        with pytest.raises(StageError, match=rf"stage '{culprit}' failed .*broken {when}.*prompt 'long'"):
            writer.append(*failing.run_prompt(spec, LONG, max_new_tokens=30, number=1, agreement=agreement))
    assert path.read_bytes() == whole
    trace, torn = load_trace(path)
    assert (torn, [p.tokens for p in trace.prompts], {s.prompt for s in trace.steps}) == (None, [ANSWER[:8]], {0})


def test_the_first_cause_is_named_by_a_busy_parent() -> None:
    """A stage that raised is named, though its neighbours have ended too before the parent looks."""
    stages, agreement = table(rows_of(ANSWER, "110"))
    scripts = {s.name: Script(Constant(0.01), fail_at=3 if s.name == "s1" else None) for s in stages}
    spec = chain("pipelined", stages)
    with Fleet(stages, scripts=scripts) as failing:
        failing.configure(spec)
        processes = list(failing.processes.values())

        def busy(_: list[int]) -> None:
            for process in processes:
                process.join(timeout=5)

        with pytest.raises(StageError, match="stage 's1' failed in"):
            failing.run_prompt(spec, LONG, max_new_tokens=30, agreement=agreement, on_text=busy)


# -- 23: stages fight for cores -------------------------------------------------------------------


@pytest.fixture(scope="module")
def computing(tiny) -> Iterator[Fleet]:
    """Processes that compute, and one that looks up."""
    lookup = stage("lookup", tiny["target"], drafter="prompt-lookup")
    with Fleet([lookup, *(stage(name, tiny[name]) for name in ("near", "target"))]) as running:
        yield running


@pytest.mark.skipif(len(host.available_cores()) < 2, reason="two stages that compute together need two cores")
def test_a_child_is_pinned_and_counts_its_own_threads(computing: Fleet) -> None:
    """Each stage process sits on the cores that the header names, no core has two of them, and their
    threads together are no more than the cores here."""
    near, target = computing.stages["near"], computing.stages["target"]
    resolved = computing.configure(chain("pipelined", [near, target]))
    for spec in resolved.stages:
        assert os.sched_getaffinity(computing.processes[spec.name].pid) == set(spec.cores)
    assert not set(resolved.stages[0].cores) & set(resolved.stages[1].cores)
    assert sum(spec.threads for spec in resolved.stages) <= len(host.available_cores())
    alone = computing.configure(PipelineSpec.alone(target.model_copy(update={"threads": 2})))
    assert alone.target.threads == 2
    assert len(os.sched_getaffinity(computing.processes["target"].pid)) == 2


@pytest.mark.skipif(len(host.available_cores()) < 2, reason="asks for two threads")
def test_effective_threads_are_echoed(computing: Fleet) -> None:
    """The header has the threads that are in force, not those that were asked for: a lookup has one."""
    lookup, target = computing.stages["lookup"], computing.stages["target"]
    asked = [item.model_copy(update={"threads": 2}) for item in (lookup, target)]
    header = new_trace(computing.configure(chain("speculative", asked))).header()
    assert [item["threads"] for item in header["pipeline"]["stages"]] == [1, 2]


def test_threads_fit_the_cores_that_a_stage_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of one stage on the one core that it names are refused, as on ``device: cpu:0``."""
    monkeypatch.setattr(host, "available_cores", lambda: [0, 1])
    with pytest.raises(InputError, match=r"stages\[a\]\.threads"):
        host.assign_cores(chain("pipelined", [stage("a", "m", threads=2, cores=(0,)), stage("t")]), scripted=False)


@pytest.mark.skipif(len(host.available_cores()) < 2, reason="needs a core to move away from")
def test_every_thread_of_a_stage_is_pinned() -> None:
    """A stage's threads that began while its model was loaded, such as OpenMP's, move to its cores too."""
    def threads() -> list[int]:
        return [int(name) for name in os.listdir("/proc/self/task")]

    before = os.sched_getaffinity(0)
    over = threading.Event()
    older = threading.Thread(target=over.wait)
    older.start()
    try:
        set_threads(1, (min(before),), torch_loaded=False)
        assert os.sched_getaffinity(older.native_id) == {min(before)}
    finally:
        over.set()
        older.join()
        for thread in threads():
            os.sched_setaffinity(thread, before)


# -- 26: NaN in JSON, unknown schema versions -----------------------------------------------------

CONSTANT = {"kind": "constant", "seconds": 1}


def test_a_profile_without_a_version_is_of_this_one() -> None:
    """A profile by hand may leave its version out and is read as one of today's; a written one has it."""
    made = Profile.from_dict({"latency": {"a": CONSTANT}})
    assert made.to_dict()["version"] == PROFILE_VERSION
    assert Profile.from_dict(made.to_dict()).to_dict() == made.to_dict()


@pytest.mark.parametrize("version", [
    PROFILE_VERSION + 1, 0, "1", None, math.nan, [1], True,
])
def test_a_version_is_a_whole_number(version: Any) -> None:
    """A profile's version that is newer, older or no number is refused by that name, as a trace's is."""
    with pytest.raises(InputError, match="profile: version must be 1 or 2"):
        Profile.from_dict({"version": version, "latency": {"a": CONSTANT}})


@pytest.mark.parametrize(("part", "word"), [
    ({"latency": {"a": {"kind": "constant", "seconds": math.nan}}}, "seconds"),
    ({"contention": [{"a": math.nan, "b": 0.5}]}, "contention.a"),
    ({"turns": [{"a": math.nan}]}, "contention.a"),
    ({"acceptance": {"a>b": {"kind": "iid", "acceptance_rate": math.nan}}}, "acceptance_rate"),
    ({"costs": {"a": {"start_s": math.nan}}}, "costs.start_s"),
    ({"slowness": {"a": [1.0, math.nan]}}, "slowness.a"),
    ({"slowness": {"a": [1.2, 1.0]}}, "slowness.a"),
    ({"slowness": {"a": []}}, "slowness.a"),
    ({"timing_spread": math.inf}, "timing_spread"),
])
def test_nan_in_a_profile_names_its_field(part: dict[str, Any], word: str, tmp_path: Path) -> None:
    """JSON as Python writes it may hold NaN and Infinity: a profile with one is refused by the field's name."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"latency": {"a": CONSTANT}, **part}), encoding="utf-8")
    from pipespec_model.profile import load_profile

    with pytest.raises(InputError, match=word):
        load_profile(path)


@pytest.mark.parametrize(("line", "field", "value"), [
    (1, "duration_s", '"fast"'), (1, "width", "1.5"), (2, "tokens", '"abc"'), (2, "margins", "[1e999]"),
])
def test_a_field_of_another_type_is_refused(line: int, field: str, value: str, tmp_path: Path) -> None:
    """A trace whose record holds a word, a fraction or an infinity where a number belongs is refused by line."""
    path = tmp_path / "t.jsonl"
    step = StepRecord(0, 0, "decode", 0.0, 0.5, 0, 3, 1, 0, 0, 1, 0)
    record = PromptRecord(0, "p", 3, [1], 1.0, 1.0, [{}], margins=[0.5])
    save_trace(Trace("measured", {"stages": []}, steps=[step], prompts=[record]), path)
    lines = path.read_text(encoding="utf-8").splitlines()
    old = json.dumps(json.loads(lines[line])[field])
    lines[line] = lines[line].replace(f'"{field}": {old}', f'"{field}": {value}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"t\.jsonl:{line + 1}"):
        load_trace(path)


# -- 27: arithmetic that depends on batch width ---------------------------------------------------


@pytest.fixture(scope="module")
def reference(tiny) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny["target"], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def int8(tiny) -> Any:
    import torch

    torch.set_num_threads(1)
    return make_runner(stage("int8", tiny["target"], quantize="int8"), None, None)


@pytest.mark.parametrize("prompt", [PROMPT, (9,), (11, 12, 13, 14, 11, 12)])
def test_int8_chooses_in_teacher_forcing_as_in_generation(int8, prompt: tuple[int, ...]) -> None:
    """At width 1 an int8 stage's choices along a text that it generated are that text."""
    from execute.torch_runner import teacher_forced

    int8.begin(prompt)
    done = drive(chain("autoregressive", [stage("int8")]), [int8], prompt, 60)
    assert {step.width for step, _ in done.steps[0][1:]} == {1}
    assert teacher_forced(int8, prompt, done.tokens).choices == done.tokens


def test_int8_weights_have_a_scale_a_channel(int8, reference) -> None:
    """Every linear layer of an int8 stage, in either decoder, has one scale per output channel; the float
    model that it was made from is left as it was."""
    import torch

    from execute.int8 import Int8Linear, int8_model

    generic = [layer.weight() for layer in int8_model(reference).modules()
               if isinstance(layer, Int8Linear)]
    fused = [linear.weight() for linear in int8.step.linears]
    assert (len(generic), len(fused)) == (3 * 7 + 1, 3 * 4 + 1)
    assert reference.lm_head.weight.dtype == torch.float32
    for weight in [*generic, *fused]:
        assert weight.qscheme() == torch.per_channel_affine
        assert weight.q_per_channel_axis() == 0
        assert weight.q_per_channel_scales().shape == (weight.shape[0],)


def test_int8_reads_its_prompt_with_float_weights(int8, runners) -> None:
    """The logits after the prompt and the cache of the prompt are the float model's, bit by bit; the
    next step's are not."""
    import torch

    full = runners["target"]
    for runner in (int8, full):
        runner.begin(PROMPT)
    first = [runner.logits([], Step("prefill", 0, 0, len(PROMPT), (), 1, 0, False)) for runner in (int8, full)]
    assert torch.equal(*first)
    for name in ("keys", "values"):
        assert torch.equal(*(getattr(r.cache, name)[:, : len(PROMPT)] for r in (int8, full)))
    after = [r.logits([20], Step("decode", 1, len(PROMPT), 1, (), 1, 0, False)) for r in (int8, full)]
    assert not torch.allclose(*after, atol=1e-6)
    assert torch.allclose(*after, atol=2.0)


# -- 29: calling layers one by one ----------------------------------------------------------------


def both_decoders(model: Any) -> list[Any]:
    from execute.decoders import GenericDecoder, LlamaDecoder

    return [LlamaDecoder(copy.deepcopy(model)), GenericDecoder(model)]


TEXT = [(7 * i + 3) % 90 + 1 for i in range(40)]
CUTS = [(1, 2), (4, 5), (5, 3), (12, 9), (30, 10), (39, 1)]


def differences(decoder: Any, model: Any) -> list[float]:
    """Largest difference of logits from one pass of transformers over the whole text without a cache, for
    several new tokens on a cache, with no mask given."""
    import torch

    out = []
    with torch.inference_mode():
        expected = model(torch.tensor([TEXT]), use_cache=False).logits[0]
        for held, width in CUTS:
            cache = decoder.new_cache()
            decoder.forward(TEXT[:held], 0, 1, cache)
            found = decoder.forward(TEXT[held : held + width], held, width, cache)
            assert cache.get_seq_length() == held + width
            out.append(float((found - expected[held : held + width]).abs().max()))
    return out


def test_several_new_tokens_on_a_cache(reference) -> None:
    """Several new tokens on a cache give transformers' own logits, in either decoder: each sees the cache
    and what is before it, and nothing behind it."""
    for decoder in both_decoders(reference):
        assert max(differences(decoder, reference)) < 1e-3


def test_that_comparison_can_fail(reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without a mask the logits are far off."""
    from execute.decoders import LlamaDecoder

    decoder = both_decoders(reference)[0]
    monkeypatch.setattr(LlamaDecoder, "_mask", lambda *_: None)
    far = differences(decoder, reference)
    assert min(far) > 1.0


def test_positions_are_explicit(reference) -> None:
    """A token fed at a position has that position, also after the cache was cut and filled again, and up
    to the end of the context."""
    import torch

    from execute.torch_runner import crop_to

    text = (TEXT * 7)[:CONTEXT]
    for decoder in both_decoders(reference):
        with torch.inference_mode():
            cache = decoder.new_cache()
            decoder.forward([50, 51, 52, 53, 54, 55], 0, 1, cache)
            for start, end in ((0, 3), (3, 100), (100, 101), (101, CONTEXT)):
                crop_to(cache, start)
                decoder.forward([60, 61], start, 1, cache)
                crop_to(cache, start)
                found = decoder.forward(text[start:end], start, end - start, cache)
                expected = reference(torch.tensor([text[:end]]), use_cache=False).logits[0, start:]
                assert torch.allclose(found, expected, atol=1e-3), (type(decoder).__name__, start)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_logits_asked_for_are_computed(reference, keep: int) -> None:
    """``keep`` rows come out, they are the last ones, and the output head saw no other."""
    import torch

    class Head:
        """Counts the rows that it is given."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.rows = inner, 0

        def __call__(self, x: Any) -> Any:
            self.rows += x.shape[0]
            return self.inner(x)

    decoder = both_decoders(reference)[0]
    decoder._head = head = Head(decoder._head)
    with torch.inference_mode():
        everything = decoder.forward(TEXT, 0, len(TEXT), decoder.new_cache())
        assert head.rows == len(TEXT)
        for each in (decoder, both_decoders(reference)[1]):
            assert torch.allclose(each.forward(TEXT, 0, keep, each.new_cache()), everything[-keep:], atol=1e-3)
    assert head.rows == len(TEXT) + keep
