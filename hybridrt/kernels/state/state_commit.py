"""Commits a verify step: recurrent states, conv inputs and KV of accepted tokens, in place.

Slot -1 and rows that accepted nothing are padding: only scratch entries may change.
"""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import IntermediateStates
from hybridrt.kernels.core.slots import write_columns, write_rows


@operation(By("triton"))
def commit_intermediate(states: Tensor, intermediate: IntermediateStates, state_slots: Tensor, last: Tensor) -> None:
    """In each of L layers states[state_slots[b]] = stored[rows[b], last[b] - 1] where last[b] > 0, in place.

    Args:
        states: [L, S + 1, *state].
        intermediate: `stored` [L, R + 1, T, *state].
        state_slots: [B] int32; -1 leaves everything as it is.
        last: [B] int32, number of the last accepted token + 1; 0 leaves everything as it is.
    """
    kept = state_slots.masked_fill(last == 0, -1)
    for layer, stored in zip(states, intermediate.stored):
        write_rows(layer, kept, stored[intermediate.rows, (last - 1).clamp(min=0)])


@operation(By("triton"))
def commit_conv_window(
    conv: Tensor, intermediate: IntermediateStates, state_slots: Tensor, last: Tensor, positions: Tensor
) -> None:
    """The conv inputs that end at the last accepted token enter the rings of each of L layers, in place.

    Args:
        conv: [L, S + 1, C, Wc] rings; Wc is a power of two.
        intermediate: `stored` [L, R + 1, T, C, K - 1].
        state_slots, last: as in `commit_intermediate`.
        positions: [B] int32, absolute position of that token.
    """
    offsets = torch.arange(1 - intermediate.stored.shape[-1], 1, device=conv.device)
    columns, kept = (positions[:, None] + offsets) & (conv.shape[-1] - 1), state_slots.masked_fill(last == 0, -1)
    for rings, inputs in zip(conv, intermediate.stored):
        write_columns(rings, kept, columns, inputs[intermediate.rows, (last - 1).clamp(min=0)].transpose(1, 2))


@operation()
def move_kv(cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """Slot destination[i] takes what slot source[i] held before any moved, in all layers. Slot 0 is scratch.

    Args:
        cache: [A, pages, page_size, heads, dim]; source, destination: [n] int32 token slots.
    """
    slots = cache.flatten(1, 2)
    slots.index_copy_(1, destination.long(), slots[:, source.long()])
