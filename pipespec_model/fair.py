"""Fair comparison: the same devices put to their best other use, and what a token costs.

A pipeline holds several devices, so its plain speed-up over the target alone compares unequal spending.  Here the
other side gets the same devices: the target sharded over them, that target with its drafter in turn, or
independent replicas of it (throughput only: no single answer comes faster).  Assumes devices of one kind and one
request at a time on each side.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from .acceptance import IID
from .errors import InputError
from .latency import non_negative
from .pays import Pair, best_lookahead
from .predict import synchronous_rounds

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


@dataclass(frozen=True)
class Uses:
    """Tokens per second of one answer, by what the same devices do.

    autoregressive : the target sharded over all of them
    synchronous : the same, and the drafter on one of them, in turn; the best window
    pipelined : drafter and target at once, each on its own; the best lookahead
    """

    autoregressive: float
    synchronous: float
    pipelined: float

    @property
    def best(self) -> str:
        """Name of the fastest; of equals the simplest."""
        speeds = asdict(self)
        return next(name for name, speed in speeds.items() if speed >= (1 - 1e-9) * max(speeds.values()))


def uses_of_two_devices(pair: Pair, *, serial_share: float = SERIAL_SHARE) -> Uses:
    """What one device for each of a pair is worth, used in three ways; ``pair.lookahead`` is chosen anew.

    serial_share : as in ``sharding_gain``; of every step of the target, whatever its width

    >>> uses_of_two_devices(Pair(0.03, (0.1,) * 9, 0.9)).best
    'pipelined'
    >>> uses_of_two_devices(Pair(0.03, (0.1,) * 9, 0.1)).best
    'autoregressive'
    """
    gain = sharding_gain(2, serial_share)
    rounds = [synchronous_rounds(draft_s=pair.draft_s, verify_s=verify_s / gain, window=window,
                                 acceptance=IID(pair.acceptance_rate)).tokens_per_s
              for window, verify_s in enumerate(pair.verify_s) if window]
    return Uses(autoregressive=gain / pair.verify_s[0], synchronous=max(rounds),
                pipelined=replace(pair, lookahead=best_lookahead(pair)).solve().tokens_per_s)


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
