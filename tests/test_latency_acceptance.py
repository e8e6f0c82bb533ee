"""Latency and acceptance models: hand values, moments against samplers, round trips."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_model.acceptance import IID, Hazard, Markov, Recorded, acceptance_from_dict
from pipespec_model.errors import InputError
from pipespec_model.latency import (
    Affine,
    Constant,
    Empirical,
    Observed,
    Roofline,
    Table,
    fit_line,
    fit_table,
    latency_from_dict,
    undisturbed,
)

FOUR = 4.0
"""Standard errors: a two-sided normal exceeds them once in 15,800 looks.  The draws are seeded, so a
failure is a change of the code and never luck."""

LATENCIES = [
    Constant(0.004), Affine(0.12, 0.425, 0.001, 1e-6), Table((1, 2, 8), (0.1, 0.4, 0.46), 1e-5, 100, (0.9, 1.0, 1.1)),
    Empirical((0.1, 0.2, 0.4)), Roofline(2e9, 2e9, 1e12, 1e14, 1e5, 1e-4),
]
ACCEPTANCES = [IID(0.8), Markov(0.9, 0.4), Hazard((0.9, 0.7, 0.5)), Recorded((True, False, True, True, False))]


@pytest.mark.parametrize("model", LATENCIES, ids=lambda m: type(m).__name__)
def test_a_latency_model_survives_to_dict_and_back(model):
    """latency_from_dict(to_dict(x)) == x, through JSON."""
    assert latency_from_dict(json.loads(json.dumps(model.to_dict()))) == model


@pytest.mark.parametrize("model", ACCEPTANCES, ids=lambda m: type(m).__name__)
def test_an_acceptance_model_survives_to_dict_and_back(model):
    """acceptance_from_dict(to_dict(x)) == x, through JSON."""
    assert acceptance_from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_affine_jumps_at_width_two():
    """Width 1 has its own value; from 2 up time is affine in width; context adds its share."""
    model = Affine(one_s=0.12, base_s=0.4, per_token_s=0.01, per_context_s=0.001)
    assert [model.mean_s(w, 0) for w in (1, 2, 5)] == pytest.approx([0.12, 0.42, 0.45])
    assert model.mean_s(1, 100) == pytest.approx(0.22)


def test_a_table_is_linear_between_widths_and_beyond_the_last():
    """Between entries and beyond the last a table goes on in a straight line; below the first it is flat."""
    table = Table((2, 4, 8), (0.2, 0.4, 0.6), per_context_s=0.001, at_context=100)
    assert [table.mean_s(w, 100) for w in (1, 2, 3, 4, 6, 8, 10)] == pytest.approx(
        [0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert table.mean_s(2, 150) == pytest.approx(0.25)
    assert table.mean_s(2, 50) == pytest.approx(0.15)
    falling = Table((1, 2), (0.2, 0.1))
    assert falling.mean_s(9, 0) == pytest.approx(0.1)


def test_a_roofline_is_the_larger_of_memory_and_arithmetic():
    """Narrow steps wait for memory (1 GB at 1 GB/s is 1 s), wide ones for arithmetic (20 tokens of 0.1 s)."""
    model = Roofline(1e9, 1e9, 1e9, 1e10, cache_bytes_per_token=1e6, overhead_s=0.5)
    assert model.mean_s(1, 0) == pytest.approx(1.5)
    assert model.mean_s(1, 100) == pytest.approx(1.6)
    assert model.mean_s(20, 0) == pytest.approx(2.5)


def test_a_sampler_is_a_quantile_function():
    """Draws 0, ½ and 1 give lowest, middle and highest time; equal draws give equal times."""
    table = Table((1,), (0.1,), quantiles=(0.8, 1.0, 1.2))
    assert [table.sample_s(1, 0, u) for u in (0.0, 0.25, 0.5, 0.999999)] == pytest.approx(
        [0.08, 0.09, 0.1, 0.12], rel=1e-5)
    assert [Empirical((0.1, 0.3, 0.2)).sample_s(1, 0, u) for u in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("model", LATENCIES[:3], ids=lambda m: type(m).__name__)
def test_the_mean_of_the_sampler_is_the_mean(model):
    """A latency model's sampler averages to its mean, within four standard errors."""
    draws = np.random.default_rng(5).random(4000)
    times = np.array([model.sample_s(3, 120, u) for u in draws])
    error = times.std() / math.sqrt(len(times)) + 1e-15
    assert abs(times.mean() - model.mean_s(3, 120)) < FOUR * error


