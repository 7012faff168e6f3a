"""Packed weights in the layout that kernels read, and products of many tokens and look-ups with it."""

from typing import Any

import torch
from torch import Tensor, nn

from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation
from hybridrt.kernels.quant.decode import CENTRE_OF_INT4
from hybridrt.kernels.quant.decode_weight import decode_weight
from hybridrt.kernels.quant.formats import unpack_pairs
from hybridrt.kernels.quant.quant_weight import (
    Code,
    QuantWeight,
    check_weight,
    dequantize,
    expert_of,
    pack_planes,
    packed_words,
)
from hybridrt.layers.quant.layouts import bits_of
from hybridrt.layers.quant.packed_weight import PackedWeight, on_host, taken_rows

CODE: dict[str, Code] = {"fp8": "e4m3", "int8": "int8", "int4": "int4", "fp4": "e2m1"}
STEPS = (128, 64, 32, 16, 8, 4, 2, 1)
NUMBERS = 1 << 24  # that a product of many tokens decodes at once, and that are stored anew at once


def kernel_weight(weight: PackedWeight) -> QuantWeight | None:
    """A stack [E, out, in] in the layout of kernels. None if they do not take its groups of inputs, or if it has 8 bits
    and a number of inputs that is no multiple of 4."""
    found = _columns(weight)
    if found is None or not _takes_width(weight):
        return None
    wide, columns = found
    code = CODE[weight.scheme.method]
    data = weight.codes.data if bits_of(weight.scheme) == 8 else _planes(weight, code)
    factor = None if weight.factor is None else weight.factor.data
    if weight.scales.shape[2] == 1 and weight.zeros is None:
        rows = weight.starts[-1]
        scales = _grid(weight.scales.data, _all_rows(weight), None).float()[..., 0].expand(-1, rows)
        return QuantWeight(data, code, weight.width, factor=scales.contiguous() if factor is None else scales * factor)
    high, rows_of = _rows(weight)
    scale = _grid(weight.scales.data, rows_of, columns)
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    zero = None
    if weight.zeros is not None:
        zero = _grid(weight.zeros.data, rows_of, columns).short() + (CENTRE_OF_INT4 if code == "int4" else 0)
    return QuantWeight(data, code, weight.width, (high, wide), scale, zero, factor)


def may_have_kernel(weight: PackedWeight) -> bool:
    """Whether kernels take its scheme and width, before it has its tensors. Only they give the group of each input
    where the scheme is `indexed`."""
    return _takes_width(weight) and (weight.scheme.indexed or _columns(weight) is not None)


def _takes_width(weight: PackedWeight) -> bool:
    return bits_of(weight.scheme) == 4 or weight.width % 4 == 0


def _planes(weight: PackedWeight, code: Code) -> Tensor:
    """The 4-bit codes as `pack_planes` stores them, NUMBERS at a time: what is in between takes several bytes a number.
    On "meta" nothing takes memory, but each block takes 3 ms of the search for kernels at a start."""
    rows = weight.codes.data.flatten(0, 1)
    step = len(rows) if rows.is_meta else max(NUMBERS // weight.width, 1)
    words = torch.empty(len(rows), packed_words(weight.width), dtype=torch.int32, device=rows.device)
    for own, into in zip(rows.split(step), words.split(step), strict=True):
        into.copy_(pack_planes(unpack_pairs(own)[:, : weight.width], code))
    return words.unflatten(0, (weight.count, -1))


def _all_rows(weight: PackedWeight) -> Tensor | None:
    return None if weight.row_of is None else on_host(weight.row_of)


def _rows(weight: PackedWeight) -> tuple[int, Tensor | None]:
    """Rows of a block, and the scale row of each block; None: as they are."""
    index = _all_rows(weight)
    if index is None:
        return (weight.starts[-1] if weight.scales.shape[1] == 1 else 1), None
    step = next(step for step in STEPS if _constant(index, step))
    return step, index[::step]


def _columns(weight: PackedWeight) -> tuple[int, Tensor | None] | None:
    """Columns of a block, and the scale column of each block (None: as they are). None if kernels cannot
    have them: they take groups of 16 and of multiples of 32."""
    if weight.column_of is None:
        wide = weight.scheme.block[1] or weight.width
        return (wide, None) if wide == 16 or wide % 32 == 0 or wide >= weight.width else None
    if weight.column_of.shape[:2] != (1, 1):
        return None
    index = on_host(weight.column_of)[0, 0]
    step = next((step for step in STEPS if step >= 16 and _constant(index, step)), None)
    return None if step is None else (step, index[::step])


def _constant(index: Tensor, step: int) -> bool:
    """Whether all of an index is constant in runs of `step`."""
    first = torch.arange(len(index)) // step * step
    return torch.equal(index, index[first])


def _grid(grid: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Rows and columns of a stack of grids, of any dtype."""
    taken = grid.view(torch.uint8) if grid.dtype.itemsize == 1 else grid
    taken = taken if rows is None else taken.index_select(1, rows.to(grid.device))
    taken = taken if columns is None else taken.index_select(2, columns.to(grid.device))
    return taken.contiguous().view(grid.dtype)


def finished(weight: PackedWeight, stack: bool = False) -> QuantWeight | None:
    """`kernel_weight` with parameters, instead of those of `weight`, which are freed. stack: of experts, maybe of one;
    else one matrix."""
    found = kernel_weight(weight)
    if found is None:
        return None
    check_weight(found)
    own = found if stack else expert_of(found, 0)
    weight.clear()
    tensors = {name: t for name, t in own._asdict().items() if isinstance(t, Tensor)}
    held: Any = {name: nn.Parameter(t.contiguous(), requires_grad=False) for name, t in tensors.items()}
    return own._replace(**held)


def parameters(weight: QuantWeight) -> dict[str, nn.Parameter]:
    return {name: t for name, t in weight._asdict().items() if isinstance(t, nn.Parameter)}


def product_of_many(weight: QuantWeight, x: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
    """act(x W^T + b) by blocks of rows, which are decoded."""
    y = x.new_empty(x.shape[0], weight.rows)
    step = max(NUMBERS // weight.width // STEPS[0], 1) * STEPS[0]
    for start in range(0, weight.rows, step):
        end = min(start + step, weight.rows)
        decoded, part = decode_weight(rows_of(weight, start, end), x.dtype).t(), y[:, start:end]
        if bias is None:
            torch.mm(x, decoded, out=part)
        else:
            torch.addmm(bias[start:end], x, decoded, out=part)
    return y if activation is None else ACTIVATIONS[activation](y)


def rows_of(weight: QuantWeight, start: int, end: int) -> QuantWeight:
    """Rows from a multiple of 128 on."""
    high = weight.block[0]
    at = slice(None) if high >= weight.rows else slice(start // high, -(-end // high))
    scale, zero = (None if t is None else t[at] for t in (weight.scale, weight.zero))
    block = (min(high, end - start) if high >= weight.rows else high, weight.block[1])
    factor = None if weight.factor is None else weight.factor[start:end]
    return weight._replace(data=weight.data[start:end], block=block, scale=scale, zero=zero, factor=factor)


def looked_up(weight: QuantWeight, ids: Tensor) -> Tensor:
    """float32 [T, in]: rows `ids`."""
    rows = ids // weight.block[0]
    scale, zero = (None if t is None else taken_rows(t, rows) for t in (weight.scale, weight.zero))
    data = taken_rows(weight.data, ids)
    factor = None if weight.factor is None else weight.factor[ids]
    return dequantize(weight._replace(data=data, block=(1, weight.block[1]), scale=scale, zero=zero, factor=factor))
