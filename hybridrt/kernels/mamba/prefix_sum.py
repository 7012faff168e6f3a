"""Running sums within each request: y_t = S + x_1 + ... + x_t, and S becomes the last y.

This is the recurrence of the history branch's mode "prefix_sum". Sums are easy to predict: tests
notice a wrong slot, a lost state or a sum that runs into the next row.
"""

from typing import Any

import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import StateSlots
from hybridrt.kernels.core.slots import advance_states, pad_mask


def _check(x: Tensor, state: StateSlots, *_: Any, **__: Any) -> None:
    states = state.states
    if states.dtype != torch.float32 or states.shape[1:] != x.shape[-1:]:
        raise ConfigError(
            f"running sums of {x.shape[-1]} numbers a token need as many float32 numbers a slot; states are "
            f"{states.dtype} of shape {tuple(states.shape[1:])}"
        )


@operation(By("triton"), check=_check)
def prefix_sum_varlen(x: Tensor, state: StateSlots, query_start_loc: Tensor) -> Tensor:
    """Running sums of ragged rows, packed along one axis.

    Args:
        x: [T, C]; row b holds x[query_start_loc[b]:query_start_loc[b+1]].
        state: float32 sums [S+1, C].
        query_start_loc: [B+1] int32. Tokens past its last entry get zeros.

    Returns:
        [T, C] in x's dtype.

    Raises:
        ConfigError: states and x do not hold as many numbers, or states are not float32.
    """
    out = torch.zeros_like(x)
    lens = query_start_loc.diff().tolist()
    first = 0
    for row, (count, slot) in enumerate(zip(lens, state.read_state_slots.tolist(), strict=True)):
        if count and slot >= 0:
            sums = state.states[slot] + x[first : first + count].float().cumsum(0)
            state.states[state.write_state_slots[row]] = sums[-1]
            out[first : first + count] = sums
        first += count
    return out


@operation(By("triton"), check=_check)
def prefix_sum_update(x: Tensor, state: StateSlots) -> Tensor:
    """Running sums of T new tokens of each row: decode (T = 1), verify (T > 1).

    Args:
        x: [B, T, C].
        state: the states of `prefix_sum_varlen`.

    Returns:
        [B, T, C] in x's dtype.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)

    def step(t: int, before: Tensor) -> Tensor:
        out[:, t] = before + x[:, t].float()
        return out[:, t]

    advance_states(state, x.shape[1], step)
    return out.masked_fill_(pad_mask(state.read_state_slots, 3), 0.0).to(x.dtype)
