"""Triton kernel of `fp8_linear` for more than 64 tokens and few rows, which are split along the inputs.

cuBLAS has a program for each 128 rows and does not split the inputs: 24 programs for a weight of 3,072 rows, on 132
multiprocessors.
"""

import torch
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import arrival_counters, cdiv
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.kernels.dense.skinny_linear_triton import MULTIPROCESSORS, store_output, weight_rows
from hybridrt.kernels.quant.fp8_linear import GROUP, TokenCodes
from hybridrt.kernels.quant.quant_weight import QuantWeight

ROWS, TOKENS = 128, 64  # of a program
PROGRAMS = 2 * MULTIPROCESSORS  # that run at a time


@jit_kernel(do_not_specialize=["tokens"])
def _fp8_split_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr,
    tokens, N, x_scale_sr, K: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of tokens, SPLIT, blocks of rows], so that programs that read the same weights run together."""
    block_t, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = part * PART
    end = tl.minimum(first + PART, K)
    k, t = tl.arange(0, BLOCK_K), block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    # Past the last row and token they repeat: cheaper than masks, and never written.
    row = tl.minimum(weight_rows(block, N, ACTIVATION, BLOCK_N), N - 1)
    token = tl.minimum(t, tokens - 1)
    weights = weight_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    inputs = x_ptr + token[None, :] * K + k[:, None]
    begin(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        # Tensor cores add products of e4m3 with few bits: sums of BLOCK_K columns are added in float32.
        products = tl.dot(tl.load(weights + start), tl.load(inputs + start))
        if scale_ptr is None:
            acc += products
        else:
            x_scale = tl.load(x_scale_ptr + start // BLOCK_K * x_scale_sr + token)
            if ROWS % BLOCK_N == 0 and ACTIVATION != "silu_and_mul":
                x_scale *= tl.load(scale_ptr + block * BLOCK_N // ROWS * (K // BLOCK_K) + start // BLOCK_K)
            else:
                scale = tl.load(scale_ptr + row // ROWS * (K // BLOCK_K) + start // BLOCK_K)
                products *= scale[:, None]
            acc += products * x_scale[None, :]
    if scale_ptr is None:
        acc *= tl.load(x_scale_ptr + token)[None, :]
    here = tokens - block_t * BLOCK_T
    out_ptr += block_t.to(tl.int64) * BLOCK_T * (N // 2 if ACTIVATION == "silu_and_mul" else N)
    if SPLIT == 1:
        store_output(tl.trans(acc), bias_ptr, factor_ptr, out_ptr, block, here, N, ACTIVATION, BLOCK_N)
    else:
        tile = block * tl.num_programs(0) + block_t
        cells = parts_ptr + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_T)
        cells += tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        tl.store(cells + part * (BLOCK_N * BLOCK_T), acc)
        tl.debug_barrier()  # publish stores
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals_ptr + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for other in range(SPLIT):
                total += tl.load(cells + other * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
            store_output(tl.trans(total), bias_ptr, factor_ptr, out_ptr, block, here, N, ACTIVATION, BLOCK_N)


def fp8_split_triton(
    x: TokenCodes,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:
    """`fp8_linear` in one launch. Programs that share a tile add their parts in order."""
    rows, width, device = weight.rows, weight.width, weight.data.device
    out = torch.empty(x.tokens, rows // 2 if activation == "silu_and_mul" else rows, dtype=dtype, device=device)
    blocks, token_blocks = cdiv(rows, ROWS), cdiv(x.tokens, TOKENS)
    split = max(1, min(PROGRAMS // (blocks * token_blocks), width // (4 * GROUP)))
    part = cdiv(width, GROUP * split) * GROUP
    split = cdiv(width, part)
    parts, arrivals = None, None
    if split > 1:
        parts = torch.empty((blocks * token_blocks, split, ROWS, TOKENS), dtype=torch.float32, device=device)
        arrivals = arrival_counters(weight.data, blocks * token_blocks)
    _fp8_split_kernel[token_blocks, split, blocks](
        x.codes, x.scale, weight.data, weight.scale, weight.factor, bias, out, parts, arrivals, x.tokens, rows,
        x.scale.stride(0), K=width, ROWS=weight.block[0], ACTIVATION=activation, BLOCK_N=ROWS, BLOCK_T=TOKENS,
        BLOCK_K=GROUP, STAGES=3, PART=part, SPLIT=split, num_warps=4, **pdl(device),
    )  # fmt: skip
    return out
