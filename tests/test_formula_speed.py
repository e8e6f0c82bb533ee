"""How long a prediction takes, once compiled."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from drawn_pipelines import script

from pipespec_model.predict import predict

pytestmark = pytest.mark.bench


def milliseconds(call: Callable[[int], object], number: int) -> float:
    call(0)
    begun = time.perf_counter()
    for i in range(number):
        call(i)
    return 1e3 * (time.perf_counter() - begun) / number


def test_ten_thousand_pairs_take_seconds() -> None:
    """Two stages: at most 1 ms a prediction on average over random pairs."""
    drawn = [script().drawn(seed, k=2) for seed in range(300)]
    assert milliseconds(lambda i: predict(*drawn[i]), len(drawn)) <= 1.0


def test_a_chain_takes_milliseconds() -> None:
    """Three to five stages: 5 ms on average over random pipelines, with half as much again for a busy machine."""
    drawn = [script().drawn(seed) for seed in range(100)]
    assert milliseconds(lambda i: predict(*drawn[i]), len(drawn)) <= 7.5
