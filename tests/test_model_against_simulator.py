"""Theory on the right-hand side: renewal equations written on paper against the event simulator.

A synchronous chain of two stages with i.i.d. acceptance α and constant step times d and v.  A round
drafts γ tokens (γ d) and verifies them (v).  The bonus token goes to the drafter, so every round,
also the one after a full acceptance, starts with γ fresh drafts and rounds are independent:

    P(emit j) = α^(j−1) (1 − α) for j ≤ γ,   P(emit γ + 1) = α^γ,
    tokens a second, long run = (1 − α^(γ+1)) / ((1 − α)(γ d + v)).

The first round's prefill is a draft, or a verification, like any other.  Near the budget, with r
tokens to go, only min(γ, r − 1) drafts are made (the last token is always the target's own), which
cuts off nothing but what could not be emitted.  So the time T(r) obeys an exact renewal equation,
T(0) = 0 and T(r) = min(γ, r − 1) d + v + T(r − J), for its mean and its second moment.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipespec_model import closed_form, metrics
from pipespec_model.acceptance import IID
from pipespec_model.agreement import synthetic
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import PipelineSpec
from pipespec_model.trace import Trace
from simulate.run import simulate

FOUR = 4.0
"""Standard errors.  A correct simulator fails one look in 15,800; there are 12, so one seed in 1,300
would; the seed is fixed."""
DRAFT_S, VERIFY_S = 0.001, 0.004
PROMPTS, TOKENS = 80, 50


def chain(window: int) -> PipelineSpec:
    return PipelineSpec.from_dict({
        "strategy": "speculative", "stages": [{"name": "s0", "model": "a"}, {"name": "s1", "model": "b"}],
        "links": [{"lookahead": window, "buffer_tokens": window, "max_window": window}]})


def times(*seconds: float) -> Profile:
    return Profile({f"s{i}": StageLatency(Constant(s)) for i, s in enumerate(seconds)})


def simulated(rate: float, window: int, *, num_prompts: int = PROMPTS, num_tokens: int = TOKENS) -> Trace:
    spec = chain(window)
    names = [stage.choice_key for stage in spec.stages]
    made = [synthetic(names, [IID(rate)], num_tokens=num_tokens, seed=7, prompt=i) for i in range(num_prompts)]
    return simulate(spec, times(DRAFT_S, VERIFY_S), made, seed=7)


def emitted(rate: float, window: int) -> list[float]:
    """P(emit j), j = 1 … window + 1."""
    return [rate ** (j - 1) * (1 - rate) for j in range(1, window + 1)] + [rate**window]


def renewal(rate: float, window: int, budget: int) -> tuple[float, float]:
    """Mean and standard deviation of a prompt's seconds, by the renewal equation."""
    mean, second = [0.0], [0.0]
    for togo in range(1, budget + 1):
        drafts = min(window, togo - 1)
        cost = drafts * DRAFT_S + VERIFY_S
        odds = list(enumerate(emitted(rate, drafts), 1))
        mean.append(sum(p * (cost + mean[togo - j]) for j, p in odds))
        second.append(sum(p * (cost**2 + 2 * cost * mean[togo - j] + second[togo - j]) for j, p in odds))
    return mean[-1], math.sqrt(max(second[-1] - mean[-1] ** 2, 0.0))


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_a_chain_obeys_its_renewal_equation(rate: float, window: int):
    """Mean seconds a prompt, and so tokens a second, lie within four standard errors of the theory."""
    trace = simulated(rate, window)
    mean, spread = renewal(rate, window, TOKENS)
    seconds = np.array([p.total_s for p in trace.prompts])
    error = spread / math.sqrt(PROMPTS)
    assert abs(seconds.mean() - mean) < FOUR * error
    throughput = metrics.tokens_per_s(trace.prompts)
    assert throughput is not None
    assert abs(throughput * mean / TOKENS - 1) < FOUR * error / mean * 1.1
    # The spread too: its own standard error is about spread / sqrt(2 n).
    assert abs(seconds.std(ddof=1) / spread - 1) < FOUR / math.sqrt(2 * PROMPTS) * 1.2


