"""Gluon kernel of prompt attention over copies of keys and values: one warp loads, two warpgroups compute.

The algorithm is that of FlashAttention-3 (Shah et al. 2024), without its order between warpgroups. A warpgroup has 64
query rows. While it computes the weights of a block of keys, tensor cores multiply the weights of the block before
with values, and the other warpgroup's blocks. Blocks are visited from the last one on: only the first ones need a mask.
Keys of latent attention have further numbers, which all heads share. A second product adds these to the scores.

Gluon has no interpreter: tests compile the kernel, and run it on a GPU.
"""

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

from hybridrt.kernels.attention.prefill_tiles_triton import PIPELINE_BLOCK, PIPELINE_ROWS, KeySources
from hybridrt.kernels.core.gluon_kernel_triton import copy_tile, gluon_kernel, join_threads
from hybridrt.kernels.core.launch import cdiv
from hybridrt.kernels.core.records import AttentionPrompts, PagedKV
from hybridrt.kernels.core.tiles_triton import LOG2_E

ROWS = gl.constexpr(PIPELINE_ROWS)
STAGES = 2  # blocks of keys, and of values, on their way
REGISTERS, LOADER_REGISTERS = 240, 24  # of a thread

# Barriers of each stage: its keys or values have come; both warpgroups have used them.
KEYS_FULL, KEYS_FREE, VALUES_FULL, VALUES_FREE = map(gl.constexpr, range(4))


@gluon.jit
def _bar(bars, kind: gl.constexpr, j):  # type: ignore[no-untyped-def]
    """The barrier of the stage of block j, counted from the first one that is visited."""
    STAGES: gl.constexpr = bars.shape[0] // 4
    return bars.index(kind * STAGES + j % STAGES)


