"""Recorded probabilities of sampled text: what they are, and that simulations draw from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipespec_model.acceptance import Markov
from pipespec_model.agreement import MADE_UP, NO_PROPOSAL, Agreement
from pipespec_model.coupling import NONE, best_agreement, same_draw, shared_noise_agreement
from pipespec_model.errors import InputError
from pipespec_model.fit import _acceptance
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from simulate.compiled import run_totals
from simulate.engine import PromptRun
from simulate.run import simulate
from simulate.totals import Totals

PROBABILITIES = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6).filter(lambda x: sum(x) > 0.1)


def normal(weights: list[float]) -> np.ndarray:
    return np.array(weights) / sum(weights)


def text(*rows: list[float], tokens: list[list[int]] | None = None, **more) -> Agreement:
    """Rows of probabilities, drafters first; recorded choices are the target's own where not given."""
    k, n = len(rows) + 1, len(rows[0])
    chance = np.array([*rows, [1.0] * n])
    made = np.array(tokens) if tokens else np.tile(np.arange(n) + 1, (k, 1))
    return Agreement("p", 3, tuple("abcd"[:k]), made, same_draw=chance, **more)


# -- the probability ----------------------------------------------------------------------------------


@given(PROBABILITIES, PROBABILITIES)
@settings(max_examples=100, deadline=None)
def test_over_the_targets_draws_it_is_the_probability_of_one_token(a: list[float], b: list[float]) -> None:
    """Σ_v p_v · same_draw(v) is what shared noise agrees with, which no coupling's 1 − TV falls short of."""
    n = min(len(a), len(b))
    assume(sum(a[:n]) > 0 and sum(b[:n]) > 0)
    p, q = normal(a[:n]), normal(b[:n])
    mean = sum(p[v] * same_draw(p, q, v) for v in range(n) if p[v] > NONE)
    assert mean == pytest.approx(shared_noise_agreement(p, q), abs=1e-9)
    assert mean <= best_agreement(p, q) + 1e-9


def test_draws_with_shared_noise_agree_as_often_as_it_says() -> None:
    """Of 40,000 draws of two distributions with one noise, by the target's token: within 4.5 standard errors (odds of
    a false alarm below 5e-5 with six tokens); without the condition the figure would be off by more."""
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    noise = rng.gumbel(size=(40_000, 6))
    target, drafter = (np.log(p) + noise).argmax(1), (np.log(q) + noise).argmax(1)
    unconditional = []
    for token in range(6):
        same = (drafter == target)[target == token]
        error = max(same.std(), 1e-3) / np.sqrt(len(same))
        assert abs(same.mean() - same_draw(p, q, token)) < 4.5 * error
        unconditional.append(abs(same.mean() - shared_noise_agreement(p, q)) / error)
    assert max(unconditional) > 10


def test_a_token_that_the_target_cannot_draw_is_refused() -> None:
    """There is nothing to condition on; where the drafter cannot draw it, it never does."""
    with pytest.raises(InputError, match="p must be > 0 at token 1, which was drawn, got 0"):
        same_draw([1.0, 0.0], [0.5, 0.5], 1)
    assert same_draw([0.5, 0.5], [1.0, 0.0], 1) == 0.0


# -- drawing from it ----------------------------------------------------------------------------------


def test_choices_are_drawn_with_their_probabilities() -> None:
    """Over 4,000 prompts each position's share of agreement is within 4.5 standard errors of its probability (odds
    of a false alarm below 4e-5); a probability of 0 or 1 is kept to the letter."""
    made = text([0.0, 0.2, 0.7, 1.0])
    drawn = np.array([made.drawn(5, number).tokens for number in range(4000)])
    shares = (drawn[:, 0] == drawn[:, 1]).mean(0)
    assert shares[[0, 3]].tolist() == [0.0, 1.0]
    error = np.sqrt(np.array([0.2 * 0.8, 0.7 * 0.3]) / 4000)
    assert (np.abs(shares[1:3] - [0.2, 0.7]) < 4.5 * error).all()


