"""A Mamba-2 decode step of a CPU over neighbouring rows of the pools, which are updated where they stand.

It equals `mamba2_decode` in classic mode, with half of the operations and no copy of a state. A step of a small model
takes as long as the calls of its operations, so what is equal in all layers is looked up once a step (`PoolRows`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.records import NO_LIMIT, ConvWeights, SSMWeights
from hybridrt.kernels.slots import neighbours


class PoolRows(NamedTuple):
    """Rows of one token each whose slots are neighbours in the pools.

    Attributes:
        run: the slots.
        order: [B] int64, the step's row of each slot; None where the rows are in the order of the slots.
        positions: of the new tokens, by slot; first: the smallest.
    """

    run: slice
    order: Tensor | None
    positions: list[int]
    first: int

    def holds(self, xBC: Tensor, conv: Tensor, states: Tensor, taps: int) -> bool:
        """Whether the rows of these pools may be updated in place: all is float32, and each row is past its first K - 1
        positions, before which its ring holds what another request left."""
        return self.first >= taps - 1 and xBC.dtype == conv.dtype == states.dtype == torch.float32


def pool_rows(slots: Tensor, start_positions: Tensor) -> PoolRows | None:
    """The rows of slots [B] int32 with their new tokens at `start_positions` [B]; None on a GPU, where looking would
    wait for the device, and where slots are no neighbours or padding."""
    found = neighbours(slots)
    if found is None:
        return None
    run, order = found
    positions = (start_positions if order is None else start_positions.index_select(0, order)).tolist()
    return PoolRows(run, order, positions, min(positions))


def mamba2_in_place(
    xBC: Tensor, dt: Tensor, z: Tensor | None, conv_weights: ConvWeights, weights: SSMWeights, conv: Tensor,
    states: Tensor, rows: PoolRows, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Advances each of B rows by one token.

    Args:
        xBC: [B, C], dt: [B, H] and z: [B, H * P] or None, as in `mamba2_decode`.
        conv: [S+1, C, Wc] and states: [S+1, H, P, N], the pools.
        out: [B, H * P] of any row stride, where the result is to be left.

    Returns:
        [B, H * P].
    """
    rings, states, order = conv[rows.run], states[rows.run], rows.order
    if order is None:
        return _step(xBC, dt, z, conv_weights, weights, rings, states, rows.positions, out)
    sorted_z = None if z is None else z.index_select(0, order)
    y = _step(
        xBC.index_select(0, order), dt.index_select(0, order), sorted_z, conv_weights, weights, rings, states,
        rows.positions,
    )  # fmt: skip
    return (torch.empty_like(y) if out is None else out).index_copy_(0, order, y)


def _step(
    xBC: Tensor, dt: Tensor, z: Tensor | None, conv_weights: ConvWeights, weights: SSMWeights, rings: Tensor,
    states: Tensor, positions: list[int], out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    A, D, dt_bias, dt_limit = weights
    batch, heads, dim, columns = states.shape
    width, keys = heads * dim, (xBC.shape[1] - heads * dim) // 2
    conved = F.silu(_conv(xBC, conv_weights, rings, positions) if conv_weights.weight.shape[1] else xBC)
    channels, B, C = conved.split_with_sizes((width, keys, keys), 1)
    x = channels.view(batch, heads, dim)
    step = F.softplus(dt if dt_bias is None else dt + dt_bias)
    if dt_limit != NO_LIMIT:
        step = step.clamp_(*dt_limit)
    groups = batch * keys // columns
    states.mul_((step * A).exp_().view(batch, heads, 1, 1))
    state = states.view(groups, -1, columns)
    state.addcmul_((x * step.unsqueeze(-1)).view(groups, -1, 1), B.reshape(groups, 1, columns))
    # C x state^T: state x C takes nine times as long for several rows.
    y = torch.bmm(C.reshape(groups, 1, columns), state.transpose(1, 2)).view(batch, heads, dim)
    if D is not None:
        y.addcmul_(x, D.unsqueeze(-1))
    y = y.view(batch, width)
    if z is None:
        return y if out is None else out.copy_(y)
    return torch.mul(y, F.silu(z), out=y if out is None else out)


def _conv(xBC: Tensor, weights: ConvWeights, rings: Tensor, positions: list[int]) -> Tensor:
    """The conv [B, C] of the new tokens xBC [B, C], which enter the rings [B, C, Wc]."""
    weight, bias, _ = weights
    width, taps = rings.shape[2], weight.shape[1]
    newest = {position & width - 1 for position in positions}
    if len(newest) == 1 and width == taps:  # as one row: no indices of single columns
        column = newest.pop()
        rings.select(2, column).copy_(xBC)
        inputs = rings.roll(-1 - column, 2)
    else:
        last = torch.tensor(positions)[:, None]
        columns = (last + torch.arange(1 - taps, 1) & width - 1)[:, None].expand(-1, xBC.shape[1], -1)
        rings.scatter_(2, columns[..., -1:], xBC.unsqueeze(2))
        inputs = rings.gather(2, columns)
    conved = inputs.mul_(weight).sum(-1)
    return conved if bias is None else conved.add_(bias)
