"""Triton kernel of the running sums: a program walks the tokens of one row for a block of its columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # columns of a program


@triton.jit
def _prefix_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, states_ptr, read_ptr, write_ptr, starts_ptr, stored_ptr, rows_ptr, x_st, stored_sr,
    T: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of T tokens each, or between starts[b] and starts[b + 1] where T is 0."""
    b = tl.program_id(0)
    read, write = tl.load(read_ptr + b).to(tl.int64), tl.load(write_ptr + b).to(tl.int64)
    first, end = b * T, b * T + T
    if T == 0:
        first, end = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    if (read < 0) | (first == end):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    total = tl.load(states_ptr + read * C + c, mask=mask, other=0.0)
    x, out = x_ptr + first.to(tl.int64) * x_st + c, out_ptr + first.to(tl.int64) * C + c
    if stored_ptr is not None:
        stored = stored_ptr + tl.load(rows_ptr + b).to(tl.int64) * stored_sr + c
    for _ in range(end - first):
        total += tl.load(x, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)
        x += x_st
        out += C
        if stored_ptr is not None:
            tl.store(stored, total, mask=mask)
            stored += C
    if stored_ptr is None:
        tl.store(states_ptr + write * C + c, total, mask=mask)


def prefix_sum_varlen_triton(
    x: Tensor, states: Tensor, read_slots: Tensor, write_slots: Tensor, query_start_loc: Tensor
) -> Tensor:
    """`prefix_sum_varlen` for x [T, C], states [S+1, C]."""
    return _launch(x, states, read_slots, write_slots, query_start_loc, None, None, 0)


def prefix_sum_update_triton(
    x: Tensor,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    intermediate_states: Tensor | None,
    rows: Tensor | None,
    parents: None,
) -> Tensor:
    """`prefix_sum_update` of chains for x [B, T, C]."""
    return _launch(x.flatten(0, 1), states, read_slots, write_slots, None, intermediate_states, rows, x.shape[1])


def _launch(
    x: Tensor,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    starts: Tensor | None,
    stored: Tensor | None,
    rows: Tensor | None,
    tokens: int,
) -> Tensor:
    columns = x.shape[1]
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if len(read_slots) and x.numel():
        _prefix_sum_kernel[(len(read_slots), triton.cdiv(columns, BLOCK))](
            x, out, states, read_slots, write_slots, starts, stored, rows, x.stride(0),
            0 if stored is None else stored.stride(0),
            T=tokens, C=columns, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out