def test_who_is_more_like_the_target_agrees_where_another_does() -> None:
    """One uniform a position serves all stages, whatever their order; a wrong choice is the recorded one, or none of
    a vocabulary's, and no proposal stays none."""
    made = text([0.2] * 200, [0.6] * 200)
    d, m, t = made.drawn(0, 0).tokens
    assert (m == t)[d == t].all()
    assert (d == t).sum() < (m == t).sum()
    assert (d[d != t] >= MADE_UP).all()
    kept = text([0.0, 0.0, 0.3], tokens=[[9, NO_PROPOSAL, 8], [1, 2, 3]]).drawn(1, 2).tokens[0].tolist()
    assert kept[:2] == [9, NO_PROPOSAL]
    assert kept[2] in (8, 3)


def test_seed_and_prompt_decide_the_draws() -> None:
    """The same for the same two, whoever asks; other ones for another seed or prompt."""
    made = text([0.5] * 64)
    first = made.drawn(1, 2).tokens.tolist()
    assert made.drawn(1, 2).tokens.tolist() == first
    assert made.drawn(2, 2).tokens.tolist() != first != made.drawn(1, 3).tokens.tolist()


def test_what_is_kept_of_rows_and_positions() -> None:
    """Rows chosen by name and the rest of a text take their probabilities along; the rate is their mean."""
    made = text([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert made.rate("a") == pytest.approx(0.2)
    picked = made.select(["b", "c"]).after(1)
    assert picked.same_draw is not None
    assert picked.same_draw.tolist() == [[0.5, 0.6], [1.0, 1.0]]
    with pytest.raises(InputError, match=r"agreement.same_draw must be 2 × 1 as tokens"):
        Agreement("p", 1, ("a", "b"), np.ones((2, 1), np.int64), same_draw=np.ones((1, 1)))
    with pytest.raises(InputError, match=r"agreement.same_draw must be in \[0, 1\], got 1.5"):
        text([1.5])


# -- simulating with it -------------------------------------------------------------------------------

SPEC = PipelineSpec.from_dict({"strategy": "speculative", "stages": [{"name": "a", "model": "a"},
                                                                     {"name": "b", "model": "b"}],
                               "links": [{"lookahead": 3}]})
TEXTS = tuple(Agreement(f"p{i}", 3, tuple(s.choice_key for s in SPEC.stages), np.tile(np.arange(40) + 1, (2, 1)),
                        same_draw=np.stack([np.linspace(0.2, 1.0, 40), np.ones(40)])) for i in range(3))
PROFILE = Profile({"a": StageLatency(Constant(0.001)), "b": StageLatency(Constant(0.01))}, agreement=TEXTS)


def test_both_engines_draw_alike() -> None:
    """Totals of the compiled engine are those of the SimPy model, in every seed, and seeds differ."""
    by_seed = []
    for seed in (3, 4):
        runs = Totals.of_runs(PromptRun(SPEC, PROFILE, item, seed=seed, prompt=i).run() for i, item in enumerate(TEXTS))
        found = run_totals(SPEC, PROFILE, num_prompts=1, num_tokens=1, seed=seed)
        assert found.total_s.tolist() == runs.total_s.tolist()
        by_seed.append(found.total_s.tolist())
    assert by_seed[0] != by_seed[1]


def test_acceptance_is_fitted_from_the_probabilities() -> None:
    """Expected counts: after an agreement (probability 0.5) and after none the next one has its own probability."""
    entry = text([0.5, 0.8, 0.1])
    model = _acceptance([entry])["a>b"]
    assert isinstance(model, Markov)
    hit_hit, hits = 0.5 * 0.8 + 0.8 * 0.1, 0.5 + 0.8
    miss_hit, misses = 0.5 + 0.5 * 0.8 + 0.2 * 0.1, 1 + 0.5 + 0.2
    assert (model.after_accept_rate, model.after_reject_rate) == pytest.approx((hit_hit / hits, miss_hit / misses))


def test_a_trace_is_of_drawn_choices() -> None:
    """Certain agreement accepts every draft, whatever was recorded; certain disagreement none."""
    for chance, accepted in ((1.0, True), (0.0, False)):
        item = Agreement("p", 3, TEXTS[0].names, np.tile(np.arange(12) + 1, (2, 1)),
                         same_draw=np.array([[chance] * 12, [1.0] * 12]))
        steps = [s for s in simulate(SPEC, PROFILE, [item]).steps if s.stage == 1 and s.drafts]
        assert all((s.accepted == s.drafts) is accepted for s in steps)
