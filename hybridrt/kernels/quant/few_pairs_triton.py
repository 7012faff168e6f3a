"""Gluon kernel of routed experts with weights of 8 and 4 bits and few tokens each: tensor cores that read registers.

A program multiplies BLOCK_N rows of one expert's matrix with PAIRS of its tokens. A tensor core multiplies 16 rows with
8 tokens, most of which may be empty: memory is the limit. A warp loads 16 bytes of a row at a time into the registers
from which the tensor cores read, AHEAD groups of 128 columns before it multiplies them; several programs of a
multiprocessor keep memory busy while one of them prepares inputs or ends.

Inputs are not quantised. e4m3: codes are exact in float16. Inputs become float16 too, each group of 128 times a power
of two, so that its largest is near 2^14: exact but for numbers 2^-29 times as large. 4 bits: as in `one_token_triton`.

Gluon has no interpreter: tests compile the kernel, and run it on a GPU.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hybridrt.kernels.core.code_fragments_triton import (
    E2M1_FACTOR,
    add_products,
    bytes_by_thread,
    columns_by_run,
    fragments,
    load_e2m1_scales,
    of_runs,
    runs_by_thread,
    sum_of_parts,
)
from hybridrt.kernels.core.gluon_kernel_triton import gluon_kernel, join_threads, reinterpret
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, begin_in_turn, pdl
from hybridrt.kernels.dense.moe_triton import Blocks, activate_experts
from hybridrt.kernels.dense.pipeline_tiles import GROUP
from hybridrt.kernels.quant.quant_weight import QuantWeight

LARGEST = gl.constexpr(14)  # power of two of a group's largest input
PAIRS = 8  # columns of a tensor core
CHUNK = 4  # groups of 128 inputs of each that are loaded at once: a power of two


class FewPairsTile(NamedTuple):
    """A program's work.

    Attributes:
        rows: of the weight, gates included: a multiple of 16.
        parts: of the weight's columns, each of them multiplied by other warps. More than one only if a block has one
            pair: columns of a tensor core are then parts of its inputs, and a part's products with others are dropped.
        warps: of the program. Each multiplies 16 rows of a part at a time.
        ahead: groups of 128 columns of each part that are on their way.
    """

    rows: int
    parts: int
    warps: int
    ahead: int


@gluon.jit
def _weight_row(block, m, OUT: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of row m of a program. Of 16 rows the last 8 are those that the first 8 gate: so a thread has both."""
    if GATED:
        row = block * (BLOCK_N // 2) + m // 16 * 8 + m % 8 + m % 16 // 8 * OUT
    else:
        row = block * BLOCK_N + m
    return row


@gluon.jit
def _tile(  # type: ignore[no-untyped-def]
    w_ptr, scale_ptr, zero_ptr, block, j, OUT: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, CODE: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr,
    loads: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Codes of group j of each part, zeros past the last one, their scales, and what numbers of zero are."""
    GROUPS: gl.constexpr = K // 128
    STEPS: gl.constexpr = (GROUPS + PARTS - 1) // PARTS
    BLOCKS: gl.constexpr = (K + COLUMNS - 1) // COLUMNS
    EACH: gl.constexpr = 4 if CODE == "e4m3" else 8  # codes of a word
    M: gl.constexpr = BLOCK_N * PARTS
    m = gl.arange(0, M, gl.SliceLayout(1, loads))
    row, group = _weight_row(block, m % BLOCK_N, OUT, GATED, BLOCK_N), m // BLOCK_N * STEPS + j
    k = gl.expand_dims(gl.arange(0, 128 // EACH, gl.SliceLayout(0, loads)), 0)
    at = w_ptr + gl.expand_dims(row * (K // EACH) + group * (128 // EACH), 1) + k
    live = j < STEPS
    if STEPS * PARTS > GROUPS:
        live &= gl.expand_dims(group < GROUPS, 1)
    tile = gl.load(at, mask=live, other=0)
    r = gl.arange(0, M, gl.SliceLayout(1, mma))
    scale, zero = r, r
    if CODE == "e2m1":
        m = gl.arange(0, M, gl.SliceLayout(1, gl.SliceLayout(2, of_runs(loads, M))))
        row, group = _weight_row(block, m % BLOCK_N, OUT, GATED, BLOCK_N), m // BLOCK_N * STEPS + j
        scale = load_e2m1_scales(scale_ptr, row, gl.minimum(group, GROUPS - 1), K, COLUMNS, M, loads)
    elif scale_ptr is not None or zero_ptr is not None:
        group = gl.minimum(r // BLOCK_N * STEPS + j, GROUPS - 1)
        cell = _weight_row(block, r % BLOCK_N, OUT, GATED, BLOCK_N) // ROWS * BLOCKS + group * 128 // COLUMNS
        if scale_ptr is not None:
            scale = gl.load(scale_ptr + cell).to(gl.float32)
        if zero_ptr is not None:
            zero = gl.load(zero_ptr + cell).to(gl.float32)
    return tile, scale, zero


@gluon.jit
def _enter_inputs(x, inputs, sides, COUNT: gl.constexpr, CODE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Stores COUNT groups [COUNT, 128], and for each what its products are multiplied with (e4m3), or the sum of its
    inputs (int4)."""
    if CODE == "e4m3":
        x = x.to(gl.float32)
        largest = gl.maximum(gl.max(gl.abs(x), 1), 1e-30)
        # 2^LARGEST / 2^exponent and its inverse, made of bits.
        exponent = (largest.to(gl.int32, bitcast=True) >> 23) & 0xFF
        up = ((254 + LARGEST - exponent) << 23).to(gl.float32, bitcast=True)
        sides.store(((exponent - LARGEST) << 23).to(gl.float32, bitcast=True))
        inputs.store((x * gl.expand_dims(up, 1)).to(gl.float16))
    else:
        if CODE == "int4":
            sides.store(gl.sum(x.to(gl.float32), 1))
        inputs.store(columns_by_run(x, COUNT))


@gluon_kernel(do_not_specialize=["num_pairs", "num_experts"])
def _few_pairs_kernel(  # type: ignore[no-untyped-def]
    a_ptr, w_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, pairs_ptr, block_expert_ptr, out_ptr, a_sr, num_pairs,
    num_experts, PAIRS_PER_ROW: gl.constexpr, K: gl.constexpr, OUT: gl.constexpr, CODE: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACTIVATE: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
    ALPHA: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, AHEAD: gl.constexpr,
    CHUNK: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[pair] = act(w[expert] a[pair // PAIRS_PER_ROW] + bias[expert]) for a block of one expert's pairs and BLOCK_N
    rows of w [E, OUT or 2 OUT, K], gates included. Grid [blocks of rows, blocks of pairs]. Blocks have PAIRS pairs, or
    one if there is no list of pairs: PAIRS is then the number of a tensor core's columns."""
    SINGLE: gl.constexpr = pairs_ptr is None
    gl.static_assert(PARTS == 1 or SINGLE)
    STEPS: gl.constexpr = (K // 128 + PARTS - 1) // PARTS
    ROUNDS: gl.constexpr = (STEPS + AHEAD - 1) // AHEAD
    PADDED: gl.constexpr = (ROUNDS * AHEAD + CHUNK - 1) // CHUNK * CHUNK
    N: gl.constexpr = OUT * 2 if GATED else OUT
    M: gl.constexpr = BLOCK_N * PARTS
    EACH: gl.constexpr = 4 if CODE == "e4m3" else 8
    SCALES: gl.constexpr = ((N + ROWS - 1) // ROWS) * ((K + COLUMNS - 1) // COLUMNS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    loads: gl.constexpr = bytes_by_thread(M, WARPS) if CODE == "e4m3" else runs_by_thread(M, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 16 if CODE == "e4m3" else 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 16 if CODE == "e4m3" else 2)
    of_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    number: gl.constexpr = gl.float16 if CODE == "e4m3" else gl.bfloat16
    block, pair_block = gl.program_id(0), gl.program_id(1)

    # Groups of 128 inputs, those of all columns of a tensor core one after the other.
    c = gl.arange(0, CHUNK * PAIRS, gl.SliceLayout(1, of_x))
    k, end = c // PAIRS * 128, K
    if SINGLE:
        row = pair_block.to(gl.int64) // PAIRS_PER_ROW * a_sr + c * 0
        live = c % PAIRS < PARTS
        k += c % PAIRS * (STEPS * 128)
        end = gl.minimum((c % PAIRS + 1) * (STEPS * 128), K)
    # Up: the kernel before this one may have made the blocks. Down reads them early: up began in turn.
    if ACTIVATE:
        begin_in_turn(PDL)
    if not SINGLE:
        pair = gl.load(pairs_ptr + pair_block * PAIRS + c % PAIRS)
        row, live = pair.to(gl.int64) // PAIRS_PER_ROW * a_sr, pair < num_pairs
    columns = gl.expand_dims(row + k, 1) + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, of_x)), 0)
    # Before it is known which expert it is. A list of no expert is not filled.
    EARLY: gl.constexpr = ACTIVATE and SINGLE
    if EARLY:
        x = gl.load(a_ptr + columns, mask=gl.expand_dims(live & (k < end), 1), other=0.0)
    expert = gl.load(block_expert_ptr + pair_block).to(gl.int64)
    if expert >= num_experts or expert < 0:
        if not ACTIVATE:
            begin(PDL)
        return
    w_ptr = w_ptr.cast(gl.pointer_type(gl.int32)) + expert * (N * (K // EACH))
    if scale_ptr is not None:
        scale_ptr += expert * SCALES
    if zero_ptr is not None:
        zero_ptr += expert * SCALES
    tiles = (
        _tile(w_ptr, scale_ptr, zero_ptr, block, 0, OUT, K, ROWS, COLUMNS, CODE, GATED, BLOCK_N, PARTS, loads, mma),
    )
    for g in gl.static_range(1, AHEAD):
        more = _tile(
            w_ptr, scale_ptr, zero_ptr, block, g, OUT, K, ROWS, COLUMNS, CODE, GATED, BLOCK_N, PARTS, loads, mma
        )
        tiles += (more,)  # type: ignore[assignment]
    if not ACTIVATE:
        begin(PDL)
    if not EARLY:
        x = gl.load(a_ptr + columns, mask=gl.expand_dims(live & (k < end), 1), other=0.0)

    CHUNKS: gl.constexpr = PADDED // CHUNK
    rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    inputs = gl.allocate_shared_memory(number, [CHUNKS, CHUNK * PAIRS, 128], rows)
    sides = gl.allocate_shared_memory(gl.float32, [CHUNKS, CHUNK * PAIRS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _enter_inputs(x, inputs.index(0), sides.index(0), CHUNK * PAIRS, CODE)
    for i in gl.static_range(1, CHUNKS):
        live_now = live & (k + i * (CHUNK * 128) < end)
        x = gl.load(a_ptr + (columns + i * (CHUNK * 128)), mask=gl.expand_dims(live_now, 1), other=0.0)
        _enter_inputs(x, inputs.index(i), sides.index(i), CHUNK * PAIRS, CODE)
    inputs = reinterpret(inputs, number, [PADDED, PAIRS, 128], rows)
    sides = reinterpret(sides, gl.float32, [PADDED, PAIRS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    join_threads()

    acc = gl.zeros([M, PAIRS], gl.float32, mma)
    for at in range(0, ROUNDS * AHEAD, AHEAD):
        for g in gl.static_range(AHEAD):
            tile, scale, zero = tiles[0]
            a = fragments(tile, scale, CODE, M, loads, left)
            following = _tile(
                w_ptr, scale_ptr, zero_ptr, block, at + (g + AHEAD), OUT, K, ROWS, COLUMNS, CODE, GATED, BLOCK_N, PARTS,
                loads, mma,
            )  # fmt: skip
            tiles = tiles[1:] + (following,)  # noqa: RUF005
            b = inputs.index(at + g).permute((1, 0)).load(right)
            side = None if CODE == "e2m1" else sides.index(at + g)
            own_scale = None if CODE == "e2m1" or scale_ptr is None else scale
            acc = add_products(acc, a, b, side, own_scale, None if zero_ptr is None else zero, CODE, mma)

    if CODE == "e2m1":
        acc *= E2M1_FACTOR
    WIDE: gl.constexpr = 1 if SINGLE else PAIRS
    # A thread has neighbouring rows, so that threads of a warp store neighbouring numbers.
    stores: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
    y = acc
    if SINGLE:
        total = sum_of_parts(acc, PARTS, BLOCK_N, mma)
        y = gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, stores)), 1)
    y = gl.convert_layout(y, stores)
    row = _weight_row(block, gl.arange(0, BLOCK_N, gl.SliceLayout(1, stores)), OUT, GATED, BLOCK_N) + expert * N
    if factor_ptr is not None:
        y *= gl.expand_dims(gl.load(factor_ptr + row), 1)
    if bias_ptr is not None:
        y += gl.expand_dims(gl.load(bias_ptr + row).to(gl.float32), 1)
    HEIGHT: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        both = gl.permute(gl.reshape(y, [BLOCK_N // 16, 2, 8, WIDE]), (0, 2, 3, 1))
        pairs_of_rows: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])
        hidden, up = gl.convert_layout(gl.reshape(both, [HEIGHT, WIDE, 2]), pairs_of_rows).split()
        y = gl.convert_layout(activate_experts(hidden, up, True, LIMIT, ALPHA), stores)
    elif ACTIVATE:
        y = activate_experts(y, y, False, LIMIT, ALPHA)
    n = gl.expand_dims(block * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, stores)), 1)
    if SINGLE:
        gl.store(out_ptr + pair_block.to(gl.int64) * OUT + n, y.to(out_ptr.dtype.element_ty))
    else:
        pair = gl.load(pairs_ptr + pair_block * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, stores)))
        cells = out_ptr + gl.expand_dims(pair.to(gl.int64) * OUT, 0) + n
        gl.store(cells, y.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(pair < num_pairs, 0))


def few_pairs_product(
    a: Tensor, w: QuantWeight, bias: Tensor | None, blocks: Blocks | None, out: Tensor, ids: Tensor, **meta: Any
) -> None:
    """One launch. blocks: of 8 or 16 pairs; None: each pair is one."""
    assert a.stride(1) == 1 and w.data.is_contiguous() and out.shape[1] % GROUP == 0  # so blocks of rows are whole
    pairs, of_blocks, size = (None, ids, PAIRS) if blocks is None else (blocks.pairs, blocks.experts, blocks.size)
    tile = few_pairs_tile(w.code, size, blocks is None)
    rows, steps = tile.rows // (2 if meta["GATED"] else 1), cdiv(w.width // GROUP, tile.parts)
    _few_pairs_kernel[(cdiv(out.shape[1], rows), of_blocks.numel())](
        a, w.data, w.scale, w.zero, w.factor, bias, pairs, of_blocks, out, a.stride(0), ids.numel(), len(w.data),
        K=w.width, OUT=out.shape[1], CODE=w.code, ROWS=w.block[0], COLUMNS=w.block[1], BLOCK_N=tile.rows,
        PARTS=tile.parts, PAIRS=size, AHEAD=min(tile.ahead, steps), CHUNK=min(CHUNK, next_power_of_2(steps)),
        WARPS=tile.warps, num_warps=tile.warps, **meta, **pdl(a.device),
    )  # fmt: skip


def few_pairs_tile(code: str, size: int, single: bool) -> FewPairsTile:
    """The one that was fastest on an H200 (benchmarks/log/experts.md). single: a block has one pair."""
    if code != "e4m3":
        return FewPairsTile(16, 4, 4, 4) if single else FewPairsTile(128, 1, 8 if size == PAIRS else 4, 2)
    if single:
        return FewPairsTile(32, 4, 4, 2)
    return FewPairsTile(128, 1, 4, 2)
