"""Linear layers with int8 weights and activations on a CPU, one scale per token.

Weights: one symmetric scale per output channel.  Activations: each token is divided by its own largest
magnitude before it is rounded, so a token's result does not depend on what else is in the step: a drafter
drafts the same whether it takes its tokens one by one or several at once, and the agreement measured one way
holds the other way.  (torch's dynamic quantisation has one scale per step.  It costs as much, agrees less
with the float weights, and its drafts change with the width: docs/lab-notes.md.)

Where the library has no such kernel (processors that are not x86), tokens go one by one through its dynamic one.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

_ENGINES = ("x86", "fbgemm")  # that have the kernel


def _levels() -> int:
    """Activations' levels on either side of zero.  Processors without VNNI add two products in 16 bits, which
    overflows with all eight bits in use."""
    return 127 if torch.cpu._is_vnni_supported() else 63


class Int8Linear(nn.Module):
    """The int8 counterpart of a float32 linear layer: ``[..., in]`` to ``[..., out]``, float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scales = weight.abs().amax(1).clamp_(min=torch.finfo(weight.dtype).tiny) / 127
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            # Such tensors are marked for removal; torchao, named in their place, is slower than float32 here at
            # one token a step (docs/lab-notes.md), so they stay until they are gone.
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(rounded, None)
        self._bias = linear.bias  # added afterwards, since a token's scale is taken out before
        self._levels = _levels()
        self._one_by_one = torch.backends.quantized.engine not in _ENGINES

    def weight(self) -> Tensor:
        """As quantised, ``[out, in]``."""
        return torch.ops.quantized.linear_unpack(self._packed)[0]

    def forward(self, x: Tensor) -> Tensor:
        if self._one_by_one:
            tokens = x.reshape(-1, 1, self.in_features)
            out = torch.cat([torch.ops.quantized.linear_dynamic(token, self._packed) for token in tokens])
            out = out.view(*x.shape[:-1], self.out_features)
        else:
            largest = torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True).clamp_(min=1e-30)
            out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
                x / largest, 1 / self._levels, self._levels + 1, self._packed).mul_(largest)
        return out if self._bias is None else out.add_(self._bias)


def int8_model(model: Any) -> Any:
    """A copy whose linear layers are int8; everything else is copied, and a tied output head is untied."""
    replaced = {id(module): Int8Linear(module) for module in model.modules() if isinstance(module, nn.Linear)}
    return copy.deepcopy(model, memo=replaced)
