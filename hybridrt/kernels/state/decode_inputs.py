"""Inputs of a decode graph: page-table entries, tokens, positions and KV slots, in one launch."""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import DecodeRowInputs, TokenInputs


@operation(By("triton", "hybridrt.kernels.state.decode_prep_triton:decode_inputs_triton"))
def decode_inputs(
    out: TokenInputs, step: DecodeRowInputs, last_tokens: Tensor, tables: Tensor, page_size: int,
    mrope_deltas: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills `out` with the tokens of a step's decode rows.

    Padding drafts get KV slot 0, which is never written, and repeat the last sampled token, which
    computes nothing new.

    Args:
        last_tokens: [R + 1] int32, last sampled token of each request row; -1, of logits that were
            not finite, is read as 0.
        tables: [R + 1, G, max_context] int32 token slots in each page group; those of new pages are
            entered first. max_context is 0 for a model without KV: every slot is 0 then.
        mrope_deltas: [R + 1] int32 by request row: what `out.mrope_positions`, which is filled too,
            have more than the positions. None: neither exists.
    """
    rows, num_drafts = step.rows, step.num_drafts
    batch = rows.shape[0]
    tokens = out.input_ids.shape[0] // batch
    ids, where = out.input_ids.view(batch, tokens), out.positions.view(batch, tokens)
    ids[:] = last_tokens[rows, None].clamp(min=0)
    if step.drafts is not None and num_drafts is not None:
        real = torch.arange(tokens - 1, device=rows.device) < num_drafts[:, None]
        ids[:, 1:] = torch.where(real, step.drafts, ids[:, 1:])
    where.copy_(step.seq_lens[:, None] + torch.arange(-tokens, 0, dtype=torch.int32, device=rows.device))
    if mrope_deltas is not None and out.mrope_positions is not None:
        torch.add(where, mrope_deltas[rows, None], out=out.mrope_positions.view(batch, tokens))
    if not tables.shape[2]:
        out.out_cache_loc.zero_()
        return
    padding = 0 if num_drafts is None else tokens - 1 - num_drafts
    _enter_pages(tables, rows, (step.seq_lens - 1 - padding) // page_size, step.new_pages, page_size)
    slots = tables.transpose(0, 1)[:, rows[:, None], where]
    if num_drafts is not None:
        slots = slots.masked_fill(torch.arange(tokens, device=rows.device) > num_drafts[:, None], 0)
    out.out_cache_loc.copy_(slots.flatten(1).view(out.out_cache_loc.shape))


def _enter_pages(tables: Tensor, rows: Tensor, page_index: Tensor, new_pages: Tensor, page_size: int) -> None:
    by_page = tables.view(*tables.shape[:2], -1, page_size)
    offsets = torch.arange(page_size, dtype=torch.int32, device=rows.device)
    fresh = new_pages[..., None] * page_size + offsets
    by_page[rows, :, page_index] = by_page[rows, :, page_index].where(new_pages[..., None] < 0, fresh)
