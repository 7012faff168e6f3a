"""Triton kernels of `selective_scan`: three launches over the chunks of a plan.

1. `_mamba1_chunks_kernel`: each chunk's final state if it started from zero, and its summed time.
2. `_mamba1_entry_states_kernel`: walks each request's chunks; replaces each local state by the true state before
   the chunk, and writes the last one to the pool.
3. `_mamba1_outputs_kernel`: runs each chunk again from that state and writes the outputs.

Chunks run in parallel; each decay is computed twice for it. A thread holds all states of two
channels, so sums over states need no other thread. For that, tiles are [N, channels], A is
transposed first, and the hint in `_tile` keeps the compiler from giving a thread four channels.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2, zero_after
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.state.conv_and_gates_triton import silu, softplus


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    rates_ptr, CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):
    """Channels i (two a thread), state numbers n, masks of both, and A in powers of two."""
    i = tl.max_contiguous(tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), 2)
    n = tl.arange(0, BLOCK_N)
    i_mask, n_mask = i < CHANNELS, n < N
    mask = n_mask[:, None] & i_mask[None, :]
    begin(PDL)
    rates = tl.load(rates_ptr + n[:, None] * CHANNELS + i[None, :], mask=mask, other=0.0)
    return i, n, i_mask, n_mask, mask, rates


@triton.jit
def _advance(state, rates, dt_bias, x, dt, key, i_mask, n_mask):  # type: ignore[no-untyped-def]
    """Returns the state [N, channels] after one token. `rates`: A in powers of two."""
    x = tl.load(x, mask=i_mask, other=0.0).to(tl.float32)
    key = tl.load(key, mask=n_mask, other=0.0).to(tl.float32)
    step = softplus(tl.load(dt, mask=i_mask, other=0.0).to(tl.float32) + dt_bias)
    state = state * tl.exp2(rates * step[None, :]) + key[:, None] * (step * x)[None, :]
    return state, x, step


@jit_kernel
def _mamba1_chunks_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, rates_ptr, B_ptr, dt_bias_ptr, entry_ptr, times_ptr, cu_chunks_ptr,
    x_st: tl.constexpr, dt_st: tl.constexpr, B_st: tl.constexpr,
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    i, n, i_mask, n_mask, mask, rates = _tile(rates_ptr, CHANNELS, N, BLOCK_I, BLOCK_N, PDL)
    dt_bias = tl.load(dt_bias_ptr + i, mask=i_mask, other=0.0).to(tl.float32)
    state = tl.zeros([BLOCK_N, BLOCK_I], tl.float32)
    time = tl.zeros([BLOCK_I], tl.float32)
    first, end = tl.load(cu_chunks_ptr + chunk), tl.load(cu_chunks_ptr + chunk + 1)
    token = first.to(tl.int64)
    x, dt, key = x_ptr + token * x_st + i, dt_ptr + token * dt_st + i, B_ptr + token * B_st + n
    for _ in range(first, end):
        state, _x, step = _advance(state, rates, dt_bias, x, dt, key, i_mask, n_mask)
        time += step
        x += x_st
        dt += dt_st
        key += B_st
    place = chunk.to(tl.int64)
    tl.store(entry_ptr + (place * N + n[:, None]) * CHANNELS + i[None, :], state, mask=mask)
    tl.store(times_ptr + place * CHANNELS + i, time, mask=i_mask)


@jit_kernel
def _mamba1_entry_states_kernel(  # type: ignore[no-untyped-def]
    rates_ptr, entry_ptr, times_ptr, states_ptr, read_slots_ptr, write_slots_ptr, has_initial_ptr,
    first_chunk_ptr, last_chunk_ptr, saves_ptr, states_ss: tl.constexpr,
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    i, n, i_mask, n_mask, mask, rates = _tile(rates_ptr, CHANNELS, N, BLOCK_I, BLOCK_N, PDL)
    read = tl.load(read_slots_ptr + b).to(tl.int64)
    if read < 0:
        return
    write = tl.load(write_slots_ptr + b).to(tl.int64)
    tile = i[:, None] * N + n[None, :]
    of_pool = i_mask[:, None] & n_mask[None, :]
    has_initial = tl.zeros(of_pool.shape, tl.int32) + tl.load(has_initial_ptr + b).to(tl.int32) > 0
    initial = tl.load(states_ptr + read * states_ss + tile, mask=of_pool & has_initial, other=0.0)
    state = tl.trans(initial).to(tl.float32)
    first = tl.load(first_chunk_ptr + b)
    entry = entry_ptr + (first.to(tl.int64) * N + n[:, None]) * CHANNELS + i[None, :]
    time = times_ptr + first.to(tl.int64) * CHANNELS + i
    for chunk in range(first, tl.load(last_chunk_ptr + b) + 1):
        local = tl.load(entry, mask=mask, other=0.0)
        decay = tl.exp2(rates * tl.load(time, mask=i_mask, other=0.0)[None, :])
        tl.store(entry, state, mask=mask)
        state = state * decay + local
        entry += N * CHANNELS
        time += CHANNELS
        if saves_ptr is not None:
            save = tl.load(saves_ptr + chunk).to(tl.int64)
            if save > 0:
                kept = tl.trans(state).to(states_ptr.dtype.element_ty)
                tl.store(states_ptr + save * states_ss + tile, kept, mask=of_pool)
    tl.store(states_ptr + write * states_ss + tile, tl.trans(state).to(states_ptr.dtype.element_ty), mask=of_pool)


@jit_kernel
def _mamba1_outputs_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, rates_ptr, B_ptr, C_ptr, z_ptr, D_ptr, dt_bias_ptr, entry_ptr, out_ptr,
    read_slots_ptr, cu_chunks_ptr, seq_idx_ptr,
    x_st: tl.constexpr, dt_st: tl.constexpr, B_st: tl.constexpr, C_st: tl.constexpr, z_st: tl.constexpr,
    CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    i, n, i_mask, n_mask, mask, rates = _tile(rates_ptr, CHANNELS, N, BLOCK_I, BLOCK_N, PDL)
    dt_bias = tl.load(dt_bias_ptr + i, mask=i_mask, other=0.0).to(tl.float32)
    D = tl.load(D_ptr + i, mask=i_mask, other=0.0).to(tl.float32)
    first, end = tl.load(cu_chunks_ptr + chunk), tl.load(cu_chunks_ptr + chunk + 1)
    token = first.to(tl.int64)
    out = out_ptr + token * CHANNELS + i
    if tl.load(read_slots_ptr + tl.load(seq_idx_ptr + chunk)) < 0:
        for _ in range(first, end):
            tl.store(out, tl.zeros([BLOCK_I], out_ptr.dtype.element_ty), mask=i_mask)
            out += CHANNELS
        return
    state = tl.load(entry_ptr + (chunk.to(tl.int64) * N + n[:, None]) * CHANNELS + i[None, :], mask=mask, other=0.0)
    x, dt, z = x_ptr + token * x_st + i, dt_ptr + token * dt_st + i, z_ptr + token * z_st + i
    key, query = B_ptr + token * B_st + n, C_ptr + token * C_st + n
    for _ in range(first, end):
        state, new, _step = _advance(state, rates, dt_bias, x, dt, key, i_mask, n_mask)
        read = state * tl.load(query, mask=n_mask, other=0.0).to(tl.float32)[:, None]
        gate = silu(tl.load(z, mask=i_mask, other=0.0).to(tl.float32))
        y = (tl.sum(read, axis=0) + D * new) * gate
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=i_mask)
        x += x_st
        dt += dt_st
        z += z_st
        key += B_st
        query += C_st
        out += CHANNELS


def selective_scan_triton(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts) -> Tensor:
    """`selective_scan` in three launches."""
    x, dt, B, z = inputs.x, inputs.dt, inputs.B, inputs.z
    states, read_slots, plan = state.states, state.read_state_slots, prompts.plan
    assert z is not None
    (tokens, channels), state_dim, chunks = x.shape, states.shape[2], len(plan.seq_idx)
    out = x.new_empty((tokens, channels))
    zero_after(out, plan.num_tokens)
    entry_states = torch.empty((chunks, state_dim, channels), dtype=torch.float32, device=x.device)
    times = torch.empty((chunks, channels), dtype=torch.float32, device=x.device)
    rates = torch.empty((state_dim, channels), dtype=torch.float32, device=x.device)
    torch.mul(weights.A.t(), math.log2(math.e), out=rates)
    sizes = {"CHANNELS": channels, "N": state_dim, "BLOCK_N": next_power_of_2(state_dim), "BLOCK_I": 64}
    launch = {**sizes, "num_warps": 1, **pdl(x.device)}
    grid = (cdiv(channels, 64), chunks)
    _mamba1_chunks_kernel[grid](
        x, dt, rates, B, weights.dt_bias, entry_states, times, plan.cu_chunk_seqlens,
        x.stride(0), dt.stride(0), B.stride(0), **launch,
    )  # fmt: skip
    _mamba1_entry_states_kernel[cdiv(channels, 64), len(read_slots)](
        rates, entry_states, times, states, read_slots, state.write_state_slots, prompts.has_initial_state,
        plan.first_chunk, plan.last_chunk, None if prompts.saves is None else prompts.saves.chunk_slots,
        states.stride(0), **launch,
    )  # fmt: skip
    _mamba1_outputs_kernel[grid](
        x, dt, rates, B, inputs.C, z, weights.D, weights.dt_bias, entry_states, out, read_slots, plan.cu_chunk_seqlens,
        plan.seq_idx, x.stride(0), dt.stride(0), B.stride(0), inputs.C.stride(0), z.stride(0), **launch,
    )  # fmt: skip
    return out
