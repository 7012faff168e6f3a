"""Entries in the tables of request rows around a step, one launch each on a GPU."""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import RowTables


@operation(By("triton"))
def enter_rows(rows: Tensor, state_slots: Tensor, phases: Tensor | None, apart: int, tables: RowTables) -> None:
    """Gives `rows` their state slots, and empty rings that begin at column `phases` modulo `apart`, 0 if that is None.

    Args:
        rows, state_slots, phases: [n] integers.
    """
    index = rows.long()
    tables.req_to_state_slot[index] = state_slots.int()
    tables.ring_start[index] = torch.zeros_like(state_slots).int() if phases is None else (phases % apart).int()
    tables.ring_length.index_fill_(0, index, 0)


@operation(By("triton"))
def clear_slots(states: Tensor, state_slots: Tensor) -> None:
    """Zeroes slots in all layers. The scratch slot 0, which pads them, stays as it is.

    Args:
        states: [L, S + 1, n] pool of any dtype, contiguous.
        state_slots: [b] integers.
    """
    states.index_fill_(1, state_slots[state_slots > 0].long(), 0)


@operation(By("triton"))
def enter_pages(rows: Tensor, page_indices: Tensor, pages: Tensor, tables: Tensor, page_size: int) -> None:
    """Page `page_indices[i]` of row `rows[i]` becomes page `pages[i, g]` of each page group g: its
    token slots, for all i.

    Args:
        rows, page_indices: [n] integers. pages: [n, G] contiguous.
        tables: [R + 1, G, max_context] int32, whole pages.
    """
    by_page = tables.view(*tables.shape[:2], -1, page_size)
    offsets = torch.arange(page_size, device=pages.device)
    by_page[rows.long(), :, page_indices.long()] = (pages[..., None] * page_size + offsets).int()


@operation(By("triton"))
def enter_tokens(rows: Tensor, tokens: Tensor, last_tokens: Tensor) -> None:
    """`tokens` [n] int64 become the last tokens of `rows` [n] int32, in [R + 1] int32."""
    last_tokens[rows.long()] = tokens.int()
