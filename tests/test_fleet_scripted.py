"""Stage processes: real messages, waits and rollbacks, with stages that replay given tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import STRATEGIES, chain, drive, replays, rows_of, table

from execute.fleet import Fleet, new_trace
from execute.prompts import Prompt
from execute.scripted import Script
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.metrics import LinkFigures, booked_links, link_figures
from pipespec_model.trace import load_trace, save_trace

ANSWER = list(range(100, 130))
PROMPT = Prompt("p", "", tokens=(1, 2, 3))
PATTERNS = ("1", "0", "110", "10", "1110100")
# Different step times, so that every stage is overtaken by its neighbours now and then.
STEP_S = (0.0006, 0.0017, 0.0011, 0.0023)
NUM_STAGES = len(STEP_S)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    stages, _ = table(rows_of(ANSWER, "1", "1", "1"))
    scripts = {item.name: Script(Constant(s)) for item, s in zip(stages, STEP_S, strict=True)}
    with Fleet(stages, scripts=scripts) as running:
        yield running


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_answer_is_the_targets_row_and_every_draft_is_accounted_for(fleet: Fleet, strategy: str, k: int) -> None:
    """Whatever the drafters propose, the text is the target's, and each draft ends in one place."""
    for patterns in itertools.islice(itertools.product(PATTERNS, repeat=k - 1), 0, None, (1, 7, 18)[k - 2]):
        stages, agreement = table(rows_of(ANSWER, *patterns))
        for lookahead in (0, 3) if strategy.startswith("pipelined") else (1, 4):
            pipeline = chain(strategy, stages, window=4, lookahead=lookahead)
            record, steps = fleet.run_prompt(pipeline, PROMPT, max_new_tokens=30, agreement=agreement)
            assert record.tokens == ANSWER, patterns
            for link in booked_links(pipeline):
                assert LinkFigures.of(*record.counters[link : link + 2]).conserved, (patterns, link)
            assert sum(step.emitted for step in steps if step.stage == k - 1) == 30


def test_extreme_drafters(fleet: Fleet) -> None:
    """An always-right drafter has blocks accepted whole; an always-wrong one has acceptance exactly 0."""
    for pattern, strategy in itertools.product("10", STRATEGIES):
        stages, agreement = table(rows_of(ANSWER, pattern))
        pipeline = chain(strategy, stages, window=4, lookahead=4)
        record, steps = fleet.run_prompt(pipeline, PROMPT, max_new_tokens=30, agreement=agreement)
        verified = [step for step in steps if step.stage == 1 and step.drafts]
        figures = LinkFigures.of(*record.counters)
        if pattern == "1":
            assert max(step.accepted for step in verified) >= 3
            assert figures.rejected == 0
        else:
            assert figures.accepted == 0
            assert figures.rejected > 0
        assert record.tokens == ANSWER


@pytest.mark.parametrize("strategy", ["autoregressive", *STRATEGIES])
@pytest.mark.parametrize("window", [1, 5, 50])
def test_budget_is_exact_in_process(strategy: str, window: int) -> None:
    """Exactly min(budget, end of sequence) tokens, for budgets around the window and ends around it."""
    answer = list(range(100, 160))
    budgets = sorted({0, 1, 2, window, window + 1})
    for budget, ending, pattern in itertools.product(budgets, (None, 0, 1, window - 1, window, window + 1), PATTERNS):
        count = 1 if strategy == "autoregressive" else 3
        rows = rows_of(answer, pattern, "110") if count == 3 else [answer]
        stages, agreement = table(rows)
        eos = () if ending is None else (answer[ending], 7)
        pipeline = chain(strategy, stages, window=window)
        done = drive(pipeline, replays(agreement), (1, 2, 3), budget, eos=eos, rng=np.random.default_rng(budget))
        assert done.tokens == answer[: budget if ending is None else min(budget, ending + 1)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5])
def test_budget_is_exact_with_processes(fleet: Fleet, strategy: str, budget: int) -> None:
    """Three processes also give exactly as many tokens as asked for."""
    stages, agreement = table(rows_of(ANSWER, "110", "10"))
    record, _ = fleet.run_prompt(chain(strategy, stages, window=4), PROMPT, max_new_tokens=budget, agreement=agreement)
    assert record.tokens == ANSWER[:budget]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("k", [0, 1, 3, 4, 5])
