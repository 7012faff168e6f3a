"""What Triton kernels of prompt attention share: rows of queries, places of keys, a step of the softmax."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Of the warp-specialized kernel (`prefill_pipeline_triton.py`).
PIPELINE_BLOCK = {128: 128, 256: 64}  # keys of a block, by numbers of a head
PIPELINE_ROWS = 128  # query rows of a program
PIPELINE_LATENT = (128, 64)  # numbers of latent attention's keys: those of a head, and those that heads share


@triton.jit
def span(starts_ptr, seq_lens_ptr, b, mask, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows b: first query, queries, length, and the first visible position, aligned."""
    start = tl.load(starts_ptr + b, mask=mask, other=0)
    query_len = tl.load(starts_ptr + b + 1, mask=mask, other=0) - start
    seq_len = tl.load(seq_lens_ptr + b, mask=mask, other=0)
    origin = seq_len * 0  # of its shape
    if WINDOW > 0:
        origin = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return start, query_len, seq_len, origin


@triton.jit
def copied_before(starts_ptr, seq_lens_ptr, b, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a head's copy before those of row b of the batch: whole tiles of the rows before it."""
    blocks = 0
    for first in range(0, b, 64):
        i = first + tl.arange(0, 64)
        _, _, seq_len, origin = span(starts_ptr, seq_lens_ptr, i, i < b, WINDOW, BLOCK_N)
        blocks += tl.sum(tl.cdiv(seq_len - origin, BLOCK_N), 0)
    return blocks * BLOCK_N


@triton.jit
def query_rows(block_m, query_len, kv_head, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile's first token, its rows' relative tokens, heads, and mask."""
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    first = block_m * BLOCK_M // GROUPS
    return first, m // GROUPS - first, kv_head * GROUPS + m % GROUPS, m < query_len * GROUPS


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    source, slot, row, kv_head, HKV: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D], at slots of a cache or rows of a tensor descriptor."""
    if PAGED:
        d = tl.arange(0, BLOCK_D)
        at = ((slot.to(tl.int64) * HKV + kv_head) * STRIDE)[:, None] + d[None, :]
        return tl.load(source + at, mask=(d < D)[None, :], other=0.0)
    else:
        return source.load([row, 0])


@triton.jit
def softmax_step(scores, row_max, row_sum, scale_log2):  # type: ignore[no-untyped-def]
    """Weights of a tile, the factor for earlier sums, new maxima and sums."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


class KeySources(NamedTuple):
    """Where the kernel finds keys and values: caches, or copies with whole tiles for each row.

    Attributes:
        keys, values: caches; or copies [heads * total, width], those of a head one after the other, or descriptors of
            them.
        ropes: the last numbers of keys, which all heads share: a view of the cache, or a copy [total, width] or its
            descriptor; None if there are none.
        total: rows of one head in a copy; 0 for caches, which are read through page tables.
    """

    keys: Any
    values: Any
    ropes: Any = None
    total: int = 0
