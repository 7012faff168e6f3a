"""Gluon kernel of `fp8_token_linear`: one token, quantised by each program, and tensor cores that read registers.

A tensor core multiplies 16 rows with 8 columns. With one token the columns are PARTS parts of the inputs: part p of the
weight's columns is multiplied with all of them, and its product with part p of the token is kept. So a program's warps
share rows, and a warp loads 16 bytes of a row at a time into the registers from which the tensor cores read. Weights
are on their way before the kernel waits for the one before it. Multiply-adds need four times as many instructions, and
take as long as memory does.

Gluon has no interpreter: tests compile the kernel, and run it on a GPU.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hybridrt.kernels.core.gluon_kernel_triton import gluon_kernel, join_threads
from hybridrt.kernels.core.launch import cdiv
from hybridrt.kernels.core.pdl_triton import pdl
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm, activated_width
from hybridrt.kernels.dense.skinny_linear_triton import MULTIPROCESSORS
from hybridrt.kernels.quant.fp8_linear import GROUP
from hybridrt.kernels.quant.quant_weight import QuantWeight

PARTS = 8
ALL = 1 << 10  # more than there are: each block of rows has a program
MANY_ROWS, WIDE = 4096, 8192  # of a weight and of its rows


class TokenTile(NamedTuple):
    """A program's work.

    Attributes:
        rows: of the weight, in a block.
        warps: of the program.
        ahead: groups of 128 columns of each part that are on their way.
        most: programs that a multiprocessor gets; each takes several blocks in turn if there are more.
    """

    rows: int
    warps: int
    ahead: int
    most: int


@gluon.jit
def _loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, column, split, K: gl.constexpr):  # type: ignore[no-untyped-def]
    """Inputs, numbers of the residual and weights of the norm; inputs instead of what there is none of."""
    mask = column < K
    pointer = x_ptr + column
    if tail_ptr is not None:
        pointer = gl.where(column < split, pointer, tail_ptr + (column - split))
    x = gl.load(pointer, mask=mask, other=0.0)
    residual, norm = x, x
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + column, mask=mask, other=0.0)
    if norm_ptr is not None:
        norm = gl.load(norm_ptr + column, mask=mask, other=0.0)
    return x, residual, norm


@gluon.jit
def _all_loaded(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, residual_ptr, norm_ptr, column, split, K: gl.constexpr, STEPS: gl.constexpr
):
    """`_loaded` of each group of 128 columns of the parts."""
    loaded = (_loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, column, split, K),)
    for j in gl.static_range(1, STEPS):
        group = _loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, column + j * 128, split, K)
        loaded += (group,)  # type: ignore[assignment]
    return loaded


@gluon.jit
def _inputs(loaded, residual_ptr, norm_ptr, total_ptr, column, sum_end, squares):  # type: ignore[no-untyped-def]
    """(x + residual) * norm weight in float32, and `squares` with those of x + residual."""
    x, residual, norm = loaded[0], loaded[1], loaded[2]
    x = x.to(gl.float32)
    if residual_ptr is not None:
        rounded = (x + residual.to(gl.float32)).to(total_ptr.dtype.element_ty)
        gl.store(total_ptr + column, rounded, mask=column < sum_end)
        x = rounded.to(gl.float32)
    if norm_ptr is not None:
        squares += x * x
        x *= norm
    return x, squares


@gluon.jit
def _weight_row(block, n, N, BLOCK_N: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of the n-th row of a block. A gate's next row is that which it gates. Past the last row it repeats."""
    row = block * BLOCK_N + n
    if ACTIVATION == "silu_and_mul":
        row = row // 2 + row % 2 * (N // 2)
    return gl.minimum(row, N - 1)


