"""Triton kernel of the running sums: a program walks the tokens of one row in tiles, for a block of columns."""

import torch
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.records import StateSlots
from hybridrt.kernels.mamba.prefix_sum import prefix_sum_update
from hybridrt.kernels.state.conv_and_gates_triton import strides

COLUMNS, TOKENS = 32, 64  # columns of a program, and most tokens of one of its tiles


@jit_kernel
def _prefix_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, states_ptr, read_ptr, write_ptr, starts_ptr, stored_ptr, rows_ptr, x_st, states_ss, stored_sr,
    T: tl.constexpr, C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows of T tokens each, or between starts[b] and starts[b + 1] where T is 0."""
    b = tl.program_id(0)
    read, write = tl.load(read_ptr + b).to(tl.int64), tl.load(write_ptr + b).to(tl.int64)
    first, end = b * T, b * T + T
    if T == 0:
        first, end = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    if (read < 0) | (first == end):
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = c < C
    total = tl.load(states_ptr + read * states_ss + c, mask=column, other=0.0)
    for start in range(first, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        at, mask = token.to(tl.int64)[:, None], (token < end)[:, None] & column[None, :]
        x = tl.load(x_ptr + at * x_st + c[None, :], mask=mask, other=0.0).to(tl.float32)
        sums = total[None, :] + tl.cumsum(x, 0)
        tl.store(out_ptr + at * C + c[None, :], sums.to(out_ptr.dtype.element_ty), mask=mask)
        if stored_ptr is not None:
            stored = tl.load(rows_ptr + b).to(tl.int64) * stored_sr + (token - first)[:, None] * C + c[None, :]
            tl.store(stored_ptr + stored, sums, mask=mask)
        # The last sum itself, not the same numbers added in another order.
        last = tl.arange(0, BLOCK_T) == BLOCK_T - 1
        total = tl.sum(tl.where(last[:, None], sums, 0.0), 0)
    if stored_ptr is None:
        tl.store(states_ptr + write * states_ss + c, total, mask=column)


def prefix_sum_varlen_triton(x: Tensor, state: StateSlots, query_start_loc: Tensor) -> Tensor:
    """Triton `prefix_sum_varlen`."""
    return _launch(x, state, query_start_loc, 0)


def prefix_sum_update_triton(x: Tensor, state: StateSlots) -> Tensor:
    """Triton `prefix_sum_update`. With predecessors, which are rare, the reference serves."""
    if state.intermediate is not None and state.intermediate.predecessors is not None:
        return prefix_sum_update.reference(x, state)
    return _launch(x.flatten(0, 1), state, None, x.shape[1]).view(x.shape)


def _launch(x: Tensor, state: StateSlots, starts: Tensor | None, tokens: int) -> Tensor:
    kept = state.intermediate
    stored, rows = (None, None) if kept is None else (kept.stored, kept.rows)
    columns, batch = x.shape[1], len(state.read_state_slots)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _prefix_sum_kernel[batch, cdiv(columns, COLUMNS)](
        x, out, state.states, state.read_state_slots, state.write_state_slots, starts, stored, rows, x.stride(0),
        state.states.stride(0), strides(stored)[0],
        T=tokens, C=columns, BLOCK_T=next_power_of_2(tokens or TOKENS), BLOCK_C=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