@gluon.jit
def _blocks_before(seq_lens_ptr, b, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks of keys of the batch's rows before row b."""
    blocks = 0
    for first in range(0, b, 128):
        i = first + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        lens = gl.load(seq_lens_ptr + i, mask=i < b, other=0)
        blocks += gl.sum((lens + BLOCK - 1) // BLOCK, 0)
    return blocks


@gluon.jit
def _load_blocks(  # type: ignore[no-untyped-def]
    k_desc, v_desc, rope_desc, k_buffer, v_buffer, rope_buffer, bars, first, row, blocks
):
    """Fills stages with blocks of the copies, the last block first.

    They are rows from `first` on of what all heads share, and from first + row on of keys and values.
    """
    STAGES: gl.constexpr = k_buffer.shape[0]
    BLOCK: gl.constexpr = k_buffer.shape[1]
    BYTES: gl.constexpr = BLOCK * k_buffer.shape[2] * 2
    SHARED: gl.constexpr = 0 if rope_desc is None else BLOCK * rope_buffer.shape[2] * 2
    for j in range(blocks):
        stage = j % STAGES
        shared = first + (blocks - 1 - j) * BLOCK
        at = shared + row
        if j >= STAGES:
            mbarrier.wait(_bar(bars, KEYS_FREE, j), (j // STAGES - 1) & 1)
        mbarrier.expect(_bar(bars, KEYS_FULL, j), BYTES + SHARED)
        copy_tile(k_desc, [at, 0], _bar(bars, KEYS_FULL, j), k_buffer.index(stage))
        if rope_desc is not None:
            copy_tile(rope_desc, [shared, 0], _bar(bars, KEYS_FULL, j), rope_buffer.index(stage))
        if j >= STAGES:
            mbarrier.wait(_bar(bars, VALUES_FREE, j), (j // STAGES - 1) & 1)
        mbarrier.expect(_bar(bars, VALUES_FULL, j), BYTES)
        copy_tile(v_desc, [at, 0], _bar(bars, VALUES_FULL, j), v_buffer.index(stage))


@gluon.jit
def _softmax(scores, row_max, row_sum, scale_log2):  # type: ignore[no-untyped-def]
    """As `softmax_step` (prefill_tiles_triton.py)."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))
    rescale = gl.exp2(row_max - new_max)
    return weights, rescale, new_max, row_sum * rescale + gl.sum(weights, 1)


@gluon.jit
def _begin_scores(  # type: ignore[no-untyped-def]
    q_buffer, q_rope, k_buffer, rope_buffer, bars, j, ROPE: gl.constexpr, of_scores: gl.constexpr
):
    """Starts to multiply the queries with the keys of block j."""
    STAGES: gl.constexpr = k_buffer.shape[0]
    BLOCK: gl.constexpr = k_buffer.shape[1]
    mbarrier.wait(_bar(bars, KEYS_FULL, j), (j // STAGES) & 1)
    keys, none = k_buffer.index(j % STAGES).permute((1, 0)), gl.zeros([64, BLOCK], gl.float32, of_scores)
    scores = warpgroup_mma(q_buffer, keys, none, use_acc=False, is_async=True)
    if ROPE > 0:
        scores = warpgroup_mma(q_rope, rope_buffer.index(j % STAGES).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _masked(scores, position, offset, of_scores: gl.constexpr):  # type: ignore[no-untyped-def]
    BLOCK: gl.constexpr = scores.shape[1]
    key = offset + gl.arange(0, BLOCK, gl.SliceLayout(0, of_scores))
    return gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(position, 1), scores, float("-inf"))


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    q_buffer, q_rope, k_buffer, v_buffer, rope_buffer, bars, weights, acc, row_max, row_sum, position, blocks,
    scale_log2, j, MASKED: gl.constexpr, ROPE: gl.constexpr, of_scores: gl.constexpr, of_out: gl.constexpr,
):  # fmt: skip
    """Multiplies the weights of block j - 1 with its values, and computes those of block j."""
    STAGES: gl.constexpr = k_buffer.shape[0]
    BLOCK: gl.constexpr = k_buffer.shape[1]
    scores = _begin_scores(q_buffer, q_rope, k_buffer, rope_buffer, bars, j, ROPE, of_scores)
    mbarrier.wait(_bar(bars, VALUES_FULL, j - 1), ((j - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_buffer.index((j - 1) % STAGES), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(_bar(bars, KEYS_FREE, j), count=1)
    if MASKED:
        scores = _masked(scores, position, (blocks - 1 - j) * BLOCK, of_scores)
    following, rescale, row_max, row_sum = _softmax(scores, row_max, row_sum, scale_log2)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(_bar(bars, VALUES_FREE, j - 1), count=1)
    acc *= gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, of_out)), 1)
    return _as_operand(following, q_buffer.dtype, of_out), acc, row_max, row_sum


@gluon.jit
def _as_operand(weights, dtype: gl.constexpr, of_out: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, of_out, 2))


@gluon.jit
def _query_rows(row, start, query_len, kv_head, GROUPS: gl.constexpr, of_rows: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens and heads [64] of query rows, and which of them [64, 1] there are."""
    m = row + gl.arange(0, 64, gl.SliceLayout(1, of_rows))
    live = gl.expand_dims(m < query_len * GROUPS, 1)
    return (start + m // GROUPS).to(gl.int64), kv_head * GROUPS + m % GROUPS, live


@gluon.jit
def _load_queries(  # type: ignore[no-untyped-def]
    q_ptr, buffer, first: gl.constexpr, row, start, query_len, kv_head, q_st, q_sh, GROUPS: gl.constexpr
):
    """Numbers of 64 query rows from number `first` on."""
    WIDTH: gl.constexpr = buffer.shape[1]
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    token, head, live = _query_rows(row, start, query_len, kv_head, GROUPS, of_rows)
    d = first + gl.arange(0, WIDTH, gl.SliceLayout(0, of_rows))
    at = gl.expand_dims(token * q_st + head * q_sh, 1) + gl.expand_dims(d, 0)
    buffer.store(gl.load(q_ptr + at, mask=live, other=0.0))


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr, q_buffer, q_rope, k_buffer, v_buffer, rope_buffer, bars, sinks_ptr, out_ptr, q_st, q_sh, scale_log2,
    v_scale, start, query_len, seq_len, kv_head, row, blocks, GROUPS: gl.constexpr, ROPE: gl.constexpr,
    OUT_ST: gl.constexpr,
):  # fmt: skip
    """64 query rows from `row` on, of the `GROUPS` heads of each token."""
    STAGES: gl.constexpr = k_buffer.shape[0]
    BLOCK: gl.constexpr = k_buffer.shape[1]
    D: gl.constexpr = k_buffer.shape[2]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    if blocks > 0:
        _load_queries(q_ptr, q_buffer, 0, row, start, query_len, kv_head, q_st, q_sh, GROUPS)
        if ROPE > 0:
            _load_queries(q_ptr, q_rope, D, row, start, query_len, kv_head, q_st, q_sh, GROUPS)
        fence_async_shared()
        join_threads()
        m = row + gl.arange(0, 64, gl.SliceLayout(1, of_scores))
        nearest = seq_len - query_len + row // GROUPS
        position = seq_len - query_len + m // GROUPS
        row_max = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, of_scores))
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, of_scores))
        if sinks_ptr is not None:
            row_max = gl.maximum(gl.load(sinks_ptr + kv_head * GROUPS + m % GROUPS) * LOG2_E, row_max)
            row_sum += 1.0
        acc = gl.zeros([64, D], gl.float32, of_out)
        scores = _begin_scores(q_buffer, q_rope, k_buffer, rope_buffer, bars, 0, ROPE, of_scores)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(_bar(bars, KEYS_FREE, 0), count=1)
        scores = _masked(scores, position, (blocks - 1) * BLOCK, of_scores)
        weights, _, row_max, row_sum = _softmax(scores, row_max, row_sum, scale_log2)
        weights = _as_operand(weights, q_buffer.dtype, of_out)
        masked = gl.minimum(gl.maximum(blocks - (nearest + 1) // BLOCK, 1), blocks)
        for j in range(1, masked):
            weights, acc, row_max, row_sum = _step(
                q_buffer, q_rope, k_buffer, v_buffer, rope_buffer, bars, weights, acc, row_max, row_sum, position,
                blocks, scale_log2, j, True, ROPE, of_scores, of_out,
            )  # fmt: skip
        for j in range(masked, blocks):
            weights, acc, row_max, row_sum = _step(
                q_buffer, q_rope, k_buffer, v_buffer, rope_buffer, bars, weights, acc, row_max, row_sum, position,
                blocks, scale_log2, j, False, ROPE, of_scores, of_out,
            )  # fmt: skip
        mbarrier.wait(_bar(bars, VALUES_FULL, blocks - 1), ((blocks - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, v_buffer.index((blocks - 1) % STAGES), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        acc /= gl.expand_dims(gl.convert_layout(row_sum, gl.SliceLayout(1, of_out)), 1)
        if v_scale is not None:
            acc *= v_scale
        q_buffer.store(acc.to(q_buffer.dtype))  # so that threads of a warp store neighbouring numbers
        join_threads()
        token, head, live = _query_rows(row, start, query_len, kv_head, GROUPS, of_rows)
        d = gl.arange(0, D, gl.SliceLayout(0, of_rows))
        at = gl.expand_dims(token * OUT_ST + head * D, 1) + gl.expand_dims(d, 0)
        gl.store(out_ptr + at, q_buffer.load(of_rows), mask=live)


@gluon_kernel(do_not_specialize_on_alignment=["seq_lens_ptr"])
def _attention_pipeline_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_desc, v_desc, rope_desc, starts_ptr, seq_lens_ptr, sinks_ptr, out_ptr, q_st, q_sh, total, scale_log2,
    v_scale, GROUPS: gl.constexpr, STAGES: gl.constexpr, OUT_ST: gl.constexpr, REGISTERS: gl.constexpr,
    LOADER: gl.constexpr,
):  # fmt: skip
    """Grid [key/value heads, blocks of ROWS query rows, rows of the batch]."""
    BLOCK: gl.constexpr = k_desc.block_shape[0]
    D: gl.constexpr = k_desc.block_shape[1]
    ROPE: gl.constexpr = 0 if rope_desc is None else rope_desc.block_shape[1]
    # The last blocks of a row start first: they have the longest context.
    kv_head, block_m, b = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1), gl.program_id(2)
    start = gl.load(starts_ptr + b)
    query_len, seq_len = gl.load(starts_ptr + b + 1) - start, gl.load(seq_lens_ptr + b)
    row = block_m * ROWS
    furthest = seq_len - query_len + gl.minimum((row + ROWS - 1) // GROUPS, query_len - 1)
    blocks = gl.where(row < query_len * GROUPS, furthest // BLOCK + 1, 0)
    first = _blocks_before(seq_lens_ptr, b, BLOCK) * BLOCK
    q0 = gl.allocate_shared_memory(k_desc.dtype, [64, D], k_desc.layout)
    q1 = gl.allocate_shared_memory(k_desc.dtype, [64, D], k_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK, D], k_desc.layout)
    v = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK, D], k_desc.layout)
    ropes, q0_rope, q1_rope = k, q0, q1
    if ROPE > 0:
        ropes = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK, ROPE], rope_desc.layout)
        q0_rope = gl.allocate_shared_memory(k_desc.dtype, [64, ROPE], rope_desc.layout)
        q1_rope = gl.allocate_shared_memory(k_desc.dtype, [64, ROPE], rope_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(_bar(bars, KEYS_FULL, i), count=1)
        mbarrier.init(_bar(bars, KEYS_FREE, i), count=2)
        mbarrier.init(_bar(bars, VALUES_FULL, i), count=1)
        mbarrier.init(_bar(bars, VALUES_FREE, i), count=2)
    fence_async_shared()  # copies count on them
    # Arguments are written out: in a tuple with a name, constants would become tensors.
    gl.warp_specialize([
        (_attend, (q_ptr, q0, q0_rope, k, v, ropes, bars, sinks_ptr, out_ptr, q_st, q_sh, scale_log2, v_scale, start,
                   query_len, seq_len, kv_head, row, blocks, GROUPS, ROPE, OUT_ST)),
        (_attend, (q_ptr, q1, q1_rope, k, v, ropes, bars, sinks_ptr, out_ptr, q_st, q_sh, scale_log2, v_scale, start,
                   query_len, seq_len, kv_head, row + 64, blocks, GROUPS, ROPE, OUT_ST)),
        (_load_blocks, (k_desc, v_desc, rope_desc, k, v, ropes, bars, first, kv_head * total, blocks)),
    ], [4, 1], [REGISTERS, LOADER])  # fmt: skip


def attention_pipeline(q: Tensor, copies: KeySources, kv: PagedKV, batch: AttentionPrompts, out: Tensor) -> None:
    """Causal attention of q [T, Hq, D + R] into out [T, Hq, D], in 16 bits, for heads of PIPELINE_BLOCK.

    Args:
        copies: tensors in q's dtype, R numbers in `ropes`. Rows of the batch follow each other, in whole blocks.
        kv: the cache that was copied, of which scales and sinks are read. It has no window.
    """
    block, kv_heads = PIPELINE_BLOCK[copies.keys.shape[1]], len(copies.keys) // copies.total
    groups = q.shape[1] // kv_heads

    def described(copy: Tensor) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(128, 16, rank=2)
        return TensorDescriptor(copy, list(copy.shape), [copy.stride(0), 1], [block, copy.shape[1]], layout)

    _attention_pipeline_kernel[kv_heads, cdiv(max(batch.query_lens) * groups, PIPELINE_ROWS), len(batch.query_lens)](
        q, described(copies.keys), described(copies.values), None if copies.ropes is None else described(copies.ropes),
        batch.query_start_loc, batch.seq_lens, kv.sinks, out, q.stride(0), q.stride(1), copies.total,
        kv.score_scale * LOG2_E.value, kv.v_scale if kv.coded else None, GROUPS=groups, STAGES=STAGES,
        OUT_ST=out.stride(0), REGISTERS=REGISTERS, LOADER=LOADER_REGISTERS, num_warps=4,
    )  # fmt: skip
