"""Products of e4m3 weights with inputs that are quantised too, on GPUs that multiply such numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridrt.base.device import capability
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation
from hybridrt.kernels.quant.formats import scale_values
from hybridrt.kernels.quant.fp8_linear import FEW_TOKENS, GROUP, MAX_TOKENS, TOKEN_WIDTH, TokenCodes, fp8_linear
from hybridrt.kernels.quant.quant_weight import QuantWeight

MULTIPLE = 128  # of rows: cuBLAS takes multiples of 16, torch checks scales as if blocks were whole
SCALES_OF = 4  # columns of a grid of scales are padded to a multiple
# On an H200 (benchmarks/log/products.md) our kernel is faster up to FEW_TOKENS tokens for all weights, and up to
# MAX_TOKENS for those with blocks. With FEW_ROWS to MANY_ROWS rows it takes the same time for 65 tokens as for 128;
# cuBLAS is faster below NEARLY_ALL tokens, ours from there on: 8,728 x 3,072 takes 17.4 us, in cuBLAS 15.3 at 96 tokens
# and 19.8 at 128. Products of more tokens were faster in ours too, but whole steps were not.
NEARLY_ALL = 113
FEW_ROWS, MANY_ROWS = 4096, 16384


class Fp8Product(NamedTuple):
    """A weight [N, K] and what `torch.nn.functional.scaled_mm` reads of it.

    Attributes:
        weight: its data are the first rows of `padded`, and its scales those that kernels read.
        group: numbers of a token that share a scale: GROUP, or K if rows of the weight have one scale.
        padded: e4m3 [N rounded up to MULTIPLE, K].
        scale: float32, of blocks of GROUP x GROUP [ceil(N / GROUP), K / GROUP], the columns padded to SCALES_OF;
            of rows and GROUP columns [K / GROUP, rows of `padded`]; of rows [1, rows of `padded`].
        square: scales are those of GROUP x GROUP.
    """

    weight: QuantWeight
    group: int
    padded: Tensor
    scale: Tensor
    square: bool


def multiplies_fp8(device: torch.device) -> bool:
    """Whether tensor cores and cuBLAS multiply e4m3 by blocks of 128: compute capability 9.0."""
    return device.type == "cuda" and capability(device) == (9, 0)


def fp8_product(weight: QuantWeight) -> Fp8Product | None:
    """None if products with quantised inputs do not take the weight's blocks."""
    if weight.code != "e4m3" or weight.zero is not None or weight.width % GROUP:
        return None
    if weight.scale is None and weight.factor is None:
        return None
    if weight.scale is not None and weight.block[1] != GROUP:
        return None
    weight = _with_one_scale(weight)
    grid, factor, (rows, width) = weight.scale, weight.factor, weight.data.shape
    padded = _padded(weight.data, -rows % MULTIPLE)
    weight = weight._replace(data=nn.Parameter(padded[:rows], requires_grad=False))
    if factor is not None:
        return Fp8Product(weight, width, padded, F.pad(factor, (0, -rows % MULTIPLE))[None], square=False)
    assert grid is not None
    if weight.block[0] == GROUP:
        return Fp8Product(weight, GROUP, padded, F.pad(grid, (0, -grid.shape[1] % SCALES_OF)), square=True)
    each = F.pad(grid.repeat_interleave(weight.block[0], 0)[:rows], (0, 0, 0, -rows % MULTIPLE))
    return Fp8Product(weight, GROUP, padded, each.t().contiguous(), square=False)


def _with_one_scale(weight: QuantWeight) -> QuantWeight:
    """Scales of blocks in float32, which our kernels and cuBLAS read; checkpoints may have them in bfloat16. Factors of
    rows become part of them: a model's multipliers, and scales of rows of one block. The parts of a matrix, which have
    multipliers, have blocks of their own."""
    grid, factor, block = weight.scale, weight.factor, weight.block
    if grid is not None:
        grid = scale_values(grid) if factor is None else scale_values(grid) * factor[:: block[0], None]
    elif factor is not None and weight.width == GROUP:
        grid, block = factor[:, None].contiguous(), (1, GROUP)
    else:
        return weight
    return weight._replace(scale=nn.Parameter(grid, requires_grad=False), factor=None, block=block)


def joined_products(products: Sequence[Fp8Product | None]) -> Fp8Product | None:
    """One product for weights side by side along the input; None unless all have the same blocks."""
    first = products[0]
    if first is None or first.group != GROUP:
        return None
    weights, scales = list[QuantWeight](), list[Tensor]()
    for product in products:
        if product is None or product.weight.block != first.weight.block or product.weight.scale is None:
            return None
        weights.append(product.weight)
        scales.append(product.weight.scale)
    data = torch.cat([weight.data.view(torch.uint8) for weight in weights], 1).view(first.weight.data.dtype)
    scale = nn.Parameter(torch.cat(scales, 1), requires_grad=False)
    return fp8_product(weights[0]._replace(data=data, width=data.shape[1], scale=scale))


def _padded(data: Tensor, rows: int) -> Tensor:
    """Zeros below."""
    if not rows:
        return data.detach()
    found = torch.zeros(len(data) + rows, data.shape[1], dtype=torch.uint8, device=data.device).view(data.dtype)
    found[: len(data)].view(torch.uint8).copy_(data.view(torch.uint8))
    return found


def multiply_codes(
    product: Fp8Product, x: TokenCodes, bias: Tensor | None, activation: Activation | None, dtype: torch.dtype
) -> Tensor:
    """act(x W^T + b) [T, N], or [T, N / 2] for "silu_and_mul", by our kernel or by cuBLAS. Rows of the result may have
    any stride."""
    if takes_kernel(x.tokens, product.weight):
        return fp8_linear(x, product.weight, bias, dtype=dtype, activation=activation)
    y = _by_library(product, x, dtype)[: x.tokens, : product.weight.rows]
    y = y if bias is None else y + bias
    return y if activation is None else ACTIVATIONS[activation](y)


def takes_kernel(tokens: int, weight: QuantWeight) -> bool:
    """Whether our kernel is faster than cuBLAS."""
    if tokens <= FEW_TOKENS:
        return True
    first = NEARLY_ALL if FEW_ROWS < weight.rows <= MANY_ROWS else FEW_TOKENS + 1
    return weight.scale is not None and first <= tokens <= MAX_TOKENS


def takes_token(product: Fp8Product) -> bool:
    """Whether one token is multiplied by `fp8_token_linear`, which quantises it, too."""
    return product.weight.width <= TOKEN_WIDTH


def _by_library(product: Fp8Product, x: TokenCodes, dtype: torch.dtype) -> Tensor:
    kinds, scale = F.ScalingType, product.scale
    if product.group == GROUP:
        of_x, of_weight = kinds.BlockWise1x128, kinds.BlockWise128x128 if product.square else kinds.BlockWise1x128
        scale = scale.t()
    else:
        of_x = of_weight = kinds.RowWise
    return F.scaled_mm(x.codes, product.padded.t(), x.scale.t(), of_x, scale, of_weight, output_dtype=dtype)
