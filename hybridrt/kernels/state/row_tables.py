"""Entries in the tables of request rows, and the inputs of recurrent decode."""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import RowTables
from hybridrt.kernels.core.slots import NO_SLOT, PADDING_SLOT


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
        states: [L, S + 1, n] pool of any dtype, each slot of a layer contiguous.
        state_slots: [b] integers.
    """
    states.index_fill_(1, state_slots[state_slots > NO_SLOT].long(), 0)


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
    last_tokens.index_copy_(0, rows.long(), tokens.int())


class DecodeBuffers(NamedTuple):
    """Per-row inputs of the recurrent decode kernels, [B] int32 each; prefix views of them serve a graph's bucket.

    Attributes:
        state_slots: -1 for padding rows.
        start_positions: position of the row's first new token.
        accepted: tokens that a plain decode step commits: 1, and 0 for padding rows.
        ring_start, ring_length: snapshot of the row's ring cursors at the head of the step.
    """

    state_slots: Tensor
    start_positions: Tensor
    accepted: Tensor
    ring_start: Tensor
    ring_length: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> "DecodeBuffers":
        """Each begins at a multiple of 16 bytes: kernels are compiled for one alignment."""
        return cls(*torch.zeros((5, -(-rows // 4) * 4), dtype=torch.int32, device=device)[:, :rows])

    def prefix(self, rows: int) -> "DecodeBuffers":
        """Views of the first `rows` entries."""
        return DecodeBuffers(*(t[:rows] for t in self))


@operation(By("triton", "hybridrt.kernels.state.decode_prep_triton:fill_decode_metadata_triton"))
def fill_decode_metadata(
    out: DecodeBuffers,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    num_real: int,
    tokens_per_row: int,
    tables: RowTables,
) -> None:
    """Fills `out` for the B rows `req_pool_indices`, of which the first `num_real` are real.

    Args:
        req_pool_indices, seq_lens: [B] int32; seq_lens counts the step's tokens.
    """
    torch.index_select(tables.req_to_state_slot, 0, req_pool_indices, out=out.state_slots)
    torch.sub(seq_lens, tokens_per_row, out=out.start_positions)
    torch.index_select(tables.ring_start, 0, req_pool_indices, out=out.ring_start)
    torch.index_select(tables.ring_length, 0, req_pool_indices, out=out.ring_length)
    out.accepted.fill_(1)
    if num_real < out.state_slots.shape[0]:
        out.state_slots[num_real:] = PADDING_SLOT
        out.start_positions[num_real:] = 0
        out.accepted[num_real:] = 0
