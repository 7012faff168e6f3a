"""A linear layer of a few tokens, with the norm before it and the activation behind it.

With 1 to MAX_TOKENS rows a matrix product costs what reading its weights costs, so the work is to keep the memory busy:
the norm is recomputed instead of stored, the activation applied before the output is written.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.errors import ConfigError
from hybridrt.kernels.activation import relu2, silu_and_mul
from hybridrt.kernels.operation import by, operation
from hybridrt.kernels.rms_norm import rms_norm

Activation = Literal["silu_and_mul", "relu2"]

MAX_TOKENS = 64
# Where cuBLAS becomes as fast on an H200; with an activation, and rows to fill the device, at MAX_TOKENS.
ALONE_UP_TO, FILLING_ROWS = 32, 16384


def is_skinny(x: Tensor, weight: Tensor, activation: Activation | None) -> bool:
    """Whether skinny_linear beats the separate operations for x `[T, K]`: few rows and 16-bit weights, on a GPU."""
    most = ALONE_UP_TO if activation is None or len(weight) < FILLING_ROWS else MAX_TOKENS
    return x.is_cuda and 0 < x.shape[0] <= most and weight.dtype in (torch.bfloat16, torch.float16)


def _check(
    x: Tensor,
    *_: Any,
    tail: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    **__: Any,
) -> None:
    if x.shape[0] > MAX_TOKENS:
        raise ConfigError(f"skinny_linear takes at most {MAX_TOKENS} tokens, not {x.shape[0]}")
    if residual is not None and norm_weight is None:
        raise ConfigError("skinny_linear adds a residual only in front of a norm; pass norm_weight too")
    if tail is not None and norm_weight is not None:
        raise ConfigError("skinny_linear normalises one tensor; concatenate x and tail first")


@operation(by("triton"), check=_check)
def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None]:
    """act(rms_norm(x + residual) W^T + b) and x + residual; norm, residual, bias and activation are optional.

    Args:
        x: [T, K] with any row stride, T at most MAX_TOKENS.
        weight: [N, K] contiguous; bias: [N] or None.
        tail: [T, K - K1], the last columns of the input where x `[T, K1]` holds the first: two inputs of one merged
            weight need no copy side by side. Not with a norm.
        norm_weight: [K] float32, as in `rms_norm`; eps belongs to it.
        residual: [T, K], added before the norm. It may be overwritten: use the returned sum instead.
        activation: "silu_and_mul" halves N (gate rows, then up rows); "relu2".

    Returns:
        y [T, N] or [T, N / 2] in x's dtype, accumulated in float32; x + residual rounded to residual's dtype, or None.

    Raises:
        ConfigError: too many tokens, a residual without a norm, or a tail with one.
    """
    # The separate operations one after the other
    dtype = x.dtype
    if tail is not None:
        x = torch.cat((x, tail), dim=-1)
    if residual is not None:
        x = residual = (x.float() + residual.float()).to(residual.dtype)
    if norm_weight is not None:
        x = rms_norm.reference(x, norm_weight, eps).to(dtype)
    y = F.linear(x, weight, bias)
    if activation == "silu_and_mul":
        y = silu_and_mul.reference(y)
    elif activation == "relu2":
        y = relu2.reference(y)
    return y, residual
