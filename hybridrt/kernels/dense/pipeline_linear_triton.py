"""Gluon kernel of products of few tokens: one warp loads, warpgroups multiply.

Weights are 16-bit numbers; or e4m3 codes with scales of blocks, multiplied with codes of tokens; or codes of 4 bits,
which become 16-bit numbers in the registers from which tensor cores read. The warp fills stages of shared memory by the
tensor memory accelerator, ahead of the warpgroups and before the wait for earlier kernels. Each warpgroup multiplies 64
rows of the weight with all tokens of a program. While it adds products to its float32 sums, or makes numbers of codes,
another one has the tensor cores. In kernels without roles all warps wait for memory, for products and for scales in
turn.

Gluon has no interpreter: tests compile the kernel, and run it on a GPU.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hybridrt.kernels.core.code_fragments_triton import (
    E2M1_FACTOR,
    e2m1_in_order,
    load_e2m1_scales,
    numbers_in_order,
    of_runs,
    words_by_thread,
)
from hybridrt.kernels.core.gluon_kernel_triton import copy_tile, gluon_kernel, join_threads, reinterpret
from hybridrt.kernels.core.launch import arrival_counters, cdiv
from hybridrt.kernels.core.pdl_triton import pdl
from hybridrt.kernels.dense.pipeline_tiles import GROUP, ROW_BYTES, UNIT, PipelineTile
from hybridrt.kernels.dense.skinny_linear import Activation

# Registers of a thread of other warpgroups than the first, by their number. The first has what is left.
REGISTERS = {2: 208, 3: 152}
LOADER_REGISTERS = 40
WORD = 8  # 4-bit codes of an int32
SCALES = gl.NVMMASharedLayout(0, 32, rank=1)  # in shared memory


class WeightCodes(NamedTuple):
    """What makes numbers of a weight's codes.

    Attributes:
        code: "e4m3", "int4" or "e2m1".
        scale: of blocks [ceil(N / block[0]), ceil(K / block[1])]; float32 for e4m3. int4 may have none.
        block: rows and columns that share a scale. e4m3: 128 columns; int4: a multiple of 128, or all; e2m1: a row's
            16 with scales in e4m3, or 32 with exponents in uint8.
        zero: int4: what is subtracted from a block's codes, like `scale`. None: 8.
        factor: float32 [N], of rows, or None.
        tokens: e4m3: scales of the inputs, float32 [K / 128, T], T at least the number of tokens.
    """

    code: Literal["e4m3", "int4", "e2m1"]
    scale: Tensor | None
    block: tuple[int, int]
    zero: Tensor | None = None
    factor: Tensor | None = None
    tokens: Tensor | None = None


# Of a program that multiplies numbers as they are.
NO_CODES: dict[str, Any] = {"CODE": None, "ROWS": 1, "SPAN": 1}


@gluon.jit
def _wait_for_earlier(PDL: gl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_wait()


@gluon.jit
def _copy_rows(w_desc, buffer, bar, unit, k, half, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """64 rows of the weight: 32 gates and the 32 rows that they gate, or neighbours."""
    if GATED:
        copy_tile(w_desc, [unit // 2, k], bar, buffer.slice(0, 32))
        copy_tile(w_desc, [half + unit // 2, k], bar, buffer.slice(32, 32))
    else:
        copy_tile(w_desc, [unit, k], bar, buffer)


@gluon.jit
def _copy_weights(w_desc, w0, w1, w2, stage, bar, row, k, half, WARPGROUPS: gl.constexpr, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    _copy_rows(w_desc, w0.index(stage), bar, row, k, half, GATED)
    _copy_rows(w_desc, w1.index(stage), bar, row + 64, k, half, GATED)
    if WARPGROUPS > 2:
        _copy_rows(w_desc, w2.index(stage), bar, row + 128, k, half, GATED)


@gluon.jit
def _copy_tokens(  # type: ignore[no-untyped-def]
    x_desc, tail_desc, s_desc, x_buffer, s_buffer, bar, token, group, head, scale_stride, COLUMNS: gl.constexpr
):
    if tail_desc is not None:
        if group * COLUMNS < head:
            copy_tile(x_desc, [token, group * COLUMNS], bar, x_buffer)
        else:
            copy_tile(tail_desc, [token, group * COLUMNS - head], bar, x_buffer)
    else:
        copy_tile(x_desc, [token, group * COLUMNS], bar, x_buffer)
    if s_desc is not None:
        copy_tile(s_desc, [group * scale_stride + token], bar, s_buffer)


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    w_desc, x_desc, tail_desc, s_desc, w0, w1, w2, x_buffer, s_buffer, full, empty, row, token, first, groups, half,
    head, scale_stride, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
    T: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Fills stages. Weights of the first ones do not wait for earlier kernels."""
    OF_WEIGHT: gl.constexpr = w_desc.block_shape[1]  # numbers in memory of COLUMNS
    BYTES: gl.constexpr = (
        WARPGROUPS * 64 * OF_WEIGHT * (w_desc.dtype.primitive_bitwidth // 8)
        + T * COLUMNS * (x_desc.dtype.primitive_bitwidth // 8) + (0 if s_desc is None else T * 4)
    )  # fmt: skip
    begun = gl.minimum(groups, STAGES)
    for g in range(begun):
        bar = full.index(g)
        mbarrier.expect(bar, BYTES)
        _copy_weights(w_desc, w0, w1, w2, g, bar, row, (first + g) * OF_WEIGHT, half, WARPGROUPS, GATED)
    _wait_for_earlier(PDL)
    for g in range(begun):
        _copy_tokens(
            x_desc, tail_desc, s_desc, x_buffer.index(g), s_buffer.index(g), full.index(g), token, first + g, head,
            scale_stride, COLUMNS,
        )  # fmt: skip
    for g in range(STAGES, groups):
        stage = g % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (g // STAGES - 1) & 1)
        mbarrier.expect(bar, BYTES)
        _copy_weights(w_desc, w0, w1, w2, stage, bar, row, (first + g) * OF_WEIGHT, half, WARPGROUPS, GATED)
        _copy_tokens(
            x_desc, tail_desc, s_desc, x_buffer.index(stage), s_buffer.index(stage), bar, token, first + g, head,
            scale_stride, COLUMNS,
        )  # fmt: skip


@gluon.jit
def _finished(y, row, N, factor_ptr, bias_ptr):  # type: ignore[no-untyped-def]
    """With factors and biases of rows; y [rows, tokens]."""
    if factor_ptr is not None:
        y *= gl.expand_dims(gl.load(factor_ptr + gl.minimum(row, N - 1)), 1)
    if bias_ptr is not None:
        y += gl.expand_dims(gl.load(bias_ptr + gl.minimum(row, N - 1)).to(gl.float32), 1)
    return y


@gluon.jit
def _store(y, column, t, width, tokens, out_ptr):  # type: ignore[no-untyped-def]
    cells = out_ptr + gl.expand_dims(t, 0).to(gl.int64) * width + gl.expand_dims(column, 1)
    mask = gl.expand_dims(t < tokens, 0) & gl.expand_dims(column < width, 1)
    gl.store(cells, y.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _sum_of_parts(  # type: ignore[no-untyped-def]
    cells, row, token, HIGH: gl.constexpr, WIDE: gl.constexpr, T: gl.constexpr, SPLIT: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """[HIGH, WIDE] of the sums, in the order of the parts."""
    r = row + gl.arange(0, HIGH, gl.SliceLayout(1, layout))
    t = token + gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    at = cells + gl.expand_dims(t, 0) * 64 + gl.expand_dims(r, 1)
    total = gl.load(at, cache_modifier=".cg")
    for part in gl.static_range(1, SPLIT):
        total += gl.load(at + part * (64 * T), cache_modifier=".cg")
    return total


@gluon.jit
def _store_gated(gate, up, unit, t, half, tokens, N, factor_ptr, bias_ptr, out_ptr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    column = unit // 2 + gl.arange(0, 32, gl.SliceLayout(1, layout))
    gate = _finished(gate, column, N, factor_ptr, bias_ptr)
    up = _finished(up, half + column, N, factor_ptr, bias_ptr)
    _store(gate / (1.0 + gl.exp(-gate)) * up, column, t, half, tokens, out_ptr)


@gluon.jit
def _store_rows(  # type: ignore[no-untyped-def]
    y, unit, t, tokens, N, factor_ptr, bias_ptr, out_ptr, SQUARED: gl.constexpr, layout: gl.constexpr
):
    column = unit + gl.arange(0, 64, gl.SliceLayout(1, layout))
    y = _finished(y, column, N, factor_ptr, bias_ptr)
    if SQUARED:
        y = gl.maximum(y, 0.0)
        y *= y
    _store(y, column, t, N, tokens, out_ptr)


@gluon.jit
def _cells(grid_ptr, row, first, N, BLOCKS: gl.constexpr, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the scales or zeros of rows begin."""
    return grid_ptr + gl.minimum(row, N - 1) // ROWS * BLOCKS + first


@gluon.jit
def _products(  # type: ignore[no-untyped-def]
    w_buffer, x_buffer, s_buffer, full, empty, scale_ptr, zero_ptr, unit, first, groups, N, K: gl.constexpr,
    CODE: gl.constexpr, ROWS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, T: gl.constexpr,
    GATED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """float32 sums [64, T] of the groups of columns from `first` on."""
    acc = gl.zeros([64, T], gl.float32, mma)
    row = _rows(unit, N, GATED, gl.SliceLayout(1, mma))
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    words: gl.constexpr = words_by_thread()
    if CODE is None:
        for g in range(groups):
            stage = g % STAGES
            mbarrier.wait(full.index(stage), (g // STAGES) & 1)
            acc = warpgroup_mma(w_buffer.index(stage), x_buffer.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
    elif CODE == "int4":
        BLOCK: gl.constexpr = (min(SPAN, K) + 127) // 128  # groups that share a scale
        BLOCKS: gl.constexpr = (K + BLOCK * 128 - 1) // (BLOCK * 128)
        dtype: gl.constexpr = x_buffer.dtype
        scales, scale, zeros, zero = row, row, row, row
        if scale_ptr is not None:
            scales = _cells(scale_ptr, row, 0, N, BLOCKS, ROWS)
            scale = gl.load(scales + first // BLOCK)
        if zero_ptr is not None:
            of_words = _rows(unit, N, GATED, gl.SliceLayout(1, words))
            zeros = _cells(zero_ptr, of_words, 0, N, BLOCKS, ROWS)
            zero = gl.load(zeros + first // BLOCK)
        for g in range(groups):
            stage = g % STAGES
            mbarrier.wait(full.index(stage), (g // STAGES) & 1)
            own_zero = None if zero_ptr is None else zero.to(gl.float32)
            numbers = numbers_in_order(w_buffer.index(stage).load(words), own_zero, dtype, left)
            inputs = x_buffer.index(stage).permute((1, 0))
            following = (first + gl.minimum(g + 1, groups - 1)) // BLOCK
            if zero_ptr is not None:
                zero = gl.load(zeros + following)
            if scale_ptr is None:
                acc = warpgroup_mma(numbers, inputs, acc, is_async=True)
                acc, numbers = warpgroup_mma_wait(0, deps=[acc, numbers])
            else:
                product = warpgroup_mma(
                    numbers, inputs, gl.zeros([64, T], gl.float32, mma), use_acc=False, is_async=True
                )
                now = scale.to(gl.float32)
                scale = gl.load(scales + following)
                product, numbers = warpgroup_mma_wait(0, deps=[product, numbers])
                acc += product * gl.expand_dims(now, 1)
            mbarrier.arrive(empty.index(stage), count=1)
    elif CODE == "e2m1":
        of_scales: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, of_runs(words, 64)))
        own = gl.minimum(_rows(unit, N, GATED, of_scales), N - 1)
        group = first + gl.zeros([64], gl.int32, of_scales)
        scale = load_e2m1_scales(scale_ptr, own, group, K, SPAN, 64, words)
        for g in range(groups):
            stage = g % STAGES
            mbarrier.wait(full.index(stage), (g // STAGES) & 1)
            numbers = e2m1_in_order(w_buffer.index(stage).load(words), scale, words, left)
            acc = warpgroup_mma(numbers, x_buffer.index(stage).permute((1, 0)), acc, is_async=True)
            scale = load_e2m1_scales(scale_ptr, own, group + gl.minimum(g + 1, groups - 1), K, SPAN, 64, words)
            acc, numbers = warpgroup_mma_wait(0, deps=[acc, numbers])
            mbarrier.arrive(empty.index(stage), count=1)
        acc *= E2M1_FACTOR
    else:
        scales = _cells(scale_ptr, row, first, N, K // 128, ROWS)
        scale = gl.load(scales)
        for g in range(groups):
            stage = g % STAGES
            mbarrier.wait(full.index(stage), (g // STAGES) & 1)
            # Tensor cores add products of e4m3 with few bits: sums of 128 columns are added in float32.
            product = warpgroup_mma(
                w_buffer.index(stage), x_buffer.index(stage).permute((1, 0)), gl.zeros([64, T], gl.float32, mma),
                use_acc=False, is_async=True,
            )  # fmt: skip
            now = scale
            scale = gl.load(scales + gl.minimum(g + 1, groups - 1))
            product = warpgroup_mma_wait(0, deps=[product])
            # Loaded late: 32 numbers of a thread, for which there are no registers while the tensor cores multiply.
            x_scale = s_buffer.index(stage).load(gl.SliceLayout(0, mma))
            acc += (product * gl.expand_dims(now, 1)) * gl.expand_dims(x_scale, 0)
            mbarrier.arrive(empty.index(stage), count=1)
    return acc


@gluon.jit
def _rows(unit, N, GATED: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of the weight, in a warpgroup's 64."""
    row = gl.arange(0, 64, layout)
    if GATED:
        at = unit // 2 + row % 32 + (row // 32) * (N // 2)
    else:
        at = unit + row
    return at


@gluon.jit
def _halves(y, T: gl.constexpr):  # type: ignore[no-untyped-def]
    return y.reshape([64, 2, T // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _pieces(y, T: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of at most 32 tokens."""
    if T <= 32:
        found = (y,)
    elif T == 64:
        found = _halves(y, 64)
    else:
        a, b = _halves(y, 128)
        found = _halves(a, 64) + _halves(b, 64)
    return found


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    w_buffer, x_buffer, s_buffer, full, empty, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr,
    arrivals_ptr, unit, token, first, groups, N, tokens, cell, part, K: gl.constexpr, CODE: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, T: gl.constexpr, SPLIT: gl.constexpr,
    ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """64 rows of the weight from `unit` on. cell: place of their sums among `parts`, and of their arrivals."""
    GATED: gl.constexpr = ACTIVATION == "silu_and_mul"
    DEPTH: gl.constexpr = 256 // x_buffer.dtype.primitive_bitwidth  # columns of an instruction
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, DEPTH])
    acc = _products(
        w_buffer, x_buffer, s_buffer, full, empty, scale_ptr, zero_ptr, unit, first, groups, N, K, CODE, ROWS, SPAN,
        STAGES, T, GATED, mma,
    )  # fmt: skip
    _wait_for_earlier(PDL)  # they may still read the outputs and count arrivals
    half = N // 2
    WIDE: gl.constexpr = min(T, 32)  # tokens at a time: more need too many registers
    # A thread has four neighbouring rows, so that threads of a warp store neighbouring numbers.
    of_64: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    of_32: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    if SPLIT == 1:
        # All numbers of these rows were multiplied: sums take their memory, that of 32 tokens is 8 KiB.
        FIT: gl.constexpr = STAGES * w_buffer.shape[2] * (w_buffer.dtype.primitive_bitwidth // 8) // (4 * WIDE)
        gl.static_assert(FIT > 0)
        sums = reinterpret(w_buffer, gl.float32, [FIT, 64, WIDE], gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
        pieces = _pieces(acc, T)
        for begun in gl.static_range(0, T // WIDE, FIT):
            if begun > 0:
                join_threads()  # until sums were read
            for piece in gl.static_range(begun, min(begun + FIT, T // WIDE)):
                sums.index(piece - begun).store(pieces[piece])
            join_threads()
            for piece in gl.static_range(begun, min(begun + FIT, T // WIDE)):
                found = sums.index(piece - begun)
                if GATED:
                    t = token + piece * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, of_32))
                    gate, up = found.slice(0, 32).load(of_32), found.slice(32, 32).load(of_32)
                    _store_gated(gate, up, unit, t, half, tokens, N, factor_ptr, bias_ptr, out_ptr, of_32)
                else:
                    t = token + piece * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, of_64))
                    y = found.load(of_64)
                    _store_rows(y, unit, t, tokens, N, factor_ptr, bias_ptr, out_ptr, ACTIVATION == "relu2", of_64)
    else:
        cells = parts_ptr + cell.to(gl.int64) * (SPLIT * 64 * T)
        r = gl.arange(0, 64, gl.SliceLayout(1, mma))
        c = gl.arange(0, T, gl.SliceLayout(0, mma))
        gl.store(cells + part * (64 * T) + gl.expand_dims(c, 0) * 64 + gl.expand_dims(r, 1), acc)
        join_threads()  # publish stores
        if gl.atomic_add(arrivals_ptr + cell, 1, sem="acq_rel") == SPLIT - 1:
            gl.store(arrivals_ptr + cell, 0)
            for t0 in range(0, T, WIDE):
                if GATED:
                    t = token + t0 + gl.arange(0, WIDE, gl.SliceLayout(0, of_32))
                    gate = _sum_of_parts(cells, 0, t0, 32, WIDE, T, SPLIT, of_32)
                    up = _sum_of_parts(cells, 32, t0, 32, WIDE, T, SPLIT, of_32)
                    _store_gated(gate, up, unit, t, half, tokens, N, factor_ptr, bias_ptr, out_ptr, of_32)
                else:
                    t = token + t0 + gl.arange(0, WIDE, gl.SliceLayout(0, of_64))
                    y = _sum_of_parts(cells, 0, t0, 64, WIDE, T, SPLIT, of_64)
                    _store_rows(y, unit, t, tokens, N, factor_ptr, bias_ptr, out_ptr, ACTIVATION == "relu2", of_64)


@gluon_kernel(do_not_specialize=["tokens"])
def _pipeline_kernel(  # type: ignore[no-untyped-def]
    w_desc, x_desc, tail_desc, s_desc, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr,
    tokens, N, head, scale_stride, K: gl.constexpr, CODE: gl.constexpr, ROWS: gl.constexpr, SPAN: gl.constexpr,
    ACTIVATION: gl.constexpr, T: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid [blocks of tokens, SPLIT, blocks of WARPGROUPS * 64 rows]: programs that read the same weights run together.

    w_desc: rows of the weight, 32 at a time for "silu_and_mul", else 64. x_desc: T tokens, of which tail_desc has the
    columns from `head` on. s_desc: T scales of codes. Scales and zeros are those of ROWS rows and SPAN columns.
    """
    GATED: gl.constexpr = ACTIVATION == "silu_and_mul"
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block_t, part, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    row, token, half = block * (WARPGROUPS * 64), block_t * T, N // 2
    COLUMNS: gl.constexpr = x_desc.block_shape[1]
    GROUPS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    first = part * GROUPS // SPLIT
    groups = (part + 1) * GROUPS // SPLIT - first
    cell = (block * gl.num_programs(0) + block_t) * WARPGROUPS
    OF_WEIGHT: gl.constexpr = w_desc.block_shape[1]
    w0 = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 64, OF_WEIGHT], w_desc.layout)
    w1 = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 64, OF_WEIGHT], w_desc.layout)
    w2 = w0
    if WARPGROUPS > 2:
        w2 = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 64, OF_WEIGHT], w_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, T, COLUMNS], x_desc.layout)
    s = x
    if s_desc is not None:
        s = gl.allocate_shared_memory(gl.float32, [STAGES, T], s_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()  # copies count on them
    # Arguments are written out: in a tuple with a name, constants would become tensors.
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_multiply, (w0, x, s, full, empty, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr,
                         arrivals_ptr, row, token, first, groups, N, tokens, cell, part, K, CODE, ROWS, SPAN,
                         STAGES, T, SPLIT, ACTIVATION, PDL)),
            (_multiply, (w1, x, s, full, empty, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr,
                         arrivals_ptr, row + 64, token, first, groups, N, tokens, cell + 1, part, K, CODE, ROWS, SPAN,
                         STAGES, T, SPLIT, ACTIVATION, PDL)),
            (_load, (w_desc, x_desc, tail_desc, s_desc, w0, w1, w2, x, s, full, empty, row, token, first, groups, half,
                     head, scale_stride, WARPGROUPS, STAGES, GATED, PDL, T, COLUMNS)),
        ], [4, 1], [REGISTERS, LOADER])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (w0, x, s, full, empty, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr,
                         arrivals_ptr, row, token, first, groups, N, tokens, cell, part, K, CODE, ROWS, SPAN,
                         STAGES, T, SPLIT, ACTIVATION, PDL)),
            (_multiply, (w1, x, s, full, empty, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr,
                         arrivals_ptr, row + 64, token, first, groups, N, tokens, cell + 1, part, K, CODE, ROWS, SPAN,
                         STAGES, T, SPLIT, ACTIVATION, PDL)),
            (_multiply, (w2, x, s, full, empty, scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, parts_ptr,
                         arrivals_ptr, row + 128, token, first, groups, N, tokens, cell + 2, part, K, CODE, ROWS,
                         SPAN, STAGES, T, SPLIT, ACTIVATION, PDL)),
            (_load, (w_desc, x_desc, tail_desc, s_desc, w0, w1, w2, x, s, full, empty, row, token, first, groups, half,
                     head, scale_stride, WARPGROUPS, STAGES, GATED, PDL, T, COLUMNS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOADER])  # fmt: skip


def pipeline_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: PipelineTile,
    *,
    tail: Tensor | None = None,
    codes: WeightCodes | None = None,
    activation: Activation | None = None,
) -> None:
    """act(x W^T + b) in one launch, for what `takes_rows`. The last of the programs that share rows adds their parts,
    in order.

    Args:
        x: [T, K] of 16 bits, or e4m3 codes [at least T, K].
        weight: [N, K] in x's dtype, or words of 4-bit codes [N, ceil(K / 32) * 4].
        out: [T, N], or [T, N / 2] for "silu_and_mul", contiguous, in any dtype.
        tile: one of `pipeline_tiles` for this product.
        tail: [T, K - K1], the last columns of the inputs if x is [T, K1], K1 a multiple of a stage's columns.
        codes: of a weight that is quantised.
    """
    rows, tokens, device = len(weight), len(out), weight.device
    width = x.shape[1] + (0 if tail is None else tail.shape[1])
    gated, four = activation == "silu_and_mul", codes is not None and codes.code != "e4m3"
    columns = GROUP if four else ROW_BYTES // weight.itemsize
    of_weight = columns // WORD if four else columns
    blocks, token_blocks = cdiv(rows, UNIT * tile.warpgroups), cdiv(tokens, tile.tokens)
    parts, arrivals = None, None
    if tile.split > 1:
        units = blocks * token_blocks * tile.warpgroups
        parts = torch.empty((units, tile.split, tile.tokens, UNIT), dtype=torch.float32, device=device)
        arrivals = arrival_counters(weight, units)

    def rows_of(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(min(ROW_BYTES, columns * x.itemsize), 8 * x.itemsize, rank=2)
        return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns], layout)

    scale, of_tokens, own = None, None, NO_CODES
    if codes is not None:
        own = {"CODE": codes.code, "ROWS": codes.block[0], "SPAN": codes.block[1]}
        if codes.tokens is not None:
            scale = codes.tokens
            of_tokens = TensorDescriptor(scale, [scale.numel()], [1], [tile.tokens], SCALES)
    grids = (None, None, None) if codes is None else (codes.scale, codes.zero, codes.factor)
    _pipeline_kernel[token_blocks, tile.split, blocks](
        rows_of(weight, 32 if gated else UNIT, of_weight), rows_of(x, tile.tokens, columns),
        None if tail is None else rows_of(tail, tile.tokens, columns), of_tokens, *grids, bias, out, parts, arrivals,
        tokens, rows, x.shape[1], 0 if scale is None else scale.stride(0), K=width, ACTIVATION=activation,
        T=tile.tokens, WARPGROUPS=tile.warpgroups, STAGES=tile.stages, SPLIT=tile.split,
        REGISTERS=REGISTERS[tile.warpgroups], LOADER=LOADER_REGISTERS, num_warps=4, **own, **pdl(device),
    )  # fmt: skip
