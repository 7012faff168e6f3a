"""A linear layer whose weight and inputs are e4m3: inputs are quantised by token, or by 128 numbers of one."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.dense.norm_activation import rms_norm
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, InputNorm, activated_width, check_one_tensor
from hybridrt.kernels.quant.formats import E4M3_MAX
from hybridrt.kernels.quant.quant_weight import QuantWeight, dequantize

GROUP = 128
PADDING = 16  # rows of codes: libraries take multiples
SMALLEST = 1e-12
TOKEN_WIDTH = 32768  # inputs of one token, which a program keeps in shared memory: 2 KiB for 1,024 of them
MAX_TOKENS, FEW_TOKENS = 128, 64  # of a product; FEW_TOKENS of weights with one scale a row


class TokenCodes(NamedTuple):
    """x[t, k] = codes[t, k] * scale[k // group, t] for t below `tokens`.

    Attributes:
        codes: e4m3 [T, K], T a multiple of PADDING. Rows past `tokens` are not filled.
        scale: float32 [K / group, T].
    """

    codes: Tensor
    scale: Tensor
    tokens: int
    group: int


def empty_codes(x: Tensor, width: int, group: int) -> TokenCodes:
    """Codes of `width` numbers for each token of x [tokens, ...], not filled."""
    tokens, padded = x.shape[0], -(-x.shape[0] // PADDING) * PADDING
    codes = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(width // group, padded, dtype=torch.float32, device=x.device)
    return TokenCodes(codes, scale, tokens, group)


def _check_quantize(x: Tensor, group: int, norm: InputNorm | None = None, before: Activation | None = None) -> None:
    if before is not None and (before not in ACTIVATIONS or (before == "silu_and_mul" and x.shape[1] % 2)):
        raise ConfigError(f"no activation {before!r} of {x.shape[1]} numbers; there are {', '.join(ACTIVATIONS)}")
    width = activated_width(x.shape[1], before)
    if group not in (GROUP, width) or width % GROUP:
        raise ConfigError(
            f"tokens of {width} numbers are quantised by {GROUP} numbers or whole, and have a multiple of {GROUP}"
        )
    if norm is not None and before is not None:
        raise ConfigError("quantize_tokens applies a norm or an activation; apply one of them first")


@operation(By("triton"), check=_check_quantize)
def quantize_tokens(
    x: Tensor, group: int, norm: InputNorm | None = None, before: Activation | None = None
) -> tuple[TokenCodes, Tensor | None]:
    """Codes of rms_norm(x + residual), and x + residual; norm and residual are optional. Or codes of act(x).

    A scale is the largest size of its numbers / 448, the largest e4m3 number.

    Args:
        x: [T, K], K a multiple of GROUP; [T, 2K] before "silu_and_mul".
        group: GROUP, or K for one scale a token.
        before: the activation. Its results are rounded to x's dtype, as if they were stored.

    Raises ConfigError for other widths and groups, and for a norm with an activation.
    """
    residual = None
    if before is not None:
        x = ACTIVATIONS[before].reference(x.float()).to(x.dtype)
    if norm is not None:
        if norm.residual is not None:
            x = residual = (x.float() + norm.residual.float()).to(norm.residual.dtype)
        x = rms_norm.reference(x.float(), norm.norm_weight, norm.eps)
    found = empty_codes(x, x.shape[1], group)
    numbers = x.float().unflatten(1, (-1, group))
    scale = numbers.abs().amax(2).clamp(min=SMALLEST) / E4M3_MAX
    found.codes[: len(x)] = (numbers * (1 / scale).unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX).flatten(1)
    found.scale[:, : len(x)] = scale.t()
    return found, residual


def decoded_tokens(x: TokenCodes) -> Tensor:
    """float32 [tokens, K]."""
    numbers = x.codes[: x.tokens].float().unflatten(1, (-1, x.group))
    return (numbers * x.scale[:, : x.tokens].t().unsqueeze(2)).flatten(1)


def _check_scale(name: str, weight: QuantWeight) -> None:
    if weight.scale is not None and (weight.block[1] != GROUP or weight.scale.dtype != torch.float32):
        raise ConfigError(
            f"{name} takes float32 scales of blocks of {GROUP} columns, not {weight.scale.dtype} of {weight.block[1]}"
        )


def _check(x: TokenCodes, weight: QuantWeight, *_: object, **__: object) -> None:
    if x.codes.shape[1] != weight.width:
        raise ConfigError(f"a weight of {weight.width} columns takes as many numbers a token, not {x.codes.shape[1]}")
    if weight.code != "e4m3" or (weight.scale is not None) != (x.group == GROUP) or weight.zero is not None:
        raise ConfigError("fp8_linear takes e4m3 weights; those with blocks take inputs in groups of 128, others whole")
    _check_scale("fp8_linear", weight)
    most, kind = (FEW_TOKENS, "one scale a row") if weight.scale is None else (MAX_TOKENS, "blocks")
    if x.tokens > most:
        text = f"fp8_linear takes at most {most} tokens of weights with {kind}, not {x.tokens}"
        raise ConfigError(f"{text}: multiply more by torch.nn.functional.scaled_mm, as multiply_codes does")


@operation(By("triton"), check=_check)
def fp8_linear(
    x: TokenCodes,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:
    """act(x W^T + b) [T, N] in `dtype`, or [T, N / 2] for "silu_and_mul".

    Products of codes are exact and summed in float32; the kernel applies scales to the sums of 128
    columns, or of all if neither side has groups.

    Args:
        weight: e4m3 [N, K]. If it has blocks (of 128 columns), x has groups of 128; else x has one
            scale a token.

    Raises ConfigError for other weights, for more than MAX_TOKENS tokens, or FEW_TOKENS without
    blocks; the Triton provider also for more than FEW_TOKENS where the Gluon kernel does not run.
    """
    y = F.linear(decoded_tokens(x), dequantize(weight), None if bias is None else bias.float())
    return (y if activation is None else ACTIVATIONS[activation].reference(y)).to(dtype)


def _check_token(
    x: Tensor, weight: QuantWeight, *_: object, tail: Tensor | None = None, norm: InputNorm | None = None, **__: object
) -> None:
    width = x.shape[1] + (0 if tail is None else tail.shape[1])
    if x.shape[0] != 1 or width != weight.width:
        raise ConfigError(f"fp8_token_linear takes one token of {weight.width} numbers, not {[x.shape[0], width]}")
    check_one_tensor("fp8_token_linear", tail, norm)
    if weight.code != "e4m3" or weight.zero is not None or width % GROUP or width > TOKEN_WIDTH:
        raise ConfigError(f"fp8_token_linear takes e4m3 weights of a multiple of {GROUP} columns, up to {TOKEN_WIDTH}")
    if tail is not None and tail.dtype != x.dtype:
        raise ConfigError(f"fp8_token_linear takes x and tail of one dtype, not {x.dtype} and {tail.dtype}")
    _check_scale("fp8_token_linear", weight)


@operation(By("triton", "hybridrt.kernels.quant.one_token_triton:one_token_triton"), check=_check_token)
def fp8_token_linear(
    x: Tensor,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    norm: InputNorm | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`quantize_tokens` and `fp8_linear` of one token: act(codes of rms_norm(x + residual) W^T + b), and x + residual.

    Args:
        x: [1, K].
        weight: e4m3 [N, K], K at most TOKEN_WIDTH, with blocks of GROUP columns or one scale a row.
        tail: [1, K - K1], the last inputs if x is [1, K1]. Not with a norm.

    Returns y [1, N], or [1, N / 2] for "silu_and_mul", in x's dtype; x + residual, or None.

    Raises ConfigError for other weights, more tokens, a tail with a norm, or one of another dtype.
    """
    dtype, x = x.dtype, x if tail is None else torch.cat((x, tail), 1)
    codes, total = quantize_tokens.reference(x, GROUP if weight.scale is not None else weight.width, norm)
    return fp8_linear.reference(codes, weight, bias, dtype=dtype, activation=activation), total
