"""Gluon kernel of products of one token with weights of 8 and 4 bits: tensor cores that read registers.

A tensor core multiplies 16 rows with 8 columns. With one token the columns are PARTS parts of the inputs: part p of the
weight's columns is multiplied with all of them, and its product with part p of the token is kept. So a program's warps
share rows, and a warp loads 16 bytes of a row at a time into the registers from which the tensor cores read. Weights
are on their way before the kernel waits for the one before it. Multiply-adds need four times as many instructions, and
take as long as memory does.

e4m3: each program quantises the token. Codes are exact in float16.

4 bits: a thread loads a run of 32 codes of a row. The order of columns is that of its words, and inputs are stored in
it. Numbers of int4 stay 128 too large: that adds a multiple of the sum of the inputs. Those of e2m1 are multiplied with
their scales first, which is exact for those of fp4.

Gluon has no interpreter: tests compile the kernel, and run it on a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hybridrt.kernels.core.code_fragments_triton import (
    E2M1_FACTOR,
    add_products,
    columns_by_run,
    fragments,
    load_e2m1_scales,
    of_runs,
    runs_by_thread,
    sum_of_parts,
)
from hybridrt.kernels.core.gluon_kernel_triton import gluon_kernel, join_threads
from hybridrt.kernels.core.launch import cdiv
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.skinny_linear import Activation, InputNorm, activated_width
from hybridrt.kernels.dense.skinny_linear_triton import MULTIPROCESSORS
from hybridrt.kernels.quant.fp8_linear import GROUP
from hybridrt.kernels.quant.quant_weight import QuantWeight

PARTS = 8
REGISTERS = 1 << 16  # of a multiprocessor
ALL = 1 << 10  # more than there are: each block of rows has a program
MANY_ROWS, WIDE = 4096, 8192  # of a weight and of its rows
NARROW = 3072  # inputs: for more, e4m3 takes more registers than four programs on a multiprocessor have
FULL_ROWS = 3584  # from here on blocks of 16 rows keep nearly all places of two programs a multiprocessor busy
# Blocks of a program, and steps of a block, for which it is compiled: more of them are a loop.
MAX_ROUNDS, MAX_STEPS = 8, 12
LOADED, NORMED = 12, 4  # groups of 128 inputs of each part that are loaded at once, and those with a norm


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

    def limits(self, unrolled: int, steps: int) -> dict[str, int]:
        """So many registers that `most` programs run at a time. A loop would need more, and so would many steps."""
        limited = self.most != ALL and unrolled and steps <= MAX_STEPS
        return {"maxnreg": REGISTERS // (32 * self.warps * self.most) // 8 * 8} if limited else {}


@gluon.jit
def _loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, column, end, split):  # type: ignore[no-untyped-def]
    """Inputs before `end`, numbers of the residual and weights of the norm; inputs instead of what there is none of."""
    mask = column < end
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
def _some_loaded(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, residual_ptr, norm_ptr, column, end, split, COUNT: gl.constexpr
):
    """`_loaded` of COUNT groups of 128 columns of each part."""
    loaded = (_loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, column, end, split),)
    for j in gl.static_range(1, COUNT):
        group = _loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, column + j * 128, end, split)
        loaded += (group,)  # type: ignore[assignment]
    return loaded


@gluon.jit
def _inputs(loaded, residual_ptr, norm_ptr, total_ptr, column, sum_end, squares):  # type: ignore[no-untyped-def]
    """(x + residual) * norm weight in float32, and `squares` with those of x + residual, which is stored before
    `sum_end`."""
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
def _enter_inputs(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, residual_ptr, norm_ptr, total_ptr, inputs, sides, split, eps, K: gl.constexpr,
    PARTS: gl.constexpr, STEPS: gl.constexpr, CHUNK: gl.constexpr, CODE: gl.constexpr, GROUPED: gl.constexpr,
    of_x: gl.constexpr,
):  # fmt: skip
    """Stores inputs [STEPS, PARTS, 128] and, for each 128, the scale of codes or the sum of numbers. The result is a
    factor of all products."""
    part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(1, of_x)), 1) * (STEPS * 128)
    column = part + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, of_x)), 0)
    end = gl.minimum(part + STEPS * 128, K)  # of a part: the last groups of a chunk are past it
    sum_end = gl.where(gl.program_id(0) == 0, end, 0)  # only the first program writes x + residual
    squares = gl.zeros([PARTS, 128], gl.float32, of_x)
    whole = 1.0
    if CODE == "e2m1":
        whole = E2M1_FACTOR
    elif CODE == "e4m3" and not GROUPED:
        largest = gl.zeros([PARTS, 128], gl.float32, of_x)
        for first in range(0, STEPS, CHUNK):
            at = column + first * 128
            loaded = _some_loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, at, end, split, CHUNK)
            for j in gl.static_range(CHUNK):
                x, _ = _inputs(loaded[j], residual_ptr, norm_ptr, total_ptr, at + j * 128, end * 0, squares)
                largest = gl.maximum(largest, gl.abs(x))
        whole = gl.maximum(gl.max(gl.max(largest, 1), 0), 1e-12) / 448.0
    for first in range(0, STEPS, CHUNK):
        at = column + first * 128
        loaded = _some_loaded(x_ptr, tail_ptr, residual_ptr, norm_ptr, at, end, split, CHUNK)
        for j in gl.static_range(CHUNK):
            x, squares = _inputs(loaded[j], residual_ptr, norm_ptr, total_ptr, at + j * 128, sum_end, squares)
            if CODE != "e4m3":
                rounded = x.to(gl.bfloat16)
                if CODE == "int4":
                    sides.index(first + j).store(gl.sum(rounded.to(gl.float32), 1))
                inputs.index(first + j).store(columns_by_run(rounded, PARTS))
            else:
                if GROUPED:
                    own = gl.maximum(gl.max(gl.abs(x), 1), 1e-12) / 448.0
                    x *= gl.expand_dims(1.0 / own, 1)
                    sides.index(first + j).store(own)
                else:
                    x *= 1.0 / whole
                inputs.index(first + j).store(x.to(gl.float8e4nv).to(gl.float16))
    factor = whole
    if norm_ptr is not None:  # instead of a factor of each input
        factor *= 1.0 / gl.sqrt(gl.sum(gl.sum(squares, 1), 0) / K + eps)
    return factor


@gluon.jit
def _weight_row(block, n, N, BLOCK_N: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of the n-th row of a block. A gate's next row is that which it gates. Past the last row it repeats."""
    row = block * BLOCK_N + n
    if ACTIVATION == "silu_and_mul":
        row = row // 2 + row % 2 * (N // 2)
    return gl.minimum(row, N - 1)


