"""The built-in family, sampled: what is recorded along a text is the law of what a run accepts, and is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Done, chain, drive, stage

from execute.forced import Draws, Forced, forced
from execute.loading import end_of_sequence, load_tokenizer
from execute.prompts import Prompt, built_in, encode
from execute.record import chance_and_overlap
from execute.sampler import sampler_of
from execute.torch_runner import TorchRunner
from pipespec_model import metrics
from pipespec_model.agreement import Agreement
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.sampling import Sampling
from simulate.run import simulate

STAGES = [stage("tiny-s", "tiny-s"), stage("tiny-l", "tiny-l")]
SPEC = chain("speculative", STAGES, window=3)
SAMPLING = Sampling(temperature=1.0, top_p=0.98, seed=7)
NUM_TEXTS, NUM_TOKENS, DRAWS = 40, 24, 25
CONTROLS = 16  # texts whose drafter is run once more, with noise of its own
LIMIT = 4.0  # standard errors: odds of a false alarm 6e-5


@dataclass
class Text:
    """One sampled text: the run that made it, what both stages say along it, and a run whose drafter has noise of
    its own."""

    done: Done
    apart: Done | None
    prompt_length: int
    mine: Forced
    own: Forced

    @property
    def figures(self) -> np.ndarray:
        return chance_and_overlap(self.own, self.mine, self.done.tokens)

    @property
    def agreement(self) -> Agreement:
        return Agreement("p", self.prompt_length, tuple(item.choice_key for item in STAGES),
                         np.array([self.mine.choices, self.done.tokens]), budget=NUM_TOKENS,
                         same_draw=np.stack([self.figures[0], np.ones(len(self.done.tokens))]))


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    torch.set_num_threads(1)
    runners = [TorchRunner(item) for item in STAGES]
    tokenizer = load_tokenizer("tiny-l")
    prompts = encode(built_in(model="tiny-l"), tokenizer, end_of_sequence("tiny-l", tokenizer))
    def run(prompt: Prompt, *numbers: int) -> Done:
        for runner, number in zip(runners, numbers, strict=True):
            runner.begin(prompt.tokens, sampler_of(SAMPLING, prompt.tokens, number=number, eos=()))
        return drive(SPEC, runners, prompt.tokens, NUM_TOKENS)

    out = []
    for number in range(NUM_TEXTS):
        prompt = prompts[number % len(prompts)]
        done = run(prompt, number, number)
        apart = run(prompt, 1000 + number, number) if number < CONTROLS else None
        out.append(Text(done, apart, len(prompt.tokens), *(
            forced(runner, item, prompt.tokens, done.tokens, Draws(SAMPLING, number))
            for runner, item in zip(runners, STAGES, strict=True))))
    return out


def test_along_its_own_text_the_target_draws_it(texts: list[Text]) -> None:
    """Teacher-forced with the same noise, the target's draws are the text, with room to the next best; what a run
    accepted is told by the drafter's own draws."""
    for text in texts[:12]:
        assert text.own.choices == text.done.tokens
        assert min(text.own.margins) > 0
        for step, accepted in text.done.steps[-1]:
            window = [text.mine.choices[step.position + i] == text.done.tokens[step.position + i]
                      for i in range(min(len(step.drafts), NUM_TOKENS - step.position))]
            assert accepted == (window.index(False) if False in window else len(window))


def test_recorded_probabilities_are_those_of_the_draws(texts: list[Text]) -> None:
    """Over all positions of 40 texts the drafts that are right are as many as the probabilities say: within four
    standard errors (odds of a false alarm 6e-5).  Their mean is below that of 1 − TV and above its bound."""
    right = np.concatenate([np.array(t.mine.choices) == t.done.tokens for t in texts])
    chance, overlap = np.concatenate([t.figures for t in texts], 1)
    assert abs((right - chance).sum()) < LIMIT * np.sqrt((chance * (1 - chance)).sum())
    assert (overlap / (2 - overlap)).mean() < chance.mean() < overlap.mean()


def steps_beyond(texts: list[Text], runs: list[Done]) -> float:
    """Target steps of runs beyond the mean of simulated ones of the same texts, in standard errors."""
    profile = Profile({item.time_key: StageLatency(Constant(0.001)) for item in STAGES})
    gaps = []
    for text, run in zip(texts, runs, strict=True):
        trace = simulate(SPEC, profile, [text.agreement] * DRAWS)
        gaps.append(len(run.steps[-1]) - len(metrics.target_steps(trace)) / DRAWS)
    return float(np.mean(gaps) / (np.std(gaps, ddof=1) / np.sqrt(len(gaps))))


def test_simulated_acceptance_is_the_executors(texts: list[Text]) -> None:
    """For 40 texts of 24 tokens the target's steps are as many in the runs as on average in 25 simulations each from
    the recorded probabilities: within four standard errors of the mean difference by text (odds of a false alarm
    3e-4, by Student's t).  A drafter with noise of its own gives the same texts in more steps: 16 of them show it."""
    assert abs(steps_beyond(texts, [text.done for text in texts])) < LIMIT
    apart = [text.apart for text in texts[:CONTROLS] if text.apart is not None]
    assert [run.tokens for run in apart] == [text.done.tokens for text in texts[:CONTROLS]]
    assert steps_beyond(texts[:CONTROLS], apart) > LIMIT


def test_a_lookup_proposes_with_certainty(texts: list[Text]) -> None:
    """A stage that does not draw agrees or not: its probability is 0 or 1, and 1 − TV is the target's own
    probability of its choice; where it proposes nothing both are 0."""
    text = texts[0]
    lookup = Forced([text.done.tokens[0], -1, *text.mine.choices[2:]])
    chance, overlap = chance_and_overlap(text.own, lookup, text.done.tokens)
    assert set(chance.tolist()) <= {0.0, 1.0}
    assert (chance[0], chance[1], overlap[1]) == (1.0, 0.0, 0.0)
    logs: Any = text.own.log_probabilities
    assert overlap[0] == pytest.approx(np.exp(logs[0, text.done.tokens[0]]), abs=1e-6)
