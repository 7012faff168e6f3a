"""A Mamba-2 decode step on a CPU that updates neighbouring rows of the pools in place.

It equals `mamba2_decode` in classic mode, with half of the operations and no copy of a state.
Numbers that are equal in all layers are computed once a step (`PoolRows`).
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.records import NO_LIMIT, ConvWeights, SSMWeights


@dataclass(frozen=True)
class PoolRows:
    """Rows of one token each whose slots are neighbours in the pools.

    Attributes:
        run: the slots.
        order: [B] int64, the step's row of each slot; None where the rows are in the order of the slots.
        columns: of the rings that hold the rows' inputs.
        first: the smallest position of a new token.
    """

    run: slice
    order: Tensor | None
    columns: "ConvColumns"
    first: int


class ConvColumns(dict[int, Tensor]):
    """[B, 1, Wc] int64 for rings of Wc columns, a power of two: their columns, oldest input first.
    Computed by the first layer of a step.

    Args:
        positions: [B] int32, of the new tokens, by slot.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self._positions = positions

    def __missing__(self, width: int) -> Tensor:
        found = self[width] = (self._positions.view(-1, 1, 1) + torch.arange(1 - width, 1)) & (width - 1)
        return found


def pool_rows(slots: Tensor, start_positions: Tensor) -> PoolRows | None:
    """The rows of slots [B] int32 whose new tokens are at `start_positions` [B]. None if slots are
    no neighbours or padding, and on a GPU, where a look would wait for the device.
    """
    found = neighbours(slots)
    if found is None:
        return None
    run, order = found
    positions = start_positions if order is None else start_positions.index_select(0, order)
    return PoolRows(run, order, ConvColumns(positions), min(positions.tolist()))


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


def mamba2_in_place(
    xBC: Tensor, dt: Tensor, z: Tensor | None, conv_weights: ConvWeights, weights: SSMWeights, conv: Tensor,
    states: Tensor, rows: PoolRows, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Advances each of B rows by one token. All is float32, and each row has K - 1 earlier
    positions (before, its ring has the inputs of another request).

    Args:
        xBC: [B, C], dt: [B, H] and z: [B, H * P] or None, as in `mamba2_decode`.
        conv: [S+1, C, Wc] and states: [S+1, H, P, N], the pools, of any distance between slots.
        out: [B, H * P] of any row stride, where the result is to be left.

    Returns:
        [B, H * P].
    """
    if (order := rows.order) is not None:
        xBC, dt, z = xBC.index_select(0, order), dt.index_select(0, order), z if z is None else z.index_select(0, order)
        y = mamba2_in_place(xBC, dt, z, conv_weights, weights, conv, states, replace(rows, order=None))
        return (torch.empty_like(y) if out is None else out).index_copy_(0, order, y)
    rings, states = conv[rows.run], states[rows.run]
    batch, heads, dim, columns = states.shape
    width, keys = heads * dim, (xBC.shape[1] - heads * dim) // 2
    conved = F.silu(_conv(xBC, conv_weights, rings, rows) if conv_weights.weight.shape[1] else xBC)
    channels, B, C = conved.split_with_sizes((width, keys, keys), 1)
    x = channels.view(batch, heads, dim)
    step = F.softplus(dt if weights.dt_bias is None else dt + weights.dt_bias)
    if weights.dt_limit != NO_LIMIT:
        step = step.clamp_(*weights.dt_limit)
    groups = keys // columns
    states.mul_((step * weights.A).exp_().view(batch, heads, 1, 1))
    state = states.view(batch, groups, -1, columns)
    state.addcmul_((x * step.unsqueeze(-1)).view(batch, groups, -1, 1), B.reshape(batch, groups, 1, columns))
    # Rows may be any distance apart, so one product takes one group. state x C takes nine times as long for several.
    C, products = C.reshape(batch, groups, 1, columns), list[Tensor]()
    for group in range(groups):
        products.append(torch.bmm(C[:, group], state[:, group].transpose(1, 2)))
    y = (products[0] if groups == 1 else torch.cat(products, 1)).view(batch, heads, dim)
    if weights.D is not None:
        y.addcmul_(x, weights.D.unsqueeze(-1))
    y = y.view(batch, width)
    if z is None:
        return y if out is None else out.copy_(y)
    return torch.mul(y, F.silu(z), out=y if out is None else out)


def _conv(xBC: Tensor, weights: ConvWeights, rings: Tensor, rows: PoolRows) -> Tensor:
    columns = rows.columns[rings.shape[2]][..., -weights.weight.shape[1] :].expand(-1, xBC.shape[1], -1)
    rings.scatter_(2, columns[..., -1:], xBC.unsqueeze(2))
    conved = rings.gather(2, columns).mul_(weights.weight).sum(-1)
    return conved if weights.bias is None else conved.add_(weights.bias)
