"""Triton kernels of `quantize_tokens` and `fp8_linear`: tensor cores multiply the codes as they are."""

import torch
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import arrival_counters, cdiv, dot_width, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.pipeline_linear_triton import WeightCodes, pipeline_linear
from hybridrt.kernels.dense.pipeline_tiles import (
    FEWEST,
    PipelineTile,
    has_pipeline,
    pipeline_tile,
    programs_of,
)
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm, activated_width
from hybridrt.kernels.dense.skinny_linear_triton import MULTIPROCESSORS, store_output, weight_rows
from hybridrt.kernels.quant.fp8_linear import FEW_TOKENS, GROUP, TokenCodes, empty_codes
from hybridrt.kernels.quant.quant_weight import QuantWeight

PROGRAM_ROWS = 64  # of a weight, that a program multiplies; sums of more leave no registers
PROGRAM_COLUMNS = 2048  # that a program quantises, if the token's sum of squares is not asked for


@jit_kernel
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, codes_ptr, scale_ptr, x_sr, residual_sr, scale_sr, eps,
    D: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [tokens, blocks of columns]. The residual and the norm are optional, or there is an activation."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    d = first + tl.arange(0, BLOCK)
    mask = d < D
    weight = None if norm_ptr is None else tl.load(norm_ptr + d, mask=mask, other=0.0)
    begin(PDL)
    x = tl.load(x_ptr + row * x_sr + d, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        target = residual_ptr + row * residual_sr + d
        rounded = (x + tl.load(target, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(target, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if norm_ptr is not None:
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)) * weight
    if ACTIVATION is not None:
        if ACTIVATION == "silu_and_mul":
            x = x * tl.sigmoid(x) * tl.load(x_ptr + row * x_sr + D + d, mask=mask, other=0.0).to(tl.float32)
        else:
            x = tl.maximum(x, 0.0)
            x *= x
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if GROUP == D:
        scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
        codes = x * (1.0 / scale)
        tl.store(scale_ptr + row, scale)
    else:
        groups = tl.reshape(x, [BLOCK // GROUP, GROUP])
        scale = tl.maximum(tl.max(tl.abs(groups), 1), 1e-12) / 448.0
        codes = tl.reshape(groups * (1.0 / scale)[:, None], [BLOCK])
        g = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + g * scale_sr + row, scale, mask=g * GROUP < D)
    tl.store(codes_ptr + row * D + d, codes.to(codes_ptr.dtype.element_ty), mask=mask)


def quantize_tokens_triton(
    x: Tensor, group: int, norm: InputNorm | None = None, before: Activation | None = None
) -> tuple[TokenCodes, Tensor | None]:
    """One launch. The residual is overwritten with the sum."""
    tokens, width = x.shape[0], activated_width(x.shape[1], before)
    assert x.stride(1) == 1
    norm_weight, eps, residual = (None, 0.0, None) if norm is None else (norm.norm_weight, norm.eps, norm.residual)
    found, whole = empty_codes(x, width, group), next_power_of_2(width)
    block = whole if norm is not None or group == width else min(whole, PROGRAM_COLUMNS)
    _quantize_kernel[(tokens, cdiv(width, block))](
        x, residual, norm_weight, found.codes, found.scale, x.stride(0),
        0 if residual is None else residual.stride(0), found.scale.stride(0), eps,
        D=width, GROUP=group, ACTIVATION=before, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **pdl(x.device),
    )  # fmt: skip
    return found, residual


@jit_kernel(do_not_specialize=["tokens"])
def _fp8_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr,
    tokens, N, x_scale_sr, K: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SPLIT programs for each block of rows, of PART columns each. Weight [BLOCK_N, K or its part] x tokens [K, T].

    Two blocks of K at a time: with one, a program waits for memory more often than it has bytes on their way.
    """
    block, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    first = part * PART
    end = tl.minimum(first + PART, K)
    k, t = tl.arange(0, BLOCK_K), tl.arange(0, T)
    row = tl.minimum(weight_rows(block, N, ACTIVATION, BLOCK_N), N - 1)
    weights = weight_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    inputs = x_ptr + t[None, :] * K + k[:, None]
    live = t < tokens
    begin(PDL)
    acc = tl.zeros([BLOCK_N, T], tl.float32)
    for start in tl.range(first, end, 2 * BLOCK_K, num_stages=STAGES):
        # An odd number of blocks ends with the last one twice, once times zeros.
        later, also = tl.minimum(start + BLOCK_K, K - BLOCK_K), live & (start + BLOCK_K < K)
        tile, next_tile = tl.load(weights + start), tl.load(weights + later)
        x = tl.load(inputs + start, mask=live[None, :], other=0.0)
        next_x = tl.load(inputs + later, mask=also[None, :], other=0.0)
        # Tensor cores add products of e4m3 with few bits: sums of BLOCK_K columns are added in float32.
        products, next_products = tl.dot(tile, x), tl.dot(next_tile, next_x)
        if scale_ptr is not None:
            scales, x_scales = scale_ptr + row // ROWS * (K // BLOCK_K), x_scale_ptr + t
            scale, next_scale = tl.load(scales + start // BLOCK_K), tl.load(scales + later // BLOCK_K)
            x_scale = tl.load(x_scales + start // BLOCK_K * x_scale_sr, mask=live, other=0.0)
            next_x_scale = tl.load(x_scales + later // BLOCK_K * x_scale_sr, mask=live, other=0.0)
            products *= scale[:, None] * x_scale[None, :]
            next_products *= next_scale[:, None] * next_x_scale[None, :]
        acc += products + next_products
    if scale_ptr is None:
        acc *= tl.load(x_scale_ptr + t, mask=live, other=0.0)[None, :]
    if SPLIT == 1:
        store_output(tl.trans(acc), bias_ptr, factor_ptr, out_ptr, block, tokens, N, ACTIVATION, BLOCK_N)
    else:
        cells = parts_ptr + block.to(tl.int64) * (SPLIT * BLOCK_N * T)
        cells += tl.arange(0, BLOCK_N)[:, None] * T + t[None, :]
        tl.store(cells + part * (BLOCK_N * T), acc)
        tl.debug_barrier()  # publish stores
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals_ptr + block, 0)
            total = tl.zeros([BLOCK_N, T], tl.float32)
            for other in range(SPLIT):
                total += tl.load(cells + other * (BLOCK_N * T), cache_modifier=".cg")
            store_output(tl.trans(total), bias_ptr, factor_ptr, out_ptr, block, tokens, N, ACTIVATION, BLOCK_N)


def fp8_linear_triton(
    x: TokenCodes,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:
    """One launch: of the kernel with roles of warps for weights in blocks, if few tokens need one wave of its programs,
    else of `_fp8_linear_kernel`. Programs that share rows add their parts in order. Raises ConfigError for more than
    FEW_TOKENS tokens that the first does not take."""
    rows, width, device = weight.rows, weight.width, weight.data.device
    out = torch.empty(x.tokens, activated_width(rows, activation), dtype=dtype, device=device)
    tile = _pipeline_tile(x.tokens, weight, device)
    if tile is not None:
        assert weight.data.is_contiguous() and x.codes.is_contiguous() and x.scale.is_contiguous()
        assert weight.scale is not None
        codes = WeightCodes("e4m3", weight.scale, weight.block, tokens=x.scale)
        pipeline_linear(x.codes, weight.data, bias, out, tile, codes=codes, activation=activation)
        return out
    if x.tokens > FEW_TOKENS:
        raise ConfigError(
            f"{x.tokens} tokens, more than {FEW_TOKENS}, take weights in blocks on a GPU of compute capability 9.0: "
            "call fp8_linear.reference elsewhere"
        )
    padded = dot_width(x.tokens)
    blocks = cdiv(rows, PROGRAM_ROWS)
    split = max(1, min(8, 3 * MULTIPROCESSORS // blocks, width // 512))
    part = cdiv(width, 2 * GROUP * split) * 2 * GROUP
    split = cdiv(width, part)
    parts, arrivals = None, None
    if split > 1:
        parts = torch.empty((blocks, split, PROGRAM_ROWS, padded), dtype=torch.float32, device=device)
        arrivals = arrival_counters(weight.data, blocks)
    _fp8_linear_kernel[(blocks * split,)](
        x.codes, x.scale, weight.data, weight.scale, weight.factor, bias, out, parts, arrivals,
        x.tokens, rows, x.scale.stride(0), K=width, T=padded, ROWS=weight.block[0], ACTIVATION=activation,
        BLOCK_N=PROGRAM_ROWS, BLOCK_K=GROUP, STAGES=3, PART=part, SPLIT=split, num_warps=4, **pdl(device),
    )  # fmt: skip
    return out


def _pipeline_tile(tokens: int, weight: QuantWeight, device: torch.device) -> PipelineTile | None:
    """None if the kernel with roles does not run, or takes more than one wave of programs for a few tokens."""
    if weight.scale is None or weight.factor is not None or weight.width % GROUP or not has_pipeline(device):
        return None
    programs = multiprocessors(device)
    tile = pipeline_tile(tokens, weight.rows, weight.width // GROUP, programs)
    return tile if tokens > FEWEST or programs_of(tile, tokens, weight.rows) <= programs else None
