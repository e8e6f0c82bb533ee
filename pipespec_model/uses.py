"""Devices for a drafter and a target: which use of them gives one answer fastest?

Asked of the formulas (renewal.py, predict.synchronous_rounds) and of the loss by sharding (fair.py), so their
assumptions hold here: constant step times, i.i.d. acceptance, one request at a time, no cost between steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from .acceptance import IID
from .fair import SERIAL_SHARE, sharding_gain
from .pays import Pair, best_lookahead
from .predict import synchronous_rounds


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


def uses_of_devices(pair: Pair, *, target_devices: int = 1, serial_share: float = SERIAL_SHARE) -> Uses:
    """What ``target_devices`` and one more are worth, used in three ways; ``pair.lookahead`` is chosen anew.

    pair : step times of the drafter on one device and of the target on ``target_devices``
    serial_share : as in ``sharding_gain``; of every step of the target, whatever its width

    >>> uses_of_devices(Pair(0.03, (0.1,) * 9, 0.9)).best
    'pipelined'
    >>> uses_of_devices(Pair(0.03, (0.1,) * 9, 0.1)).best
    'autoregressive'
    """
    gain = sharding_gain(target_devices + 1, serial_share) / sharding_gain(target_devices, serial_share)
    rounds = [synchronous_rounds(draft_s=pair.draft_s, verify_s=verify_s / gain, window=window,
                                 acceptance=IID(pair.acceptance_rate)).tokens_per_s
              for window, verify_s in enumerate(pair.verify_s) if window]
    return Uses(autoregressive=gain / pair.verify_s[0], synchronous=max(rounds),
                pipelined=replace(pair, lookahead=best_lookahead(pair)).solve().tokens_per_s)
