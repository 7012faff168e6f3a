"""Reads and writes pool rows by slot; slot -1 is padding. Nothing here waits for the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrt.kernels.core.records import StateSlots

# Entry 0 of a pool is scratch, so slot 0 may mean something else.
SCRATCH = 0  # padding may read and write it: the numbers are finite, and no request gets them
NO_SLOT = 0  # the model keeps no state, or this one is not saved
OWN_SLOT = 0


def pad_mask(slots: Tensor, ndim: int) -> Tensor:
    """True for padding rows: `slots` [B] as [B, 1, ...] with `ndim` dimensions."""
    return (slots < 0).view(-1, *[1] * (ndim - 1))


def neighbours(slots: Tensor) -> tuple[slice, Tensor | None] | None:
    """CPU slots [B] as a slice of the pool, without a copy, if they are consecutive in any order.

    Also returns the row of each entry, [B] int64; None if they are in order. Returns None otherwise
    or with padding, and on a GPU, where looking would wait for the device.
    """
    if slots.device.type != "cpu":
        return None
    numbers = slots.tolist()
    first, end = min(numbers), min(numbers) + len(numbers)
    in_order = list(range(first, end))
    if first < 0 or sorted(numbers) != in_order:
        return None
    return slice(first, end), None if numbers == in_order else slots.argsort()


def read_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Copy of pool[slots] [B, ...]; padding rows get the scratch row 0."""
    return pool.index_select(0, slots.clamp(min=0))


def initial_states(states: Tensor, slots: Tensor, has_initial_state: Tensor) -> Tensor:
    """[B, *state] float32: a copy of states[slots], zeros where has_initial_state [B] is False."""
    return read_rows(states, slots).float().masked_fill_(~has_initial_state.view(-1, *[1] * (states.ndim - 1)), 0.0)


def write_rows(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """pool[slots] = values [B, ...] in the pool's dtype; padding rows touch nothing."""
    # Padding writes to row 0, which is restored: masking all costs more.
    scratch = pool[:1].clone()
    pool.index_copy_(0, slots.clamp(min=0).long(), values.to(pool.dtype))
    pool[:1] = scratch


def advance_states(state: StateSlots, tokens: int, step: Callable[[int, Tensor], Tensor]) -> None:
    """Advances the states of B rows by `tokens` tokens each and leaves them where `state` says.

    The state is rounded to its dtype after every token, as in steps of one token. A token starts
    from the state after its predecessor.

    Args:
        step: (token number, state before it [B, *state] float32, may be overwritten) to the state
            after it.
    """
    states = state.states
    current = read_rows(states, state.read_state_slots).float()
    if state.intermediate is None:
        for t in range(tokens):
            current = step(t, current).to(states.dtype).float()
        write_rows(states, state.write_state_slots, current)
        return
    stored, rows, predecessors = state.intermediate.stored, state.intermediate.rows, state.intermediate.predecessors
    initial = current
    kept = torch.where(state.read_state_slots < 0, -1, rows)
    for t in range(tokens):
        if predecessors is not None:
            found = stored[rows.clamp(min=0), predecessors[:, t].clamp(min=0)].float()
            current = torch.where(pad_mask(predecessors[:, t], found.ndim), initial, found)
        current = step(t, current).to(states.dtype).float()
        write_rows(stored[:, t], kept, current)


def write_columns(rings: Tensor, slots: Tensor, columns: Tensor, values: Tensor, rows: Tensor | None = None) -> None:
    """rings[rows[b], :, columns[b, i]] = values [B, n, C, ...]; padding rows (slot -1) touch
    nothing. rows [B]: places of state rings; None for `slots`, as for conv rings."""
    ring = (slots.clamp(min=0) if rows is None else rows)[:, None]
    old = rings[ring, :, columns]
    rings[ring, :, columns] = torch.where(pad_mask(slots, values.ndim), old, values.to(rings.dtype))


def real_tokens(slots: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """[T] bool: the token belongs to a row of `query_start_loc` [B+1] that is not padding."""
    tokens = torch.arange(num_tokens, device=slots.device, dtype=query_start_loc.dtype)
    row = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    return (row < len(slots)) & (slots[row.clamp(max=len(slots) - 1)] >= 0)
