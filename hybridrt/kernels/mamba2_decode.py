"""A whole Mamba-2 decode or verify step in one operation: conv, SiLU, time step, state, skip and gate.

It reads one merged projection (z, x|B|C, dt) and ends at the input of the output projection (or of the gated norm). A
layer without a conv gives weights without taps, and conv rings without channels. There are three state modes:

- classic: the state is read and written each step;
- replay: with a `ring`; the state is a checkpoint, and the inputs since stand there (`mamba2_replay.py`);
- intermediate: with `state.intermediate`; the state is read only, and the state after each token stored.

Tokens of a row form a chain; draft trees go through `causal_conv1d_update` and `selective_state_update`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.causal_conv1d import causal_conv1d_update
from hybridrt.kernels.mamba2_common import skip_and_gate, split_conv_channels, time_step
from hybridrt.kernels.mamba2_replay import mamba2_replay
from hybridrt.kernels.operation import By, operation
from hybridrt.kernels.records import ConvState, ConvWeights, FusedStep, SSMInputs, SSMWeights
from hybridrt.kernels.selective_state_update import selective_state_update
from hybridrt.kernels.slots import neighbours
from hybridrt.kernels.state_ring import check_step


def _check(xBC: Tensor, *_: Any, step: FusedStep, **__: Any) -> None:
    check_step(xBC, step)


@operation(By("triton"), check=_check)
def mamba2_decode(
    xBC: Tensor, dt: Tensor, z: Tensor | None, *, weights: SSMWeights, step: FusedStep, out: Tensor | None = None
) -> Tensor:
    """Advances each of B rows by T tokens.

    Args:
        xBC: [B, T, C] raw conv inputs: x [H*P], B [G*N], C [G*N] side by side. dt: [B, T, H] raw. z: [B, T, H, P] or
            None. Any row and token stride: they may be column slices of one projection.
        out: [B, T, H, P] of any row and token stride, where the result is to be left.

    Returns:
        [B, T, H, P] in xBC's dtype.

    Raises:
        ConfigError: the conv ring or the state ring is too narrow for T tokens, or the conv does not end in SiLU.
    """
    # The separate operations one after the other, but for the plain decode step
    conv_weights, conv_state, state, ring = step
    states, read_slots, write_slots, intermediate = state
    places = None
    if xBC.shape[1] == 1 and ring is None and intermediate is None and read_slots is write_slots:
        places = _rows_in_place(conv_weights, conv_state, states, xBC)
    if places is not None:
        run, order = places
        rings = conv_state._replace(conv=conv_state.conv[run])
        if order is None:
            y = _one_token(xBC, dt, z, conv_weights, weights, rings, states[run])
            return y if out is None else out.copy_(y)
        inputs, steps = xBC.index_select(0, order), dt.index_select(0, order)
        gates = None if z is None else z.index_select(0, order)
        rings = rings._replace(start_positions=rings.start_positions.index_select(0, order))
        y = _one_token(inputs, steps, gates, conv_weights, weights, rings, states[run])
        return (torch.empty_like(y) if out is None else out).index_copy_(0, order, y)
    taps = conv_weights.weight.shape[1]
    conved = causal_conv1d_update.reference(xBC, conv_weights, conv_state) if taps else F.silu(xBC)
    x, B, C = split_conv_channels(conved, states.shape)
    tokens = SSMInputs(x, dt, B, C, z)
    if ring is None:
        return selective_state_update.reference(tokens, weights, state, out)
    y = mamba2_replay(tokens, weights, state, ring)
    return y if out is None else out.copy_(y)


def _rows_in_place(
    weights: ConvWeights, conv_state: ConvState, states: Tensor, xBC: Tensor
) -> tuple[slice, Tensor | None] | None:
    """The pool rows that a decode step may update in place, and the step's row of each; None if it may not. It may if
    slots are adjacent on a CPU, all rows are past their first K - 1 positions, and all is float32. This saves two
    copies of each row's state and half of the operations."""
    conv, slots, _, start_positions = conv_state
    if any(t.dtype != torch.float32 for t in (xBC, conv, states)):
        return None
    return neighbours(slots) if min(start_positions.tolist()) >= weights.weight.shape[1] - 1 else None


def _one_token(
    xBC: Tensor,
    dt: Tensor,
    z: Tensor | None,
    conv_weights: ConvWeights,
    weights: SSMWeights,
    conv_state: ConvState,
    states: Tensor,
) -> Tensor:
    """One token of each of B rows, whose conv rings [B, C, Wc] and states [B, H, P, N] are updated in place."""
    A, D, dt_bias, dt_limit = weights
    conved = F.silu(_conv_one_token(xBC, conv_weights, conv_state) if conv_weights.weight.shape[1] else xBC[:, 0])
    x, B, C = split_conv_channels(conved, states.shape)
    step = time_step(dt[:, 0], dt_bias, dt_limit)
    heads, keys = x.shape[1], B.reshape(-1, 1, B.shape[2])
    state = states.mul_((step * A).exp_()[..., None, None]).view(len(keys), -1, B.shape[2])
    state.addcmul_((x * step[..., None]).reshape(len(keys), -1, 1), keys)
    y = torch.bmm(C.reshape(keys.shape), state.transpose(1, 2)).view(-1, heads, x.shape[2])
    return skip_and_gate(y, x, D, None if z is None else z[:, 0])[:, None]


def _conv_one_token(xBC: Tensor, weights: ConvWeights, state: ConvState) -> Tensor:
    """The conv [B, C] of one token of each row, xBC [B, 1, C], which enters the rings [B, C, Wc]."""
    (weight, bias, _), (conv, _, _, start_positions) = weights, state
    width, taps = conv.shape[2], weight.shape[1]
    newest = {position & width - 1 for position in start_positions.tolist()}
    if len(newest) == 1 and width == taps:  # as one row: no indices of single columns
        column = newest.pop()
        conv.select(2, column).copy_(xBC[:, 0])
        inputs = conv.roll(-1 - column, 2)
    else:
        last = start_positions.long()[:, None]
        columns = (last + torch.arange(1 - taps, 1) & width - 1)[:, None].expand(-1, xBC.shape[2], -1)
        conv.scatter_(2, columns[..., -1:], xBC.transpose(1, 2))
        inputs = conv.gather(2, columns)
    conved = inputs.mul_(weight).sum(-1)
    return conved if bias is None else conved.add_(bias)
