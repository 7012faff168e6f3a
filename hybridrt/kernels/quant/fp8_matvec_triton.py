"""Triton kernel of `fp8_linear` for one token: multiply-add instead of tensor cores.

A program loads a tile of the weight before it waits for the kernel that quantises the token, and keeps it in registers
while it loads the next. Tensor cores would take 64 rows at a time through shared memory, of which fewer bytes are on
their way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.kernels.dense.skinny_linear_triton import store_output, weight_rows
from hybridrt.kernels.quant.fp8_linear import GROUP, TokenCodes
from hybridrt.kernels.quant.quant_weight import QuantWeight


class MatvecTile(NamedTuple):
    """Rows and columns of the weight that a program has in registers."""

    block_n: int
    block_k: int
    num_warps: int


@triton.jit
def _two_codes(words, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lower or upper two e4m3 codes of int32 words, as two float32 numbers."""
    # One instruction converts two codes; from bytes, Triton makes several for each.
    pair = tl.inline_asm_elementwise(
        "{.reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, " + HALF + ";}",
        "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    first = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    second = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@jit_kernel
def _fp8_matvec_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, factor_ptr, bias_ptr, out_ptr, N, x_scale_sr,
    K: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of rows]. A thread owns 16 bytes of each row, which have one scale."""
    WORDS: tl.constexpr = K // 4
    word, run = tl.arange(0, BLOCK_K // 4), tl.arange(0, BLOCK_K // 16)
    group = run // (GROUP // 16)
    row = tl.minimum(weight_rows(tl.program_id(0), N, ACTIVATION, BLOCK_N), N - 1)
    weights = weight_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64)[:, None] * WORDS + word[None, :]
    codes = x_ptr.to(tl.pointer_type(tl.int32)) + word
    tile = tl.load(weights, mask=(word < WORDS)[None, :], other=0)
    if scale_ptr is not None:
        scales = scale_ptr + (row // ROWS * (K // GROUP))[:, None] + group[None, :]
        scale = tl.load(scales, mask=(group < K // GROUP)[None, :], other=0.0)
    begin(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K // 16], tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(codes + start // 4, mask=word < WORDS - start // 4, other=0)
        x0, x1 = _two_codes(x, "low")
        x2, x3 = _two_codes(x, "high")
        w0, w1 = _two_codes(tile, "low")
        w2, w3 = _two_codes(tile, "high")
        # One after the other, so that three of four are fused multiply-adds.
        products = w0 * x0[None, :] + w1 * x1[None, :]
        products += w2 * x2[None, :]
        products += w3 * x3[None, :]
        sums = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 16, 4]), axis=2)
        if scale_ptr is None:
            acc += sums
        else:
            of_x = x_scale_ptr + (start // GROUP + group) * x_scale_sr
            x_scale = tl.load(of_x, mask=group < K // GROUP - start // GROUP, other=0.0)
            acc += sums * (scale * x_scale[None, :])
        if BLOCK_K < K:
            # Last, to reuse the registers of this piece.
            after = start + BLOCK_K
            tile = tl.load(weights + after // 4, mask=(word < WORDS - after // 4)[None, :], other=0)
            if scale_ptr is not None:
                left = K // GROUP - after // GROUP
                scale = tl.load(scales + after // GROUP, mask=(group < left)[None, :], other=0.0)
    y = tl.sum(acc, axis=1)
    if scale_ptr is None:
        y *= tl.load(x_scale_ptr)
    store_output(y[None, :], bias_ptr, factor_ptr, out_ptr, tl.program_id(0), 1, N, ACTIVATION, BLOCK_N)


def fp8_matvec_triton(
    x: TokenCodes,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:
    """`fp8_linear` of one token in one launch."""
    rows, width, device = weight.rows, weight.width, weight.data.device
    out = torch.empty(1, rows // 2 if activation == "silu_and_mul" else rows, dtype=dtype, device=device)
    tile = matvec_tile(rows, width)
    _fp8_matvec_kernel[(cdiv(rows, tile.block_n),)](
        x.codes, x.scale, weight.data, weight.scale, weight.factor, bias, out, rows, x.scale.stride(0), K=width,
        ROWS=weight.block[0], ACTIVATION=activation, GROUP=GROUP, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, **pdl(device),
    )  # fmt: skip
    return out


def matvec_tile(rows: int, width: int) -> MatvecTile:
    """Of a weight [rows, width]."""
    tile = MatvecTile(4, 1024, 2) if rows > 4096 else MatvecTile(4, 2048, 4)
    return tile._replace(block_k=max(GROUP, min(tile.block_k, next_power_of_2(width))))
