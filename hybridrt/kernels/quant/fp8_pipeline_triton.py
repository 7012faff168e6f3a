"""Gluon kernel of `fp8_linear` for weights with blocks: one warp loads, warpgroups multiply.

The warp fills stages of shared memory by the tensor memory accelerator, ahead of the warpgroups and before the wait for
earlier kernels. Each warpgroup multiplies 64 rows of the weight with all tokens of a program. While it adds products to
its float32 sums, another one has the tensor cores. In kernels without roles all warps wait for memory, for products and
for scales in turn.

Gluon has no interpreter: tests compile the kernel, and run it on a GPU.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hybridrt.base.device import capability, multiprocessors
from hybridrt.kernels.core.gluon_kernel_triton import gluon_kernel
from hybridrt.kernels.core.launch import arrival_counters, cdiv
from hybridrt.kernels.core.pdl_triton import pdl
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.kernels.quant.fp8_linear import GROUP, TokenCodes
from hybridrt.kernels.quant.quant_weight import QuantWeight

UNIT = 64  # rows of the weight that a warpgroup multiplies
# Nanoseconds on an H200 (benchmarks/log/products.md). GROUP_TIME: a program of (warpgroups, tokens) multiplies a
# group of 128 columns. WAVE_TIME: a wave of programs begins and ends. PART_TIME: sums of a part are added, for each
# of its warpgroups and tokens. These numbers predict 83 measured times at 64 to 256 tokens with a median error of 4%.
# Where memory is the limit, programs take up to a quarter longer, whatever the tile. Tiles of one warpgroup are left
# out: sums of two runs were not always equal.
GROUP_TIME = {(3, 64): 520, (3, 128): 890, (2, 64): 325, (2, 128): 580}
WAVE_TIME, PART_TIME = 4200, 3
# Of shared memory, and of groups of 128 columns in it. Two warpgroups are up to 5% faster with four than with more.
STAGE_BYTES, MOST_STAGES = 208_000, {2: 4, 3: 6}
FEWEST_GROUPS, MOST_PARTS = 3, 8  # of a program, if programs share rows
# Registers of a thread of other warpgroups than the first, by their number. The first has what is left.
REGISTERS = {2: 208, 3: 152}
LOADER_REGISTERS = 40
CODES, SCALES = gl.NVMMASharedLayout(128, 8, rank=2), gl.NVMMASharedLayout(0, 32, rank=1)  # in shared memory

# Triton 3.6 has other names for three functions.
_join_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


class PipelineTile(NamedTuple):
    """A program's share of a product.

    Attributes:
        warpgroups: that multiply, 2 or 3, 64 rows of the weight each.
        tokens: of a program.
        stages: groups of 128 columns in shared memory.
        split: programs that share rows, each a part of the columns.
    """

    warpgroups: int
    tokens: int
    stages: int
    split: int


@cache
def pipeline_tile(tokens: int, rows: int, width: int, programs: int) -> PipelineTile:
    """The tile that takes the least time by measured parts. programs: that run at a time."""
    groups, best, least = width // GROUP, None, float("inf")
    for (warpgroups, block), group_time in GROUP_TIME.items():
        blocks = cdiv(rows, UNIT * warpgroups) * cdiv(tokens, block)
        fitting = STAGE_BYTES // (GROUP * (UNIT * warpgroups + block) + 4 * block)
        stages = min(fitting, MOST_STAGES[warpgroups])
        most = max(1, min(MOST_PARTS, groups // FEWEST_GROUPS, programs // blocks))  # parts wait for no second wave
        for split in range(1, most + 1):
            time = cdiv(blocks * split, programs) * (WAVE_TIME + cdiv(groups, split) * group_time)
            time += PART_TIME * split * warpgroups * block if split > 1 else 0
            if time < least:
                best, least = PipelineTile(warpgroups, block, stages, split), time
    assert best is not None
    return best


def takes_pipeline(weight: QuantWeight, device: torch.device) -> bool:
    """Whether the kernel runs: compute capability 9.0 alone has its instructions. On "meta" it is compiled for that."""
    fits = weight.scale is not None and weight.factor is None and weight.width % GROUP == 0
    return fits and (device.type == "meta" or capability(device) == (9, 0))


@gluon.jit
def _wait_for_earlier(PDL: gl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_wait()


@gluon.jit
def _copy_rows(w_desc, buffer, bar, unit, k, half, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    """64 rows of the weight: 32 gates and the 32 rows that they gate, or neighbours."""
    if GATED:
        _copy_tile(w_desc, [unit // 2, k], bar, buffer.slice(0, 32))
        _copy_tile(w_desc, [half + unit // 2, k], bar, buffer.slice(32, 32))
    else:
        _copy_tile(w_desc, [unit, k], bar, buffer)


@gluon.jit
def _copy_weights(w_desc, w0, w1, w2, stage, bar, row, k, half, WARPGROUPS: gl.constexpr, GATED: gl.constexpr):  # type: ignore[no-untyped-def]
    _copy_rows(w_desc, w0.index(stage), bar, row, k, half, GATED)
    _copy_rows(w_desc, w1.index(stage), bar, row + 64, k, half, GATED)
    if WARPGROUPS > 2:
        _copy_rows(w_desc, w2.index(stage), bar, row + 128, k, half, GATED)


@gluon.jit
def _copy_tokens(x_desc, s_desc, x_buffer, s_buffer, bar, token, group, scale_stride):  # type: ignore[no-untyped-def]
    _copy_tile(x_desc, [token, group * 128], bar, x_buffer)
    _copy_tile(s_desc, [group * scale_stride + token], bar, s_buffer)


@gluon.jit
def _load(  # type: ignore[no-untyped-def]
    w_desc, x_desc, s_desc, w0, w1, w2, x_buffer, s_buffer, full, empty, row, token, first, groups, half, scale_stride,
    WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Fills stages. Weights of the first ones do not wait for earlier kernels."""
    BYTES: gl.constexpr = WARPGROUPS * 64 * 128 + T * 128 + T * 4
    begun = gl.minimum(groups, STAGES)
    for g in range(begun):
        bar = full.index(g)
        mbarrier.expect(bar, BYTES)
        _copy_weights(w_desc, w0, w1, w2, g, bar, row, (first + g) * 128, half, WARPGROUPS, GATED)
    _wait_for_earlier(PDL)
    for g in range(begun):
        _copy_tokens(
            x_desc, s_desc, x_buffer.index(g), s_buffer.index(g), full.index(g), token, first + g, scale_stride
        )
    for g in range(STAGES, groups):
        stage = g % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (g // STAGES - 1) & 1)
        mbarrier.expect(bar, BYTES)
        _copy_weights(w_desc, w0, w1, w2, stage, bar, row, (first + g) * 128, half, WARPGROUPS, GATED)
        _copy_tokens(x_desc, s_desc, x_buffer.index(stage), s_buffer.index(stage), bar, token, first + g, scale_stride)


@gluon.jit
def _finished(y, row, N, bias_ptr):  # type: ignore[no-untyped-def]
    """With the bias of rows; y [rows, tokens]."""
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
def _store_gated(gate, up, unit, t, half, tokens, N, bias_ptr, out_ptr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    column = unit // 2 + gl.arange(0, 32, gl.SliceLayout(1, layout))
    gate = _finished(gate, column, N, bias_ptr)
    up = _finished(up, half + column, N, bias_ptr)
    _store(gate / (1.0 + gl.exp(-gate)) * up, column, t, half, tokens, out_ptr)


@gluon.jit
def _store_rows(y, unit, t, tokens, N, bias_ptr, out_ptr, SQUARED: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    column = unit + gl.arange(0, 64, gl.SliceLayout(1, layout))
    y = _finished(y, column, N, bias_ptr)
    if SQUARED:
        y = gl.maximum(y, 0.0)
        y *= y
    _store(y, column, t, N, tokens, out_ptr)


@gluon.jit
def _products(  # type: ignore[no-untyped-def]
    w_buffer, x_buffer, s_buffer, full, empty, scale_ptr, unit, first, groups, N, K, STAGES: gl.constexpr,
    ROWS: gl.constexpr, T: gl.constexpr, GATED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """float32 sums [64, T] of the groups of columns from `first` on."""
    of_row: gl.constexpr = gl.SliceLayout(1, mma)
    row = gl.arange(0, 64, of_row)
    if GATED:
        at = unit // 2 + row % 32 + (row // 32) * (N // 2)
    else:
        at = unit + row
    scales = scale_ptr + gl.minimum(at, N - 1) // ROWS * (K // 128) + first
    scale = gl.load(scales)
    acc = gl.zeros([64, T], gl.float32, mma)
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
def _halves(y, T: gl.constexpr):  # type: ignore[no-untyped-def]
    return y.reshape([64, 2, T // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    w_buffer, x_buffer, s_buffer, full, empty, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr,
    unit, token, first, groups, N, K, tokens, cell, part, STAGES: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr,
    SPLIT: gl.constexpr, ACTIVATION: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """64 rows of the weight from `unit` on. cell: place of their sums among `parts`, and of their arrivals."""
    GATED: gl.constexpr = ACTIVATION == "silu_and_mul"
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    acc = _products(
        w_buffer, x_buffer, s_buffer, full, empty, scale_ptr, unit, first, groups, N, K, STAGES, ROWS, T, GATED, mma
    )
    _wait_for_earlier(PDL)  # they may still read the outputs and count arrivals
    half = N // 2
    # A thread has four neighbouring rows, so that threads of a warp store neighbouring numbers.
    of_64: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    of_32: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    if SPLIT == 1:
        # All codes of these rows were multiplied: sums take their memory, 32 tokens a stage.
        sums = _reinterpret(w_buffer, gl.float32, [STAGES, 64, 32], gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
        first_half, second_half = _halves(acc, T)
        if T == 64:
            sums.index(0).store(first_half)
            sums.index(1).store(second_half)
        else:
            a, b = _halves(first_half, T // 2)
            sums.index(0).store(a)
            sums.index(1).store(b)
            a, b = _halves(second_half, T // 2)
            sums.index(2).store(a)
            sums.index(3).store(b)
        _join_threads()
        for piece in gl.static_range(T // 32):
            if GATED:
                t = token + piece * 32 + gl.arange(0, 32, gl.SliceLayout(0, of_32))
                gate, up = sums.index(piece).slice(0, 32).load(of_32), sums.index(piece).slice(32, 32).load(of_32)
                _store_gated(gate, up, unit, t, half, tokens, N, bias_ptr, out_ptr, of_32)
            else:
                t = token + piece * 32 + gl.arange(0, 32, gl.SliceLayout(0, of_64))
                y = sums.index(piece).load(of_64)
                _store_rows(y, unit, t, tokens, N, bias_ptr, out_ptr, ACTIVATION == "relu2", of_64)
    else:
        WIDE: gl.constexpr = 32  # tokens at a time: more need too many registers
        cells = parts_ptr + cell.to(gl.int64) * (SPLIT * 64 * T)
        r = gl.arange(0, 64, gl.SliceLayout(1, mma))
        c = gl.arange(0, T, gl.SliceLayout(0, mma))
        gl.store(cells + part * (64 * T) + gl.expand_dims(c, 0) * 64 + gl.expand_dims(r, 1), acc)
        _join_threads()  # publish stores
        if gl.atomic_add(arrivals_ptr + cell, 1, sem="acq_rel") == SPLIT - 1:
            gl.store(arrivals_ptr + cell, 0)
            for t0 in range(0, T, WIDE):
                if GATED:
                    t = token + t0 + gl.arange(0, WIDE, gl.SliceLayout(0, of_32))
                    gate = _sum_of_parts(cells, 0, t0, 32, WIDE, T, SPLIT, of_32)
                    up = _sum_of_parts(cells, 32, t0, 32, WIDE, T, SPLIT, of_32)
                    _store_gated(gate, up, unit, t, half, tokens, N, bias_ptr, out_ptr, of_32)
                else:
                    t = token + t0 + gl.arange(0, WIDE, gl.SliceLayout(0, of_64))
                    y = _sum_of_parts(cells, 0, t0, 64, WIDE, T, SPLIT, of_64)
                    _store_rows(y, unit, t, tokens, N, bias_ptr, out_ptr, ACTIVATION == "relu2", of_64)


@gluon_kernel(do_not_specialize=["tokens"])
def _fp8_pipeline_kernel(  # type: ignore[no-untyped-def]
    w_desc, x_desc, s_desc, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, tokens, N, scale_stride,
    K: gl.constexpr, ROWS: gl.constexpr, ACTIVATION: gl.constexpr, T: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, REGISTERS: gl.constexpr, LOADER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid [blocks of tokens, SPLIT, blocks of WARPGROUPS * 64 rows]: programs that read the same weights run together.

    w_desc: rows of the weight, 32 at a time for "silu_and_mul", else 64. x_desc: T tokens. s_desc: T scales.
    """
    GATED: gl.constexpr = ACTIVATION == "silu_and_mul"
    gl.static_assert(STAGES * 64 * 128 >= 64 * T * 4)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block_t, part, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    row, token, half = block * (WARPGROUPS * 64), block_t * T, N // 2
    first = part * (K // 128) // SPLIT
    groups = (part + 1) * (K // 128) // SPLIT - first
    cell = (block * gl.num_programs(0) + block_t) * WARPGROUPS
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    w0 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], codes)
    w1 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], codes)
    w2 = w0
    if WARPGROUPS > 2:
        w2 = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], codes)
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, T, 128], codes)
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
            (_multiply, (w0, x, s, full, empty, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, row, token,
                         first, groups, N, K, tokens, cell, part, STAGES, ROWS, T, SPLIT, ACTIVATION, PDL)),
            (_multiply, (w1, x, s, full, empty, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, row + 64, token,
                         first, groups, N, K, tokens, cell + 1, part, STAGES, ROWS, T, SPLIT, ACTIVATION, PDL)),
            (_load, (w_desc, x_desc, s_desc, w0, w1, w2, x, s, full, empty, row, token, first, groups, half,
                     scale_stride, WARPGROUPS, STAGES, GATED, PDL, T)),
        ], [4, 1], [REGISTERS, LOADER])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (w0, x, s, full, empty, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, row, token,
                         first, groups, N, K, tokens, cell, part, STAGES, ROWS, T, SPLIT, ACTIVATION, PDL)),
            (_multiply, (w1, x, s, full, empty, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, row + 64, token,
                         first, groups, N, K, tokens, cell + 1, part, STAGES, ROWS, T, SPLIT, ACTIVATION, PDL)),
            (_multiply, (w2, x, s, full, empty, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, row + 128, token,
                         first, groups, N, K, tokens, cell + 2, part, STAGES, ROWS, T, SPLIT, ACTIVATION, PDL)),
            (_load, (w_desc, x_desc, s_desc, w0, w1, w2, x, s, full, empty, row, token, first, groups, half,
                     scale_stride, WARPGROUPS, STAGES, GATED, PDL, T)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOADER])  # fmt: skip


def fp8_pipeline_triton(
    x: TokenCodes,
    weight: QuantWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation: Activation | None = None,
) -> Tensor:
    """`fp8_linear` in one launch, for what `takes_pipeline`. The last of the programs that share rows adds their parts,
    in order."""
    rows, width, device = weight.rows, weight.width, weight.data.device
    tile = pipeline_tile(x.tokens, rows, width, multiprocessors(device))
    gated = activation == "silu_and_mul"
    out = torch.empty(x.tokens, rows // 2 if gated else rows, dtype=dtype, device=device)
    blocks, token_blocks = cdiv(rows, UNIT * tile.warpgroups), cdiv(x.tokens, tile.tokens)
    parts, arrivals = None, None
    if tile.split > 1:
        units = blocks * token_blocks * tile.warpgroups
        parts = torch.empty((units, tile.split, tile.tokens, UNIT), dtype=torch.float32, device=device)
        arrivals = arrival_counters(weight.data, units)
    assert weight.data.is_contiguous() and x.codes.is_contiguous() and x.scale.is_contiguous()
    _fp8_pipeline_kernel[token_blocks, tile.split, blocks](
        TensorDescriptor(weight.data, [rows, width], [width, 1], [32 if gated else UNIT, GROUP], CODES),
        TensorDescriptor(x.codes, list(x.codes.shape), [width, 1], [tile.tokens, GROUP], CODES),
        TensorDescriptor(x.scale, [x.scale.numel()], [1], [tile.tokens], SCALES),
        weight.scale, bias, out, parts, arrivals, x.tokens, rows, x.scale.stride(0),
        K=width, ROWS=weight.block[0], ACTIVATION=activation, T=tile.tokens, WARPGROUPS=tile.warpgroups,
        STAGES=tile.stages, SPLIT=tile.split, REGISTERS=REGISTERS[tile.warpgroups], LOADER=LOADER_REGISTERS,
        num_warps=4, **pdl(device),
    )  # fmt: skip
    return out
