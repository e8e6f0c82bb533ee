"""Pitfalls of caches, of sampling and of dead children, as test_pitfalls.py has the others.

Where the test of a pitfall is (no file named: here):

=======  ===========================================================================================
pitfall  test
=======  ===========================================================================================
4        test_a_cache_that_cannot_roll_back_ends_the_run_before_its_first_token;
         test_loading.test_cache_that_cannot_roll_back_is_refused, .test_refusal_comes_before_the_weights
9        test_what_a_step_draws_does_not_depend_on_its_window, test_draws_with_other_options_are_told_apart;
         test_losslessness.test_draws_have_the_processed_distribution, .test_p_values_are_uniform,
         .test_a_drafter_may_draw_as_it_likes, .test_broken_rules_have_another_distribution
10       test_equal_and_one_hot_scores_are_drawn_from, test_a_draft_that_the_target_never_draws_is_refused,
         test_a_nan_is_an_error_naming_stage_and_position, test_temperature_zero_is_greedy
12       test_prompts_draw_alike_in_any_order, and of the simulator test_sweep's rows for any number of
         workers; test_sampling.test_seed_prompt_and_position_each_have_noise_of_their_own.
         That stages share their noise is the scheme itself (docs/losslessness.md): what they must not
         share is the noise of two positions, and test_losslessness catches that
21       test_faults.test_killed_stage_is_named_and_finished_prompts_are_kept, .test_failure_while_loading_*,
         .test_interrupt_ends_with_130, .test_stages_end_with_their_parent;
         test_load.test_a_killed_run_is_taken_up_with_resume
=======  ===========================================================================================
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import VOCABULARY, chain, drive, stage, word_tokenizer
from scipy.stats import chi2

from execute.fleet import Fleet
from execute.prompts import Prompt
from execute.sampler import Sampler, sampler_of
from execute.torch_runner import chosen
from pipespec_model.errors import StageError
from pipespec_model.messages import Step
from pipespec_model.sampling import Sampling

PROMPT = (5, 6, 7, 8)
OPTIONS: dict[str, dict[str, Any]] = {
    "0.3": {"temperature": 0.3}, "1": {"temperature": 1.0}, "2": {"temperature": 2.0},
    "top-k": {"temperature": 1.0, "top_k": 2}, "top-p": {"temperature": 1.0, "top_p": 0.7}}
LOGITS = torch.linspace(-1.5, 2.0, 8)
NONE = -math.inf


# -- 4: caches that cannot roll back --------------------------------------------------------------


def test_a_cache_that_cannot_roll_back_ends_the_run_before_its_first_token(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``execute run`` with a sliding-window target that is there in full: status 2, one line naming the layer type,
    no text."""
    from execute.__main__ import main

    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16, bos_token_id=None, eos_token_id=None)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "m")
    word_tokenizer().save_pretrained(tmp_path / "m")
    (tmp_path / "p.yaml").write_text(
        f"strategy: autoregressive\nstages: [{{name: t, model: {tmp_path / 'm'}}}]\n", encoding="utf-8")
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["run", str(tmp_path / "p.yaml"), "--prompt", "w1 w2"])
    said = capfd.readouterr()
    assert (end.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "must have a cache that can roll back; it has layers of type sliding_attention" in said.err


# -- 9: what is drawn is not what is verified with ------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_a_step_draws_does_not_depend_on_its_window(options: dict[str, Any]) -> None:
    """A verification of eight rows at once draws at each position what a plain step draws there."""
    rows = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(Sampling(**options, seed=4), PROMPT, number=1)
    together = sampler.choose(rows, [1, 2], tuple(range(8)))
    alone = [sampler.choose(rows[i : i + 1], [1, 2, *range(i)], ())[0] for i in range(9)]
    assert together == alone
    assert len(set(together)) > 1


def test_draws_with_other_options_are_told_apart() -> None:
    """Negative control: 4,000 draws with one set of options do not have the distribution of another: something that
    must not be drawn is, or chi-square is below 1e-6; their own they have (odds of a false alarm 5e-4)."""
    for mine, options in OPTIONS.items():
        sampler = Sampler(Sampling(**options, seed=6), PROMPT, number=0)
        scores = sampler.scores(LOGITS[None], [], ())[0]
        counts = np.bincount([sampler.draw(scores, position) for position in range(4000)], minlength=8)
        for other, claimed in OPTIONS.items():
            theirs = Sampler(Sampling(**claimed), PROMPT, number=0).scores(LOGITS[None], [], ())[0]
            p = theirs.double().softmax(-1).numpy()
            may = p > 0
            fit = chi2.sf(((counts - 4000 * p)[may] ** 2 / (4000 * p[may])).sum(), may.sum() - 1)
            if mine == other:
                assert counts[~may].sum() == 0
                assert fit > 1e-4
            else:
                assert counts[~may].sum() > 0 or fit < 1e-6, (mine, other)


# -- 10: nothing is left to draw from -------------------------------------------------------------


def one_hot(*tokens: int) -> torch.Tensor:
    rows = torch.full((len(tokens), 8), NONE)
    rows[range(len(tokens)), list(tokens)] = 0.0
    return rows


def test_equal_and_one_hot_scores_are_drawn_from() -> None:
    """Drafter and target with equal scores draw the same; a score for one token alone draws that token, whether the
    drafter's is the same or another; all of them at any temperature."""
    for options in OPTIONS.values():
        draft, target = (Sampler(Sampling(**options, seed=2), PROMPT, number=0) for _ in range(2))
        drafts = [draft.choose(LOGITS[None], list(range(i)), ())[0] for i in range(20)]
        assert drafts == [target.choose(LOGITS[None], list(range(i)), ())[0] for i in range(20)]
        assert target.choose(one_hot(3, 5, 3), [], (3, 1)) == [3, 5, 3]


class Fixed:
    """A runner with the same scores in every row."""

    def __init__(self, row: torch.Tensor, **options: Any) -> None:
        self.row, self.sampler = row, sampler_of(Sampling(**options), PROMPT, number=0, eos=())

    def run(self, sequence: list[int], step: Step) -> list[int]:
        return chosen(self.row.repeat(len(step.drafts) + 1, 1), sequence, step, self.sampler)


@pytest.mark.parametrize("strategy", ["speculative", "pipelined"])
def test_a_draft_that_the_target_never_draws_is_refused(strategy: str) -> None:
    """A drafter sure of a token that the target's top-k cuts off: it is never in the text, and nothing is accepted."""
    options = {"temperature": 1.0, "top_k": 3, "seed": 1}
    team = [Fixed(one_hot(0)[0], **options), Fixed(LOGITS, **options)]
    done = drive(chain(strategy, [stage("d"), stage("t")]), team, PROMPT, 40)
    assert len(done.tokens) == 40
    assert set(done.tokens) <= {5, 6, 7}
    assert done.links()[0].accepted == 0
    assert done.links()[0].rejected > 5


@pytest.mark.parametrize("options", [None, Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_nan_is_an_error_naming_stage_and_position(tiny, tmp_path: Path, options: Sampling | None) -> None:
    """A model whose logits become NaN: an error with the stage and the position, never a token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny["target"])
    with torch.no_grad():
        model.lm_head.weight[7] = math.nan
    model.save_pretrained(tmp_path)
    near, broken = stage("near", tiny["near"]), stage("broken", tmp_path)
    with Fleet([near, broken]) as fleet, pytest.raises(
            StageError, match=r"stage 'broken' failed in \w+ at position 0: .*position 0 must have a finite maximum"):
        fleet.run_prompt(chain("speculative", [near, broken]), Prompt("p", "", tokens=PROMPT), max_new_tokens=8,
                         sampling=options)


def test_temperature_zero_is_greedy(runners: dict[str, Any]) -> None:
    """The text at temperature 0 is the best token each time, and what ever smaller temperatures tend to."""
    texts = []
    for temperature in (None, 0.0, 1e-4):
        sampling = None if temperature is None else Sampling(temperature=temperature)
        runners["target"].begin(PROMPT, sampler_of(sampling, PROMPT, number=0, eos=()))
        texts.append(drive(chain("autoregressive", [stage("target")]), [runners["target"]], PROMPT, 30).tokens)
    assert texts[0] == texts[1] == texts[2]


# -- 12: streams of random numbers ----------------------------------------------------------------


def test_prompts_draw_alike_in_any_order(runners: dict[str, Any]) -> None:
    """A prompt's text belongs to its number: the same alone, first, last or between others, and with another number
    another text."""

    def text(number: int) -> list[int]:
        team = [runners["near"], runners["target"]]
        for runner in team:
            runner.begin(PROMPT, sampler_of(Sampling(temperature=1.2, seed=3), PROMPT, number=number, eos=()))
        return drive(chain("pipelined", [stage("near"), stage("target")]), team, PROMPT, 16).tokens

    forwards = {number: text(number) for number in range(5)}
    assert {number: text(number) for number in (3, 0, 4, 2, 1)} == forwards
    assert len({tuple(tokens) for tokens in forwards.values()}) == 5
