"""Every strategy with tiny random models equals transformers' own greedy decoding, token for token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import CONTEXT, STRATEGIES, VOCABULARY, Done, chain, drive, stage

from execute.torch_runner import TorchRunner, teacher_forced
from pipespec_model.errors import InputError
from pipespec_model.lookup import PromptLookup
from pipespec_model.messages import Step

PROMPT = (5, 6, 7, 8)
REPEATING = (11, 12, 13, 14, 11, 12, 13, 14, 11, 12)
PIPELINES = {"mid": ("mid", "target"), "near": ("near", "target"), "three": ("mid", "near", "target"),
             "lookup": ("lookup", "target"), "lookup-near": ("lookup", "near", "target")}


def run(runners: dict[str, Any], names: Sequence[str], strategy: str, prompt: Sequence[int], budget: int, *,
        window: int = 4, wait: bool = False, eos: Sequence[int] = (), seed: int | None = None) -> Done:
    """wait : the verifier starts with a full window in a pipeline too."""
    specs = [stage(n, drafter="prompt-lookup" if n == "lookup" else "model") for n in names]
    team = [PromptLookup() if name == "lookup" else runners[name] for name in names]
    for runner in team:
        runner.begin(prompt)
    rng = None if seed is None else np.random.default_rng(seed)
    pipeline = chain(strategy, specs, window=window, lookahead=window if wait else None)
    return drive(pipeline, team, prompt, budget, eos=eos, rng=rng)


def test_autoregressive_is_plain_greedy(runners, plain_greedy) -> None:
    """The target alone gives what transformers' generate gives."""
    assert run(runners, ["target"], "autoregressive", PROMPT, 80).tokens == plain_greedy(PROMPT, 80)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("names", PIPELINES.values(), ids=PIPELINES)
def test_strategies_are_token_exact(runners, plain_greedy, names, strategy: str, seed: int | None) -> None:
    """In float32 every strategy, two stages or three, whatever the schedule, gives the greedy text."""
    for prompt in ((9,), PROMPT, REPEATING):
        done = run(runners, names, strategy, prompt, 40, seed=seed)
        assert done.tokens == plain_greedy(prompt, 40)
        assert all(link.conserved for link in done.links())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafters_are_strong_enough_to_exercise_acceptance(runners, strategy: str) -> None:
    """The comparisons above see long accepted blocks and rejections, not only the easy cases."""
    done = run(runners, PIPELINES["near"], strategy, PROMPT, 100, wait=True)
    rounds = done.verifications()
    assert max(accepted for _, accepted in rounds) >= 3
    assert any(accepted < drafts for drafts, accepted in rounds)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_always_wrong_drafter(runners, plain_greedy, strategy: str) -> None:
    """A drafter that is wrong everywhere has acceptance exactly 0 and leaves the text as it is."""

    class Wrong:
        """Avoids the target's choice."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def run(self, sequence: Sequence[int], step: Step) -> list[int]:
            return [(token + 1) % VOCABULARY for token in self.inner.run(sequence, step)]

    own = copy.copy(runners["target"])
    for runner in (own, runners["target"]):
        runner.begin(PROMPT)
    done = drive(chain(strategy, [stage("d"), stage("t")]), [Wrong(own), runners["target"]], PROMPT, 40)
    assert done.counters[1]["accepted"] == 0
    assert done.counters[1]["rejected"] > 5
    assert done.tokens == plain_greedy(PROMPT, 40)


@pytest.mark.parametrize("k", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("names", [("target", "target"), ("near", "target"), ("mid", "near", "target")])
def test_end_of_sequence_at_every_place_of_a_window(runners, plain_greedy, names, strategy: str, k: int) -> None:
    """With the token of position k declared the end (window 4), the text ends at its first occurrence:
    nothing after it is emitted or accepted, whatever else ends a sequence."""
    answer = plain_greedy(PROMPT, 30)
    ends = (answer[k], VOCABULARY + 5)
    expected = answer[: answer.index(answer[k]) + 1]
    team = dict(runners, target=copy.copy(runners["target"]))
    if names[0] == "target":
        team["drafter"] = copy.copy(runners["target"])
        names = ("drafter", "target")
    done = run(team, names, strategy, PROMPT, 30, eos=ends, wait=True)
    assert done.tokens == expected
    assert sum(right for _, right in done.verifications()) <= len(expected)
    assert done.counters[-1]["emitted"] == len(expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prompt_that_ends_with_the_end_token(runners, plain_greedy, strategy: str) -> None:
    """An end token in the prompt ends nothing: only generated ones count."""
    answer = plain_greedy(PROMPT, 20)
    assert PROMPT[-1] not in answer
    assert run(runners, PIPELINES["near"], strategy, PROMPT, 20, eos=(PROMPT[-1],)).tokens == answer


@pytest.mark.parametrize("budget", [1, 2, 4, 5])
@pytest.mark.parametrize("window", [1, 4, 50])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_budget_is_exact(runners, plain_greedy, strategy: str, window: int, budget: int) -> None:
    """A model pipeline gives exactly as many tokens as asked for."""
    for names in (PIPELINES["near"], PIPELINES["lookup-near"]):
        assert run(runners, names, strategy, PROMPT, budget, window=window).tokens == plain_greedy(PROMPT, budget)


def test_padding_is_never_chosen(tiny, runners) -> None:
    """Logits beyond the stated vocabulary are padding and are not proposed."""
    few = 20
    cut = TorchRunner(stage("cut", tiny["target"]), vocabulary=few)
    cut.begin(PROMPT)
    done = drive(chain("autoregressive", [stage("cut")]), [cut], PROMPT, 30)
    assert max(done.tokens) < few
    assert max(run(runners, ["target"], "autoregressive", PROMPT, 30).tokens) >= few


def test_teacher_forced_choices_decide_acceptance(runners, plain_greedy) -> None:
    """The target's own choices along its answer are that answer, and a drafter's recorded bits are the
    accepts and rejects of a real run."""
    answer = plain_greedy(PROMPT, 40)
    own = teacher_forced(runners["target"], PROMPT, answer)
    assert own.choices == answer
    assert len(own.margins) == len(answer)
    assert min(own.margins) > 0
    assert own.log_probabilities is None
    choices = teacher_forced(runners["near"], PROMPT, answer).choices
    bits = [a == b for a, b in zip(choices, answer, strict=True)]
    done = run(runners, PIPELINES["near"], "speculative", PROMPT, 40)
    for step, accepted in done.steps[-1]:
        window = bits[step.position : step.position + len(step.drafts)]
        assert accepted == (window.index(False) if False in window else len(window))


def test_int8_copy_shares_the_prompt_cache(tiny, plain_greedy) -> None:
    """An int8 drafter leaves the text as it is and is right most of the time."""
    int8 = TorchRunner(stage("int8", tiny["target"], quantize="int8"))
    full = TorchRunner(stage("full", tiny["target"]))
    assert full.context_limit == CONTEXT
    for runner in (int8, full):
        runner.begin(PROMPT)
    done = drive(chain("speculative", [stage("int8"), stage("full")]), [int8, full], PROMPT, 40)
    assert done.tokens == plain_greedy(PROMPT, 40)
    assert done.counters[1]["accepted"] > done.counters[1]["rejected"]


def test_unknown_quantisation_is_refused(tiny) -> None:
    """What this backend cannot quantise is an error naming the field."""
    with pytest.raises(InputError, match=r"stages\[q\]\.quantize must be 'int8'"):
        TorchRunner(stage("q", tiny["target"], quantize="4bit"))
