"""Laws of the fair comparison."""

from __future__ import annotations

import doctest

import pytest

from pipespec_model import fair
from pipespec_model.errors import InputError

# Llama-2-7B, batch 1, A100 80GB SXM4 (NVIDIA NeMo Framework user guide): milliseconds by number of devices.
PUBLISHED_MS = {1: 234.0, 2: 171.7, 4: 143.7, 8: 136.5}


def test_doctests_run():
    """The examples in the documentation are true, and every public function has one."""
    found = doctest.testmod(fair)
    assert found.attempted >= 6
    assert found.failed == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_on_the_targets_own_devices_the_fair_speedup_is_the_plain_one(share: float):
    """Without further devices there is no better use of them, whatever the efficiency."""
    for devices in (1, 2, 5):
        assert fair.speedup_same_devices(30, 12, devices, devices, serial_share=share) == pytest.approx(2.5)
        assert fair.throughput_against_replicas(30, 12, devices, devices) == pytest.approx(2.5)


def test_perfect_sharding_equals_replicas_and_none_equals_plain():
    """With no serial share n devices are n times as fast; with nothing but it, as fast as one."""
    for n in (2, 3, 8):
        assert fair.speedup_same_devices(30, 10, n, 1, serial_share=0.0) == pytest.approx(
            fair.throughput_against_replicas(30, 10, n, 1))
        assert fair.speedup_same_devices(30, 10, n, 1, serial_share=1.0) == pytest.approx(3.0)


def test_default_efficiency_follows_the_measurement_it_is_from():
    """One serial share gives the published gain on 2, 4 and 8 devices within 6 %; perfect scaling does not."""
    for n, ms in PUBLISHED_MS.items():
        assert fair.sharding_gain(n) == pytest.approx(PUBLISHED_MS[1] / ms, rel=0.06)
    assert fair.sharding_gain(8, 0.0) > 4 * PUBLISHED_MS[1] / PUBLISHED_MS[8]


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
    (lambda: fair.speedup_same_devices(1, 0, 2, 1), "target_tokens_per_s"),
    (lambda: fair.throughput_against_replicas(1, 1, 2, 4), "target_devices"),
    (lambda: fair.joules_per_token(1, idle_w=1, busy_w=2, busy_fraction=1.5), "busy_fraction"),
    (lambda: fair.cost_per_million_tokens(0, 1), "tokens_per_s"),
])
def test_arguments_out_of_range_are_refused(call, words: str):
    """Each error names the field."""
    with pytest.raises(InputError, match=words):
        call()
