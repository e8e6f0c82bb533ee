"""Sampled text has the target's distribution, in every strategy and under every delivery order.

Stub stages with a vocabulary of 8: what stage i draws after a token is a row of its own table of probabilities, drawn
with the executor's noise.  So the distribution of a text is known exactly.  Odds of a false alarm are stated for
seeds not yet looked at; with the seeds below the outcome is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import STRATEGIES, chain, drive, stage
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2, kstest
from test_protocol import World, explore, pipeline

from execute.sampler import Sampler, gumbel
from pipespec_model.agreement import Agreement
from pipespec_model.coupling import best_agreement, shared_noise_agreement, shared_noise_bound, total_variation
from pipespec_model.messages import Step
from pipespec_model.protocol import Stage
from pipespec_model.sampling import Sampling
from pipespec_model.uniforms import SAMPLE, word

VOCABULARY = 8
LENGTH = 4
Rule = Callable[["Law", Sequence[int], Sequence[int]], list[int]]


def tables(k: int) -> NDArray[np.float64]:
    """``[stage, last token, token]``: probabilities, the target's last; no one below 0.02."""
    rng = np.random.default_rng(5)
    target = rng.dirichlet(np.ones(VOCABULARY), VOCABULARY)
    found = [0.5 * target + 0.5 * rng.dirichlet(np.ones(VOCABULARY), VOCABULARY) for _ in range(k - 1)]
    return 0.84 * np.array([*found, target]) + 0.02


