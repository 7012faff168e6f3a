"""Triton kernels of `decode_inputs` and `fill_decode_metadata`, at the head of a decode step."""

import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import DecodeRowInputs, RowTables, TokenInputs
from hybridrt.kernels.state.row_tables import DecodeBuffers


@jit_kernel
def _decode_inputs_kernel(  # type: ignore[no-untyped-def]
    input_ids, positions, out_cache_loc, mrope_positions, mrope_deltas,
    rows, seq_lens, new_pages, drafts, num_drafts, last_tokens, tables,
    tables_sr, tables_sg, locs_sg, TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,
    HAS_KV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [decode rows, page groups]."""
    b, group = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    row = tl.load(rows + b).to(tl.int64)
    length = tl.load(seq_lens + b)
    page = tl.load(new_pages + b * tl.num_programs(1) + group)
    table = tables + row * tables_sr + group * tables_sg
    drafted = 0
    if num_drafts is not None:
        drafted = tl.load(num_drafts + b)
    last_index = (length - TOKENS + drafted) // PAGE
    if page >= 0:
        offset = tl.arange(0, PAGE)
        tl.store(table + last_index * PAGE + offset, page * PAGE + offset)
    t = tl.arange(0, BLOCK_TOKENS)
    live = t < TOKENS
    position = length - TOKENS + t
    # Not from the table: this program's store there is not awaited.
    fresh = position // PAGE == tl.where(page >= 0, last_index, -1)
    real = live & (t <= drafted)
    known = tl.zeros([BLOCK_TOKENS], tl.int32)
    if HAS_KV:
        known = tl.load(table + position, mask=real & (fresh == 0), other=0)
    slot = tl.where(fresh, page * PAGE + position % PAGE, known)
    tl.store(out_cache_loc + group * locs_sg + b * TOKENS + t, tl.where(real, slot, 0), mask=live)
    tl.store(positions + b * TOKENS + t, position, mask=live)
    if mrope_deltas is not None:
        tl.store(mrope_positions + b * TOKENS + t, position + tl.load(mrope_deltas + row), mask=live)
    proposed = tl.load(drafts + b * (TOKENS - 1) + t - 1, mask=real & (t > 0), other=0)
    last = tl.maximum(tl.load(last_tokens + row), 0)
    tl.store(input_ids + b * TOKENS + t, tl.where(real & (t > 0), proposed, last), mask=live)


def decode_inputs_triton(
    out: TokenInputs, step: DecodeRowInputs, last_tokens: Tensor, tables: Tensor, page_size: int,
    mrope_deltas: Tensor | None = None,
) -> None:  # fmt: skip
    """See hybridrt.kernels.state.decode_inputs.decode_inputs."""
    batch = step.rows.shape[0]
    tokens = out.input_ids.shape[0] // batch
    if step.drafts is None:
        step = step._replace(drafts=step.rows)  # no draft is read
    groups, locs = tables.shape[1], out.out_cache_loc
    _decode_inputs_kernel[(batch, groups)](
        *out, mrope_deltas, *step, last_tokens, tables, *tables.stride()[:2], locs.stride(0) if groups > 1 else 0,
        tokens, next_power_of_2(tokens), page_size, tables.shape[2] > 0, num_warps=1,
        **pdl(out.input_ids.device),
    )  # fmt: skip


# Specialising on row counts would compile while serving.
@jit_kernel(do_not_specialize=["num_rows", "num_real"])
def _fill_decode_metadata_kernel(  # type: ignore[no-untyped-def]
    slots, start_positions, accepted, ring_start_out, ring_length_out, req_pool_indices, seq_lens,
    num_rows, num_real, tokens_per_row, req_to_state_slot, ring_start, ring_length, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < num_rows
    real = b < num_real
    row = tl.load(req_pool_indices + b, mask=live, other=0)
    start = tl.load(seq_lens + b, mask=live, other=0) - tokens_per_row
    tl.store(slots + b, tl.where(real, tl.load(req_to_state_slot + row, mask=live, other=0), -1), mask=live)
    tl.store(start_positions + b, tl.where(real, start, 0), mask=live)
    tl.store(accepted + b, real.to(tl.int32), mask=live)
    tl.store(ring_start_out + b, tl.load(ring_start + row, mask=live, other=0), mask=live)
    tl.store(ring_length_out + b, tl.load(ring_length + row, mask=live, other=0), mask=live)


def fill_decode_metadata_triton(
    out: DecodeBuffers,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    num_real: int,
    tokens_per_row: int,
    tables: RowTables,
) -> None:
    """See hybridrt.kernels.state.row_tables.fill_decode_metadata."""
    rows = out.state_slots.shape[0]
    _fill_decode_metadata_kernel[(cdiv(rows, 128),)](
        *out, req_pool_indices, seq_lens, rows, num_real, tokens_per_row, *tables, BLOCK=128, num_warps=4,
    )  # fmt: skip
