"""The gated short convolution of decode steps against a loop over tokens, by every provider."""

import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.records import ConvState, ConvWeights
from hybridrt.kernels.state.short_conv import short_conv_update
from tests.support.levels import sweep
from tests.support.mamba2_oracle import changed_rows, close, conv_loop, int32, poisoned

pytestmark = pytest.mark.usefixtures("provider")
C, DONE = 10, (0, 1, 2, 7, 1000)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}

RING_TOLERANCE = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 8e-3}  # the interpreter cuts bfloat16 off


def expected(projected: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[n, B | C | x] of all tokens of a request to [n, C], the conv in float32."""
    into, out, x = projected.chunk(3, -1)
    return (out * conv_loop(into * x, weight, bias, False)).to(projected.dtype)


def step(
    tokens: int, taps: int, dtype: torch.dtype, separate: bool = False, biased: bool = True
) -> tuple[Tensor, Tensor, Tensor, ConvState]:
    """A step's output, what it should be, the rings before it, and the state that it left."""
    torch.manual_seed(tokens + taps)
    width = 1 << (taps - 2 + tokens).bit_length()
    histories = [torch.randn(done + tokens, 3 * C).to(dtype) for done in DONE]
    weight, bias = torch.randn(C, taps).to(dtype), torch.randn(C).to(dtype) if biased else None
    read = [7, 39, 3, -1, 20]
    write = [8, 37, 4, -1, 21] if separate else read
    conv = poisoned(40, C, width, dtype=dtype)
    for slot, done, history in zip(read, DONE, histories, strict=True):
        into, _, x = history.chunk(3, -1)
        for p in range(max(0, done - taps + 1), done) if slot >= 0 else ():
            conv[slot, :, p % width] = (into * x)[p]
    wide = torch.full((len(DONE), tokens, 3 * C + 6), torch.nan, dtype=dtype)
    wide[:, :, 2 : 2 + 3 * C] = torch.stack([h[len(h) - tokens :] for h in histories])
    wide[3] = torch.nan  # padding
    before, state = conv.clone(), ConvState(conv, int32(*read), int32(*write), int32(*DONE))
    out = short_conv_update(wide[:, :, 2 : 2 + 3 * C], ConvWeights(weight, bias, None), state)
    wanted = torch.stack([expected(h, weight, bias)[-tokens:] for h in histories])
    wanted[3] = 0.0
    for slot, done, history in zip(write, DONE, histories, strict=True):
        into, _, x = history.chunk(3, -1)
        for p in range(max(0, done + tokens - taps + 1), done + tokens) if slot >= 0 else ():
            close(conv[slot, :, p % width], (into * x)[p], RING_TOLERANCE[dtype])
    return out, wanted, before, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "taps"), sweep([(1, 3), (5, 3), (1, 2), (3, 4), (3, 7)], 2))
def test_update_equals_loop(dtype: torch.dtype, tokens: int, taps: int) -> None:
    out, wanted, before, state = step(tokens, taps, dtype, biased=taps != 2)
    assert out.dtype == dtype and out.shape == (len(DONE), tokens, C)
    close(out, wanted, TOLERANCE[dtype])
    assert changed_rows(before, state.conv) == {7, 39, 3, 20}


def test_rings_may_go_to_other_slots() -> None:
    out, wanted, before, state = step(2, 3, torch.float32, separate=True)
    close(out, wanted, 1e-6)
    assert changed_rows(before, state.conv) == {8, 37, 4, 21}


def test_no_rows() -> None:
    none, conv = int32(), torch.zeros(3, C, 4)
    out = short_conv_update(
        torch.zeros(0, 1, 3 * C), ConvWeights(torch.ones(C, 3), None, None), ConvState(conv, *[none] * 3)
    )
    assert out.shape == (0, 1, C)


def test_a_narrow_ring_is_refused() -> None:
    weights, state = ConvWeights(torch.ones(C, 3), None, None), ConvState(torch.zeros(3, C, 4), *[int32(1)] * 3)
    with pytest.raises(ConfigError, match="3 taps and steps of 3 tokens"):
        short_conv_update(torch.zeros(1, 3, 3 * C), weights, state)
