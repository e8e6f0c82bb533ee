"""The paper's closed forms: limits, recurrence, monotonicity, Theorem 1; and every doctest."""

from __future__ import annotations

import doctest
import math
from importlib import import_module
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_model import closed_form as cf
from pipespec_model.acceptance import IID
from pipespec_model.errors import InputError

RATES = [i / 20 for i in range(1, 20)]
WINDOWS = [1, 2, 3, 4, 8, 16, 64]


def test_theorem_1_on_a_grid():
    """E[N] > 1 for 0 < α < 1 and γ > 0, strictly."""
    for rate in [1e-6, *RATES, 1 - 1e-6]:
        for window in WINDOWS:
            assert cf.tokens_per_step(rate, window) > 1.0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("window", [0, 1, 4, 16])
def test_the_recurrence_converges_to_its_fixed_point_geometrically(rate: float, window: int):
    """Eq. 2 approaches Eq. 3 with the exact ratio α^(γ+1) − α each step, from either end."""
    limit = cf.verify_probability(rate, window)
    ratio = rate ** (window + 1) - rate
    assert cf.next_verify_probability(limit, rate, window) == pytest.approx(limit, abs=1e-15)
    for start in (0.0, 1.0):
        rho = start
        for step in range(1, 12):
            rho = cf.next_verify_probability(rho, rate, window)
            assert rho - limit == pytest.approx(ratio**step * (start - limit), abs=1e-14)


def test_limits_are_exact():
    """α → 1 gives γ + 1, α = 0 and γ = 0 give 1, with no 0/0 on the way."""
    for window in [0, *WINDOWS]:
        assert cf.tokens_per_verification(1.0, window) == window + 1
        assert cf.tokens_per_step(1.0, window) == window + 1
        assert cf.tokens_per_verification(0.0, window) == cf.tokens_per_step(0.0, window) == 1.0
        assert cf.tokens_per_verification(1 - 1e-9, window) == pytest.approx(window + 1, rel=1e-6)
    for rate in [0.0, *RATES, 1.0]:
        assert cf.tokens_per_verification(rate, 0) == cf.tokens_per_step(rate, 0) == pytest.approx(1.0)


@given(st.floats(0, 1), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_verification_emits_the_sum_of_the_powers(rate: float, window: int):
    """(1 − α^(γ+1)) / (1 − α) is 1 + α + … + α^γ, and is the i.i.d. model's own moment."""
    powers = math.fsum(rate**i for i in range(window + 1))
    assert cf.tokens_per_verification(rate, window) == pytest.approx(powers, rel=1e-7)
    assert IID(rate).mean_emitted(window) == pytest.approx(powers, rel=1e-9)


def test_more_acceptance_and_wider_windows_never_emit_less():
    """Tokens a verification grow in α and in γ; tokens a step grow in γ."""
    for window in WINDOWS:
        assert all(a < b for a, b in pairwise(cf.tokens_per_verification(r, window) for r in RATES))
        assert all(a < b for a, b in pairwise(cf.tokens_per_step(r, window) for r in RATES))
    for rate in RATES:
        assert all(a <= b for a, b in pairwise(cf.tokens_per_verification(rate, w) for w in WINDOWS))


def test_hand_computed_values():
    """α = ½, γ = 1: ρ = ½ / (1 − ¼ + ½) = 0.4, E[N] = 0.6 + 0.4·1.5 = 1.2."""
    assert cf.verify_probability(0.5, 1) == pytest.approx(0.4)
    assert cf.tokens_per_step(0.5, 1) == pytest.approx(1.2)
    assert cf.next_verify_probability(1.0, 0.5, 1) == pytest.approx(0.25)
    assert cf.pipelined_tokens_per_s(0.5, 1, 0.1) == pytest.approx(12.0)


def test_a_free_drafter_gives_the_whole_window_and_a_slow_one_loses():
    """At c = 0 the synchronous speed-up is the tokens a verification; at c = 1 it is below 1."""
    for rate in RATES:
        for window in WINDOWS:
            assert cf.synchronous_speedup(rate, window, 0.0) == cf.tokens_per_verification(rate, window)
            assert cf.synchronous_speedup(rate, window, 1.0) < 1.0
    assert cf.synchronous_tokens_per_s(0.0, 0, 0.5, 0.1) == cf.autoregressive_tokens_per_s(0.1) == pytest.approx(10)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: cf.tokens_per_step(1.5, 4), "acceptance_rate must be in [0, 1], got 1.5"),
    (lambda: cf.tokens_per_verification(math.nan, 4), "acceptance_rate must be in [0, 1], got nan"),
    (lambda: cf.verify_probability(0.5, -1), "window must be >= 0, got -1"),
    (lambda: cf.synchronous_speedup(0.5, 4, -0.1), "cost_ratio must be >= 0, got -0.1"),
])
def test_arguments_out_of_range_are_refused(call, words: str):
    """A rate outside [0, 1], a negative window or cost is an error that names it."""
    with pytest.raises(InputError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [
    "closed_form", "acceptance", "coupling", "uniforms", "latency",
])
def test_doctests_run(name: str):
    """The examples in the documentation are true, and there are some."""
    found = doctest.testmod(import_module(f"pipespec_model.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