def test_end_of_sequence_with_processes(fleet: Fleet, strategy: str, k: int) -> None:
    """Nothing after the end token is emitted or accepted (window 4, end at position k)."""
    stages, agreement = table(rows_of(ANSWER, "1", "1"))
    prompt = Prompt("ends", "", tokens=(1, 2, ANSWER[k]), eos=(ANSWER[k], 5))
    pipeline = chain(strategy, stages, window=4, lookahead=4)
    record, _ = fleet.run_prompt(pipeline, prompt, max_new_tokens=30, agreement=agreement)
    assert record.tokens == ANSWER[: k + 1]
    assert record.counters[-1]["accepted"] <= k + 1


def test_lookup_that_proposes_nothing_is_not_waited_for(fleet: Fleet) -> None:
    """A drafter that cannot go on says so: a verifier that wants drafts takes a plain step."""
    for strategy, gap in itertools.product(STRATEGIES, ([-1], [-1, -1, 1], [1, 1, 1, -1])):
        stages, agreement = table(rows_of(ANSWER, "1"))
        block = stages[0].model_copy(update={"drafter": "prompt-lookup"})
        row = [t if gap[i % len(gap)] > 0 else -1 for i, t in enumerate(ANSWER)]
        agreement.tokens[0] = row
        agreement = type(agreement)("p", 3, (block.choice_key, stages[1].choice_key), agreement.tokens)
        pipeline = chain(strategy, [block, stages[1]], window=4, lookahead=3)
        record, _ = fleet.run_prompt(pipeline, PROMPT, max_new_tokens=30, agreement=agreement)
        assert record.tokens == ANSWER
        assert LinkFigures.of(*record.counters).conserved


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_text_is_streamed_as_it_is_decided(fleet: Fleet, strategy: str) -> None:
    """The pieces that are shown while a prompt runs make up the answer."""
    stages, agreement = table(rows_of(ANSWER, "110", "10"))
    pieces: list[int] = []
    record, _ = fleet.run_prompt(chain(strategy, stages), PROMPT, max_new_tokens=30, agreement=agreement,
                                 on_text=pieces.extend)
    assert pieces == record.tokens == ANSWER


def test_trace_survives_a_file(fleet: Fleet, tmp_path) -> None:
    """A run's records, header and link figures are the same after a round trip through the file."""
    stages, agreement = table(rows_of(ANSWER, "110"))
    pipeline = chain("pipelined", stages)
    trace = new_trace(fleet.configure(pipeline), emulated=True)
    for number in range(3):
        trace.add(*fleet.run_prompt(pipeline, PROMPT, max_new_tokens=20, number=number, agreement=agreement))
    save_trace(trace, tmp_path / "t.jsonl")
    read, torn = load_trace(tmp_path / "t.jsonl")
    assert torn is None
    assert read == trace
    assert link_figures(read, 0).conserved
    busy = [(s.start_s, s.start_s + s.duration_s) for s in read.steps if s.prompt == 0 and s.stage == 1]
    assert all(0 <= a < b for a, b in busy)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(busy))


def test_spec_echoes_effective_values(fleet: Fleet) -> None:
    """The configured pipeline names the cores and threads that are in force."""
    stages, _ = table(rows_of(ANSWER, "1"))
    spec = fleet.configure(chain("pipelined", stages))
    assert all(item.cores and item.threads == 1 for item in spec.stages)


def test_bad_requests_are_refused(fleet: Fleet) -> None:
    """A stage that the fleet lacks and an empty prompt are bad input, and the fleet goes on."""
    stages, agreement = table(rows_of(ANSWER, "1"))
    stranger = stages[0].model_copy(update={"name": "x"})
    with pytest.raises(InputError, match=r"stages.0.name must be one of s0, s1, s2, s3, got 'x'"):
        fleet.configure(chain("pipelined", [stranger, stages[1]]))
    with pytest.raises(InputError, match="prompt 'e' must not be empty"):
        fleet.run_prompt(chain("pipelined", stages), Prompt("e", ""), max_new_tokens=5, agreement=agreement)
    record, _ = fleet.run_prompt(chain("pipelined", stages), PROMPT, max_new_tokens=5, agreement=agreement)
    assert record.tokens == ANSWER[:5]
