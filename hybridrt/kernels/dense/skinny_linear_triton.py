"""Triton kernels of `skinny_linear`: one token by multiply-add, several by tensor cores.

Both stream the weights once, a block of rows per program, and reduce in a fixed order.

One token: a program keeps a tile of weights in registers while it loads the next. The norm's scale
is applied to finished products, so the sum of squares needs no pass of its own.

More tokens: tiles go through shared memory. The norm is a launch of its own: otherwise every
program would read all tokens twice. If a weight has too few rows for the device, or blocks are left
over after whole waves, programs share a row block by columns; the last to finish sums the parts in
order. Some products of 17 to 32 tokens go through the kernel with roles of warps
(`pipeline_linear_triton`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product as combinations
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors, shared_memory
from hybridrt.kernels.core.codes_triton import (
    block_sums,
    decode,
    dequantized,
    raw_scale,
    run_columns,
    tile_scale,
)
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import arrival_counters, cdiv, dot_precision, dot_width, next_power_of_2
from hybridrt.kernels.core.launch_choice import LaunchChoice, Values
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.norm_activation_triton import add_rms_norm_triton, rms_norm_triton
from hybridrt.kernels.dense.pipeline_tiles import (
    ALIGNMENT,
    FEWEST,
    ROW_BYTES,
    PipelineTile,
    has_pipeline,
    pipeline_tile,
    pipeline_tiles,
    programs_of,
    takes_rows,
)
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm, activated_width

MULTIPROCESSORS = 132  # those of the devices that the tiles of these kernels are for


@triton.jit
def weight_rows(block, N, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
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
def store_output(  # type: ignore[no-untyped-def]
    y, bias_ptr, factor_ptr, out_ptr, block, tokens, N, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = weight_rows(block, N, ACTIVATION, BLOCK_N)
    if factor_ptr is not None:
        y *= tl.load(factor_ptr + row, mask=row < N, other=0.0)[None, :]
    if bias_ptr is not None:
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


@jit_kernel
def _matvec_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, N, split, eps,
    K: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, scale_ptr=None, zero_ptr=None, factor_ptr=None, CODE: tl.constexpr = None,
    ROWS: tl.constexpr = 1, COLUMNS: tl.constexpr = 1,
):  # fmt: skip
    """One token. A thread owns one 16-byte load of each row: 8 neighbouring columns, 16 of 8 bits, 32 of 4.

    The last arguments are those of a QuantWeight with numbers of CODE in blocks [ROWS, COLUMNS]."""
    # Numbers of the weight in a word that is loaded, planes of each, and columns that one thread adds up.
    PLANES: tl.constexpr = 4 if CODE == "int4" or CODE == "e2m1" else 1
    WORD: tl.constexpr = 1 if CODE is None else 2 * PLANES if PLANES == 4 else 4
    RUN: tl.constexpr = 16 if WORD == 4 else 8
    LENGTH: tl.constexpr = (K + 31) // 32 * 4 if WORD == 8 else K // WORD
    if WORD == 4:  # bytes would be kept in a register each
        weight_ptr = weight_ptr.to(tl.pointer_type(tl.int32))
    # Planes that share a scale.
    SPAN: tl.constexpr = 2 if PLANES == 4 and COLUMNS == 16 else PLANES
    if PARTS > 1:
        x_ptr += tl.program_id(0) * BLOCK_N // (N // PARTS) * K
    k = tl.arange(0, BLOCK_K // PLANES)
    word = tl.arange(0, BLOCK_K // WORD)
    # Past the last row it repeats: cheaper than a mask, and never written.
    row = tl.minimum(weight_rows(tl.program_id(0), N, ACTIVATION, BLOCK_N), N - 1).to(tl.int64)
    weights = weight_ptr + row[:, None] * LENGTH + word[None, :]
    tile = tl.load(weights, mask=(word < LENGTH)[None, :], other=0.0)
    sum_end = tl.where(tl.program_id(0) == 0, K, 0)  # only the first program writes x + residual
    begin(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K // PLANES // RUN], tl.float32)
    squares = tl.zeros([BLOCK_K // PLANES], tl.float32)
    for start in range(0, K, BLOCK_K):
        for plane in tl.static_range(PLANES):
            column = start + run_columns(k, plane, CODE)
            mask = column < K
            x = tl.load(_input_columns(x_ptr, tail_ptr, column, split), mask=mask, other=0.0).to(tl.float32)
            if residual_ptr is not None:
                x += tl.load(residual_ptr + column, mask=mask, other=0.0).to(tl.float32)
                rounded = x.to(total_ptr.dtype.element_ty)
                tl.store(total_ptr + column, rounded, mask=column < sum_end)
                x = rounded.to(tl.float32)
            if norm_ptr is not None:
                squares += x * x
                x *= tl.load(norm_ptr + column, mask=mask, other=0.0)
            if CODE is None:
                products = tl.reshape(tile.to(tl.float32) * x[None, :], [BLOCK_N, BLOCK_K // 8, 8])
                acc += tl.sum(products, axis=2)
            else:
                x *= raw_scale(CODE)
                values = decode(tile, plane, CODE, tl.float32, RAW=True)
                if plane % SPAN == 0:
                    products, inputs = values * x[None, :], x
                else:
                    products += values * x[None, :]
                    inputs += x
                if (plane + 1) % SPAN == 0:
                    acc += block_sums(
                        products, inputs, scale_ptr, zero_ptr, row, start, plane, K, CODE, ROWS, COLUMNS, RUN
                    )
        if BLOCK_K < K:
            # Last, to reuse the registers of this piece.
            following = (start + BLOCK_K) // WORD
            tile = tl.load(weights + following, mask=(following + word < LENGTH)[None, :], other=0.0)
    y = tl.sum(acc, axis=1)
    if norm_ptr is not None:
        y *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)
    store_output(y[None, :], bias_ptr, factor_ptr, out_ptr, tl.program_id(0), 1, N, ACTIVATION, BLOCK_N)


@jit_kernel(do_not_specialize=["tokens", "whole"])
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, weight_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, x_st, tail_st, tokens, N, whole,
    K: tl.constexpr, HEAD: tl.constexpr, T: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, scale_ptr=None, zero_ptr=None, factor_ptr=None,
    CODE: tl.constexpr = None, ROWS: tl.constexpr = 1, COLUMNS: tl.constexpr = 1,
):  # fmt: skip
    """`whole` programs with a block of rows each, then SPLIT for each block left.

    Weight [BLOCK_N, K or its part] x tokens [K, T]: a tensor core takes 64 rows on the left. HEAD:
    input columns before the tail. The last arguments are those of a QuantWeight: if a tile has one
    block for each row, its products are scaled, else the weights.
    """
    WORD: tl.constexpr = 8 if CODE == "int4" or CODE == "e2m1" else 1
    PLANES: tl.constexpr = 4 if WORD == 8 else 1
    LENGTH: tl.constexpr = (K + 31) // 32 * 4 if WORD == 8 else K
    ONE: tl.constexpr = COLUMNS % BLOCK_K == 0 or COLUMNS >= K
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    block, part, first, end = tl.program_id(0), 0, 0, K
    if SPLIT > 1:
        shared = block - whole
        if shared >= 0:
            block, part = whole + shared // SPLIT, shared % SPLIT
            first = part * PART
            end = tl.minimum(first + PART, K)
    k, t, word = tl.arange(0, BLOCK_K // PLANES), tl.arange(0, T), tl.arange(0, BLOCK_K // WORD)
    row = tl.minimum(weight_rows(block, N, ACTIVATION, BLOCK_N), N - 1).to(tl.int64)
    weights = weight_ptr + row[:, None] * LENGTH + word[None, :]
    live = (t < tokens)[None, :]
    begin(PDL)
    acc = tl.zeros([BLOCK_N, T], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        if LENGTH % (BLOCK_K // WORD) == 0:
            tile = tl.load(weights + start // WORD)
        else:
            tile = tl.load(weights + start // WORD, mask=(start // WORD + word < LENGTH)[None, :], other=0.0)
        products = acc
        if ONE and scale_ptr is not None:
            products = tl.zeros_like(acc)
        for plane in tl.static_range(PLANES):
            column = (start + run_columns(k, plane, CODE))[:, None]
            mask = live & (column < K)
            if HEAD == K:
                inputs = x_ptr + t[None, :] * x_st + column
            elif HEAD % BLOCK_K == 0:  # a tile is on one side
                in_tail = start >= HEAD
                source = tl.where(in_tail, tail_ptr - HEAD, x_ptr)
                inputs = source + t[None, :] * tl.where(in_tail, tail_st, x_st) + column
            else:
                head = x_ptr + t[None, :] * x_st
                inputs = tl.where(column < HEAD, head, tail_ptr - HEAD + t[None, :] * tail_st) + column
            x = tl.load(inputs, mask=mask, other=0.0)
            values = tile
            if CODE is not None:
                values = dequantized(tile, scale_ptr, zero_ptr, row, start, plane, K, CODE, ROWS, COLUMNS, ONE, x.dtype)
            products = tl.dot(values, x, products, input_precision=PRECISION)
        if ONE and scale_ptr is not None:
            acc += products * tile_scale(scale_ptr, row, start, K, CODE, ROWS, COLUMNS)
        else:
            acc = products
    if SPLIT == 1 or block < whole:
        store_output(tl.trans(acc), bias_ptr, factor_ptr, out_ptr, block, tokens, N, ACTIVATION, BLOCK_N)
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
            store_output(tl.trans(total), bias_ptr, factor_ptr, out_ptr, block, tokens, N, ACTIVATION, BLOCK_N)


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
    rows, columns = weight.shape
    tile = TILES(TiledProduct(rows, columns, padded_tokens(x.shape[0]), x.dtype), x.device)
    stored = Stored(weight, rows, columns)
    return product(x, stored, bias, tile, tail=tail, norm=norm, activation=activation, parts=parts, out=out)


@dataclass(frozen=True)
class Stored:
    """A weight [rows, columns] in memory. `data`: contiguous. `codes`: arguments of the kernels for numbers of few
    bits."""

    data: Tensor
    rows: int
    columns: int
    codes: Mapping[str, Any] = field(default_factory=dict)


def product(
    x: Tensor, weight: Stored, bias: Tensor | None, tile: Tile | PipelineTile, *, tail: Tensor | None,
    norm: InputNorm | None, activation: Activation | None, parts: int, out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`skinny_linear` by tiles of one size, those of `_matvec_kernel` for one token."""
    assert weight.data.is_contiguous() and x.stride(1) == 1
    norm_weight, eps, residual = (None, 0.0, None) if norm is None else (norm.norm_weight, norm.eps, norm.residual)
    if out is None:
        out = x.new_empty(x.shape[0], activated_width(weight.rows, activation))
    if x.shape[0] > 1:
        x, residual = normed(x, norm)
        if isinstance(tile, PipelineTile) and not _reads_by_rows(x, weight.data, tail):
            tile = matmul_tile(weight.rows, weight.columns, padded_tokens(x.shape[0]))
        if isinstance(tile, PipelineTile):
            # Here, so that the other kernels need nothing that is experimental in Triton.
            from hybridrt.kernels.dense.pipeline_linear_triton import pipeline_linear

            pipeline_linear(x, weight.data, bias, out, tile, tail=tail, activation=activation)
        else:
            _matmul(x, tail, weight, bias, activation, tile, out)
        return out, residual
    assert isinstance(tile, Tile)
    total = None if residual is None else torch.empty_like(residual)  # programs still read the old one
    _matvec_kernel[(cdiv(weight.rows, tile.block_n),)](
        x, tail, residual, norm_weight, weight.data, bias, out, total, weight.rows, x.shape[1], eps,
        K=weight.columns, ACTIVATION=activation, PARTS=parts,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps, **weight.codes, **pdl(x.device),
    )  # fmt: skip
    return out, total


