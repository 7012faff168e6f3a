"""Triton kernel of routed experts with weights of 8 and 4 bits: products of blocks of one expert's pairs.

Where experts have few pairs each, the kernel of `few_pairs_triton` multiplies them instead, if it can.

Weights are on the left of a tensor core, as in `_matmul_kernel`: they stay in registers after they
are decoded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import capability, shared_memory
from hybridrt.kernels.core.codes_triton import dequantized, run_columns, tile_scale
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_precision, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.moe_triton import Blocks, activate_experts, lay_out, weighted_sum
from hybridrt.kernels.dense.pipeline_tiles import GROUP
from hybridrt.kernels.dense.skinny_linear_triton import Tile
from hybridrt.kernels.quant.quant_experts import QuantStack
from hybridrt.kernels.quant.quant_linear import decodes_in_registers
from hybridrt.kernels.quant.quant_linear_triton import FOUR_BITS, scale_arguments
from hybridrt.kernels.quant.quant_weight import QuantWeight

# Pairs of an expert, on average, up to which the kernel for few is faster on an H200 (benchmarks/log/experts.md).
MOST_PAIRS = {"e4m3": 8, "int4": 16, "e2m1": 16}
APART = 4  # experts a pair, from which on each pair has a block of its own
NARROW = 1024  # columns of 4-bit experts for which tiles of 128 are faster (benchmarks/log/experts.md)


@triton.jit
def _load_tile(rows, first, WIDTH: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """WIDTH numbers of rows of LENGTH from number `first` on."""
    i = first + tl.arange(0, WIDTH)[None, :]
    if LENGTH % WIDTH == 0:
        tile = tl.load(rows + i)
    else:
        tile = tl.load(rows + i, mask=i < LENGTH, other=0.0)
    return tile


@jit_kernel(do_not_specialize=["num_pairs"])
def _quant_grouped_kernel(  # type: ignore[no-untyped-def]
    a_ptr, w_ptr, bias_ptr, pairs_ptr, block_expert_ptr, out_ptr, a_sr, num_pairs, num_experts,
    scale_ptr, zero_ptr, factor_ptr, CODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = act(w[expert] a[pair // PAIRS_PER_ROW] + bias[expert]) for a block of one expert's pairs and BLOCK_N
    rows of w [E, OUT or 2 OUT, K]."""
    WORD: tl.constexpr = 8 if CODE == "int4" or CODE == "e2m1" else 1
    PLANES: tl.constexpr = 4 if WORD == 8 else 1
    LENGTH: tl.constexpr = (K + 31) // 32 * 4 if WORD == 8 else K
    ONE: tl.constexpr = COLUMNS % BLOCK_K == 0 or COLUMNS >= K
    N: tl.constexpr = OUT * 2 if GATED else OUT
    BLOCKS: tl.constexpr = ((N + ROWS - 1) // ROWS) * ((K + COLUMNS - 1) // COLUMNS)
    begin(PDL)
    block = tl.program_id(1)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert >= num_experts or expert < 0:
        return
    if pairs_ptr is None:  # a block has one pair
        pair = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs).to(tl.int64)
    else:
        pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = (pair < num_pairs)[None, :]
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K // PLANES)
    row = tl.minimum(n, OUT - 1).to(tl.int64)
    if scale_ptr is not None:
        scale_ptr += expert * BLOCKS
    if zero_ptr is not None:
        zero_ptr += expert * BLOCKS
    w_rows = w_ptr + (expert * N + row)[:, None] * LENGTH
    a_rows = a_ptr + (pair // PAIRS_PER_ROW * a_sr)[None, :]
    total, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile = _load_tile(w_rows, start // WORD, BLOCK_K // WORD, LENGTH)
        up_tile = tile
        if GATED:
            up_tile = _load_tile(w_rows + OUT * LENGTH, start // WORD, BLOCK_K // WORD, LENGTH)
        products, up_products = total, up
        if ONE and scale_ptr is not None:
            products, up_products = tl.zeros_like(total), tl.zeros_like(up)
        for plane in tl.static_range(PLANES):
            column = (start + run_columns(k, plane, CODE))[:, None]
            a = tl.load(a_rows + column, mask=live & (column < K), other=0.0)
            values = dequantized(tile, scale_ptr, zero_ptr, row, start, plane, K, CODE, ROWS, COLUMNS, ONE, a.dtype)
            products = tl.dot(values, a, products, input_precision=PRECISION)
            if GATED:
                values = dequantized(
                    up_tile, scale_ptr, zero_ptr, row + OUT, start, plane, K, CODE, ROWS, COLUMNS, ONE, a.dtype
                )
                up_products = tl.dot(values, a, up_products, input_precision=PRECISION)
        if ONE and scale_ptr is not None:
            total += products * tile_scale(scale_ptr, row, start, K, CODE, ROWS, COLUMNS)
            if GATED:
                up += up_products * tile_scale(scale_ptr, row + OUT, start, K, CODE, ROWS, COLUMNS)
        else:
            total, up = products, up_products
    total = _finish(total, factor_ptr, bias_ptr, expert * N + row)
    if GATED:
        up = _finish(up, factor_ptr, bias_ptr, expert * N + OUT + row)
    if ACTIVATE:
        total = activate_experts(total, up, GATED, LIMIT, ALPHA)
    out = out_ptr + pair[None, :] * OUT + n[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=live & (n < OUT)[:, None])


@triton.jit
def _finish(total, factor_ptr, bias_ptr, row):  # type: ignore[no-untyped-def]
    if factor_ptr is not None:
        total *= tl.load(factor_ptr + row)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    return total


def quant_experts_triton(x: Tensor, experts: QuantStack, weights: Tensor, ids: Tensor) -> Tensor:
    """Three launches: two are products, one sums. Before them two lay out the pairs, if experts have several."""
    up, down = experts.up, experts.down
    out, (pairs, top_k), count = x.new_empty(x.shape), (ids.numel(), ids.shape[1]), len(up.data)
    hidden, y = (x.new_empty(pairs, width) for width in (down.width, x.shape[1]))
    apart, gated = pairs * APART <= count, experts.activation == "silu"
    few = all(takes_few_pairs(w, x.dtype, pairs / count) for w in (up, down))
    blocks = None if apart else lay_out(ids, count, 8 if few else 16)
    launch = _few_pairs_launch() if few else _launch
    act = {"ACTIVATE": True, "GATED": gated, "LIMIT": experts.limit, "ALPHA": experts.alpha}
    none = {"ACTIVATE": False, "GATED": False, "LIMIT": None, "ALPHA": None}
    launch(x, up, experts.b_up, blocks, hidden, ids, PAIRS_PER_ROW=top_k, **act)
    launch(hidden, down, experts.b_down, blocks, y, ids, PAIRS_PER_ROW=1, **none)
    weighted_sum(y, weights, ids, out)
    return out


def _few_pairs_launch() -> Callable[..., None]:
    """Imported late, so that the other kernels need nothing that is experimental in Triton."""
    from hybridrt.kernels.quant.few_pairs_triton import few_pairs_product

    return few_pairs_product


def takes_few_pairs(w: QuantWeight, dtype: torch.dtype, each: float) -> bool:
    """Whether tensor cores multiply an expert's few pairs, `each` on average, with numbers that are made of codes in
    their registers: what `decodes_in_registers`, in bfloat16, and e4m3 with scales of 128 columns or of rows."""
    if w.code not in MOST_PAIRS or each > MOST_PAIRS[w.code] or w.width % GROUP or dtype.itemsize != 2:
        return False
    device, eight = w.data.device, w.code == "e4m3"
    least = (8, 9) if eight else (8, 0)  # one instruction converts e4m3
    if not (device.type == "meta" or (device.type == "cuda" and capability(device) >= least)):
        return False
    # Inputs of a block are in shared memory. Where those of 16 pairs do not fit, blocks of 8 (`lay_out`) were faster
    # with e2m1 alone (benchmarks/log/experts.md).
    held = 8 if w.code == "e2m1" and each <= 8 else 16
    if held * (w.width + GROUP) * dtype.itemsize > shared_memory(device) // 2:
        return False
    if not eight:
        return dtype == torch.bfloat16 and decodes_in_registers(w, dtype)
    return w.zero is None and (w.scale is None or (w.scale.dtype.is_floating_point and not w.block[1] % GROUP))


def _launch(
    a: Tensor, w: QuantWeight, bias: Tensor | None, blocks: Blocks | None, out: Tensor, ids: Tensor, **meta: Any
) -> None:
    assert w.data.is_contiguous() and a.stride(1) == 1
    pairs, of_blocks, size = (None, ids, 16) if blocks is None else (blocks.pairs, blocks.experts, blocks.size)
    tile = expert_tile(w, size)
    _quant_grouped_kernel[(cdiv(out.shape[1], tile.block_n), of_blocks.numel())](
        a, w.data, bias, pairs, of_blocks, out, a.stride(0), ids.numel(), len(w.data), **scale_arguments(w),
        K=w.width, OUT=out.shape[1], PRECISION=dot_precision(a.dtype), BLOCK_M=size, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, STAGES=tile.stages, num_warps=tile.num_warps, **meta, **pdl(a.device),
    )  # fmt: skip


def expert_tile(w: QuantWeight, size: int) -> Tile:
    """Rows and columns of an expert's weight that a program multiplies with `size` pairs."""
    tile = Tile(64, 128, 4, 3)
    if w.code in FOUR_BITS:
        tile = Tile(128, 64, 8, 3) if size > 16 else replace(tile, block_k=256 if w.width > NARROW else 128)
    return replace(tile, block_k=max(64, min(tile.block_k, next_power_of_2(w.width))))
