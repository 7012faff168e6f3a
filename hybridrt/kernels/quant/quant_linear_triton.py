"""Launches the kernels of `skinny_linear` on weights of 8 and 4 bits."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrt.base.device import capability, multiprocessors
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.dense.pipeline_tiles import GROUP, PipelineTile, pipeline_tile, takes_rows
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm, activated_width
from hybridrt.kernels.dense.skinny_linear_triton import MULTIPROCESSORS, Stored, Tile, matmul_tile, normed, product
from hybridrt.kernels.quant.fp8_linear import TOKEN_WIDTH
from hybridrt.kernels.quant.quant_linear import by_pipeline, decodes_in_registers
from hybridrt.kernels.quant.quant_weight import QuantWeight

FOUR_BITS = ("int4", "e2m1")
NARROWEST = 8  # tokens of a tile


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
    """One launch for one token; several tokens with a norm need one more, and so may inputs that are copied."""
    # Imports are here, so that the other kernels need nothing that is experimental in Triton.
    if x.shape[0] == 1 and _takes_token(x, weight):
        from hybridrt.kernels.quant.one_token_triton import one_token_triton

        return one_token_triton(x, weight, bias, tail=tail, norm=norm, activation=activation, out=out)
    if x.shape[0] > 1 and by_pipeline(weight, x.dtype):
        return _by_pipeline(x, weight, bias, tail, norm, activation, out)
    stored = Stored(weight.data, weight.rows, weight.width, scale_arguments(weight))
    tile = quant_tile(weight, x.shape[0], x.dtype)
    return product(x, stored, bias, tile, tail=tail, norm=norm, activation=activation, parts=1, out=out)


def _takes_token(x: Tensor, weight: QuantWeight) -> bool:
    """Whether tensor cores multiply one token with 4-bit codes: in bfloat16, if the GPU has such numbers."""
    device = weight.data.device
    has_cores = device.type == "meta" or (device.type == "cuda" and capability(device) >= (8, 0))
    fits = decodes_in_registers(weight, x.dtype) and not weight.width % GROUP and weight.width <= TOKEN_WIDTH
    return has_cores and fits and x.dtype == torch.bfloat16


def _by_pipeline(
    x: Tensor, weight: QuantWeight, bias: Tensor | None, tail: Tensor | None, norm: InputNorm | None,
    activation: Activation | None, out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One launch, and one for a norm; one more for inputs that the tensor memory accelerator cannot read."""
    from hybridrt.kernels.dense.pipeline_linear_triton import WeightCodes, pipeline_linear

    tile = four_bit_tile(x.shape[0], weight, multiprocessors(weight.data.device))
    x, total = normed(x, norm)
    if tail is not None and not (takes_rows(x, tail) and x.shape[1] % GROUP == 0):
        x, tail = torch.cat([x, tail], 1), None
    elif not takes_rows(x):
        x = x.clone(memory_format=torch.contiguous_format)
    if out is None:
        out = x.new_empty(x.shape[0], activated_width(weight.rows, activation))
    assert weight.code == "int4" or weight.code == "e2m1"
    codes = WeightCodes(weight.code, weight.scale, weight.block, weight.zero, weight.factor)
    pipeline_linear(x, weight.data, bias, out, tile, tail=tail, codes=codes, activation=activation)
    return out, total


def four_bit_tile(tokens: int, weight: QuantWeight, programs: int) -> PipelineTile:
    """By powers of two of the tokens, so that a warm-up runs each tile. programs: that run at a time."""
    most = max(next_power_of_2(tokens), NARROWEST)
    return pipeline_tile(most, weight.rows, cdiv(weight.width, GROUP), programs, four_bits=True)


def scale_arguments(weight: QuantWeight) -> dict[str, Any]:
    """Arguments of the kernels: scales, zero points and factors, the code, and which block has one of them."""
    pointers = {"scale_ptr": weight.scale, "zero_ptr": weight.zero, "factor_ptr": weight.factor}
    return pointers | {"CODE": weight.code, "ROWS": weight.block[0], "COLUMNS": weight.block[1]}


def quant_tile(weight: QuantWeight, tokens: int, dtype: torch.dtype) -> Tile:
    """Tile of a product: 8 KiB of the weight for one token, 4 to 16 KiB for more. `dtype`: that of the inputs."""
    rows, columns, four = weight.rows, weight.width, weight.code in FOUR_BITS
    if tokens == 1:
        return _narrowed(Tile(8, 2048 if four else 1024, 4), columns)
    if dtype == torch.float32:  # twice the bytes of inputs, and registers for the parts of tf32x3
        return Tile(64, 64, 8, 2)
    if tokens > 64:
        blocks = cdiv(rows, 128)
        split = max(1, min(MULTIPROCESSORS // blocks, 8, columns // 512))
        return _narrowed(Tile(128, 128, 8, 3, split), columns)
    # Few tokens leave room in shared memory for wider tiles, if a scale is for more or is applied to the weights.
    wide = four and tokens <= 32 and (weight.scale is None or weight.block[1] != 128)
    return _narrowed(replace(matmul_tile(rows, columns, tokens), block_k=256 if wide else 128, stages=4), columns)


def _narrowed(tile: Tile, columns: int) -> Tile:
    return replace(tile, block_k=max(64, min(tile.block_k, next_power_of_2(columns))))
