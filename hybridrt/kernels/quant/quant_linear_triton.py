"""Launches the kernels of `skinny_linear` on weights of 8 and 4 bits."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm
from hybridrt.kernels.dense.skinny_linear_triton import MULTIPROCESSORS, Stored, Tile, matmul_tile, product
from hybridrt.kernels.quant.quant_weight import QuantWeight

FOUR_BITS = ("int4", "e2m1")


def quant_linear_triton(
    x: Tensor,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    norm: InputNorm | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One launch for one token; several tokens with a norm need one more."""
    stored = Stored(weight.data, weight.rows, weight.width, codes_of(weight))
    tile = quant_tile(weight, x.shape[0])
    return product(x, stored, bias, tile, tail=tail, norm=norm, activation=activation, parts=1, out=out)


def codes_of(weight: QuantWeight) -> dict[str, Any]:
    """Arguments of the kernels."""
    pointers = {"scale_ptr": weight.scale, "zero_ptr": weight.zero, "factor_ptr": weight.factor}
    return pointers | {"CODE": weight.code, "ROWS": weight.block[0], "COLUMNS": weight.block[1]}


def quant_tile(weight: QuantWeight, tokens: int) -> Tile:
    """Tile of a product: 8 KiB of the weight for one token, 4 to 16 KiB for more."""
    rows, columns, four = weight.rows, weight.width, weight.code in FOUR_BITS
    if tokens == 1:
        return _narrowed(Tile(8, 2048 if four else 1024, 4), columns)
    if tokens > 64:
        blocks = cdiv(rows, 128)
        split = max(1, min(MULTIPROCESSORS // blocks, 8, columns // 512))
        return _narrowed(Tile(128, 128, 8, 3, split), columns)
    # Few tokens leave room in shared memory for wider tiles, if a scale is for more or is applied to the weights.
    wide = four and tokens <= 32 and (weight.scale is None or weight.block[1] != 128)
    return _narrowed(replace(matmul_tile(rows, columns, tokens), block_k=256 if wide else 128, stages=4), columns)


def _narrowed(tile: Tile, columns: int) -> Tile:
    return replace(tile, block_k=max(64, min(tile.block_k, next_power_of_2(columns))))
