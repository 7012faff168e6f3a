"""Triton kernel for scans of few tokens: time steps and states of a request's chunks in one launch.

A program takes a tile of a head's state through the request's chunks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.decay_sums_triton import finite_rate, split_gates
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_width, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.state.conv_and_gates_triton import strides, time_step

ROWS_AT_ONCE = 2  # a graph has room for more requests than most steps


@triton.jit
def chunk_span(cu_chunks_ptr, chunk):  # type: ignore[no-untyped-def]
    """First token of a chunk, in 64 bits, and how many it has."""
    first = tl.load(cu_chunks_ptr + chunk)
    return first.to(tl.int64), tl.load(cu_chunks_ptr + chunk + 1) - first


@jit_kernel(do_not_specialize=["num_tokens", "rows"])
def _few_tokens_states_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, B_ptr, A_ptr, dt_bias_ptr, step_ptr, cum_ptr, rest_ptr, states_ptr, entry_ptr,
    read_slots_ptr, write_slots_ptr, has_initial_ptr, cu_chunks_ptr, first_chunk_ptr, last_chunk_ptr, saves_ptr,
    x_strides: tl.constexpr, dt_st: tl.constexpr, B_strides: tl.constexpr, states_ss: tl.constexpr, num_tokens, rows,
    dt_min, dt_max, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block, h = tl.program_id(0), tl.program_id(1)
    p = block // tl.cdiv(N, BLOCK_N) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = block % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (p < P)[:, None] & (n < N)[None, :]
    cell = h * (P * N) + p[:, None] * N + n[None, :]
    cells = states_ptr + cell
    decay = finite_rate(tl.load(A_ptr + h))
    k = tl.arange(0, BLOCK_K)
    for b in range(tl.program_id(2), rows, tl.num_programs(2)):
        read = tl.load(read_slots_ptr + b).to(tl.int64)
        first_chunk, end_chunk = tl.load(first_chunk_ptr + b), tl.load(last_chunk_ptr + b) + 1
        if read < 0:
            end_chunk = first_chunk
        has_initial = tl.zeros([BLOCK_P, BLOCK_N], tl.int32) + tl.load(has_initial_ptr + b).to(tl.int32) > 0
        own = mask & (tl.zeros([BLOCK_P, BLOCK_N], tl.int64) + read >= 0)
        state = tl.load(cells + read * states_ss, mask=own & has_initial, other=0.0).to(tl.float32)
        entry = entry_ptr + first_chunk.to(tl.int64) * (H * P * N) + cell
        for chunk in range(first_chunk, end_chunk):
            tl.store(entry, state.to(entry_ptr.dtype.element_ty), mask=mask)
            entry += H * P * N
            start, size = chunk_span(cu_chunks_ptr, chunk)
            row = h.to(tl.int64) * num_tokens + start
            x_source = x_ptr + start * x_strides[0] + h * x_strides[1] + p[None, :]
            B_source = B_ptr + start * B_strides[0] + (h // HEADS_PER_GROUP) * B_strides[1] + n[None, :]
            before, rest_before = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.float32)
            for offset in range(0, size, BLOCK_K):
                token = offset + k
                inside = token < size
                dt = dt_ptr + start * dt_st + h + token * dt_st
                step = tl.where(inside, time_step(dt, dt_bias_ptr, h + k * 0, inside, dt_min, dt_max), 0.0)
                gates, rests = split_gates(step * decay, CHUNK)
                cum, rest = tl.cumsum(gates, axis=0), rest_before + tl.cumsum(rests, axis=0)
                step *= tl.exp(-rest)
                if block == 0:
                    tl.store(step_ptr + row + token, step, mask=inside)
                    tl.store(cum_ptr + row + token, before + cum, mask=inside)
                    tl.store(rest_ptr + row + token, rest, mask=inside)
                total, all_rest = tl.sum(gates, axis=0), tl.sum(rests, axis=0)
                before += total
                rest_before += all_rest
                x_mask, B_mask = inside[:, None] & (p < P)[None, :], inside[:, None] & (n < N)[None, :]
                x = tl.load(x_source + token[:, None] * x_strides[0], mask=x_mask, other=0.0)
                key = tl.load(B_source + token[:, None] * B_strides[0], mask=B_mask, other=0.0)
                weighted = (x.to(tl.float32) * (step * tl.exp(total - cum + rest_before))[:, None]).to(key.dtype)
                state = state * tl.exp(total + all_rest) + tl.dot(tl.trans(weighted), key, input_precision="ieee")
            if saves_ptr is not None:
                save = tl.load(saves_ptr + chunk).to(tl.int64)
                if save > 0:
                    tl.store(cells + save * states_ss, state.to(states_ptr.dtype.element_ty), mask=mask)
        write = tl.load(write_slots_ptr + b).to(tl.int64)
        tl.store(cells + write * states_ss, state.to(states_ptr.dtype.element_ty), mask=own)


class ScanWork(NamedTuple):
    """Results that the kernels of a scan pass to each other.

    Attributes:
        cum, rest: [H, T] float32, running sums of A dt within each chunk: of its multiples, and of its
            rests (`decay_sums_triton.py`).
        step: [H, T] float32, dt / exp(rest).
        entry_states: [n, H, P, N] in x's dtype, the states before n chunks.
        shape: shape of a head, in the kernels' constants.
    """

    step: Tensor
    cum: Tensor
    rest: Tensor
    entry_states: Tensor
    shape: dict[str, int]


def walk_states(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, work: ScanWork) -> None:
    """Fills `work` and the states in one launch."""
    x, shape, read_slots, plan = inputs.x, work.shape, state.read_state_slots, prompts.plan
    tile = states_tile(plan.chunk_size, shape["P"], shape["N"])
    blocks = cdiv(shape["P"], tile["BLOCK_P"]) * cdiv(shape["N"], tile["BLOCK_N"])
    _few_tokens_states_kernel[blocks, shape["H"], min(len(read_slots), ROWS_AT_ONCE)](
        x, inputs.dt, inputs.B, weights.A, weights.dt_bias, work.step, work.cum, work.rest, state.states,
        work.entry_states, read_slots, state.write_state_slots, prompts.has_initial_state,
        plan.cu_chunk_seqlens, plan.first_chunk, plan.last_chunk,
        None if prompts.saves is None else prompts.saves.chunk_slots,
        strides(x), inputs.dt.stride(0), strides(inputs.B), state.states.stride(0), x.shape[0], len(read_slots),
        *weights.dt_limit, **shape, CHUNK=next_power_of_2(plan.chunk_size), **tile, **pdl(x.device),
    )  # fmt: skip


def states_tile(size: int, dim: int, state_dim: int) -> dict[str, int]:
    """Tile of a state [P, N] that a program takes through all chunks, and how many tokens are
    multiplied at a time.
    """
    return {
        "BLOCK_P": block(dim, 64), "BLOCK_N": block(state_dim, 64), "BLOCK_K": block(size, 128),
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def block(size: int, limit: int) -> int:
    """The block for a dimension of `size`: a power of two, at least 16 (a tensor core's least), at
    most `limit`.
    """
    return min(limit, dot_width(size))
