"""Device functions that the step kernels share: conv over raw inputs and ring, gates, strides."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.records import L2_NORM_EPS

L2_EPS = tl.constexpr(L2_NORM_EPS)


def strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor but the last, 1, as tl.constexpr; zero for None.

    As constants they show the compiler that rows are aligned, for any width of a merged projection.
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
def log_decay(a, A_log, dt_bias, LOWER_BOUND: tl.constexpr = None):  # type: ignore[no-untyped-def]
    """How the gated delta rule forgets, float32, from loaded numbers of any dtype: -exp(A_log) softplus(a + dt_bias).
    With a bound it is LOWER_BOUND sigmoid(exp(A_log) (a + dt_bias))."""
    if LOWER_BOUND is None:
        out = -tl.exp(A_log.to(tl.float32)) * softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    else:
        out = LOWER_BOUND * tl.sigmoid(tl.exp(A_log.to(tl.float32)) * (a.to(tl.float32) + dt_bias.to(tl.float32)))
    return out


@triton.jit
def time_step(dt_ptr, dt_bias_ptr, h, mask, dt_min, dt_max):  # type: ignore[no-untyped-def]
    """clamp(softplus(dt + dt_bias)) of heads h: dt_ptr points at their raw dt. Masked entries are
    undefined."""
    dt = tl.load(dt_ptr, mask=mask).to(tl.float32)
    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + h, mask=mask).to(tl.float32)
    return tl.minimum(tl.maximum(softplus(dt), dt_min), dt_max)


@triton.jit
def state_before(predecessors, stored, stored_st, t, initial, mask):  # type: ignore[no-untyped-def]
    """The state [rows, columns] before token t, float32: `initial`, or the one after its
    predecessor, in `stored`."""
    predecessor = tl.load(predecessors + t)
    tl.debug_barrier()  # this program stored the predecessor's state
    inherits = tl.zeros(mask.shape, tl.int32) + predecessor >= 0
    inherited = tl.load(stored + tl.maximum(predecessor, 0) * stored_st, mask=mask & inherits, other=0.0)
    return tl.where(inherits, inherited.to(tl.float32), initial)


@triton.jit
def bias_of(bias_ptr, channel, mask):  # type: ignore[no-untyped-def]
    out = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    return out


@triton.jit
def step_input(  # type: ignore[no-untyped-def]
    source, stride_t: tl.constexpr, conv_row, weight_ptr, bias_ptr, channel, mask, position,
    t, TAPS: tl.constexpr, WC: tl.constexpr,
):  # fmt: skip
    """Conv and SiLU of token t, rounded to the input's dtype, in float32.

    `channel` indexes conv ring, weight and bias; `conv_row` points at the ring [C, WC] of the row's slot. With negative
    TAPS the inputs are those after a conv, and nothing is applied.
    """
    if TAPS < 0:
        out = tl.load(source + t * stride_t, mask=mask, other=0.0).to(tl.float32)
    else:
        out = bias_of(bias_ptr, channel, mask)
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
def conv_ring(conv_row, channel, mask, WC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The conv ring [C, WC], a whole channel at a time: loads by column would be two bytes each."""
    return tl.load(conv_row + channel[:, None] * WC + tl.arange(0, WC)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def conv_taps(weight_ptr, channel, mask, TAPS: tl.constexpr, WC: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights [C, WC], zero from tap number TAPS on."""
    k = tl.arange(0, WC)
    return tl.load(
        weight_ptr + channel[:, None] * TAPS + k[None, :], mask=mask[:, None] & (k < TAPS)[None, :], other=0.0
    )


@triton.jit
def conv_of_operands(  # type: ignore[no-untyped-def]
    new, ring, taps, weight_ptr, bias_ptr, channel, mask, position, TAPS: tl.constexpr, WC: tl.constexpr
):
    """Conv and SiLU in the input's dtype; terms are added in the order of `step_input`. Weights are `taps`, loaded
    before, or those at `weight_ptr`; the other is None."""
    w = tl.arange(0, WC)
    age = (position - w) & (WC - 1)
    out = bias_of(bias_ptr, channel, mask)
    for k in tl.static_range(TAPS):
        if taps is None:
            tap = tl.load(weight_ptr + channel * TAPS + k, mask=mask, other=0.0).to(tl.float32)
        else:
            tap = tl.sum(tl.where((w == k)[None, :], taps.to(tl.float32), 0.0), axis=1)
        value = new.to(tl.float32)
        if k < TAPS - 1:
            meant = (age == TAPS - 1 - k) & (position >= TAPS - 1 - k)
            value = tl.sum(tl.where(meant[None, :], ring.to(tl.float32), 0.0), axis=1)
        out += tap * value
    return silu(out).to(new.dtype)


@triton.jit
def push_operands(  # type: ignore[no-untyped-def]
    new, ring, write_row, channel, mask, position, moved, TAPS: tl.constexpr, WC: tl.constexpr
):
    """`push_inputs` of a single token; if the row `moved`, with the K - 1 inputs before it."""
    if moved:
        w = tl.arange(0, WC)
        age = (position - w) & (WC - 1)
        past = (age > 0) & (age < TAPS) & (position >= age)
        tl.store(write_row + channel[:, None] * WC + w[None, :], ring, mask=mask[:, None] & past[None, :])
    tl.store(write_row + channel * WC + (position & (WC - 1)), new, mask=mask)


@triton.jit
def conv_one_token(  # type: ignore[no-untyped-def]
    source, conv_row, weight_ptr, bias_ptr, channel, mask, position, TAPS: tl.constexpr, WC: tl.constexpr,
    ring=None, taps=None,
):  # fmt: skip
    """`step_input` and `push_inputs` of a single token, whose row keeps its slot. `ring` and `taps`: those of
    `conv_ring` and `conv_taps` if they were loaded before. With negative TAPS the input as it is."""
    if TAPS < 0:
        out = tl.load(source, mask=mask, other=0.0)
    else:
        if ring is None:
            ring = conv_ring(conv_row, channel, mask, WC)
        new = tl.load(source, mask=mask, other=0.0)
        out = conv_of_operands(new, ring, taps, weight_ptr, bias_ptr, channel, mask, position, TAPS, WC)
        push_operands(new, ring, conv_row, channel, mask, position, False, TAPS, WC)
    return out


@triton.jit
def conv_tokens(  # type: ignore[no-untyped-def]
    source, stride_t: tl.constexpr, conv_row, weight_ptr, bias_ptr, channel, mask, position, t,
    T: tl.constexpr, TAPS: tl.constexpr, WC: tl.constexpr, ring=None, taps=None,
):  # fmt: skip
    """Conv and SiLU of the tokens `t` [BLOCK_T] at once: [BLOCK_T, channels] in the input's dtype,
    zero past T. Raw inputs enter the ring as in `push_inputs`. Without taps only SiLU, and
    with negative TAPS nothing. `ring` and `taps` of a single token: those of `conv_one_token`.
    """
    if TAPS <= 0:
        raw = source + t[:, None] * stride_t + channel[None, :]
        out = tl.load(raw, mask=mask[None, :] & (t < T)[:, None], other=0.0)
        if TAPS == 0:
            out = silu(out.to(tl.float32)).to(source.dtype.element_ty)
    elif T == 1:
        out = conv_one_token(
            source + channel, conv_row, weight_ptr, bias_ptr, channel, mask, position, TAPS, WC, ring, taps
        )[None, :]
    else:
        push_inputs(source + channel, stride_t, conv_row, channel, mask, position, T, WC)
        total = tl.zeros([t.shape[0], channel.shape[0]], tl.float32) + bias_of(bias_ptr, channel, mask)[None, :]
        for k in tl.static_range(TAPS):
            tap = tl.load(weight_ptr + channel * TAPS + k, mask=mask, other=0.0).to(tl.float32)
            token = t + (k - (TAPS - 1))
            p = position + token
            live = mask[None, :] & (t < T)[:, None]
            raw = source + token[:, None] * stride_t + channel[None, :]
            new = tl.load(raw, mask=live & (token >= 0)[:, None], other=0.0)
            before = live & ((token < 0) & (p >= 0))[:, None]
            old = tl.load(conv_row + channel[None, :] * WC + (p & (WC - 1))[:, None], mask=before, other=0.0)
            total += tap[None, :] * (new.to(tl.float32) + old.to(tl.float32))
        out = tl.where((t < T)[:, None], silu(total), 0.0).to(source.dtype.element_ty)
    return out


@triton.jit
def push_inputs(  # type: ignore[no-untyped-def]
    source, stride_t: tl.constexpr, conv_row, channel, mask, position, T: tl.constexpr, WC: tl.constexpr
):
    """Writes the T raw inputs to the conv ring `conv_row`.

    No program of the step reads these columns, so programs need no order.
    """
    ring = conv_row + channel * WC
    for t in range(T):
        value = tl.load(source + t * stride_t, mask=mask, other=0.0)
        tl.store(ring + ((position + t) & (WC - 1)), value, mask=mask)