@gluon.jit
def _tile(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, block, blocks, j, N, K: gl.constexpr, ROWS: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_N: gl.constexpr, PARTS: gl.constexpr, left: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Codes of a block's rows in group j of each part, and their scales."""
    GROUPS: gl.constexpr = K // 128
    STEPS: gl.constexpr = (GROUPS + PARTS - 1) // PARTS
    m = gl.arange(0, BLOCK_N * PARTS, gl.SliceLayout(1, left))
    row = _weight_row(block, m % BLOCK_N, N, BLOCK_N, ACTIVATION).to(gl.int64)
    first = gl.expand_dims(m // BLOCK_N * (STEPS * 128) + j * 128, 1)
    k = first + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, left)), 0)
    live = block < blocks
    if STEPS * PARTS > GROUPS:
        live &= k < K
    tile = gl.load(weight_ptr + gl.expand_dims(row * K, 1) + k, mask=live, other=0.0)
    r = gl.arange(0, BLOCK_N * PARTS, gl.SliceLayout(1, mma))
    scale = r
    if scale_ptr is not None:
        row = _weight_row(block, r % BLOCK_N, N, BLOCK_N, ACTIVATION)
        scale = gl.load(scale_ptr + row // ROWS * GROUPS + gl.minimum(r // BLOCK_N * STEPS + j, GROUPS - 1))
    return tile, scale


@gluon.jit
def _first_tiles(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, block, blocks, AHEAD: gl.constexpr, N, K: gl.constexpr, ROWS: gl.constexpr,
    ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, left: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """`_tile` of the first AHEAD groups of each part."""
    tiles = (_tile(weight_ptr, scale_ptr, block, blocks, 0, N, K, ROWS, ACTIVATION, BLOCK_N, PARTS, left, mma),)
    for j in gl.static_range(1, AHEAD):
        tile = _tile(weight_ptr, scale_ptr, block, blocks, j, N, K, ROWS, ACTIVATION, BLOCK_N, PARTS, left, mma)
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@gluon.jit
def _store(  # type: ignore[no-untyped-def]
    y, block, N, factor_ptr, bias_ptr, out_ptr, ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr
):
    """y [BLOCK_N], with factors and biases of rows, and the activation."""
    flat: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    y, n = gl.convert_layout(y, flat), gl.arange(0, BLOCK_N, flat)
    row = _weight_row(block, n, N, BLOCK_N, ACTIVATION)
    if factor_ptr is not None:
        y *= gl.load(factor_ptr + row)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + row).to(gl.float32)
    if ACTIVATION == "silu_and_mul":
        gate, up = gl.reshape(y, [BLOCK_N // 2, 2]).split()
        single: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        y = gl.convert_layout(gate / (1.0 + gl.exp(-gate)) * up, single)
        i = block * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, single)
        live = i < N // 2
    else:
        if ACTIVATION == "relu2":
            y = gl.maximum(y, 0.0)
            y *= y
        i = block * BLOCK_N + n
        live = i < N
    gl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty), mask=live)


