"""Triton kernels of `mamba2_replay` (and the replay mode of `mamba2_decode`), `mamba2_fold` and `advance_ring`.

One program keeps BLOCK_P channels of one head of one row, [BLOCK_P, N] of the checkpoint, in registers. The step's T
tokens are added to that copy as in plain decoding, but it is not written back; what the ring's older entries contribute
is added to the outputs instead. Only rows that must fold run through the entries and write the checkpoint.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.mamba2_common_triton import (
    fold_entries,
    push_inputs,
    step_input,
    step_tile,
    store_output,
    strides,
    time_step,
)  # fmt: skip
from hybridrt.kernels.pdl_triton import begin, pdl


@triton.jit
def _replay_kernel(  # type: ignore[no-untyped-def]
    x_ptr, B_ptr, C_ptr, dt_ptr, z_ptr, out_ptr, weight_ptr, bias_ptr, A_ptr, D_ptr, dt_bias_ptr,
    conv_ptr, states_ptr, values_ptr, keys_ptr, gates_ptr,
    slots_ptr, positions_ptr, rows_ptr, start_ptr, length_ptr,
    x_strides: tl.constexpr, B_strides: tl.constexpr, C_strides: tl.constexpr, dt_strides: tl.constexpr,
    z_strides: tl.constexpr, conv_ss: tl.constexpr, states_ss: tl.constexpr,
    values_sr: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr, dt_min, dt_max,
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    TAPS: tl.constexpr, WC: tl.constexpr, W: tl.constexpr, WIDEST: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = h // HEADS_PER_GROUP
    leads_group = (h % HEADS_PER_GROUP == 0) & (block == 0)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < P, n < N
    mask = p_mask[:, None] & n_mask[None, :]
    out = out_ptr + b.to(tl.int64) * (T * H * P) + h * P + p
    slot = tl.load(slots_ptr + b).to(tl.int64)
    if slot < 0:
        for t in range(T):
            tl.store(out + t * (H * P), tl.zeros([BLOCK_P], out_ptr.dtype.element_ty), mask=p_mask)
        return

    x_source = x_ptr + b.to(tl.int64) * x_strides[0] + h * x_strides[2] + p
    B_source = B_ptr + b.to(tl.int64) * B_strides[0] + g * B_strides[2] + n
    C_source = C_ptr + b.to(tl.int64) * C_strides[0] + g * C_strides[2] + n
    x_channel, B_channel = h * P + p, H * P + g * N + n
    C_channel = B_channel + (H // HEADS_PER_GROUP) * N
    position, conv_row = 0, conv_ptr
    if TAPS > 0:
        position = tl.load(positions_ptr + b)
        conv_row = conv_ptr + slot * conv_ss
        push_inputs(x_source, x_strides[1], conv_row, conv_row, x_channel, p_mask, position, False, T, TAPS, WC)
        if leads_group:
            push_inputs(B_source, B_strides[1], conv_row, conv_row, B_channel, n_mask, position, False, T, TAPS, WC)
            push_inputs(C_source, C_strides[1], conv_row, conv_row, C_channel, n_mask, position, False, T, TAPS, WC)

    row = tl.load(rows_ptr + b).to(tl.int64)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    values_row = values_ptr + row * values_sr + h * (W * P)
    keys_row = keys_ptr + row * keys_sr + g * (W * N)
    gates_row = gates_ptr + row * gates_sr + h * W
    A = tl.load(A_ptr + h)
    checkpoint = states_ptr + slot * states_ss + h * (P * N) + p[:, None] * N + n[None, :]
    state = tl.load(checkpoint, mask=mask, other=0.0).to(tl.float32)
    visible = length
    if length + T + WIDEST > W:
        state = fold_entries(state, values_row, keys_row, gates_row, A, p, p_mask, n, n_mask, start, length, W, P, N)
        tl.store(checkpoint, state.to(states_ptr.dtype.element_ty), mask=mask)
        visible = 0

    w = tl.arange(0, BLOCK_W)
    seen = w < visible
    column = (start + w) % W
    gate = tl.load(gates_row + column, mask=seen, other=0.0)
    log_decay = gate * A
    weight = gate * tl.exp(tl.sum(log_decay, axis=0) - tl.cumsum(log_decay, axis=0))
    values = tl.load(values_row + column[:, None] * P + p[None, :], mask=seen[:, None] & p_mask[None, :], other=0.0).to(
        tl.float32
    )
    state *= tl.exp(tl.sum(log_decay, axis=0))

    for t in range(T):
        dt = time_step(dt_ptr + b.to(tl.int64) * dt_strides[0] + t * dt_strides[1] + h, dt_bias_ptr, h, dt_min, dt_max)
        x = step_input(x_source, x_strides[1], conv_row, weight_ptr, bias_ptr, x_channel, p_mask, position, t, TAPS, WC)
        key = step_input(
            B_source, B_strides[1], conv_row, weight_ptr, bias_ptr, B_channel, n_mask, position, t, TAPS, WC
        )
        query = step_input(
            C_source, C_strides[1], conv_row, weight_ptr, bias_ptr, C_channel, n_mask, position, t, TAPS, WC
        )
        new = (start + length + t) % W
        tl.store(values_row + new * P + p, x.to(values_ptr.dtype.element_ty), mask=p_mask)
        if block == 0:
            tl.store(gates_row + new, dt)
        if leads_group:
            tl.store(keys_row + new * N + n, key.to(keys_ptr.dtype.element_ty), mask=n_mask)

        decay = tl.exp(A * dt)
        weight *= decay
        state = state * decay + (dt * x)[:, None] * key[None, :]
        # Loaded anew for each token: held over the loop, the keys would cost more registers than there are.
        keys = tl.load(keys_row + column[:, None] * N + n[None, :], mask=seen[:, None] & n_mask[None, :], other=0.0)
        scores = weight * tl.sum(keys.to(tl.float32) * query[None, :], axis=1)
        y = tl.sum(state * query[None, :], axis=1) + tl.sum(scores[:, None] * values, axis=0)
        z = z_ptr
        if z_ptr is not None:
            z = z_ptr + b.to(tl.int64) * z_strides[0] + t * z_strides[1] + h * z_strides[2] + p
        store_output(y, x, D_ptr, z, out + t * (H * P), h, p_mask)


@triton.jit
def _fold_kernel(  # type: ignore[no-untyped-def]
    A_ptr, states_ptr, values_ptr, keys_ptr, gates_ptr,
    read_slots_ptr, write_slots_ptr, rows_ptr, start_ptr, length_ptr,
    states_ss: tl.constexpr, values_sr: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    read = tl.load(read_slots_ptr + b).to(tl.int64)
    if read < 0:
        return
    write = tl.load(write_slots_ptr + b).to(tl.int64)
    row = tl.load(rows_ptr + b).to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < P, n < N
    mask = p_mask[:, None] & n_mask[None, :]
    tile = states_ptr + h * (P * N) + p[:, None] * N + n[None, :]
    state = tl.load(tile + read * states_ss, mask=mask, other=0.0).to(tl.float32)
    state = fold_entries(
        state, values_ptr + row * values_sr + h * (W * P), keys_ptr + row * keys_sr + (h // HEADS_PER_GROUP) * (W * N),
        gates_ptr + row * gates_sr + h * W, tl.load(A_ptr + h), p, p_mask, n, n_mask,
        tl.load(start_ptr + b), tl.load(length_ptr + b), W, P, N,
    )  # fmt: skip
    tl.store(tile + write * states_ss, state.to(states_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch"])
def _advance_kernel(  # type: ignore[no-untyped-def]
    start_ptr, length_ptr, rows_ptr, accepted_ptr, batch,
    T: tl.constexpr, WIDEST: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    accepted = tl.load(accepted_ptr + b, mask=b < batch, other=0)
    live = accepted > 0
    row = tl.load(rows_ptr + b, mask=live, other=0).to(tl.int64)
    start = tl.load(start_ptr + row, mask=live, other=0)
    length = tl.load(length_ptr + row, mask=live, other=0)
    folded = tl.where(length + T + WIDEST > W, length, 0)
    tl.store(start_ptr + row, (start + folded) % W, mask=live)
    tl.store(length_ptr + row, length - folded + accepted, mask=live)


def mamba2_replay_triton(
    states: Tensor,
    values: Tensor,
    keys: Tensor,
    gates: Tensor,
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
    slots: Tensor,
    rows: Tensor,
    start: Tensor,
    length: Tensor,
    widest: int | None = None,
) -> Tensor:
    """Triton `mamba2_replay`."""
    return launch_replay(
        states, values, keys, gates, x, dt, A, B, C, D, dt_bias, dt_limit, z, slots, rows, start, length,
        widest or x.shape[1],
    )  # fmt: skip


def launch_replay(
    states: Tensor,
    values: Tensor,
    keys: Tensor,
    gates: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    z: Tensor | None,
    slots: Tensor,
    rows: Tensor,
    start: Tensor,
    length: Tensor,
    widest: int,
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
    tile, width = step_tile(batch, tokens, states), gates.shape[2]
    _replay_kernel[batch, heads, triton.cdiv(dim, tile.block_p)](
        x, B, C, dt, z, out, weight, bias, A, D, dt_bias,
        conv, states, values, keys, gates, slots, start_positions, rows, start, length,
        strides(x), strides(B), strides(C), strides(dt), strides(z),
        strides(conv)[0], states.stride(0), values.stride(0), keys.stride(0), gates.stride(0),
        *dt_limit,
        T=tokens, H=heads, P=dim, N=states.shape[3], HEADS_PER_GROUP=heads // B.shape[2],
        TAPS=weight.shape[1] if weight is not None else 0, WC=conv.shape[2] if conv is not None else 1,
        W=width, WIDEST=widest, BLOCK_P=tile.block_p, BLOCK_N=tile.block_n, BLOCK_W=triton.next_power_of_2(width),
        num_warps=tile.num_warps, **pdl(x.device),
    )  # fmt: skip
    return out


def mamba2_fold_triton(
    states: Tensor,
    values: Tensor,
    keys: Tensor,
    gates: Tensor,
    A: Tensor,
    *,
    read_slots: Tensor,
    write_slots: Tensor,
    rows: Tensor,
    start: Tensor,
    length: Tensor,
) -> None:
    """Triton `mamba2_fold`."""
    batch, (_, heads, dim, state_dim) = len(read_slots), states.shape
    if batch == 0:
        return
    tile = step_tile(batch, 1, states)
    _fold_kernel[batch, heads, triton.cdiv(dim, tile.block_p)](
        A, states, values, keys, gates, read_slots, write_slots, rows, start, length,
        states.stride(0), values.stride(0), keys.stride(0), gates.stride(0),
        P=dim, N=state_dim, HEADS_PER_GROUP=heads // keys.shape[1], W=gates.shape[2],
        BLOCK_P=tile.block_p, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
        **pdl(states.device),
    )  # fmt: skip


def advance_ring_triton(
    start: Tensor, length: Tensor, rows: Tensor, accepted: Tensor, num_tokens: int, width: int, widest: int
) -> None:
    """Triton `advance_ring`: one launch."""
    if len(rows):
        _advance_kernel[(triton.cdiv(len(rows), 128),)](
            start, length, rows, accepted, len(rows), T=num_tokens, WIDEST=widest, W=width, BLOCK=128,
            **pdl(start.device),
        )  # fmt: skip
