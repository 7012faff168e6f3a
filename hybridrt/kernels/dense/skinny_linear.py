"""A linear layer of few tokens, fused with the norm before it and the activation after it.

With 1 to MAX_TOKENS rows a product costs as much as reading its weights: the norm is recomputed,
not stored.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.launch_choice import LaunchChoice, Values, token_bucket
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.dense.norm_activation import relu2, rms_norm, silu_and_mul

Activation = Literal["silu_and_mul", "relu2"]
ACTIVATIONS = {"silu_and_mul": silu_and_mul, "relu2": relu2}

MAX_TOKENS = 64
# Where cuBLAS catches up on an H200.
ALONE_UP_TO, FILLING_ROWS = 32, 16384


def activated_width(width: int, activation: Activation | None) -> int:
    """Numbers that an activation leaves of `width`."""
    return width // 2 if activation == "silu_and_mul" else width


def is_skinny(x: Tensor, weight: Tensor, activation: Activation | None) -> bool:
    """Whether skinny_linear beats separate operations for x `[T, K]`: few rows, 16-bit weights, a
    GPU."""
    return x.is_cuda and fuses(x.shape[0], weight, activation)


def fuses(tokens: int, weight: Tensor, activation: Activation | None) -> bool:
    """`is_skinny` of so many tokens on the weight's device, which is a GPU."""
    if not 0 < tokens <= MAX_TOKENS or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    tokens = 1 if tokens == 1 else token_bucket(tokens, 16, MAX_TOKENS)
    return FUSED(Product(len(weight), weight.shape[1], tokens, weight.dtype, activation or ""), weight.device)


class Product(NamedTuple):
    """A product of few tokens. tokens: 1, 16, 32 or 64, at least as many as there are. activation: "" for none."""

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype
    activation: str


def _built_in(shape: Product, _: torch.device) -> Values:
    max_tokens = ALONE_UP_TO if not shape.activation or shape.rows < FILLING_ROWS else MAX_TOKENS
    return {"fused": int(shape.tokens <= max_tokens)}


def _candidates(shape: Product, _: torch.device) -> list[Values]:
    """One token always has the fused kernel, which includes the norm."""
    return [{"fused": 1}] if shape.tokens == 1 else [{"fused": 0}, {"fused": 1}]


def _is_fused(fused: int) -> bool:
    return bool(fused)


FUSED = LaunchChoice("product of few tokens", Product, _built_in, _candidates, _is_fused)


class InputNorm(NamedTuple):
    """The RMS norm of a layer's input.

    Attributes:
        norm_weight: [K] float32, as in `rms_norm`; eps is the norm's.
        residual: [T, K], added before the norm. May be overwritten: use the returned sum instead.
    """

    norm_weight: Tensor
    eps: float = 0.0
    residual: Tensor | None = None


def check_one_tensor(name: str, tail: Tensor | None, norm: InputNorm | None) -> None:
    """Raises ConfigError if an operation `name` gets a tail and a norm, which is of one tensor."""
    if tail is not None and norm is not None:
        raise ConfigError(f"{name} normalises one tensor; concatenate x and tail first")


def _check(
    x: Tensor, weight: Tensor, *_: Any, tail: Tensor | None = None, norm: InputNorm | None = None,
    parts: int = 1, **__: Any,
) -> None:  # fmt: skip
    if parts > 1 and (x.shape[0] > 1 or x.shape[1] != parts * weight.shape[1] or len(weight) % (8 * parts)):
        raise ConfigError(
            f"skinny_linear in {parts} parts takes one token of {parts * weight.shape[1]} numbers and a multiple of "
            f"{8 * parts} rows, not {list(x.shape)} and {list(weight.shape)}"
        )
    if weight.dtype != x.dtype:
        raise ConfigError(f"skinny_linear takes x and W of one dtype, not {x.dtype} and {weight.dtype}")
    if x.shape[0] > MAX_TOKENS:
        raise ConfigError(f"skinny_linear takes at most {MAX_TOKENS} tokens, not {x.shape[0]}")
    check_one_tensor("skinny_linear", tail, norm)


@operation(By("triton"), check=_check)
def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    norm: InputNorm | None = None,
    activation: Activation | None = None,
    parts: int = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """act(rms_norm(x + residual) W^T + b) and x + residual; norm, residual, bias and activation are
    optional.

    Args:
        x: [T, K] with any row stride, T at most MAX_TOKENS.
        weight: [N, K] contiguous, in x's dtype; bias: [N] or None.
        tail: [T, K - K1], the last input columns if x is `[T, K1]`: avoids a copy of two inputs.
            Not with a norm.
        parts: cuts x and the weight's rows into so many parts, [1, K] and [N / parts, K] each; the
            i-th are multiplied. One token, at most a bias.
        activation: "silu_and_mul" halves N (gate rows, then up rows); "relu2".
        out: contiguous, in x's dtype, for y; None for a new tensor.

    Returns:
        y [T, N] or [T, N / 2] in x's dtype, accumulated in float32; x + residual rounded to
            residual's dtype, or None.

    Raises:
        ConfigError: too many tokens, a tail with a norm, parts that do not fit, or another dtype.
    """
    dtype = x.dtype
    if tail is not None:
        x = torch.cat((x, tail), dim=-1)
    residual = None
    if norm is not None:
        if norm.residual is not None:
            x = residual = (x.float() + norm.residual.float()).to(norm.residual.dtype)
        x = rms_norm.reference(x, norm.norm_weight, norm.eps).to(dtype)
    if parts > 1:
        pairs = zip(x.chunk(parts, 1), weight.chunk(parts), strict=True)
        y = torch.cat([F.linear(part, rows) for part, rows in pairs], 1)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x, weight, bias)
        y = y if activation is None else ACTIVATIONS[activation].reference(y)
    return y if out is None else out.copy_(y), residual
