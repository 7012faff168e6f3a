"""Triton kernel of `decode_weight`: one pass over the codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.codes_triton import dequantized
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.quant.quant_linear_triton import scale_arguments
from hybridrt.kernels.quant.quant_weight import QuantWeight

HIGH, WIDE = 8, 512  # rows and columns of a program


@jit_kernel
def _decode_weight_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, out_ptr, N, scale_ptr, zero_ptr, factor_ptr, K: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of BLOCK_N rows, blocks of BLOCK_K columns]."""
    PLANES: tl.constexpr = 4 if CODE == "int4" or CODE == "e2m1" else 1
    WORD: tl.constexpr = 8 if PLANES == 4 else 1  # codes of a number in memory
    LENGTH: tl.constexpr = (K + 31) // 32 * 4 if WORD == 8 else K
    start = tl.program_id(1) * BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)
    word = start // WORD + tl.arange(0, BLOCK_K // WORD)
    tile = tl.load(weight_ptr + row[:, None] * LENGTH + word[None, :], mask=(word < LENGTH)[None, :], other=0.0)
    begin(PDL)  # earlier kernels may still read the outputs
    factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row)
    if PLANES == 1:
        values = _plane(tile, scale_ptr, zero_ptr, factor, row, start, 0, K, CODE, ROWS, COLUMNS, out_ptr)
    else:  # of each run of 32, so that neighbours are stored together
        first = _plane(tile, scale_ptr, zero_ptr, factor, row, start, 0, K, CODE, ROWS, COLUMNS, out_ptr)
        second = _plane(tile, scale_ptr, zero_ptr, factor, row, start, 1, K, CODE, ROWS, COLUMNS, out_ptr)
        third = _plane(tile, scale_ptr, zero_ptr, factor, row, start, 2, K, CODE, ROWS, COLUMNS, out_ptr)
        last = _plane(tile, scale_ptr, zero_ptr, factor, row, start, 3, K, CODE, ROWS, COLUMNS, out_ptr)
        planes = tl.join(tl.join(first, third), tl.join(second, last))
        planes = tl.permute(tl.reshape(planes, [BLOCK_N, BLOCK_K // 32, 8, 4]), (0, 1, 3, 2))
        values = tl.reshape(planes, [BLOCK_N, BLOCK_K])
    column = start + tl.arange(0, BLOCK_K)
    tl.store(out_ptr + row[:, None] * K + column[None, :], values, mask=(n < N)[:, None] & (column < K)[None, :])


@triton.jit
def _plane(  # type: ignore[no-untyped-def]
    tile, scale_ptr, zero_ptr, factor, row, start, PLANE: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, out_ptr,
):  # fmt: skip
    """Numbers of a plane of the codes in the outputs' dtype."""
    values = dequantized(tile, scale_ptr, zero_ptr, row, start, PLANE, K, CODE, ROWS, COLUMNS, False, tl.float32)
    return (values * factor[:, None]).to(out_ptr.dtype.element_ty)


def decode_weight_triton(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    """One launch."""
    rows, width = weight.rows, weight.width
    assert weight.data.is_contiguous()
    out = torch.empty(rows, width, dtype=dtype, device=weight.data.device)
    _decode_weight_kernel[(cdiv(rows, HIGH), cdiv(width, WIDE))](
        weight.data, out, rows, K=width, BLOCK_N=HIGH, BLOCK_K=WIDE, num_warps=4, **scale_arguments(weight),
        **pdl(out.device),
    )  # fmt: skip
    return out
