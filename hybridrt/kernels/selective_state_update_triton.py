"""Triton kernel of `selective_state_update` and of the classic and intermediate modes of `mamba2_decode`.

One program keeps BLOCK_P channels of one head of one row, [BLOCK_P, N] of the state, in registers over the T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.mamba2_common_triton import (
    push_inputs,
    step_input,
    step_tile,
    store_output,
    strides,
    time_step,
)
from hybridrt.kernels.pdl_triton import begin, pdl


@triton.jit
def _update_kernel(  # type: ignore[no-untyped-def]
    x_ptr, B_ptr, C_ptr, dt_ptr, z_ptr, out_ptr, weight_ptr, bias_ptr, A_ptr, D_ptr, dt_bias_ptr,
    conv_ptr, states_ptr, stored_ptr, read_slots_ptr, write_slots_ptr, positions_ptr, rows_ptr, parents_ptr,
    x_strides: tl.constexpr, B_strides: tl.constexpr, C_strides: tl.constexpr, dt_strides: tl.constexpr,
    z_strides: tl.constexpr, conv_ss: tl.constexpr, states_ss: tl.constexpr, stored_strides: tl.constexpr,
    parents_sb: tl.constexpr, dt_min, dt_max,
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    TAPS: tl.constexpr, WC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = h // HEADS_PER_GROUP
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < P, n < N
    mask = p_mask[:, None] & n_mask[None, :]
    out = out_ptr + b.to(tl.int64) * (T * H * P) + h * P + p
    read = tl.load(read_slots_ptr + b).to(tl.int64)
    if read < 0:
        for t in range(T):
            tl.store(out + t * (H * P), tl.zeros([BLOCK_P], out_ptr.dtype.element_ty), mask=p_mask)
        return

    write = tl.load(write_slots_ptr + b).to(tl.int64)
    x_source = x_ptr + b.to(tl.int64) * x_strides[0] + h * x_strides[2] + p
    B_source = B_ptr + b.to(tl.int64) * B_strides[0] + g * B_strides[2] + n
    C_source = C_ptr + b.to(tl.int64) * C_strides[0] + g * C_strides[2] + n
    x_channel, B_channel = h * P + p, H * P + g * N + n
    C_channel = B_channel + (H // HEADS_PER_GROUP) * N
    position, conv_row = 0, conv_ptr
    if TAPS > 0:
        position = tl.load(positions_ptr + b)
        conv_row = conv_ptr + read * conv_ss
        conv_out = conv_ptr + write * conv_ss
        push_inputs(x_source, x_strides[1], conv_row, conv_out, x_channel, p_mask, position, read != write, T, TAPS, WC)
        if (h % HEADS_PER_GROUP == 0) & (block == 0):
            push_inputs(
                B_source, B_strides[1], conv_row, conv_out, B_channel, n_mask, position, read != write, T, TAPS, WC
            )
            push_inputs(
                C_source, C_strides[1], conv_row, conv_out, C_channel, n_mask, position, read != write, T, TAPS, WC
            )

    tile = h * (P * N) + p[:, None] * N + n[None, :]
    A = tl.load(A_ptr + h)
    initial = tl.load(states_ptr + read * states_ss + tile, mask=mask, other=0.0).to(tl.float32)
    state = initial
    stored = stored_ptr
    if stored_ptr is not None:
        stored = stored_ptr + tl.load(rows_ptr + b).to(tl.int64) * stored_strides[0] + tile
    for t in range(T):
        if parents_ptr is not None:
            parent = tl.load(parents_ptr + b * parents_sb + t)
            tl.debug_barrier()  # the parent's state was stored by this program
            inherits = tl.zeros(mask.shape, tl.int32) + parent >= 0
            inherited = tl.load(stored + tl.maximum(parent, 0) * stored_strides[1], mask=mask & inherits, other=0.0)
            state = tl.where(inherits, inherited.to(tl.float32), initial)
        dt = time_step(dt_ptr + b.to(tl.int64) * dt_strides[0] + t * dt_strides[1] + h, dt_bias_ptr, h, dt_min, dt_max)
        x = step_input(x_source, x_strides[1], conv_row, weight_ptr, bias_ptr, x_channel, p_mask, position, t, TAPS, WC)
        key = step_input(
            B_source, B_strides[1], conv_row, weight_ptr, bias_ptr, B_channel, n_mask, position, t, TAPS, WC
        )
        query = step_input(
            C_source, C_strides[1], conv_row, weight_ptr, bias_ptr, C_channel, n_mask, position, t, TAPS, WC
        )
        state = state * tl.exp(A * dt) + (dt * x)[:, None] * key[None, :]
        y = tl.sum(state * query[None, :], axis=1)
        z = z_ptr
        if z_ptr is not None:
            z = z_ptr + b.to(tl.int64) * z_strides[0] + t * z_strides[1] + h * z_strides[2] + p
        store_output(y, x, D_ptr, z, out + t * (H * P), h, p_mask)
        rounded = state.to(states_ptr.dtype.element_ty)
        if stored_ptr is not None:
            tl.store(stored + t * stored_strides[1], rounded, mask=mask)
        state = rounded.to(tl.float32)
    if stored_ptr is None:
        tl.store(states_ptr + write * states_ss + tile, state.to(states_ptr.dtype.element_ty), mask=mask)


def selective_state_update_triton(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None,
    read_slots: Tensor,
    write_slots: Tensor,
    intermediate_states: Tensor | None = None,
    rows: Tensor | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """Triton `selective_state_update`."""
    return launch_update(
        states, x, dt, A, B, C, D, dt_bias, dt_limit, z, read_slots, write_slots, intermediate_states, rows, parents
    )


def launch_update(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    z: Tensor | None,
    read_slots: Tensor,
    write_slots: Tensor,
    stored: Tensor | None,
    rows: Tensor | None,
    parents: Tensor | None = None,
    conv: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    start_positions: Tensor | None = None,
) -> Tensor:
    """Runs the kernel. With `conv`, `weight` and `start_positions`, x, B, C are raw and go through the conv first."""
    batch, tokens, heads, dim = x.shape
    out = torch.empty((batch, tokens, heads, dim), dtype=x.dtype, device=x.device)
    if batch == 0:
        return out
    tile = step_tile(batch, tokens, states)
    _update_kernel[batch, heads, triton.cdiv(dim, tile.block_p)](
        x, B, C, dt, z, out, weight, bias, A, D, dt_bias,
        conv, states, stored, read_slots, write_slots, start_positions, rows, parents,
        strides(x), strides(B), strides(C), strides(dt), strides(z),
        strides(conv)[0], states.stride(0), strides(stored), strides(parents)[0], *dt_limit,
        T=tokens, H=heads, P=dim, N=states.shape[3], HEADS_PER_GROUP=heads // B.shape[2],
        TAPS=weight.shape[1] if weight is not None else 0, WC=conv.shape[2] if conv is not None else 1,
        BLOCK_P=tile.block_p, BLOCK_N=tile.block_n, num_warps=tile.num_warps, **pdl(x.device),
    )  # fmt: skip
    return out
