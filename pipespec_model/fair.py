"""Fair comparison: the same devices put to their best other use, and what a token costs.

A pipeline holds several devices, so its plain speed-up over the target alone compares unequal spending.  Here the
other side gets the same devices: the target sharded over them, or independent replicas of it (throughput only:
no single answer comes faster); the synchronous use of them is in uses.py.  Assumes devices of one kind and one
request at a time on each side.
"""

from __future__ import annotations

from .errors import InputError
from .latency import non_negative

# The share of a one-token step that sharding does not shorten: Llama-3.1-8B in bfloat16 on 1, 2, 4, 8 A100-80GB at
# batch 1 makes 93.83, 149.10, 217.21, 276.01 tokens/s (README of gpt-fast, "Tensor Parallelism"), which gives 0.26,
# 0.24 and 0.25.  Larger models lose less (Llama-2-70B there: 0.065), so for one give its own.
SERIAL_SHARE = 0.25


def _devices(number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError("devices", "must be a whole number >= 1", number)


def tokens_per_s_per_device(tokens_per_s: float, devices: int) -> float:
    """Throughput (tokens/s) divided by the devices that are held, busy or not.

    >>> tokens_per_s_per_device(20.0, 4)
    5.0
    """
    non_negative("tokens_per_s", tokens_per_s)
    _devices(devices)
    return tokens_per_s / devices


def sharding_gain(devices: int, serial_share: float = SERIAL_SHARE) -> float:
    """How many times faster a step is on ``devices`` devices than on one: 1 / (s + (1 − s) / n).

    serial_share : s in [0, 1], the share of a step that does not shrink; 0 = perfect scaling, 1 = none

    References: Amdahl 1967.

    >>> sharding_gain(4, serial_share=0.0)
    4.0
    """
    _devices(devices)
    if not 0 <= serial_share <= 1:
        raise InputError("serial_share", "must be in [0, 1]", serial_share)
    return 1 / (serial_share + (1 - serial_share) / devices)


def speedup_over_sharded_target(tokens_per_s: float, target_tokens_per_s: float, devices: int, target_devices: int, *,
                         serial_share: float = SERIAL_SHARE) -> float:
    """Speed-up of one answer over the target sharded over all the devices of the pipeline.

    target_tokens_per_s : of the target alone on the ``target_devices`` that it was measured on
    serial_share : as in ``sharding_gain``

    >>> speedup_over_sharded_target(30.0, 10.0, devices=2, target_devices=1, serial_share=0.0)
    1.5
    """
    gain = sharding_gain(devices, serial_share) / sharding_gain(target_devices, serial_share)
    return tokens_per_s / (_positive("target_tokens_per_s", target_tokens_per_s) * gain)


def throughput_against_replicas(tokens_per_s: float, target_tokens_per_s: float, devices: int,
                                target_devices: int) -> float:
    """The pipeline's throughput over that of as many whole copies of the target as its devices hold.

    >>> throughput_against_replicas(30.0, 10.0, devices=4, target_devices=2)
    1.5
    """
    _devices(devices)
    _devices(target_devices)
    if target_devices > devices:
        raise InputError("target_devices", f"must be <= devices ({devices})", target_devices)
    return tokens_per_s / (_positive("target_tokens_per_s", target_tokens_per_s) * (devices // target_devices))


def joules_per_token(tokens_per_s: float, *, idle_w: float, busy_w: float, busy_fraction: float) -> float:
    """Energy of one stage's devices a committed token: idle power always, the rest while it is busy.

    idle_w, busy_w : watts of the stage's devices together; sum the stages of a pipeline
    busy_fraction : share of the whole time, as ``metrics.stage_use`` and ``Renewal.busy`` give it

    >>> joules_per_token(10.0, idle_w=100.0, busy_w=300.0, busy_fraction=0.5)
    20.0
    """
    non_negative("idle_w", idle_w)
    non_negative("busy_w", busy_w)
    if not 0 <= busy_fraction <= 1:
        raise InputError("busy_fraction", "must be in [0, 1]", busy_fraction)
    return (idle_w + (busy_w - idle_w) * busy_fraction) / _positive("tokens_per_s", tokens_per_s)


def cost_per_million_tokens(tokens_per_s: float, price_per_hour: float, devices: int = 1) -> float:
    """In the currency of ``price_per_hour`` (of one device); devices are paid for whether busy or not.

    >>> cost_per_million_tokens(1000.0, price_per_hour=3.6)
    1.0
    """
    non_negative("price_per_hour", price_per_hour)
    _devices(devices)
    return price_per_hour * devices / 3600 / _positive("tokens_per_s", tokens_per_s) * 1e6


def _positive(name: str, value: float) -> float:
    non_negative(name, value)
    if not value > 0:
        raise InputError(name, "must be > 0", value)
    return value
