"""A linear layer of few tokens with a weight of 8 or 4 bits, fused as `skinny_linear` is."""

from typing import Any

import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.dense.pipeline_tiles import GROUP, has_pipeline
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm, check_one_tensor, skinny_linear
from hybridrt.kernels.quant.quant_weight import QuantWeight, dequantize

MAX_TOKENS = 128
# Of 4-bit codes that kernels decode in registers, where the kernel with roles of warps runs: more were not tried.
FOUR_BIT_TOKENS = 512


def _check(
    x: Tensor, weight: QuantWeight, *_: Any, tail: Tensor | None = None, norm: InputNorm | None = None, **__: Any
) -> None:
    width = x.shape[1] + (0 if tail is None else tail.shape[1])
    if width != weight.width:
        raise ConfigError(f"a weight of {weight.width} columns takes as many numbers a token, not {width}")
    if x.shape[0] > MAX_TOKENS and x.shape[0] > (most := most_tokens(weight, x.dtype)):
        raise ConfigError(f"quant_linear takes at most {most} tokens, not {x.shape[0]}")
    check_one_tensor("quant_linear", tail, norm)


def most_tokens(weight: QuantWeight, dtype: torch.dtype) -> int:
    """Up to so many tokens in `dtype`, a product takes less time than one with the decoded weight."""
    return FOUR_BIT_TOKENS if by_pipeline(weight, dtype) else MAX_TOKENS


def by_pipeline(weight: QuantWeight, dtype: torch.dtype) -> bool:
    """Whether the kernel with roles of warps multiplies several tokens."""
    return decodes_in_registers(weight, dtype) and not weight.width % 8 and has_pipeline(weight.data.device)


def decodes_in_registers(weight: QuantWeight, dtype: torch.dtype) -> bool:
    """Whether kernels make numbers of the codes in the registers from which tensor cores read: int4 of which one scale
    is for a multiple of GROUP columns, or for a row; e2m1, for bfloat16 alone, with the scales of NVFP4 or MXFP4."""
    (rows, columns), scale, zero = weight.block, weight.scale, weight.zero
    if weight.code == "int4":
        whole = (scale is None and zero is None) or not columns % GROUP or columns >= weight.width
        return whole and dtype.itemsize == 2 and (scale is None or scale.dtype.is_floating_point)
    kinds = {16: torch.float8_e4m3fn, 32: torch.uint8}
    fp4 = weight.code == "e2m1" and scale is not None and scale.dtype == kinds.get(columns) and rows == 1
    return fp4 and dtype == torch.bfloat16 and not weight.width % 32


@operation(By("triton"), check=_check)
def quant_linear(
    x: Tensor,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    norm: InputNorm | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """act(rms_norm(x + residual) W^T + b) and x + residual, for W = `dequantize(weight)`.

    Args:
        x: [T, K] with any row stride, T at most `most_tokens(weight, x.dtype)`. It is not quantised.
        weight: [N, K]. Pass the same record in each call: its data own the counters of programs that share rows.

    The other arguments, the result and the errors are those of `skinny_linear`, but for `parts`.
    Products are accumulated in float32. The reference rounds W to x's dtype, the kernels do so only
    if blocks are narrower than their tiles: exact for scales of fp4 and powers of two.
    """
    w = dequantize(weight).to(x.dtype)
    return skinny_linear.reference(x, w, bias, tail=tail, norm=norm, activation=activation, out=out)