def normed(x: Tensor, norm: InputNorm | None) -> tuple[Tensor, Tensor | None]:
    """rms_norm(x + residual), and the sum if there is a residual, which it may overwrite."""
    if norm is None:
        return x, None
    if norm.residual is not None:
        return add_rms_norm_triton(x, norm.residual, norm.norm_weight, norm.eps)
    return rms_norm_triton(x, norm.norm_weight, norm.eps), None


def matvec(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """x W^T in float32 for one token x [1, K] and a float32 weight [N, K]: [1, N]."""
    rows, columns = weight.shape
    out, tile = torch.empty(1, rows, dtype=torch.float32, device=x.device), _narrowed(tile, columns)
    _matvec_kernel[(cdiv(rows, tile.block_n),)](
        x, None, None, None, weight, None, out, None, rows, columns, 0.0, K=columns, ACTIVATION=None, PARTS=1,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps, **pdl(x.device),
    )  # fmt: skip
    return out


def _matmul(
    x: Tensor, tail: Tensor | None, weight: Stored, bias: Tensor | None, activation: Activation | None, tile: Tile,
    out: Tensor,
) -> None:  # fmt: skip
    tokens, padded = x.shape[0], padded_tokens(x.shape[0])
    blocks = cdiv(weight.rows, tile.block_n)
    whole, parts, arrivals = blocks, None, None
    if tile.split > 1:
        shared = blocks if tile.shared is None else tile.shared
        whole = blocks - shared
        parts = torch.empty((shared, tile.split, tile.block_n, padded), dtype=torch.float32, device=x.device)
        arrivals = arrival_counters(weight.data, shared)
    _matmul_kernel[(whole + (blocks - whole) * tile.split,)](
        x, tail, weight.data, bias, out, parts, arrivals, x.stride(0), 0 if tail is None else tail.stride(0), tokens,
        weight.rows, whole, K=weight.columns, HEAD=x.shape[1], T=padded, ACTIVATION=activation, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, STAGES=tile.stages, SPLIT=tile.split, PRECISION=dot_precision(x.dtype),
        num_warps=tile.num_warps, **weight.codes, **pdl(x.device),
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
    blocks = cdiv(rows, 64)
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


def tile_with_roles(shape: "TiledProduct", device: torch.device) -> PipelineTile | None:
    """For `pipeline_linear`: 17 to 32 tokens, if its programs run at a time and keep two thirds of the multiprocessors
    busy. With fewer programs too few bytes are on their way. With other numbers of tokens whole steps are not faster
    (benchmarks/log/products.md)."""
    if shape.tokens != FEWEST or not _fits_roles(shape, device):
        return None
    programs = multiprocessors(device)
    tile = pipeline_tile(shape.tokens, shape.rows, _groups(shape), programs)
    return tile if 2 / 3 * programs <= programs_of(tile, shape.tokens, shape.rows) <= programs else None


def _fits_roles(shape: "TiledProduct", device: torch.device) -> bool:
    return has_pipeline(device) and shape.dtype.itemsize == 2 and not shape.columns * 2 % ALIGNMENT


def _groups(shape: "TiledProduct") -> int:
    """Groups of columns of a stage."""
    return cdiv(shape.columns * shape.dtype.itemsize, ROW_BYTES)


def _reads_by_rows(x: Tensor, weight: Tensor, tail: Tensor | None) -> bool:
    """Whether `pipeline_linear` reads these inputs: rows that begin at multiples of 16 bytes, and a tail at a stage's
    first column. Models' projections do; other inputs get the built-in tile of the other kernel."""
    inputs = (x,) if tail is None else (x, tail)
    return takes_rows(weight, *inputs) and (tail is None or not x.shape[1] * x.itemsize % ROW_BYTES)


def _narrowed(tile: Tile, columns: int) -> Tile:
    return replace(tile, block_k=max(16, min(tile.block_k, next_power_of_2(columns))))


class TiledProduct(NamedTuple):
    """What a tile may depend on. tokens: `padded_tokens`."""

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype


def padded_tokens(tokens: int) -> int:
    """Tokens of a program: 1, else a power of two of at least 16."""
    return 1 if tokens == 1 else dot_width(tokens)


def _built_in(shape: TiledProduct, device: torch.device) -> Values:
    rows, columns, tokens, _dtype = shape
    if tokens == 1:
        return _values(matvec_tile(rows, columns))
    found = tile_with_roles(shape, device)
    return _values(matmul_tile(rows, columns, tokens)) if found is None else found._asdict()


def _values(tile: Tile) -> Values:
    return {name: value for name, value in asdict(tile).items() if value is not None}


def _candidates(shape: TiledProduct, device: torch.device) -> list[Values]:
    """Tiles whose numbers fit in registers and shared memory."""
    rows, columns, tokens, dtype = shape
    if tokens == 1:  # at most 8 rows: `parts` are cut in eights
        tiles = [Tile(n, k, warps) for n, k, warps in combinations((2, 4, 8), (512, 1024, 2048), (4, 8))]
        tiles = [tile for tile in tiles if 4 <= tile.block_n * tile.block_k // (32 * tile.num_warps) <= 64]
    else:
        splits = [1] if rows > 64 * 2 * MULTIPROCESSORS else [n for n in (1, 2, 4, 8) if n <= max(1, columns // 512)]
        tiles = [Tile(64, k, 4, stages, split) for k, stages, split in combinations((64, 128), (3, 4, 6), splits)]
        room = shared_memory(device) - 1024
        tiles = [tile for tile in tiles if tile.stages * tile.block_k * (64 + tokens) * dtype.itemsize <= room]
    found = list({tile: _values(tile) for tile in (_narrowed(tile, columns) for tile in tiles)}.values())
    if tokens > 1 and _fits_roles(shape, device):
        found += [tile._asdict() for tile in pipeline_tiles(tokens, rows, _groups(shape), multiprocessors(device))]
    return found


def _tile(**values: int) -> Tile | PipelineTile:
    return PipelineTile(**values) if "warpgroups" in values else Tile(**values)


TILES = LaunchChoice("skinny_linear", TiledProduct, _built_in, _candidates, _tile)
