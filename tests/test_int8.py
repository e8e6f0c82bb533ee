"""int8 layers: what they compute does not depend on how many tokens go through at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from execute.int8 import Int8Linear
from execute.torch_runner import TorchRunner
from pipespec_model.messages import Step
from pipespec_model.spec import StageSpec

ENGINES = [engine for engine in ("x86", "qnnpack") if engine in torch.backends.quantized.supported_engines]


@pytest.fixture(params=ENGINES)
def engine(request) -> Iterator[str]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = request.param
    yield request.param
    torch.backends.quantized.engine = before


@pytest.mark.parametrize("bias", [False, True])
def test_int8_is_close_to_float_and_a_token_s_own(engine: str, bias: bool) -> None:
    """Each token's result is near the float layer's, with tokens of very different size in one step, and bit
    for bit what that token alone gives."""
    torch.manual_seed(1)
    linear = nn.Linear(96, 160, bias=bias)
    int8 = Int8Linear(linear)
    with torch.inference_mode():
        x = torch.randn(7, 96) * torch.tensor([1e-3, 1e-2, 0.1, 1, 10, 100, 1000])[:, None]
        x[3, 5] = 40.0  # an outlier, as models' first tokens have
        out, plain = int8(x), linear(x)
        error = (out - plain).abs().amax(-1) / plain.abs().amax(-1)
        assert error.max() < 0.05
        for at in range(len(x)):
            assert torch.equal(out[at : at + 1], int8(x[at : at + 1]))
        assert torch.equal(int8(torch.zeros(2, 96)), linear(torch.zeros(2, 96)))


@pytest.fixture(scope="module")
def int8() -> TorchRunner:
    return TorchRunner(StageSpec(name="q", model="tiny-m", quantize="int8"))


def logits(runner: TorchRunner, text: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
    """Of every position of the text after the prompt, ``[positions, vocab]``, in steps that end at ``cuts``."""
    prompt, found, done = text[:5], [], 0
    runner.begin(prompt)
    for end in cuts:
        fed = text[5 : 5 + done]
        drafts = tuple(text[5 + done : 5 + end])
        cached = 0 if done == 0 else 5 + done - 1
        found.append(runner.logits(fed, Step("decode", done, cached, len(drafts) + 1, drafts, 1, 0, False)))
        done = end
        runner.forget(5 + done - 1)
    return torch.cat([rows[:-1] for rows in found])


@given(st.sets(st.integers(2, 15), max_size=6))
def test_an_int8_stage_decides_the_same_however_its_steps_are_cut(int8: TorchRunner, cuts: set[int]) -> None:
    """The logits of a text are the same to the last bit in steps of one token and of any other widths: so are a
    drafter's drafts, and the agreement that is measured in one of these ways."""
    text = [3 + 7 * i % 200 for i in range(21)]
    assert torch.equal(logits(int8, text, [1, *sorted(cuts), 16]), logits(int8, text, range(1, 17)))