@gluon_kernel()
def _fp8_token_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, residual_ptr, norm_ptr, weight_ptr, scale_ptr, factor_ptr, bias_ptr, out_ptr, total_ptr, N, split,
    eps, blocks, K: gl.constexpr, ROWS: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr, AHEAD: gl.constexpr, ROUNDS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program takes blocks of BLOCK_N rows in turn, BLOCK_N * PARTS rows of products. AHEAD groups of columns of
    each part are on their way, of the next block too."""
    GROUPS: gl.constexpr = K // 128
    STEPS: gl.constexpr = (GROUPS + PARTS - 1) // PARTS
    M: gl.constexpr = BLOCK_N * PARTS
    gl.static_assert(AHEAD <= STEPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 16)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    of_x: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    program, programs = gl.program_id(0), gl.num_programs(0)

    tiles = _first_tiles(
        weight_ptr, scale_ptr, program, blocks, AHEAD, N, K, ROWS, ACTIVATION, BLOCK_N, PARTS, left, mma
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    codes = gl.allocate_shared_memory(gl.float16, [STEPS, PARTS, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    scales = gl.allocate_shared_memory(gl.float32, [STEPS, PARTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    part = gl.arange(0, PARTS, gl.SliceLayout(1, of_x))
    column = gl.expand_dims(part * (STEPS * 128), 1) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, of_x)), 0)
    squares = gl.zeros([PARTS, 128], gl.float32, of_x)
    sum_end = gl.where(program == 0, K, 0)  # only the first program writes x + residual
    loaded = _all_loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, column, split, K, STEPS)
    whole = 1.0
    if scale_ptr is None:
        largest = gl.zeros([PARTS, 128], gl.float32, of_x)
        for j in gl.static_range(STEPS):
            x, _ = _inputs(loaded[j], residual_ptr, norm_ptr, total_ptr, column + j * 128, 0, squares)
            largest = gl.maximum(largest, gl.abs(x))
        whole = gl.maximum(gl.max(gl.max(largest, 1), 0), 1e-12) / 448.0
    for j in gl.static_range(STEPS):
        x, squares = _inputs(loaded[j], residual_ptr, norm_ptr, total_ptr, column + j * 128, sum_end, squares)
        if scale_ptr is None:
            x *= 1.0 / whole
        else:
            own = gl.maximum(gl.max(gl.abs(x), 1), 1e-12) / 448.0
            x *= gl.expand_dims(1.0 / own, 1)
            scales.index(j).store(own)
        codes.index(j).store(x.to(gl.float8e4nv).to(gl.float16))
    factor = whole
    if norm_ptr is not None:  # a factor of all inputs: scales have it instead of codes
        factor *= 1.0 / gl.sqrt(gl.sum(gl.sum(squares, 1), 0) / K + eps)
    join_threads()

    r = gl.arange(0, M, gl.SliceLayout(1, mma))
    c = gl.arange(0, PARTS, gl.SliceLayout(0, mma))
    own_part = gl.expand_dims(r // BLOCK_N, 1) == gl.expand_dims(c, 0)
    for i in gl.static_range(ROUNDS):
        block = program + i * programs
        acc = gl.zeros([M, PARTS], gl.float32, mma)
        for j in gl.static_range(STEPS):
            tile, of_weight = tiles[0]
            a = tile.to(gl.float16)
            tiles = tiles[1:]
            if j + AHEAD < STEPS:
                tiles += (
                    _tile(
                        weight_ptr, scale_ptr, block, blocks, j + AHEAD, N, K, ROWS, ACTIVATION, BLOCK_N, PARTS, left,
                        mma,
                    ),
                )  # fmt: skip
            elif i + 1 < ROUNDS:
                tiles += (
                    _tile(
                        weight_ptr, scale_ptr, block + programs, blocks, j + AHEAD - STEPS, N, K, ROWS, ACTIVATION,
                        BLOCK_N, PARTS, left, mma,
                    ),
                )  # fmt: skip
            b = codes.index(j).permute((1, 0)).load(right)
            if scale_ptr is None:
                acc = mma_v2(a, b, acc)
            else:
                products = mma_v2(a, b, gl.zeros([M, PARTS], gl.float32, mma))
                of_token = scales.index(j).load(gl.SliceLayout(0, mma))
                acc += products * gl.expand_dims(of_weight, 1) * gl.expand_dims(of_token, 0)
        y = gl.sum(gl.where(own_part, acc, 0.0), 1)
        y = gl.sum(gl.reshape(y, [PARTS, BLOCK_N]), 0) * factor
        _store(y, block, N, factor_ptr, bias_ptr, out_ptr, ACTIVATION, BLOCK_N, WARPS)


def fp8_token_linear_triton(
    x: Tensor,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    norm: InputNorm | None = None,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One launch."""
    assert x.stride(1) == 1 and (tail is None or tail.stride(1) == 1) and weight.data.is_contiguous()
    norm_weight, eps, residual = (None, 0.0, None) if norm is None else (norm.norm_weight, norm.eps, norm.residual)
    rows, width = weight.rows, weight.width
    tile = token_tile(rows, width)
    out = x.new_empty(1, activated_width(rows, activation))
    total = None if residual is None else torch.empty_like(residual)  # programs still read the old one
    blocks = cdiv(rows, tile.rows)
    rounds = cdiv(blocks, tile.most * MULTIPROCESSORS)
    programs = cdiv(blocks, rounds)
    _fp8_token_kernel[(programs,)](
        x, tail, residual, norm_weight, weight.data, weight.scale, weight.factor, bias, out, total, rows, x.shape[1],
        eps, blocks, K=width, ROWS=weight.block[0], ACTIVATION=activation, BLOCK_N=tile.rows, PARTS=PARTS,
        AHEAD=min(tile.ahead, cdiv(width // GROUP, PARTS)), ROUNDS=rounds, WARPS=tile.warps,
        num_warps=tile.warps, **pdl(x.device),
    )  # fmt: skip
    return out, total


def token_tile(rows: int, width: int) -> TokenTile:
    """Of a weight [rows, width]: those that were fastest on an H200 (benchmarks/log/products.md)."""
    if rows > MANY_ROWS:
        return TokenTile(8, 4, 2, 4)
    return TokenTile(16, 4, 3, ALL) if width >= WIDE else TokenTile(8, 4, 3, ALL)
