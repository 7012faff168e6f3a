"""Triton kernels of `skinny_linear`: one token by multiply-add, several by tensor cores.

Both stream the weights once, a block of rows per program, and reduce in a fixed order.

One token: a program keeps a tile of weights in registers while it loads the next. The norm's scale
is applied to finished products, so the sum of squares needs no pass of its own.

More tokens: tiles go through shared memory. The norm is a launch of its own: otherwise every
program would read all tokens twice. If a weight has too few rows for the device, or blocks are left
over after whole waves, programs share a row block by columns; the last to finish sums the parts in
order.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.launch import arrival_counters, dot_precision
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.norm_activation_triton import add_rms_norm_triton, rms_norm_triton
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm

MULTIPROCESSORS = 132  # those of the devices that the tiles are for; tiles do not change with the device


@triton.jit
def _weight_rows(block, N, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if ACTIVATION == "silu_and_mul":
        row = row // 2 + (row % 2) * (N // 2)
    return row


@triton.jit
def _activate(y, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "silu_and_mul":
        gate, up = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
        y = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "relu2":
        y = tl.maximum(y, 0.0)
        y = y * y
    return y


@triton.jit
def _store_output(  # type: ignore[no-untyped-def]
    y, bias_ptr, out_ptr, block, tokens, N, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr
):
    if bias_ptr is not None:
        row = _weight_rows(block, N, ACTIVATION, BLOCK_N)
        y += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[None, :]
    y = _activate(y, ACTIVATION)
    width = N
    if ACTIVATION == "silu_and_mul":
        width = N // 2
    t, column = tl.arange(0, y.shape[0]), block * y.shape[1] + tl.arange(0, y.shape[1])
    out = out_ptr + t.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & (column < width)[None, :])


@triton.jit
def _input_columns(x_ptr, tail_ptr, column, split):  # type: ignore[no-untyped-def]
    pointer = x_ptr + column
    if tail_ptr is not None:
        pointer = tl.where(column < split, pointer, tail_ptr + (column - split))
    return pointer


@triton.jit
def _matvec_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, N, split, eps,
    K: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token. A thread owns 8 neighbouring columns of each row, one 16-byte load."""
    if PARTS > 1:
        x_ptr += tl.program_id(0) * BLOCK_N // (N // PARTS) * K
    k = tl.arange(0, BLOCK_K)
    # Past the last row it repeats: cheaper than a mask, and never written.
    row = tl.minimum(_weight_rows(tl.program_id(0), N, ACTIVATION, BLOCK_N), N - 1).to(tl.int64)
    weights = weight_ptr + row[:, None] * K + k[None, :]
    tile = tl.load(weights, mask=(k < K)[None, :], other=0.0)
    sum_end = tl.where(tl.program_id(0) == 0, K, 0)  # only the first program writes x + residual
    begin(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask = start + k < K
        x = tl.load(_input_columns(x_ptr, tail_ptr, start + k, split), mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            x += tl.load(residual_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
            rounded = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + start + k, rounded, mask=start + k < sum_end)
            x = rounded.to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + start + k, mask=mask, other=0.0)
        products = tl.reshape(tile.to(tl.float32) * x[None, :], [BLOCK_N, BLOCK_K // 8, 8])
        acc += tl.sum(products, axis=2)
        if BLOCK_K < K:
            # Last, to reuse the registers of this piece.
            following = start + BLOCK_K
            tile = tl.load(weights + following, mask=(following + k < K)[None, :], other=0.0)
    y = tl.sum(acc, axis=1)
    if norm_ptr is not None:
        y *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)
    _store_output(y[None, :], bias_ptr, out_ptr, tl.program_id(0), 1, N, ACTIVATION, BLOCK_N)


@triton.jit(do_not_specialize=["tokens", "whole"])
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, weight_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, x_st, tail_st, tokens, N, whole,
    K: tl.constexpr, HEAD: tl.constexpr, T: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`whole` programs with a block of rows each, then SPLIT for each block left.

    Weight [BLOCK_N, K or its part] x tokens [K, T]: a tensor core takes 64 rows on the left. HEAD:
    input columns before the tail.
    """
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    block, part, first, end = tl.program_id(0), 0, 0, K
    if SPLIT > 1:
        shared = block - whole
        if shared >= 0:
            block, part = whole + shared // SPLIT, shared % SPLIT
            first = part * PART
            end = tl.minimum(first + PART, K)
    k, t = tl.arange(0, BLOCK_K), tl.arange(0, T)
    row = tl.minimum(_weight_rows(block, N, ACTIVATION, BLOCK_N), N - 1).to(tl.int64)
    weights = weight_ptr + row[:, None] * K + k[None, :]
    live = (t < tokens)[None, :]
    begin(PDL)
    acc = tl.zeros([BLOCK_N, T], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            tile = tl.load(weights + start)
        else:
            tile = tl.load(weights + start, mask=(start + k < K)[None, :], other=0.0)
        column = (start + k)[:, None]
        mask = live & (column < K)
        if HEAD == K:
            inputs = x_ptr + t[None, :] * x_st + column
        elif HEAD % BLOCK_K == 0:  # a tile is on one side
            in_tail = start >= HEAD
            source = tl.where(in_tail, tail_ptr - HEAD, x_ptr)
            inputs = source + t[None, :] * tl.where(in_tail, tail_st, x_st) + column
        else:
            inputs = tl.where(column < HEAD, x_ptr + t[None, :] * x_st, tail_ptr - HEAD + t[None, :] * tail_st) + column
        acc = tl.dot(tile, tl.load(inputs, mask=mask, other=0.0), acc, input_precision=PRECISION)
    if SPLIT == 1 or block < whole:
        _store_output(tl.trans(acc), bias_ptr, out_ptr, block, tokens, N, ACTIVATION, BLOCK_N)
    else:
        cells = parts_ptr + (block - whole).to(tl.int64) * (SPLIT * BLOCK_N * T)
        cells += tl.arange(0, BLOCK_N)[:, None] * T + t[None, :]
        tl.store(cells + part * (BLOCK_N * T), acc)
        tl.debug_barrier()  # publish stores
        if tl.atomic_add(arrivals_ptr + block - whole, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals_ptr + block - whole, 0)
            total = tl.zeros([BLOCK_N, T], tl.float32)
            for other in range(SPLIT):
                total += tl.load(cells + other * (BLOCK_N * T), cache_modifier=".cg")
            _store_output(tl.trans(total), bias_ptr, out_ptr, block, tokens, N, ACTIVATION, BLOCK_N)


@dataclass(frozen=True)
class Tile:
    """A program's rows and columns of the weight. If `split` > 1, so many programs share each of
    the last `shared` row blocks (None: of all)."""

    block_n: int
    block_k: int
    num_warps: int
    stages: int = 1
    split: int = 1
    shared: int | None = None


def skinny_linear_triton(
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
    """One launch for one token; several tokens with a norm need one more."""
    assert weight.is_contiguous() and x.stride(1) == 1
    rows, columns = weight.shape
    norm_weight, eps, residual = (None, 0.0, None) if norm is None else (norm.norm_weight, norm.eps, norm.residual)
    out_features = rows // (2 if activation == "silu_and_mul" else 1)
    if out is None:
        out = torch.empty(x.shape[0], out_features, dtype=x.dtype, device=x.device)
    if x.shape[0] > 1:
        if norm_weight is not None and residual is not None:
            x, residual = add_rms_norm_triton(x, residual, norm_weight, eps)
        elif norm_weight is not None:
            x = rms_norm_triton(x, norm_weight, eps)
        _matmul(x, tail, weight, bias, activation, out)
        return out, residual
    total = None if residual is None else torch.empty_like(residual)  # programs still read the old one
    tile = matvec_tile(rows, columns)
    _matvec_kernel[(triton.cdiv(rows, tile.block_n),)](
        x, tail, residual, norm_weight, weight, bias, out, total, rows, x.shape[1], eps,
        K=columns, ACTIVATION=activation, PARTS=parts,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps, **pdl(x.device),
    )  # fmt: skip
    return out, total


def matvec(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """x W^T in float32 for one token x [1, K] and a float32 weight [N, K]: [1, N]."""
    rows, columns = weight.shape
    out, tile = torch.empty(1, rows, dtype=torch.float32, device=x.device), _narrowed(tile, columns)
    _matvec_kernel[(triton.cdiv(rows, tile.block_n),)](
        x, None, None, None, weight, None, out, None, rows, columns, 0.0, K=columns, ACTIVATION=None, PARTS=1,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps, **pdl(x.device),
    )  # fmt: skip
    return out


def _matmul(
    x: Tensor, tail: Tensor | None, weight: Tensor, bias: Tensor | None, activation: Activation | None, out: Tensor
) -> None:
    rows, columns = weight.shape
    tile = matmul_tile(rows, columns, x.shape[0])
    tokens, padded = x.shape[0], max(16, triton.next_power_of_2(x.shape[0]))
    blocks = triton.cdiv(rows, tile.block_n)
    whole, parts, arrivals = blocks, None, None
    if tile.split > 1:
        shared = blocks if tile.shared is None else tile.shared
        whole = blocks - shared
        parts = torch.empty((shared, tile.split, tile.block_n, padded), dtype=torch.float32, device=x.device)
        arrivals = arrival_counters(weight, shared)
    _matmul_kernel[(whole + (blocks - whole) * tile.split,)](
        x, tail, weight, bias, out, parts, arrivals, x.stride(0), 0 if tail is None else tail.stride(0), tokens, rows,
        whole, K=columns, HEAD=x.shape[1], T=padded, ACTIVATION=activation, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        STAGES=tile.stages, SPLIT=tile.split, PRECISION=dot_precision(x.dtype), num_warps=tile.num_warps,
        **pdl(x.device),
    )  # fmt: skip


def matvec_tile(rows: int, columns: int) -> Tile:
    """Small tiles for one token: programs of the next kernel find room to load weights while they
    wait."""
    tile = Tile(4, 1024, 4)
    if columns == 2048:
        tile = Tile(2 if rows <= 4096 else 4, 2048, 8)
    elif columns > rows:
        tile = Tile(4, 2048, 8) if rows < 4096 else Tile(2, 1024, 4)
    return _narrowed(tile, columns)


def matmul_tile(rows: int, columns: int, tokens: int) -> Tile:
    """Tile for several tokens: 64 rows, stages for two or three programs a multiprocessor.

    Programs share all row blocks if there are fewer than two a multiprocessor, else those left over
    after whole waves.
    """
    blocks = triton.cdiv(rows, 64)
    left = blocks % MULTIPROCESSORS
    if blocks <= MULTIPROCESSORS:
        split = max(1, min(2 * MULTIPROCESSORS // blocks, 4 if tokens <= 16 else 8, columns // 512))
        return _narrowed(Tile(64, 128, 4, 4 if tokens <= 32 else 3, split), columns)
    if tokens > 32:
        return _narrowed(Tile(64, 64, 4, 4), columns)
    one_wave = blocks < 2 * MULTIPROCESSORS
    if 0 < left <= MULTIPROCESSORS // 4 and not (one_wave and tokens <= 16):
        split = max(2, min(round(MULTIPROCESSORS / 2 / left), columns // 128))
        tile = Tile(64, 128, 4, 4) if one_wave else Tile(64, 64, 4, 5)
        return _narrowed(replace(tile, split=split, shared=left), columns)
    return _narrowed(Tile(64, 64, 4, 6) if one_wave else Tile(64, 128, 4, 4), columns)


def _narrowed(tile: Tile, columns: int) -> Tile:
    return replace(tile, block_k=max(16, min(tile.block_k, triton.next_power_of_2(columns))))