def mean_of(bits: list[bool], window: int) -> tuple[float, float]:
    """Mean and standard error of the tokens emitted by windows laid end to end over ``bits``.

    Each window starts just after a refused draft; after a full window the run is walked to its end
    first, so that the next one does too.
    """
    emitted, at = [], 0
    while at + window < len(bits):
        run = 0
        while run < window and bits[at + run]:
            run += 1
        emitted.append(run + 1)
        at += run
        while at < len(bits) and bits[at]:
            at += 1
        at += 1
    return float(np.mean(emitted)), float(np.std(emitted) / math.sqrt(len(emitted)))


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ACCEPTANCES[:3], ids=lambda m: type(m).__name__)
def test_the_moment_of_an_acceptance_model_is_that_of_its_sampler(model, window: int):
    """mean_emitted equals the mean over sampled windows within four standard errors."""
    bits = model.bits(np.random.default_rng(11).random(40_000).tolist())
    mean, error = mean_of(bits, window)
    assert abs(mean - model.mean_emitted(window)) < FOUR * error


def test_the_statistical_test_can_fail():
    """Negative control: an acceptance rate that is wrong by 0.03 lies outside four standard errors."""
    bits = IID(0.8).bits(np.random.default_rng(11).random(40_000).tolist())
    mean, error = mean_of(bits, 4)
    assert abs(mean - IID(0.77).mean_emitted(4)) > FOUR * error


def test_markov_share_of_ones_is_its_stationary_rate():
    """Long-run share of ones is enter / (enter + leave), 0.4 / 0.5; within four standard errors."""
    model = Markov(0.9, 0.4)
    assert model.acceptance_rate == pytest.approx(0.8)
    n = 40_000
    share = np.mean(model.bits(np.random.default_rng(2).random(n).tolist()))
    # The autocorrelation 0.9 - 0.4 = 0.5 widens the error by sqrt(1.5 / 0.5).
    assert abs(share - 0.8) < FOUR * math.sqrt(0.8 * 0.2 / n * 3)


