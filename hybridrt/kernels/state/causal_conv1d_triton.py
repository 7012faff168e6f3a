"""Triton kernels of `causal_conv1d_varlen`, `causal_conv1d_update` and `short_conv_update`."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import SAVES_PER_PROMPT, ConvState, ConvWeights, IntermediateStates, SavedStates
from hybridrt.kernels.state.conv_and_gates_triton import bias_of, silu, strides


@jit_kernel(do_not_specialize=["batch", "num_tokens"])
def _conv_varlen_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, conv_ptr, out_ptr, read_slots_ptr, write_slots_ptr, query_start_loc_ptr, positions_ptr,
    save_slots_ptr, save_lengths_ptr, batch, num_tokens, x_st: tl.constexpr, conv_ss: tl.constexpr, SAVES: tl.constexpr,
    C: tl.constexpr, TAPS: tl.constexpr, WC: tl.constexpr, SILU: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # Row b has the blocks from query_start_loc[b] // BLOCK_T + b on: at least one, which carries
    # the ring of a row without tokens. Past the last row is a padding row.
    rows = tl.arange(0, BLOCK_B)
    numbers = tl.load(query_start_loc_ptr + rows, mask=rows <= batch, other=0) // BLOCK_T + rows
    b = tl.sum(((numbers <= tl.program_id(1)) & (rows <= batch)).to(tl.int32), axis=0) - 1
    first = tl.load(query_start_loc_ptr + b)
    length = tl.load(query_start_loc_ptr + b + 1, mask=b < batch, other=num_tokens) - first
    read = tl.load(read_slots_ptr + b, mask=b < batch, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + b, mask=b < batch, other=0)
    block = tl.program_id(1) - first // BLOCK_T - b
    if (block > 0) & (block * BLOCK_T >= length):
        return

    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    j = tl.arange(0, BLOCK_T)
    i = block * BLOCK_T + j
    start = first.to(tl.int64) + block * BLOCK_T
    live = (i < length)[:, None] & (channel < C)[None, :]
    out = out_ptr + start * C + j[:, None] * C + channel[None, :]
    if read < 0:
        tl.store(out, tl.zeros((BLOCK_T, BLOCK_C), out_ptr.dtype.element_ty), mask=live)
        return

    c_mask = channel < C
    x = x_ptr + start * x_st + channel
    ring = conv_ptr + read * conv_ss + channel * WC
    bias = bias_of(bias_ptr, channel, c_mask)
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32) + bias[None, :]
    if block == 0:
        # Inputs in the ring come first: sums are the same bits however a prompt is cut.
        for t in tl.static_range(TAPS - 1):
            head = bias
            for k in tl.static_range(TAPS - 1 - t):
                p = position + (t + k - (TAPS - 1)) + tl.zeros(channel.shape, tl.int32)
                old = tl.load(ring + (p & (WC - 1)), mask=c_mask & (p >= 0), other=0.0)
                tap = tl.load(weight_ptr + channel * TAPS + k, mask=c_mask, other=0.0).to(tl.float32)
                head += tap * old.to(tl.float32)
            y = tl.where((j == t)[:, None], head[None, :], y)
    for k in tl.static_range(TAPS):
        own = live & (i + (k - (TAPS - 1)) >= 0)[:, None]
        new = tl.load(x[None, :] + (j + (k - (TAPS - 1)))[:, None] * x_st, mask=own, other=0.0)
        y += tl.load(weight_ptr + channel * TAPS + k, mask=c_mask, other=0.0).to(tl.float32) * new.to(tl.float32)
    if SILU:
        y = y / (1.0 + tl.exp2(y * -1.4426950408889634))  # faster than silu(y), with 40 fewer registers
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=live)
    if block == 0:
        if save_slots_ptr is not None:  # the ring may be overwritten later
            for which in range(b * SAVES, (b + 1) * SAVES):
                save = tl.load(save_slots_ptr + which).to(tl.int64)
                if save > 0:
                    save_ring, saved = conv_ptr + save * conv_ss + channel * WC, tl.load(save_lengths_ptr + which)
                    _close_row(x, ring, save_ring, position, saved, c_mask, x_st, TAPS, WC)
        write = tl.load(write_slots_ptr + b).to(tl.int64)
        write_ring = conv_ptr + write * conv_ss + channel * WC
        _close_row(x, ring, write_ring, position, length, c_mask, x_st, TAPS, WC)


@triton.jit
def _close_row(  # type: ignore[no-untyped-def]
    x, read_ring, write_ring, position, length, mask,
    x_st: tl.constexpr, TAPS: tl.constexpr, WC: tl.constexpr,
):  # fmt: skip
    """Writes the K - 1 inputs that end a row to its ring: in its first program, after all threads have
    read the old columns.
    """
    column = tl.arange(0, WC)
    age = (position + length - 1 - column) & (WC - 1)
    source = length - 1 - age
    mask = mask[:, None] & (age < TAPS - 1)[None, :]
    is_new = (source >= 0)[None, :]
    new = tl.load(x[:, None] + source.to(tl.int64)[None, :] * x_st, mask=mask & is_new, other=0.0)
    old = tl.load(read_ring[:, None] + column[None, :], mask=mask & ~is_new, other=0.0)
    tl.debug_barrier()
    tl.store(write_ring[:, None] + column[None, :], tl.where(is_new, new, old), mask=mask)


@triton.jit
def _input(x, mask, C: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, or the product of the first and the third of three widths of C, rounded as they are."""
    value = tl.load(x, mask=mask, other=0.0)
    if GATED:
        value = (value.to(tl.float32) * tl.load(x + 2 * C, mask=mask, other=0.0).to(tl.float32)).to(value.dtype)
    return value


