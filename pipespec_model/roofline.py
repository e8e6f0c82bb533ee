"""Step times, memory and cost of a model on a device before anything is measured: always an ESTIMATE.

A step reads every weight once (the embedding's rows aside), reads the cache, multiplies, and pays the runtime's
overhead (devices.py); the longest of the three counts (Williams et al. 2009, Roofline).  It cannot see what a
kernel reaches of the peaks, dequantisation, or the transfer between devices.  How far off that is: docs/estimates.md.
One request at a time.  Acceptance is no matter of sizes and is never estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from .devices import Device, Runtime
from .errors import InputError
from .fair import cost_per_million_tokens
from .latency import Roofline
from .profile import Profile, StageLatency
from .shape import ModelShape

REST_BITS = 16  # at least, of cache and activations, and of what is not quantised: embedding, head, norms
LOGIT_BYTES = 4


@dataclass(frozen=True)
class Estimate:
    """A model on one device.

    bits : per weight of the layers, scales included (4-bit in blocks of 64 with 32-bit scales: 4.5); embedding
        and head keep 16 where the layers have fewer

    >>> from pipespec_model.devices import device, runtime
    >>> llama_8b = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
    >>> said = Estimate(llama_8b, device("a100-80gb"), runtime("ideal"))
    >>> round(1e3 * said.latency.mean_s(1, 0), 2), said.fits(context=8192)  # milliseconds
    (7.36, True)
    """

    shape: ModelShape
    device: Device
    runtime: Runtime
    bits: float = 16.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 32:
            raise InputError("bits", "must be in [1, 32]", self.bits)

    @property
    def latency(self) -> Roofline:
        shape, runtime = self.shape, self.runtime
        read = self._bytes(shape.layer_weights, self.bits) + self._bytes(shape.head_weights, self._rest_bits)
        return Roofline(
            weight_bytes=read, flops_per_token=shape.flops_per_token, cache_bytes_per_token=self.cache_bytes(1),
            flops_per_cached_token=shape.flops_per_cached_token,
            bandwidth_bytes_per_s=runtime.bandwidth_share * self.device.bandwidth_bytes_per_s,
            flops_per_s=self.device.flops_per_s, overhead_s=shape.layers * runtime.layer_s,
            launch_s=shape.layers * runtime.launch_layer_s)

    @property
    def weight_bytes(self) -> float:
        """In memory: with the embedding and the norms, which a step hardly reads."""
        rest = self.shape.weights - self.shape.layer_weights
        return self._bytes(self.shape.layer_weights, self.bits) + self._bytes(rest, self._rest_bits)

    def cache_bytes(self, context: int) -> float:
        return self._bytes(self.shape.cache_values * context, self._rest_bits)

    def activation_bytes(self, width: int) -> float:
        """Of a step at its widest point: either one feed-forward layer or the logits, and the residual stream."""
        layer = self._bytes(width * 2 * self.shape.intermediate, self._rest_bits)
        stream = self._bytes(width * self.shape.hidden, self._rest_bits)
        return stream + max(layer, width * self.shape.vocabulary * LOGIT_BYTES)

    def memory_bytes(self, *, context: int, width: int = 32) -> float:
        """Needed at a context and a step's width; what a runtime keeps for itself comes on top."""
        return self.weight_bytes + self.cache_bytes(context) + self.activation_bytes(width)

    def fits(self, *, context: int, width: int = 32) -> bool:
        return self.memory_bytes(context=context, width=width) <= self.device.memory_bytes

    def devices_needed(self, *, context: int, width: int = 32) -> int:
        """By memory alone; layers on several devices work in turn, so no step gets shorter by it."""
        return ceil(self.memory_bytes(context=context, width=width) / self.device.memory_bytes)

    @property
    def _rest_bits(self) -> float:
        return max(self.bits, REST_BITS)

    @staticmethod
    def _bytes(values: float, bits: float) -> float:
        return values * bits / 8

    def to_dict(self, widths: tuple[int, ...], contexts: tuple[int, ...]) -> dict[str, Any]:
        """For a page or JSON: seconds, bytes; everything marked as estimated."""
        latency, longest, widest = self.latency, max(contexts), max(widths)
        needed = self.devices_needed(context=longest, width=widest)
        speed = 1 / latency.mean_s(1, contexts[0])
        price = self.device.price_per_hour
        return {
            "estimate": True, "device": self.device.label, "bits": self.bits,
            "step_s": [{"width": width, "context": context, "seconds": latency.mean_s(width, context)}
                       for context in contexts for width in widths],
            "memory_bytes": {"weights": self.weight_bytes, "cache": self.cache_bytes(longest),
                             "activations": self.activation_bytes(widest), "device": self.device.memory_bytes},
            "fits": self.fits(context=longest, width=widest), "devices_needed": needed,
            "autoregressive_tokens_per_s": speed,
            "joules_per_token_at_full_power": self.device.power_w and needed * self.device.power_w / speed,
            "cost_per_million_tokens": price and cost_per_million_tokens(speed, price, needed),
            "sources": {"device": self.device.source, "runtime": self.runtime.source},
        }


def with_estimate(known: Profile | None, name: str, made: Estimate, *, context: int = 8192) -> Profile:
    """A profile with one more stage, ``name``, whose times and memory are estimated; acceptance stays what it was.

    context : tokens that the cache has room for
    Raises InputError where ``known`` has times of that stage.
    """
    if known is not None and name in known.latency:
        raise InputError(f"profile.latency[{name}]", "must not be there yet", mend="choose another --name")
    before = known.to_dict() if known else {"latency": {}}
    said = f"{name}: ESTIMATE, {made.device.label}, {made.bits:g} bits, {made.runtime.source}"
    return Profile.from_dict({
        **before, "latency": {**before["latency"], name: StageLatency(made.latency).to_dict()},
        "memory_bytes": {**before.get("memory_bytes", {}), name: made.memory_bytes(context=context)},
        "source": "; ".join(text for text in (before.get("source"), said) if text)})