class Law:
    """What every stage draws for one prompt; the target's rule may be broken.

    noise : ``[position, token]``; fresh : another one, for rules that redraw
    """

    def __init__(self, k: int, seed: int, number: int, rule: Rule | None = None) -> None:
        self.noise, self.fresh = (
            torch.stack([gumbel(word(s, number, 0, SAMPLE, position), torch.arange(VOCABULARY))
                         for position in range(LENGTH + 1)]).numpy() for s in (seed, seed + 10**6))
        self.log = np.log(tables(k))
        self.target, self.rule = k - 1, rule
        text: list[int] = []
        for _ in range(LENGTH):
            text.append(self.draw(self.target, text))
        self.text = text
        self.agreement = Agreement("stub", 2, tuple(f"s{i}" for i in range(k)), np.array([text] * k))

    def draw(self, index: int, text: Sequence[int], *, position: int | None = None, fresh: bool = False) -> int:
        """The token of stage ``index`` after ``text``, with the noise of its place or of another ``position``."""
        noise = (self.fresh if fresh else self.noise)[len(text) if position is None else position]
        return int((self.log[index, text[-1] if text else 0] + noise).argmax())

    def choices(self, index: int, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
        if self.rule and index == self.target:
            return self.rule(self, sequence, drafts)
        return [self.draw(index, [*sequence, *drafts[:row]]) for row in range(len(drafts) + 1)]


class Runner:
    """Stage ``index`` of a law, as the scheduler of conftest wants it."""

    def __init__(self, law: Law, index: int) -> None:
        self.law, self.index = law, index

    def run(self, sequence: Sequence[int], step: Step) -> list[int]:
        return self.law.choices(self.index, sequence, step.drafts)


def text_of(law: Law, strategy: str, *, order: int) -> list[int]:
    """What the strategy gives when turns are taken at random."""
    k = law.target + 1
    spec = chain(strategy, [stage(f"s{i}") for i in range(k)], window=2)
    return drive(spec, [Runner(law, i) for i in range(k)], (1, 2), LENGTH, rng=np.random.default_rng(order)).tokens


# -- what is compared -----------------------------------------------------------------------------------


def exact(k: int) -> NDArray[np.float64]:
    """``[2 * VOCABULARY]``: of (second token odd?, third token)."""
    p = tables(k)[-1]
    joint = (p[0] @ p)[:, None] * p  # second, third
    return np.concatenate([joint[0::2].sum(0), joint[1::2].sum(0)])


def cell(text: Sequence[int]) -> int:
    return (text[1] % 2) * VOCABULARY + text[2]


def p_value(texts: Sequence[Sequence[int]], expected: NDArray[np.float64]) -> float:
    """Of Pearson's chi-square."""
    counts = np.bincount([cell(text) for text in texts], minlength=len(expected))
    wanted = expected * len(texts)
    return float(chi2.sf(((counts - wanted) ** 2 / wanted).sum(), len(expected) - 1))


def p_values(strategy: str, seeds: range, each: int, *, k: int = 3, rule: Rule | None = None) -> list[float]:
    """One a seed, over ``each`` prompts."""
    expected = exact(k)
    laws = ([Law(k, seed, number, rule) for number in range(each)] for seed in seeds)
    return [p_value([text_of(law, strategy, order=number) if strategy else law.text
                     for number, law in enumerate(group)], expected) for group in laws]


# -- identity -------------------------------------------------------------------------------------------


def test_the_stub_draws_as_the_executor_does() -> None:
    """Its tables go through the sampler's own ``draw`` to the same tokens."""
    law = Law(2, 3, 4)
    sampler = Sampler(Sampling(temperature=1.0, seed=3), (1, 2), number=4)
    text: list[int] = []
    for position in range(LENGTH):
        row = torch.tensor(law.log[1, text[-1] if text else 0])
        assert sampler.draw(row, position) == law.text[position]
        text.append(law.text[position])


both_handshakes = pytest.mark.parametrize("handshake", ["overlapped", "blocking"])


@both_handshakes
@pytest.mark.parametrize(("k", "strategy", "link", "seeds"), [
    (2, "pipelined", {}, 12), (2, "pipelined", {"lookahead": 2}, 12), (2, "speculative", {"lookahead": 2}, 12),
    (3, "pipelined", {"buffer_tokens": 1, "max_window": 1}, 2), (3, "speculative", {"lookahead": 2}, 12),
])
def test_every_delivery_order_gives_the_draw_of_the_target_alone(k: int, strategy: str, link: dict[str, int],
                                                                 seeds: int, handshake: str) -> None:
    """All interleavings of steps and messages: what is committed is always a prefix of the text that the target
    draws alone with that seed; so no order can select among draws."""
    spec = pipeline(k, strategy, handshake=handshake, **link)
    budget = 3 if k == 2 or strategy == "speculative" else 2
    for seed in range(seeds):
        law = Law(k, seed, 0)
        law.agreement = Agreement("stub", 2, law.agreement.names, law.agreement.tokens[:, :budget])
        stages = [Stage(spec, i, 2, budget) for i in range(k)]
        assert explore(World(law, stages)) > 5  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_drafter_may_draw_as_it_likes(strategy: str) -> None:
    """A drafter with noise of its own, or that of another place, leaves the text as it is; only fewer drafts are
    right."""
    for number in range(30):
        law = Law(3, 1, number)
        honest = law.draw

        def draw(index: int, text: Sequence[int], law: Law = law, honest: Callable[..., int] = honest) -> int:
            return honest(index, text, fresh=index == 0, position=None if index != 1 else (len(text) + 2) % LENGTH)

        law.draw = draw  # type: ignore[method-assign]
        assert text_of(law, strategy, order=number) == law.text


# -- distribution ---------------------------------------------------------------------------------------


def check_uniform(strategy: str, seeds: range, each: int) -> None:
    assert kstest(p_values(strategy, seeds, each), "uniform").pvalue > 0.001


EACH = ("", *STRATEGIES)  # "": the target alone


@pytest.mark.parametrize(("index", "strategy"), list(enumerate(EACH)), ids=[name or "alone" for name in EACH])
def test_p_values_are_uniform(index: int, strategy: str) -> None:
    """Chi-square against the target's exact distribution over 40 seeds of 80 texts: its p-values are uniform by
    Kolmogorov–Smirnov (odds of a false alarm 0.001 each; seeds differ between strategies)."""
    check_uniform(strategy, range(1000 * index, 1000 * index + 40), 80)


@pytest.mark.full
@pytest.mark.parametrize(("index", "strategy"), list(enumerate(EACH)), ids=[name or "alone" for name in EACH])
def test_p_values_are_uniform_over_200_seeds(index: int, strategy: str) -> None:
    """The same over 200 seeds of 200 texts each."""
    check_uniform(strategy, range(10_000 * (index + 1), 10_000 * (index + 1) + 200), 200)


def shared_noise(law: Law, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """All rows of a step use the noise of its first position."""
    return [law.draw(law.target, [*sequence, *drafts[:row]], position=len(sequence)) for row in range(len(drafts) + 1)]


def next_noise(law: Law, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Rows that judge a draft use the noise of the position after it."""
    return [law.draw(law.target, [*sequence, *drafts[:row]], position=len(sequence) + row + (row < len(drafts)))
            for row in range(len(drafts) + 1)]


def first_unchecked(law: Law, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """A window's first draft is taken as it is."""
    own = [law.draw(law.target, [*sequence, *drafts[:row]]) for row in range(len(drafts) + 1)]
    return [*drafts[:1], *own[1:]] if drafts else own


def second_try(law: Law, sequence: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """A draft that is refused is tried once more with fresh noise: selection by outcome."""
    out = []
    for row in range(len(drafts) + 1):
        text = [*sequence, *drafts[:row]]
        token = law.draw(law.target, text)
        refused = row < len(drafts) and token != drafts[row]
        out.append(law.draw(law.target, text, fresh=True) if refused else token)
    return out


@pytest.mark.parametrize("rule", [shared_noise, next_noise, first_unchecked, second_try])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_broken_rules_give_another_text(strategy: str, rule: Rule) -> None:
    """Negative controls of the identity: each of these departs from the target's own draws within 40 prompts."""
    laws = [Law(2, 1, number, rule) for number in range(40)]
    assert any(text_of(law, strategy, order=n) != law.text for n, law in enumerate(laws))


def deviation(strategy: str, rule: Rule | None, num_texts: int) -> float:
    """P-value of Pearson's chi-square: of the first two tokens together, or of what ``cell`` looks at, whichever is
    the smaller, doubled."""
    texts = [text_of(Law(2, 1077, number, rule), strategy, order=number) for number in range(num_texts)]
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(pairs, tuple(np.array([text[:2] for text in texts]).T), 1)
    target = tables(2)[-1]
    wanted = num_texts * target[0][:, None] * target
    first = float(chi2.sf(((pairs - wanted) ** 2 / wanted).sum(), pairs.size - 1))
    return 2 * min(first, p_value(texts, exact(2)))


@pytest.mark.parametrize(("rule", "num_texts"), [(shared_noise, 1000), (first_unchecked, 2000)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_broken_rules_have_another_distribution(strategy: str, rule: Rule, num_texts: int) -> None:
    """Negative controls of the distribution: one noise for a whole step, and a window's first draft unchecked."""
    assert deviation(strategy, rule, num_texts) < 1e-6


def test_the_next_positions_noise_is_wrong_where_steps_mix() -> None:
    """Used throughout it is as good as one's own, another seed; where plain steps come between, two positions share
    a noise."""
    assert deviation("pipelined", next_noise, 1000) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_selection_is_caught(strategy: str) -> None:
    """Negative control: a refused draft's second try favours the drafter's tokens, by little: 40,000 texts tell."""
    assert deviation(strategy, second_try, 40_000) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_many_texts_as_tell_selection_tell_nothing_else(strategy: str) -> None:
    """With the rule as it is the same number of texts has the target's distribution (false alarm 0.001 each)."""
    assert deviation(strategy, None, 40_000) > 0.001


# -- how often a draft is right ----------------------------------------------------------------------------


def weights(draw: Callable[..., Any]) -> NDArray[np.float64]:
    found = np.array(draw(st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 3.0]), min_size=5, max_size=5)))
    found[draw(st.integers(0, 4))] += 1.0
    return found / found.sum()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_shared_noise_agrees_between_its_bounds(data: st.DataObject) -> None:
    """(1 − TV)/(1 + TV) ≤ agreement ≤ 1 − TV, 1 for equal distributions, 0 for disjoint ones, and symmetric; each of
    the sums written out gives the same."""
    p, q = weights(data.draw), weights(data.draw)
    found = shared_noise_agreement(p, q)
    assert shared_noise_bound(p, q) - 1e-12 <= found <= best_agreement(p, q) + 1e-12
    assert found == pytest.approx(shared_noise_agreement(q, p), abs=1e-12)
    assert shared_noise_agreement(p, p) == pytest.approx(1)
    both = np.flatnonzero((p > 0) & (q > 0))
    assert found == pytest.approx(sum(1 / np.maximum(p / p[v], q / q[v]).sum() for v in both), abs=1e-12)
    assert total_variation(p, q) == total_variation(q, p)


def test_the_closed_form_is_what_the_sampler_does() -> None:
    """Over 20,000 positions two tables' draws agree as often as the closed form says, within four standard errors
    (odds of a false alarm below 1e-4); with noise of their own they agree less."""
    p, q = tables(2)[1, 3], tables(2)[0, 3]
    count = 20_000
    ids = torch.arange(VOCABULARY)
    noise = torch.stack([gumbel(word(9, 0, 0, SAMPLE, position), ids) for position in range(count)]).numpy()
    mine, theirs = ((np.log(row) + noise).argmax(1) for row in (p, q))
    expected = shared_noise_agreement(p, q)
    assert abs((mine == theirs).mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / count)
    assert (mine[1:] == theirs[:-1]).mean() < expected - 0.1


@pytest.mark.parametrize("options", [{"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 2.0},
                                     {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.7}],
                         ids=["0.3", "1", "2", "top-k", "top-p"])
def test_draws_have_the_processed_distribution(options: dict[str, float]) -> None:
    """20,000 draws of the sampler from eight known logits: chi-square above 1e-4, total variation below 0.02, nothing
    drawn that was cut off (odds of a false alarm 1e-4)."""
    logits = torch.linspace(-1.5, 2.0, VOCABULARY)
    sampler = Sampler(Sampling(**options, seed=2), (1,), number=0)  # type: ignore[arg-type]
    scores = sampler.scores(logits[None], [], ())[0]
    p = scores.double().softmax(-1).numpy()
    counts = np.bincount([sampler.draw(scores, position) for position in range(20_000)], minlength=VOCABULARY)
    may = p > 0
    assert counts[~may].sum() == 0
    assert chi2.sf(((counts - 20_000 * p)[may] ** 2 / (20_000 * p[may])).sum(), may.sum() - 1) > 1e-4
    assert total_variation(counts / 20_000, p) < 0.02