@jit_kernel
def _conv_update_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, conv_ptr, windows_ptr, out_ptr,
    read_slots_ptr, write_slots_ptr, positions_ptr, rows_ptr, predecessors_ptr,
    x_strides: tl.constexpr, conv_ss: tl.constexpr, windows_sr: tl.constexpr, predecessors_sb: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, WC: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    read, write = tl.load(read_slots_ptr + b).to(tl.int64), tl.load(write_slots_ptr + b).to(tl.int64)
    position = tl.load(positions_ptr + b)
    begin(PDL)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < C
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = out_ptr + b.to(tl.int64) * (T * C) + channel
    if read < 0:
        for t in range(T):
            tl.store(out + t * C, tl.zeros([BLOCK_C], dtype), mask=mask)
        return

    x = x_ptr + b.to(tl.int64) * x_strides[0] + channel
    ring, write_ring = conv_ptr + read * conv_ss + channel * WC, conv_ptr + write * conv_ss + channel * WC
    window = windows_ptr
    if windows_ptr is not None:
        window = windows_ptr + tl.load(rows_ptr + b).to(tl.int64) * windows_sr + channel * (TAPS - 1)
    for t in range(T):
        y = bias_of(bias_ptr, channel, mask)
        # Token -1 is the committed one before the first, -2 the one before.
        node = tl.zeros([BLOCK_C], tl.int32) + t
        for age in tl.static_range(TAPS):
            p = position + node
            new = _input(x + node * x_strides[1], mask & (node >= 0), C, GATED)
            old = tl.load(ring + (p & (WC - 1)), mask=mask & (node < 0) & (p >= 0), other=0.0)
            value = tl.where(node >= 0, new, old)
            tap = tl.load(weight_ptr + channel * TAPS + (TAPS - 1 - age), mask=mask, other=0.0).to(tl.float32)
            y += tap * value.to(tl.float32)
            if (windows_ptr is not None) and (age < TAPS - 1):
                tl.store(window + t * (C * (TAPS - 1)) + (TAPS - 2 - age), value, mask=mask)
            if predecessors_ptr is None:
                node -= 1
            else:
                predecessor = tl.load(predecessors_ptr + b * predecessors_sb + tl.maximum(node, 0))
                node = tl.where(node >= 0, predecessor, node - 1)
        if SILU:
            y = silu(y)
        y = y.to(dtype)
        if GATED:
            y = (tl.load(x + t * x_strides[1] + C, mask=mask).to(tl.float32) * y.to(tl.float32)).to(dtype)
        tl.store(out + t * C, y, mask=mask)
        if predecessors_ptr is None:
            own = _input(x + t * x_strides[1], mask, C, GATED)
            tl.store(write_ring + ((position + t) & (WC - 1)), own, mask=mask)
    if (predecessors_ptr is None) and (read != write):
        for k in tl.static_range(1, TAPS):
            p = position - k + tl.zeros([BLOCK_C], tl.int32)
            old = tl.load(ring + (p & (WC - 1)), mask=mask & (p >= 0), other=0.0)
            tl.store(write_ring + (p & (WC - 1)), old, mask=mask)


def causal_conv1d_varlen_triton(
    x: Tensor, weights: ConvWeights, state: ConvState, query_start_loc: Tensor, saves: SavedStates | None = None
) -> Tensor:
    """`causal_conv1d_varlen` in one launch, which needs no lengths on the host."""
    conv = state.conv
    (num_tokens, channels), batch = x.shape, len(state.read_state_slots)
    out = x.new_empty((num_tokens, channels))
    if num_tokens == 0:
        return out
    block_t, block_c = 16, min(256, next_power_of_2(channels))
    blocks = cdiv(num_tokens, block_t) + batch + 1
    save_slots, save_lengths = (None, None) if saves is None else (saves.row_slots, saves.row_lengths)
    # At least 64 rows: every other block size would be a compilation.
    _conv_varlen_kernel[cdiv(channels, block_c), blocks](
        x, weights.weight, weights.bias, conv, out, state.read_state_slots, state.write_state_slots, query_start_loc,
        state.start_positions, save_slots, save_lengths, batch, num_tokens, x.stride(0), conv.stride(0),
        SAVES=SAVES_PER_PROMPT, C=channels, TAPS=weights.weight.shape[1], WC=conv.shape[2],
        SILU=weights.activation == "silu", BLOCK_B=max(64, next_power_of_2(batch + 1)), BLOCK_T=block_t,
        BLOCK_C=block_c, **pdl(x.device),
    )  # fmt: skip
    return out


def causal_conv1d_update_triton(
    x: Tensor, weights: ConvWeights, state: ConvState, intermediate: IntermediateStates | None = None
) -> Tensor:
    """`causal_conv1d_update` in one launch; `short_conv_update` where x has three times the
    channels of the ring."""
    conv = state.conv
    windows, rows = (None, None) if intermediate is None else (intermediate.stored, intermediate.rows)
    predecessors = None if intermediate is None else intermediate.predecessors
    (batch, tokens, width), channels = x.shape, conv.shape[1]
    out = x.new_empty((batch, tokens, channels))
    block_c = 256
    _conv_update_kernel[cdiv(channels, block_c), batch](
        x, weights.weight, weights.bias, conv, windows, out, state.read_state_slots, state.write_state_slots,
        state.start_positions, rows, predecessors, strides(x), conv.stride(0), strides(windows)[0],
        strides(predecessors)[0],
        T=tokens, C=channels, TAPS=weights.weight.shape[1], WC=conv.shape[2], SILU=weights.activation == "silu",
        GATED=width > channels, BLOCK_C=block_c, **pdl(x.device),
    )  # fmt: skip
    return out
