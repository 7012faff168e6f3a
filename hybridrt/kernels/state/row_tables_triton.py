"""Triton kernels of row_tables.py."""

import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import RowTables

BLOCK, CLEARED = 128, 1024  # rows, and numbers of a slot, of a program


@jit_kernel(do_not_specialize=["count"])
def _rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, slots_ptr, phases_ptr, state_slots_ptr, ring_start_ptr, ring_length_ptr, count, apart,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    row = tl.load(rows_ptr + i, mask=mask, other=0)
    start = tl.zeros([BLOCK], tl.int32)
    if phases_ptr is not None:
        start += (tl.load(phases_ptr + i, mask=mask, other=0) % apart).to(tl.int32)
    tl.store(state_slots_ptr + row, tl.load(slots_ptr + i, mask=mask).to(tl.int32), mask=mask)
    tl.store(ring_start_ptr + row, start, mask=mask)
    tl.store(ring_length_ptr + row, tl.zeros([BLOCK], tl.int32), mask=mask)


@jit_kernel
def _pages_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, indices_ptr, pages_ptr, tables_ptr, tables_sr, tables_sg, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid [entries, page groups]."""
    i, group = tl.program_id(0), tl.program_id(1)
    offset = tl.arange(0, BLOCK)
    row, index = tl.load(rows_ptr + i).to(tl.int64), tl.load(indices_ptr + i)
    slots = tl.load(pages_ptr + i * tl.num_programs(1) + group) * PAGE + offset
    table = tables_ptr + row * tables_sr + group * tables_sg
    tl.store(table + index * PAGE + offset, slots.to(tl.int32), mask=offset < PAGE)


@jit_kernel
def _clear_kernel(  # type: ignore[no-untyped-def]
    states_ptr, slots_ptr, states_sl, states_ss: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.load(slots_ptr + tl.program_id(2)).to(tl.int64)
    if slot > 0:
        numbers = states_ptr + tl.program_id(1).to(tl.int64) * states_sl + slot * states_ss
        for start in range(tl.program_id(0) * BLOCK, SIZE, tl.num_programs(0) * BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(numbers + i, tl.zeros([BLOCK], states_ptr.dtype.element_ty), mask=i < SIZE)


@jit_kernel(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows_ptr"])
def _tokens_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, tokens_ptr, last_tokens_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    row = tl.load(rows_ptr + i, mask=mask, other=0)
    tl.store(last_tokens_ptr + row, tl.load(tokens_ptr + i, mask=mask).to(tl.int32), mask=mask)


def enter_rows_triton(rows: Tensor, state_slots: Tensor, phases: Tensor | None, apart: int, tables: RowTables) -> None:
    """See hybridrt.kernels.state.row_tables.enter_rows."""
    if count := len(rows):
        _rows_kernel[cdiv(count, BLOCK),](rows, state_slots, phases, *tables, count, apart, BLOCK=BLOCK, num_warps=4)


def clear_slots_triton(states: Tensor, state_slots: Tensor) -> None:
    """See hybridrt.kernels.state.row_tables.clear_slots."""
    layers, _, size = states.shape
    if states.numel() and len(state_slots):
        programs = min(cdiv(size, CLEARED), 16)
        _clear_kernel[programs, layers, len(state_slots)](
            states, state_slots, *states.stride()[:2], SIZE=size, BLOCK=CLEARED, num_warps=4
        )


def enter_pages_triton(rows: Tensor, page_indices: Tensor, pages: Tensor, tables: Tensor, page_size: int) -> None:
    """See hybridrt.kernels.state.row_tables.enter_pages."""
    if pages.numel():
        _pages_kernel[tuple(pages.shape)](
            rows, page_indices, pages, tables, tables.stride(0), tables.stride(1),
            PAGE=page_size, BLOCK=next_power_of_2(page_size), num_warps=1,
        )  # fmt: skip


def enter_tokens_triton(rows: Tensor, tokens: Tensor, last_tokens: Tensor) -> None:
    """See hybridrt.kernels.state.row_tables.enter_tokens."""
    if count := len(rows):
        _tokens_kernel[cdiv(count, BLOCK),](
            rows, tokens, last_tokens, count, BLOCK=BLOCK, num_warps=4, **pdl(rows.device)
        )