def test_the_comparison_can_fail():
    """Negative control: a theory with α off by 0.04, or one draft a round too many, is refuted."""
    seconds = np.mean([p.total_s for p in simulated(0.6, 4).prompts])
    for wrong in (renewal(0.64, 4, TOKENS), renewal(0.6, 5, TOKENS)):
        assert abs(seconds - wrong[0]) > FOUR * wrong[1] / math.sqrt(PROMPTS)


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("window", [1, 3, 6])
def test_without_chance_the_renewal_equation_is_exact(rate: float, window: int):
    """At α = 0 and α = 1 every prompt takes exactly the theory's time."""
    mean, spread = renewal(rate, window, 37)
    assert spread == pytest.approx(0.0, abs=1e-9)
    (record,) = simulated(rate, window, num_prompts=1, num_tokens=37).prompts
    assert record.total_s == pytest.approx(mean, abs=1e-9)


def test_the_renewal_equation_tends_to_the_closed_form():
    """For long texts tokens a second tend to the textbook form, with an error of order 1 / budget."""
    limit = closed_form.synchronous_tokens_per_s(0.7, 4, DRAFT_S / VERIFY_S, VERIFY_S)
    gaps = [abs(n / renewal(0.7, 4, n)[0] / limit - 1) for n in (250, 500, 1000)]
    assert gaps[-1] < 1e-3
    assert gaps[0] / gaps[1] == pytest.approx(2.0, rel=0.05)
    assert gaps[1] / gaps[2] == pytest.approx(2.0, rel=0.05)


def test_tokens_per_verification_is_the_closed_form():
    """The mean of the first eight rounds of every prompt, all of them with a full window, lies within
    four standard errors of (1 − α^(γ+1)) / (1 − α)."""
    trace = simulated(0.8, 4)
    rounds = [[s.emitted for s in metrics.target_steps(trace) if s.prompt == i][:8] for i in range(PROMPTS)]
    found = np.concatenate(rounds)
    assert len(found) == 8 * PROMPTS
    mean = closed_form.tokens_per_verification(0.8, 4)
    deviation = math.sqrt(float(np.array(emitted(0.8, 4)) @ np.arange(1, 6) ** 2) - mean**2)
    assert abs(found.mean() - mean) < FOUR * deviation / math.sqrt(len(found))


def test_autoregressive_is_exact():
    """n tokens take n steps: exactly 1 / t(1) tokens a second."""
    spec = PipelineSpec.from_dict({"strategy": "autoregressive", "stages": [{"name": "s0", "model": "a"}]})
    trace = simulate(spec, times(0.05), [synthetic(["a|float32|none"], [], num_tokens=n, seed=0) for n in (1, 7, 40)])
    assert [p.total_s for p in trace.prompts] == pytest.approx([0.05, 0.35, 2.0], rel=1e-12)
    assert metrics.tokens_per_s(trace.prompts) == pytest.approx(closed_form.autoregressive_tokens_per_s(0.05))


@pytest.mark.parametrize("draft_s", [0.001, 0.004, 0.05])
def test_a_useless_drafter_costs_a_pipeline_nothing(draft_s: float):
    """Overlapped, lookahead 0, no contention: with acceptance 0 the target is never slower than alone."""
    spec = PipelineSpec.from_dict({"stages": [{"name": "s0", "model": "a"}, {"name": "s1", "model": "b"}]})
    made = synthetic([stage.choice_key for stage in spec.stages], [IID(0.0)], num_tokens=30, seed=1)
    trace = simulate(spec, times(draft_s, VERIFY_S), [made])
    assert trace.prompts[0].total_s == pytest.approx(30 * VERIFY_S, rel=1e-12)
