"""Device functions that the Mamba-2 step kernels share.

A program works on BLOCK_P channels of one head of one row. Its inputs come either from tensors that went through the
conv already (TAPS == 0) or from the raw projection and the conv ring (TAPS == K taps).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class StepTile:
    """How much of a head's state [P, N] one program of a step kernel holds: block_p of P rows, all of N."""

    block_p: int
    block_n: int
    num_warps: int


def step_tile(batch: int, tokens: int, states: Tensor) -> StepTile:
    """Tile for `batch` rows of `tokens` tokens and states [S+1, H, P, N].

    Small batches are cut finer, so that every multiprocessor gets work; large ones coarser, since the programs of a
    head each repeat its conv and its look at the ring, as far as the registers reach.
    """
    _, heads, dim, state_dim = states.shape
    block_n = max(16, triton.next_power_of_2(state_dim))
    coarse = tokens == 1 and states.element_size() == 2 and batch * heads * dim * block_n > 1 << 22
    block_p = min(triton.next_power_of_2(dim), max(1, (8192 if coarse else 4096) // block_n))
    return StepTile(block_p, block_n, 8 if tokens > 1 and block_n > 128 else 4)


def strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor but the last, 1, for a kernel's tl.constexpr; zero for a tensor that is not there.

    As constants they let the compiler see that rows are aligned, whatever the width of a merged projection.
    """
    return (0,) if tensor is None else tensor.stride()[:-1]


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    return x * tl.sigmoid(x)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + e^x) in float32, exact where e^x is small (Kahan's log1p)."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def time_step(dt_ptr, dt_bias_ptr, h, dt_min, dt_max):  # type: ignore[no-untyped-def]
    """clamp(softplus(dt + dt_bias)) of head h: dt_ptr points at the head's raw dt."""
    dt = tl.load(dt_ptr).to(tl.float32)
    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + h).to(tl.float32)
    return tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)


@triton.jit
def step_input(  # type: ignore[no-untyped-def]
    source, stride_t: tl.constexpr, conv_row, weight_ptr, bias_ptr, channel, mask, position,
    t, TAPS: tl.constexpr, WC: tl.constexpr,
):  # fmt: skip
    """Input of token t in float32: `source` + t * stride_t itself, or its conv and SiLU rounded to its dtype.

    `channel` indexes conv ring, weight and bias; `conv_row` points at the ring [C, WC] of the row's slot.
    """
    if TAPS == 0:
        out = tl.load(source + t * stride_t, mask=mask, other=0.0).to(tl.float32)
    else:
        out = tl.zeros(channel.shape, tl.float32)
        if bias_ptr is not None:
            out += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(TAPS):
            tap = tl.load(weight_ptr + channel * TAPS + k, mask=mask, other=0.0).to(tl.float32)
            token = t + k - (TAPS - 1) + tl.zeros(channel.shape, tl.int32)
            p = position + token
            new = tl.load(source + token * stride_t, mask=mask & (token >= 0), other=0.0)
            old = tl.load(conv_row + channel * WC + (p & (WC - 1)), mask=mask & (token < 0) & (p >= 0), other=0.0)
            out += tap * (new.to(tl.float32) + old.to(tl.float32))
        out = silu(out).to(source.dtype.element_ty).to(tl.float32)
    return out


@triton.jit
def push_inputs(  # type: ignore[no-untyped-def]
    source, stride_t: tl.constexpr, read_row, write_row, channel, mask, position, copy_history,
    T: tl.constexpr, TAPS: tl.constexpr, WC: tl.constexpr,
):  # fmt: skip
    """Writes the T raw inputs to the conv ring `write_row`, and the K - 1 before them if it is not `read_row`.

    The columns written are not among those that any program of the step reads, so programs need no order.
    """
    ring = write_row + channel * WC
    for t in range(T):
        value = tl.load(source + t * stride_t, mask=mask, other=0.0)
        tl.store(ring + ((position + t) & (WC - 1)), value, mask=mask)
    if copy_history:
        for k in tl.static_range(1, TAPS):
            p = position - k + tl.zeros(channel.shape, tl.int32)
            value = tl.load(read_row + channel * WC + (p & (WC - 1)), mask=mask & (p >= 0), other=0.0)
            tl.store(ring + (p & (WC - 1)), value, mask=mask)


@triton.jit
def store_output(  # type: ignore[no-untyped-def]
    y, x, D_ptr, z_ptr, out_ptr, h, mask
):  # fmt: skip
    """out = (y + D x) * silu(z) for one token's channels; D_ptr and z_ptr may be None."""
    if D_ptr is not None:
        y += tl.load(D_ptr + h).to(tl.float32) * x
    if z_ptr is not None:
        y *= silu(tl.load(z_ptr, mask=mask, other=0.0).to(tl.float32))
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=mask)
