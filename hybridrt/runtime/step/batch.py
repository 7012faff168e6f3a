"""What the runtime makes of device views of what `step_inputs` packed: changes of tables, and each ForwardBatch."""

from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.core.records import DecodeRowInputs, TokenInputs
from hybridrt.kernels.sampling.draft_tree import tree_mask, tree_positions
from hybridrt.kernels.state.decode_inputs import decode_inputs
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.step.pack import Sections
from hybridrt.runtime.step.sampling_table import SamplingTable


def enter_tables(pools: Pools, sampling_table: SamplingTable, sections: Sections) -> None:
    """Writes the admissions and page writes of `pack_bookkeeping` to the device tables, zeroes the admitted state
    slots, and copies the pages that it names."""
    table = pools.req_to_token
    if sections["admit_rows"].numel():
        table.admit(sections["admit_rows"], sections["admit_state_slots"], sections["admit_phases"])
        sampling_table.admit(sections["admit_rows"].long(), sections)
    if sections["pages"].numel():
        table.write_pages(sections["page_rows"], sections["page_indices"], sections["pages"])
    if sections["copy_sources"].numel():
        pools.kv.copy_pages(*(sections[name].long() for name in ("copy_sources", "copy_targets")))


def fill_decode(
    inputs: TokenInputs,
    sections: Sections,
    bs: int,
    spec: SpecInfo | None,
    last_tokens: torch.Tensor,
    table: HybridReqToTokenPool,
) -> None:
    """The inputs of the first `bs` rows of `pack_rows`; of draft trees, their masks in `spec` too."""
    names = ("rows", "seq_lens", "new_pages") + (() if spec is None else ("drafts", "num_drafts"))
    step = DecodeRowInputs(*(sections[name][:bs] for name in names))
    decode_inputs(inputs, step, last_tokens, table.req_to_token, table.page_size)
    if spec is not None and spec.tree_mask is not None:
        mask = spec.tree_mask[:bs]
        mask.copy_(tree_mask(sections["ancestors"][:bs]))
        inputs.positions.copy_(tree_positions(inputs.positions, mask))


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
    """A step whose mode follows from its segments. `num_real` None: all rows are real. `of_the_host`: what else
    ForwardBatch has."""
    mode = ForwardMode.TARGET_VERIFY if spec_info else ForwardMode.DECODE
    if num_decode_rows < len(rows):
        mode = ForwardMode.MIXED if num_decode_rows else ForwardMode.EXTEND
    return ForwardBatch(
        mode, inputs.input_ids, inputs.positions, rows, seq_lens, query_start_loc, inputs.out_cache_loc,
        len(rows) if num_real is None else num_real, num_decode_rows, backend, spec_info=spec_info, **of_the_host,
    )  # fmt: skip


def spec_info_of(sections: Sections, tokens: int, tree: bool) -> SpecInfo | None:
    """What a step of T `tokens` a row says of its drafts; None if T is 1. The masks of trees are filled by
    `fill_decode`."""
    if tokens == 1:
        return None
    num_drafts = sections["num_drafts"]
    if not tree:
        return SpecInfo(tokens, num_drafts=num_drafts)
    mask = torch.zeros(len(num_drafts), tokens, tokens, dtype=torch.bool, device=num_drafts.device)
    return SpecInfo(tokens, sections["parents"], mask, num_drafts)