def test_hand_computed_moments():
    """1 + the sum of the probabilities to come so far, written out."""
    assert IID(0.5).mean_emitted(3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert Markov(0.9, 0.4).mean_emitted(3) == pytest.approx(1 + 0.4 + 0.36 + 0.324)
    assert Hazard((0.9, 0.5)).mean_emitted(3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)
    # Windows start at positions 0, 2 and (wrapping) after the last zero: runs 1, 2 of "1 0 1 1 0".
    assert Recorded((True, False, True, True, False)).mean_emitted(2) == pytest.approx((2 + 3) / 2)
    for model in ACCEPTANCES:
        assert model.mean_emitted(0) == 1.0


@given(st.floats(0, 1), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_iid_is_the_common_limit(rate: float, window: int):
    """Markov with equal rates and Hazard with one rate are i.i.d., in moments and bit by bit."""
    draws = np.random.default_rng(1).random(30).tolist()
    for model in (Markov(rate, rate), Hazard((rate,))):
        assert model.mean_emitted(window) == pytest.approx(IID(rate).mean_emitted(window))
        assert model.bits(draws) == IID(rate).bits(draws)


def test_extremes_are_exact():
    """Rate 0 never accepts and rate 1 always, whatever the draw."""
    draws = [0.0, 0.5, math.nextafter(1.0, 0.0)]
    assert IID(0.0).bits(draws) == [False] * 3
    assert IID(1.0).bits(draws) == [True] * 3


@pytest.mark.parametrize(("make", "words"), [
    (lambda: IID(1.1), "acceptance_rate must be in [0, 1], got 1.1"),
    (lambda: IID(math.nan), "acceptance_rate must be in [0, 1], got nan"),
    (lambda: Markov(0.5, -0.1), "after_reject_rate must be in [0, 1], got -0.1"),
    (lambda: Hazard(()), "rates must hold at least one"),
    (lambda: Hazard((0.5, 2.0)), "rates.1 must be in [0, 1], got 2.0"),
    (lambda: Recorded(()), "record must hold at least one bit"),
    (lambda: Constant(-1.0), "seconds must be a finite number >= 0, got -1.0"),
    (lambda: Constant(math.nan), "seconds must be a finite number >= 0, got nan"),
    (lambda: Table((1, 1), (0.1, 0.2)), "table.widths must increase"),
    (lambda: Table((1,), (0.1, 0.2)), "as many seconds as widths"),
    (lambda: Empirical(()), "observed_s must hold at least one time"),
    (lambda: Roofline(1, 1, 0, 1), "bandwidth_bytes_per_s must be > 0, got 0"),
    (lambda: latency_from_dict({"kind": "quadratic"}), "latency.kind must be one of constant"),
    (lambda: latency_from_dict({"kind": "constant", "second": 1}), "latency (constant)"),
    (lambda: acceptance_from_dict({"kind": "iid", "rate": 1}), "acceptance (iid)"),
    (lambda: acceptance_from_dict({"acceptance_rate": 1}), "acceptance.kind must be one of iid"),
])
def test_bad_parameters_are_refused_by_name(make, words: str):
    """Every refusal names the parameter, its rule and the value."""
    with pytest.raises(InputError) as caught:
        make()
    assert words in str(caught.value)


def test_undisturbed_leaves_out_the_slow_heap():
    """A quarter of fast samples is enough: the slow heap at 1.4x does not move the result."""
    assert undisturbed([1.0] * 5 + [1.4] * 7) == pytest.approx(1.0)
    assert undisturbed([2.0]) == 2.0


def observed(rows: list[tuple[int, int, float, int]]) -> Observed:
    return Observed(*(np.array(column) for column in zip(*rows, strict=True)))


def test_a_width_seen_only_while_the_machine_was_slow_is_not_slow():
    """Wide steps that were all timed in blocks 1.4x slow are corrected by the narrow steps beside them."""
    rows = [(1, 50, 0.05 * slow, block) for block, slow in enumerate([1.0, 1.0, 1.4, 1.4]) for _ in range(6)]
    rows += [(4, 50, 0.08 * 1.4, block) for block in (2, 3)]
    table, slow = fit_table(observed(rows))
    assert [table.mean_s(w, 50) for w in (1, 4)] == pytest.approx([0.05, 0.08], rel=1e-9)
    assert list(slow.values()) == pytest.approx([1.0, 1.0, 1.4, 1.4], rel=1e-9)


def test_a_line_is_fitted_through_its_outliers():
    """Prefills of 0.02 + 0.001 a token come back although a third of them were disturbed."""
    widths = list(range(20, 80, 2))
    seconds = [(0.02 + 0.001 * w) * (1.5 if i % 3 == 0 else 1.0) for i, w in enumerate(widths)]
    line = fit_line(widths, seconds)
    assert [line.mean_s(w, 0) for w in (10, 50, 200)] == pytest.approx([0.03, 0.07, 0.22], rel=0.03)


@pytest.mark.parametrize("seconds", [[0.5, 0.4, 0.3], [0.1, 0.9, 2.0]], ids=["falling", "below nothing"])
def test_a_line_through_noise_is_never_negative(seconds: list[float]):
    """Whatever was measured, no width gets a negative time, and a wider step never a shorter one."""
    line = fit_line([20, 40, 60], seconds)
    times = [line.mean_s(w, 0) for w in (1, 20, 100)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_table_fitted_to_a_table_gives_it_back():
    """Noise-free steps of two widths and a context slope are recovered exactly."""
    truth = Table((1, 4), (0.1, 0.16), per_context_s=1e-4, at_context=200)
    grid = [(w, c) for w in (1, 4) for c in range(100, 301, 20)]
    found, slow = fit_table(observed([(w, c, truth.mean_s(w, c), 0) for w, c in grid]))
    assert slow == {0: pytest.approx(1.0)}
    for w, c in ((1, 100), (2, 200), (4, 300)):
        assert found.mean_s(w, c) == pytest.approx(truth.mean_s(w, c), rel=1e-9)
        assert found.sample_s(w, c, 0.3) == pytest.approx(truth.mean_s(w, c), rel=1e-9)
