"""Packed linear layers compute what torch's own do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from execute.linear import PACKED_FROM, PackedLinear, can_pack


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_is_plain_up_to_rounding(dtype: torch.dtype, bound: float, bias: bool) -> None:
    """Every width around the change of kernel, and a prefill: the relative difference is rounding."""
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias, dtype=dtype)
    if not can_pack(linear_model(linear)):
        pytest.skip("this build of torch does not pack such weights")
    packed = PackedLinear(linear)
    with torch.inference_mode():
        for width in (1, 2, PACKED_FROM[dtype], 5, 9, 48):
            x = torch.randn(width, 96, dtype=dtype)
            plain = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
            assert ((packed(x).double() - plain).abs().max() / plain.abs().max()).item() < bound


def linear_model(linear: nn.Linear) -> nn.Module:
    """A module with what can_pack asks a model for."""
    linear.dtype, linear.device = linear.weight.dtype, linear.weight.device  # type: ignore[assignment]
    return linear


def test_what_cannot_be_packed_is_left_alone() -> None:
    """Half precision without kernels, and a float32 model that twice the memory would be too much for."""
    assert not can_pack(linear_model(nn.Linear(8, 8, dtype=torch.float16)))
    huge = linear_model(nn.Linear(8, 8))
    huge.register_parameter("big", nn.Parameter(torch.empty(600_000_000, device="meta"), requires_grad=False))
    assert not can_pack(huge)
