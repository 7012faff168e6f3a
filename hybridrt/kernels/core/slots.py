"""Reads, writes and checks pool rows by slot (-1 is padding), and views of tensors by head and by token.

Only checks wait for the device. Views and their copies keep strides: Triton compiles kernels by the
strides of their arguments.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridrt.base.device import is_capturing
from hybridrt.base.errors import HybridrtError, PoolError
from hybridrt.kernels.core.records import StateSlots

# Entry 0 of a pool is scratch, so slot 0 may mean something else.
SCRATCH = 0  # padding may read and write it: the numbers are finite, and no request gets them
NO_SLOT = 0  # the model keeps no state, or this one is not saved
OWN_SLOT = 0  # the slot of the row itself
PADDING_SLOT = -1  # kernels read zeros for the row and write nothing
# With HYBRIDRT_DEBUG=1, values on the device are checked too, which waits for the device.
DEBUG = os.environ.get("HYBRIDRT_DEBUG") == "1"


def pad_mask(slots: Tensor, ndim: int) -> Tensor:
    """True for padding rows: `slots` [B] as [B, 1, ...] with `ndim` dimensions."""
    return (slots < 0).view(-1, *[1] * (ndim - 1))


def may_look(device: torch.device) -> bool:
    """True if the host may read values of a device: always on a CPU, elsewhere with HYBRIDRT_DEBUG=1,
    but not while a graph is recorded."""
    return device.type == "cpu" or (DEBUG and not is_capturing())


def check_range(name: str, values: Tensor, end: int, error: type[HybridrtError] = PoolError) -> None:
    """Raises `error` unless all values are in [0, end), if they may be read."""
    if values.numel() and may_look(values.device):
        low, high = map(int, torch.aminmax(values))
        if low < 0 or high >= end:
            raise error(f"{name} holds {low if low < 0 else high}; valid are 0 to {end - 1}")


def read_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Copy of pool[slots] [B, ...]; padding rows get the scratch row 0."""
    return pool.index_select(0, slots.clamp(min=0))


def initial_states(states: Tensor, slots: Tensor, has_initial_state: Tensor) -> Tensor:
    """[B, *state] float32: a copy of states[slots], zeros where has_initial_state [B] is False."""
    found = states.index_select(0, slots.clamp(min=0)).float()
    return found.masked_fill_(~has_initial_state.view(-1, *[1] * (states.ndim - 1)), 0.0)


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
    kept = torch.where(state.read_state_slots < 0, PADDING_SLOT, rows)
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


def by_head(channels: Tensor, heads: int, dim: int) -> Tensor:
    """[..., heads * dim] as [..., heads, dim]. `unflatten` would change the token stride of one
    token."""
    *outer, inner = channels.stride()
    return channels.as_strided((*channels.shape[:-1], heads, dim), (*outer, dim * inner, inner))


def split_heads(channels: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
    """The neighbouring parts of [..., C], by (heads, dim) each: [..., heads, dim], as `by_head`."""
    *outer, inner = channels.stride()
    start, found = channels.storage_offset(), []
    for heads, dim in shapes:
        strides = (*outer, dim * inner, inner)
        found.append(channels.as_strided((*channels.shape[:-1], heads, dim), strides, start))
        start += heads * dim * inner
    return found


def take_tokens(inputs: Sequence[Tensor | None], tokens: Tensor) -> list[Tensor | None]:
    """Each input at some tokens, with its own strides. Parts of one projection become parts of one
    copy.

    Args:
        inputs: [T, ...] each. If tokens interleave in memory, the copy is dense.
        tokens: [t] int64.
    Returns:
        [t, ...] each; None for None.
    """
    merged = defaultdict[tuple[int, int, torch.dtype], dict[int, Tensor]](dict)
    for i, t in enumerate(inputs):
        if t is not None:
            merged[t.untyped_storage().data_ptr(), t.stride(0), t.dtype][i] = t
    taken: list[Tensor | None] = [None] * len(inputs)
    for (_, stride, _), parts in merged.items():
        first = min(t.storage_offset() for t in parts.values())
        width = max(t.storage_offset() + _span(t) for t in parts.values()) - first
        if width > stride and len(parts) > 1:
            for i, t in parts.items():
                (taken[i],) = take_tokens((t,), tokens)
            continue
        if width > stride:  # tokens interleave: no copy has these strides
            for i, t in parts.items():
                taken[i] = t.index_select(0, tokens)
            continue
        source = next(iter(parts.values()))
        rows = source.as_strided((len(source), width), (stride, 1), first)
        copy = source.new_empty_strided((len(tokens), width), (stride, 1))
        torch.index_select(rows, 0, tokens, out=copy)
        for i, t in parts.items():
            taken[i] = copy.as_strided((len(tokens), *t.shape[1:]), t.stride(), t.storage_offset() - first)
    return taken


def _span(t: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True))
