"""Laws of the fair comparison."""

from __future__ import annotations

import doctest

import pytest

from pipespec_model import fair
from pipespec_model.errors import InputError

# Tokens per second by number of A100-80GB, batch 1, bfloat16 (README of gpt-fast, "Tensor Parallelism").
LLAMA_3_8B = {1: 93.83, 2: 149.10, 4: 217.21, 8: 276.01}
LLAMA_2_70B = {2: 21.32, 4: 38.01, 8: 62.50}


def test_doctests_run():
    """The examples in the documentation are true, and every public function has one."""
    found = doctest.testmod(fair)
    assert found.attempted >= 6
    assert found.failed == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_on_the_targets_own_devices_the_fair_speedup_is_the_plain_one(share: float):
    """Without further devices there is no better use of them, whatever the efficiency."""
    for devices in (1, 2, 5):
        assert fair.speedup_over_sharded_target(30, 12, devices, devices, serial_share=share) == pytest.approx(2.5)
        assert fair.throughput_against_replicas(30, 12, devices, devices) == pytest.approx(2.5)


def test_perfect_sharding_equals_replicas_and_none_equals_plain():
    """With no serial share n devices are n times as fast; with nothing but it, as fast as one."""
    for n in (2, 3, 8):
        assert fair.speedup_over_sharded_target(30, 10, n, 1, serial_share=0.0) == pytest.approx(
            fair.throughput_against_replicas(30, 10, n, 1))
        assert fair.speedup_over_sharded_target(30, 10, n, 1, serial_share=1.0) == pytest.approx(3.0)


def test_one_share_follows_a_measurement_over_devices():
    """One serial share gives the published speeds of a model on 2, 4 and 8 devices within 2%, the default those of
    8B; perfect scaling does not."""
    for n, speed in LLAMA_3_8B.items():
        assert fair.sharding_gain(n) == pytest.approx(speed / LLAMA_3_8B[1], rel=0.02)
    for n, speed in LLAMA_2_70B.items():
        gain = fair.sharding_gain(n, 0.065) / fair.sharding_gain(2, 0.065)
        assert gain == pytest.approx(speed / LLAMA_2_70B[2], rel=0.02)
    assert fair.sharding_gain(8, 0.0) > 2 * LLAMA_3_8B[8] / LLAMA_3_8B[1]


def test_energy_is_additive_over_stages_and_linear_in_busy_time():
    """Two stages together are one stage of their summed powers; idle and busy are the two ends."""
    parts = sum(fair.joules_per_token(8, idle_w=i, busy_w=b, busy_fraction=0.4) for i, b in ((60, 150), (110, 420)))
    assert parts == pytest.approx(fair.joules_per_token(8, idle_w=170, busy_w=570, busy_fraction=0.4))
    assert fair.joules_per_token(8, idle_w=60, busy_w=150, busy_fraction=0.0) == pytest.approx(60 / 8)
    assert fair.joules_per_token(8, idle_w=60, busy_w=150, busy_fraction=1.0) == pytest.approx(150 / 8)


def test_cost_is_of_the_devices_held():
    """Twice the devices at the same speed cost twice as much a token."""
    assert fair.cost_per_million_tokens(50, 2.0, 4) == pytest.approx(2 * fair.cost_per_million_tokens(50, 2.0, 2))


@pytest.mark.parametrize(("call", "words"), [
    (lambda: fair.sharding_gain(0), "devices"),
    (lambda: fair.sharding_gain(2, 1.1), "serial_share"),
    (lambda: fair.speedup_over_sharded_target(1, 0, 2, 1), "target_tokens_per_s"),
    (lambda: fair.throughput_against_replicas(1, 1, 2, 4), "target_devices"),
    (lambda: fair.joules_per_token(1, idle_w=1, busy_w=2, busy_fraction=1.5), "busy_fraction"),
    (lambda: fair.cost_per_million_tokens(0, 1), "tokens_per_s"),
])
def test_arguments_out_of_range_are_refused(call, words: str):
    """Each error names the field."""
    with pytest.raises(InputError, match=words):
        call()