@gluon.jit
def _tile(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, zero_ptr, block, blocks, j, N, K: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    CODE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, loads: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Codes of a block's rows in group j of each part, their scales, and what numbers of zero are."""
    GROUPS: gl.constexpr = K // 128
    STEPS: gl.constexpr = (GROUPS + PARTS - 1) // PARTS
    BLOCKS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    EACH: gl.constexpr = 1 if CODE == "e4m3" else 8  # codes of a number that is loaded
    m = gl.arange(0, BLOCK_N * PARTS, gl.SliceLayout(1, loads))
    row = _weight_row(block, m % BLOCK_N, N, BLOCK_N, ACTIVATION).to(gl.int64)
    first = gl.expand_dims((m // BLOCK_N * STEPS + j) * (128 // EACH), 1)
    k = first + gl.expand_dims(gl.arange(0, 128 // EACH, gl.SliceLayout(0, loads)), 0)
    live = block < blocks
    if STEPS * PARTS > GROUPS:
        live &= k < K // EACH
    tile = gl.load(weight_ptr + gl.expand_dims(row * (K // EACH), 1) + k, mask=live, other=0.0 if CODE == "e4m3" else 0)
    r = gl.arange(0, BLOCK_N * PARTS, gl.SliceLayout(1, mma))
    scale, zero = r, r
    if CODE == "e2m1":
        m = gl.arange(0, BLOCK_N * PARTS, gl.SliceLayout(1, gl.SliceLayout(2, of_runs(loads, BLOCK_N * PARTS))))
        row = _weight_row(block, m % BLOCK_N, N, BLOCK_N, ACTIVATION)
        scale = load_e2m1_scales(scale_ptr, row, m // BLOCK_N * STEPS + j, K, COLUMNS, BLOCK_N * PARTS, loads)
    elif scale_ptr is not None or zero_ptr is not None:
        row = _weight_row(block, r % BLOCK_N, N, BLOCK_N, ACTIVATION) // ROWS * BLOCKS
        cell = row + gl.minimum(r // BLOCK_N * STEPS + j, GROUPS - 1) * 128 // COLUMNS
        if scale_ptr is not None:
            scale = gl.load(scale_ptr + cell).to(gl.float32)
        if zero_ptr is not None:
            zero = gl.load(zero_ptr + cell).to(gl.float32)
    return tile, scale, zero


@gluon.jit
def _first_tiles(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, zero_ptr, block, blocks, AHEAD: gl.constexpr, N, K: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, CODE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr,
    loads: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """`_tile` of the first AHEAD groups of each part."""
    tiles = (
        _tile(
            weight_ptr, scale_ptr, zero_ptr, block, blocks, 0, N, K, ROWS, COLUMNS, CODE, ACTIVATION, BLOCK_N, PARTS,
            loads, mma,
        ),
    )  # fmt: skip
    for j in gl.static_range(1, AHEAD):
        tile = _tile(
            weight_ptr, scale_ptr, zero_ptr, block, blocks, j, N, K, ROWS, COLUMNS, CODE, ACTIVATION, BLOCK_N, PARTS,
            loads, mma,
        )  # fmt: skip
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


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    tiles, acc, j, inputs, sides, weight_ptr, scale_ptr, zero_ptr, block, after, blocks, N, K: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, CODE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr, AHEAD: gl.constexpr, MORE: gl.constexpr, loads: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The products of group j of each part are added. MORE: the group AHEAD of it is loaded, of block `after` if this
    one has none."""
    STEPS: gl.constexpr = (K // 128 + PARTS - 1) // PARTS
    M: gl.constexpr = BLOCK_N * PARTS
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 16 if CODE == "e4m3" else 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 16 if CODE == "e4m3" else 2)
    tile, scale, zero = tiles[0]
    a = fragments(tile, scale, CODE, M, loads, left)
    tiles = tiles[1:]
    if MORE:
        next_block = block if j + AHEAD < STEPS else after
        next_j = j + AHEAD if j + AHEAD < STEPS else j + AHEAD - STEPS
        tiles += (
            _tile(
                weight_ptr, scale_ptr, zero_ptr, next_block, blocks, next_j, N, K, ROWS, COLUMNS, CODE, ACTIVATION,
                BLOCK_N, PARTS, loads, mma,
            ),
        )  # fmt: skip
    b = inputs.index(j).permute((1, 0)).load(right)
    as_they_are: gl.constexpr = CODE == "e2m1" or (CODE == "e4m3" and scale_ptr is None)
    side = None if as_they_are else sides.index(j)
    own_scale = None if CODE == "e2m1" or scale_ptr is None else scale
    return tiles, add_products(acc, a, b, side, own_scale, None if zero_ptr is None else zero, CODE, mma)


@gluon.jit
def _round(  # type: ignore[no-untyped-def]
    tiles, inputs, sides, factor, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, block, after, blocks,
    N, K: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CODE: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_N: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, MAX_STEPS: gl.constexpr, LAST: gl.constexpr,
    WARPS: gl.constexpr, loads: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Outputs of a block of rows. The result are the first tiles of block `after`."""
    STEPS: gl.constexpr = (K // 128 + PARTS - 1) // PARTS
    M: gl.constexpr = BLOCK_N * PARTS
    acc = gl.zeros([M, PARTS], gl.float32, mma)
    if STEPS <= MAX_STEPS:
        for j in gl.static_range(STEPS):
            tiles, acc = _step(
                tiles, acc, j, inputs, sides, weight_ptr, scale_ptr, zero_ptr, block, after, blocks, N, K, ROWS,
                COLUMNS, CODE, ACTIVATION, BLOCK_N, PARTS, AHEAD, j + AHEAD < STEPS or not LAST, loads, mma,
            )  # fmt: skip
    else:
        for j in range(STEPS):
            tiles, acc = _step(
                tiles, acc, j, inputs, sides, weight_ptr, scale_ptr, zero_ptr, block, after, blocks, N, K, ROWS,
                COLUMNS, CODE, ACTIVATION, BLOCK_N, PARTS, AHEAD, True, loads, mma,
            )  # fmt: skip
    y = sum_of_parts(acc, PARTS, BLOCK_N, mma) * factor
    _store(y, block, N, factor_ptr, bias_ptr, out_ptr, ACTIVATION, BLOCK_N, WARPS)
    return tiles


@gluon_kernel()
def _one_token_kernel(  # type: ignore[no-untyped-def]
    x_ptr, tail_ptr, residual_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, total_ptr,
    N, split, eps, blocks, rounds, K: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CODE: gl.constexpr,
    ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, CHUNK: gl.constexpr,
    ROUNDS: gl.constexpr, MAX_STEPS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each program takes ROUNDS blocks of BLOCK_N rows in turn, `rounds` if that is 0; a block is BLOCK_N * PARTS rows
    of products. AHEAD groups of columns of each part are on their way, of the next block too."""
    STEPS: gl.constexpr = (K // 128 + PARTS - 1) // PARTS
    PADDED: gl.constexpr = (STEPS + CHUNK - 1) // CHUNK * CHUNK
    gl.static_assert(AHEAD <= STEPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    loads: gl.constexpr = gl.DotOperandLayout(0, mma, 16) if CODE == "e4m3" else runs_by_thread(BLOCK_N * PARTS, WARPS)
    of_x: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    number: gl.constexpr = gl.float16 if CODE == "e4m3" else gl.bfloat16
    program, programs = gl.program_id(0), gl.num_programs(0)

    tiles = _first_tiles(
        weight_ptr, scale_ptr, zero_ptr, program, blocks, AHEAD, N, K, ROWS, COLUMNS, CODE, ACTIVATION, BLOCK_N, PARTS,
        loads, mma,
    )  # fmt: skip
    begin(PDL)

    inputs = gl.allocate_shared_memory(number, [PADDED, PARTS, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    sides = gl.allocate_shared_memory(gl.float32, [PADDED, PARTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    factor = _enter_inputs(
        x_ptr, tail_ptr, residual_ptr, norm_ptr, total_ptr, inputs, sides, split, eps, K, PARTS, STEPS, CHUNK, CODE,
        scale_ptr is not None, of_x,
    )  # fmt: skip
    join_threads()

    if ROUNDS > 0:
        for i in gl.static_range(ROUNDS):
            block = program + i * programs
            tiles = _round(
                tiles, inputs, sides, factor, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, block,
                block + programs, blocks, N, K, ROWS, COLUMNS, CODE, ACTIVATION, BLOCK_N, PARTS, AHEAD,
                MAX_STEPS, i + 1 == ROUNDS, WARPS, loads, mma,
            )  # fmt: skip
    else:
        for i in range(rounds):
            block = program + i * programs
            tiles = _round(
                tiles, inputs, sides, factor, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, block,
                block + programs, blocks, N, K, ROWS, COLUMNS, CODE, ACTIVATION, BLOCK_N, PARTS, AHEAD,
                MAX_STEPS, False, WARPS, loads, mma,
            )  # fmt: skip


def one_token_triton(
    x: Tensor,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    norm: InputNorm | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fp8_token_linear` for "e4m3", else `quant_linear` of one token, in one launch."""
    assert x.stride(1) == 1 and (tail is None or tail.stride(1) == 1) and weight.data.is_contiguous()
    norm_weight, eps, residual = (None, 0.0, None) if norm is None else (norm.norm_weight, norm.eps, norm.residual)
    rows, width = weight.rows, weight.width
    tile, steps = token_tile(rows, width, weight.code), cdiv(width // GROUP, PARTS)
    if out is None:
        out = x.new_empty(1, activated_width(rows, activation))
    total = None if residual is None else torch.empty_like(residual)  # programs still read the old one
    blocks = cdiv(rows, tile.rows)
    rounds = cdiv(blocks, tile.most * MULTIPROCESSORS)
    unrolled = rounds if rounds <= MAX_ROUNDS else 0
    _one_token_kernel[(cdiv(blocks, rounds),)](
        x, tail, residual, norm_weight, weight.data, weight.scale, weight.zero, weight.factor, bias, out, total, rows,
        x.shape[1], eps, blocks, rounds, K=width, ROWS=weight.block[0], COLUMNS=weight.block[1], CODE=weight.code,
        ACTIVATION=activation, BLOCK_N=tile.rows, PARTS=PARTS, AHEAD=min(tile.ahead, steps),
        CHUNK=min(steps, LOADED if norm is None else NORMED), ROUNDS=unrolled, MAX_STEPS=MAX_STEPS,
        WARPS=tile.warps, num_warps=tile.warps, **tile.limits(unrolled, steps), **pdl(x.device),
    )  # fmt: skip
    return out, total


def token_tile(rows: int, width: int, code: str) -> TokenTile:
    """Of a weight [rows, width]: those that were fastest on an H200 (benchmarks/log/products.md). Weights of 4 bits
    were timed with the shapes of Falcon-H1-7B alone."""
    if rows > MANY_ROWS:
        if code != "e4m3":
            return TokenTile(8, 4, 3, 4)
        return TokenTile(8, 4, 2, 4 if width <= NARROW else 3)
    if code == "e4m3" and rows > FULL_ROWS:
        return TokenTile(16, 8, 2, 2)
    return TokenTile(8, 4, 2 if width >= WIDE and code == "e4m3" else 4, ALL)
