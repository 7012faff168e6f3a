"""A linear layer of few tokens with a weight of 8 or 4 bits, fused as `skinny_linear` is."""

from typing import Any

from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm, check_one_tensor, skinny_linear
from hybridrt.kernels.quant.quant_weight import QuantWeight, dequantize

MAX_TOKENS = 128


def _check(
    x: Tensor, weight: QuantWeight, *_: Any, tail: Tensor | None = None, norm: InputNorm | None = None, **__: Any
) -> None:
    width = x.shape[1] + (0 if tail is None else tail.shape[1])
    if width != weight.width:
        raise ConfigError(f"a weight of {weight.width} columns takes as many numbers a token, not {width}")
    if x.shape[0] > MAX_TOKENS:
        raise ConfigError(f"quant_linear takes at most {MAX_TOKENS} tokens, not {x.shape[0]}")
    check_one_tensor("quant_linear", tail, norm)


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
        x: [T, K] with any row stride, T at most MAX_TOKENS. It is not quantised.
        weight: [N, K]. Keep the record: counters of programs that share rows belong to its data.

    The other arguments, the result and the errors are those of `skinny_linear`, but for `parts`.
    Products are accumulated in float32. The reference rounds W to x's dtype, the kernels do so only
    if blocks are narrower than their tiles: exact for scales of fp4 and powers of two.
    """
    w = dequantize(weight).to(x.dtype)
    return skinny_linear.reference(x, w, bias, tail=tail, norm=norm, activation=activation, out=out)
