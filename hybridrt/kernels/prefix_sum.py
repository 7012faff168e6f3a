"""Running sums within each request: y_t = S + x_1 + ... + x_t, and S becomes the last y.

The simplest recurrence, for the history branch's mode "prefix_sum". Its results are easy to predict, so tests notice a
wrong slot, a lost state or a sum that continues into the next row of a batch. Sums are float32 throughout.
"""

from math import prod

import torch
from torch import Tensor

from hybridrt.errors import ConfigError
from hybridrt.kernels.operation import By, operation
from hybridrt.kernels.records import StateSlots
from hybridrt.kernels.slots import advance_states, pad_mask


@operation(By("triton"))
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
    states, read_slots, write_slots, _ = state
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


@operation(By("triton"))
def prefix_sum_update(x: Tensor, state: StateSlots) -> Tensor:
    """Running sums of T new tokens of each row: decode (T = 1), verify of a chain or of a tree (T > 1).

    Args:
        x: [B, T, *dims].
        state: as in `prefix_sum_varlen`.

    Returns:
        [B, T, *dims] in x's dtype.
    """
    shape = x.shape
    x, state = flat_rows(x, state)
    out = torch.empty(x.shape, device=x.device)

    def step(t: int, before: Tensor) -> Tensor:
        out[:, t] = before + x[:, t].float()
        return out[:, t]

    advance_states(state, x.shape[1], step)
    return out.masked_fill_(pad_mask(state.read_state_slots, 3), 0.0).to(x.dtype).view(shape)


def flat(x: Tensor, leading: int, states: Tensor) -> tuple[Tensor, Tensor]:
    """x and states with one last dimension."""
    numbers = prod(x.shape[leading:])
    if states.dtype != torch.float32 or prod(states.shape[1:]) != numbers:
        raise ConfigError(
            f"running sums of {numbers} numbers a token need as many float32 numbers a slot; states are "
            f"{states.dtype} of shape {tuple(states.shape[1:])}"
        )
    return x.reshape(*x.shape[:leading], numbers), states.view(len(states), numbers)


def flat_rows(x: Tensor, state: StateSlots) -> tuple[Tensor, StateSlots]:
    """`flat` of B rows of T tokens, the sums after each token included."""
    intermediate = state.intermediate
    if intermediate is not None:
        intermediate = intermediate._replace(stored=intermediate.stored.flatten(2))
    x, sums = flat(x, 2, state.states)
    return x, state._replace(states=sums, intermediate=intermediate)
