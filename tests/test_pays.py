"""When a pipeline pays: break-even points, and the guarantee in seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipespec_model.errors import InputError
from pipespec_model.pays import Pair, best_lookahead, break_even_rate, elasticities, largest_cost_ratio, never_slower

FLAT = Pair(0.02, (0.1,) * 9, 0.8)
STEEP = replace(FLAT, verify_s=(0.1,) + (0.3,) * 8)


def test_the_guarantee_holds_where_it_is_claimed() -> None:
    """On 200 random pairs: where N(w) >= t(w) / t(0) for every window, overlapped with lookahead 0 is at
    least as fast as autoregressive decoding; both answers occur."""
    rng = np.random.default_rng(5)
    claims = []
    for _ in range(200):
        wide = 1 + rng.random() * rng.choice([0.0, 0.2, 3.0])
        pair = Pair(float(0.1 * rng.uniform(0.02, 1.5)), (0.1,) + (0.1 * wide,) * int(rng.integers(1, 12)),
                    float(rng.uniform(0.01, 0.99)), buffer_tokens=int(rng.integers(1, 20)))
        claims.append(never_slower(pair.acceptance_rate, pair.verify_s))
        if claims[-1]:
            assert pair.speedup >= 1 - 2e-4, pair
    assert {True, False} == set(claims)


def test_the_reviewers_counter_example() -> None:
    """α = 0.05: never slower where a wide step costs no more; slower where it costs three times as much, though
    not by much, as a plain step finds most first drafts wrong; far slower where the target waits."""
    rare = replace(FLAT, acceptance_rate=0.05)
    assert never_slower(0.05, rare.verify_s)
    assert rare.speedup >= 1
    assert not never_slower(0.05, STEEP.verify_s)
    assert 0.85 < replace(STEEP, acceptance_rate=0.05).speedup < 0.95
    assert replace(STEEP, acceptance_rate=0.05, lookahead=1).speedup < 0.5
    assert replace(rare, lookahead=3).speedup < 0.8
    assert replace(rare, blocking=True).speedup < 1


def test_break_even_is_where_the_speedup_is_one() -> None:
    """At the rate found the pair is as fast as its target; a bit below it is slower."""
    rate = break_even_rate(STEEP)
    assert rate is not None
    assert replace(STEEP, acceptance_rate=rate).speedup == pytest.approx(1.0, abs=0.01)
    assert all(replace(STEEP, acceptance_rate=rate * x).speedup < 1 for x in (0.1, 0.5, 0.9))
    assert replace(STEEP, acceptance_rate=0.0).speedup == pytest.approx(1.0)  # never right costs nothing
    assert break_even_rate(FLAT) == 0.0
    assert break_even_rate(replace(FLAT, verify_s=(0.1,) + (2.0,) * 8)) is None


def test_largest_cost_ratio() -> None:
    """A slower drafter than the one found does not reach the wanted speed-up."""
    ratio = largest_cost_ratio(FLAT, at_least=2.0)
    assert ratio is not None
    assert 0.1 < ratio < 0.9
    assert replace(FLAT, draft_s=0.1 * (ratio + 0.05)).speedup < 2.0
    assert largest_cost_ratio(FLAT, at_least=1.0) == 1.0
    assert largest_cost_ratio(FLAT, at_least=20.0) is None


def test_best_lookahead_is_the_best() -> None:
    """It is none where steps cost the same; it is some where a wide step is dear and a plain one wasted."""
    assert best_lookahead(FLAT) == 0
    dear = replace(STEEP, acceptance_rate=0.95, draft_s=0.03)
    best = best_lookahead(dear)
    speeds = [replace(dear, lookahead=i).speedup for i in range(9)]
    assert speeds[best] == max(speeds)
    assert best > 0


def test_elasticities_have_the_right_signs() -> None:
    """All times together scale throughput by -1; more agreement helps."""
    found = elasticities(FLAT)
    assert found["acceptance_rate"] > 0
    assert found["draft_s"] <= 0
    assert found["draft_s"] + found["verify_s"] == pytest.approx(-1.0, abs=0.1)
    with pytest.raises(InputError, match="acceptance_rate"):
        elasticities(replace(FLAT, acceptance_rate=1.0))
