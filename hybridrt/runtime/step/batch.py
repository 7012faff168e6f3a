"""Applies packed table changes and builds the ForwardBatch from a step's arrays on the device."""

from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.core.records import DecodeRowInputs, TokenInputs
from hybridrt.kernels.state.decode_inputs import decode_inputs
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.step.pack import StepArrays, TableChanges, fill_relations
from hybridrt.runtime.step.sampling_table import SamplingTable


def enter_tables(pools: Pools, sampling_table: SamplingTable, changes: TableChanges[torch.Tensor]) -> None:
    """Applies admissions (and zeroes their state slots), page-table entries and page copies."""
    table = pools.req_to_token
    if (admissions := changes.admissions) is not None:
        table.admit(admissions.rows, admissions.state_slots, admissions.phases)
        sampling_table.enter_rows(admissions.rows.long(), admissions.sampling)
    if (entries := changes.pages) is not None:
        table.write_pages(entries.rows, entries.indices, entries.pages)
    if (copies := changes.copies) is not None:
        pools.kv.copy_pages(copies.sources.long(), copies.targets.long())


def fill_decode(
    inputs: TokenInputs,
    arrays: StepArrays[torch.Tensor],
    bs: int,
    spec: SpecInfo | None,
    last_tokens: torch.Tensor,
    table: HybridReqToTokenPool,
) -> None:
    """Computes the inputs of the first `bs` rows, and what they see in `spec`."""
    drafts = arrays.drafts
    step = DecodeRowInputs(
        arrays.rows[:bs], arrays.seq_lens[:bs], arrays.new_pages[:bs],
        *(() if drafts is None else (drafts.tokens[:bs], drafts.counts[:bs])),
    )  # fmt: skip
    decode_inputs(inputs, step, last_tokens, table.tables, table.page_size)
    if spec is not None and drafts is not None:
        fill_relations(spec, drafts, bs, inputs.positions)


def make_batch(
    backend: AttentionBackend,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    inputs: TokenInputs,
    num_decode_rows: int,
    spec_info: SpecInfo | None,
    num_real: int | None = None,
    **of_the_host: Any,
) -> ForwardBatch:
    """A step, with the mode of its segments.

    Args:
        num_real: None: all rows are real.
        of_the_host: other fields of ForwardBatch.
    """
    mode = ForwardMode.TARGET_VERIFY if spec_info else ForwardMode.DECODE
    if num_decode_rows < len(rows):
        mode = ForwardMode.MIXED if num_decode_rows else ForwardMode.EXTEND
    return ForwardBatch(
        mode, inputs.input_ids, inputs.positions, rows, seq_lens, query_start_loc, inputs.out_cache_loc,
        len(rows) if num_real is None else num_real, num_decode_rows, backend, spec_info=spec_info, **of_the_host,
    )  # fmt: skip
