"""Running sums within each request: y_t = S + x_1 + ... + x_t, and S becomes the last y.

The simplest recurrence, for the history branch's mode "prefix_sum". Its results are easy to predict, so tests notice a
wrong slot, a lost state or a sum that continues into the next row of a batch. Sums are float32 throughout.
"""

from math import prod

import torch
from torch import Tensor

from hybridrt.errors import ConfigError
from hybridrt.kernels.operation import by, operation
from hybridrt.kernels.records import IntermediateStates, StateSlots
from hybridrt.kernels.slots import pad_mask, read_rows, write_rows


@operation(by("triton"))
def prefix_sum_varlen(x: Tensor, state: StateSlots, query_start_loc: Tensor) -> Tensor:
    """Running sums of ragged rows, packed along one axis.

    Args:
        x: [T, *dims] of any number of dims; row b holds x[query_start_loc[b]:query_start_loc[b+1]].
        state: float32 sums, as many numbers a slot as dims has.
        query_start_loc: [B+1] int32. Tokens past its last entry get zeros.

    Returns:
        [T, *dims] in x's dtype.

    Raises:
        ConfigError: states and x do not hold as many numbers, or states are not float32.
    """
    shape = x.shape
    states, read_slots, write_slots = state
    x, states = flat(x, 1, states)
    out = torch.zeros_like(x)
    lens = query_start_loc.diff().tolist()
    first = 0
    for row, (count, slot) in enumerate(zip(lens, read_slots.tolist(), strict=True)):
        if count and slot >= 0:
            sums = states[slot] + x[first : first + count].float().cumsum(0)
            states[write_slots[row]] = sums[-1]
            out[first : first + count] = sums
        first += count
    return out.view(shape)


@operation(by("triton"))
def prefix_sum_update(x: Tensor, state: StateSlots, intermediate: IntermediateStates | None = None) -> Tensor:
    """Running sums of T new tokens of each row: decode (T = 1), verify of a chain or of a tree (T > 1).

    Args:
        x: [B, T, *dims].
        state: as in `prefix_sum_varlen`.
        intermediate: if given, the pool is left alone and the sum after each token stored.

    Returns:
        [B, T, *dims] in x's dtype.
    """
    shape, (stored, rows, parents) = x.shape, stored_sums(intermediate, x.shape[1])
    states, read_slots, write_slots = state
    x, states = flat(x, 2, states)
    initial = current = read_rows(states, read_slots)
    out = torch.empty(x.shape, device=x.device)
    for t in range(x.shape[1]):
        if parents is not None:
            parent = parents[:, t, None, None].long()
            of_parent = out.gather(1, parent.clamp(min=0).expand(-1, 1, x.shape[2])).squeeze(1)
            current = torch.where(parent[:, 0] < 0, initial, of_parent)
        current = current + x[:, t].float()
        out[:, t] = current
    if stored is None:
        write_rows(states, write_slots, current)
    else:
        assert rows is not None
        write_rows(stored, torch.where(read_slots < 0, -1, rows), out)
    return out.masked_fill_(pad_mask(read_slots, 3), 0.0).to(x.dtype).view(shape)


def flat(x: Tensor, leading: int, states: Tensor) -> tuple[Tensor, Tensor]:
    """x and states with one last dimension."""
    numbers = prod(x.shape[leading:])
    if states.dtype != torch.float32 or prod(states.shape[1:]) != numbers:
        raise ConfigError(
            f"running sums of {numbers} numbers a token need as many float32 numbers a slot; states are "
            f"{states.dtype} of shape {tuple(states.shape[1:])}"
        )
    return x.reshape(*x.shape[:leading], numbers), states.view(len(states), numbers)


def stored_sums(
    intermediate: IntermediateStates | None, tokens: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Where the sums after `tokens` tokens of each row are stored, [R+1, T, numbers]; rows and parents."""
    if intermediate is None:
        return None, None, None
    return intermediate.stored.flatten(2)[:, :tokens], intermediate.rows, intermediate.parents
