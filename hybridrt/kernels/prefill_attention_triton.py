"""Triton kernels of prefill attention over pages (flash attention, Dao et al. 2022).

As in decode, all query heads that share a key/value head are rows of one tile: row m of a tile is token m // GROUPS and
head m % GROUPS of the group; scores are in units of log 2. Long chunks copy the keys and values of their contexts
together first: the tensor memory accelerator then fetches whole tiles, and neither registers nor instructions go into
addresses. Short ones read the pages where they are.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hybridrt.kernels.launch import H200_SHARED_MEMORY, dot_precision, multiprocessors, shared_memory
from hybridrt.kernels.records import AttentionPrompts, PagedKV

BLOCK_M, BLOCK_N = 128, 64  # query rows and context positions per tile; half of them in float32
GATHER_FROM = 8192  # query rows of a key/value head and request, in the mean, from which on copying keys together pays
GATHER_MOST = 1 << 30  # bytes of such a copy: contexts so long that it would be larger are read from their pages


@triton.jit
def _span(starts_ptr, seq_lens_ptr, b, mask, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """First query, queries, length of the rows b, and the first position, aligned, that any of their queries sees."""
    start = tl.load(starts_ptr + b, mask=mask, other=0)
    query_len = tl.load(starts_ptr + b + 1, mask=mask, other=0) - start
    seq_len = tl.load(seq_lens_ptr + b, mask=mask, other=0)
    origin = seq_len * 0
    if WINDOW > 0:
        origin = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return start, query_len, seq_len, origin


@triton.jit
def _gathered_before(starts_ptr, seq_lens_ptr, b, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where row b's keys begin among the gathered: each row fills whole tiles."""
    blocks = 0
    for first in range(0, b, 64):
        i = first + tl.arange(0, 64)
        _, _, seq_len, origin = _span(starts_ptr, seq_lens_ptr, i, i < b, WINDOW, BLOCK_N)
        blocks += tl.sum(tl.cdiv(seq_len - origin, BLOCK_N), 0)
    return blocks * BLOCK_N


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    k_cache_ptr, v_cache_ptr, table_ptr, rows_ptr, starts_ptr, seq_lens_ptr, k_ptr, v_ptr, table_sr, total,
    HKV: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of one row and key/value head; zeros past the row's end, before its window and past the head's width."""
    block, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, query_len, seq_len, origin = _span(starts_ptr, seq_lens_ptr, b, b >= 0, WINDOW, BLOCK_N)
    if origin + block * BLOCK_N >= seq_len:
        return
    offset, d = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    pos = origin + offset
    kept = pos < seq_len
    if WINDOW > 0:
        kept &= pos > seq_len - query_len - WINDOW  # the pages before may be another request's by now
    slot = tl.load(table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_sr + pos, mask=kept, other=0).to(tl.int64)
    source, mask = ((slot * HKV + kv_head) * D)[:, None] + d[None, :], kept[:, None] & (d < D)[None, :]
    row = kv_head.to(tl.int64) * total + _gathered_before(starts_ptr, seq_lens_ptr, b, WINDOW, BLOCK_N) + offset
    target = row[:, None] * BLOCK_D + d[None, :]
    tl.store(k_ptr + target, tl.load(k_cache_ptr + source, mask=mask, other=0.0).to(k_ptr.dtype.element_ty))
    tl.store(v_ptr + target, tl.load(v_cache_ptr + source, mask=mask, other=0.0).to(v_ptr.dtype.element_ty))


@triton.jit
def _query_rows(block_m, query_len, kv_head, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile's first token; its rows' tokens counted from there, their heads, and which rows there are."""
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    first = block_m * BLOCK_M // GROUPS
    return first, m // GROUPS - first, kv_head * GROUPS + m % GROUPS, m < query_len * GROUPS


@triton.jit
def _tile(source, slot, row, kv_head, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values [BLOCK_N, BLOCK_D]: at slots of a cache, or from a row of a tensor descriptor on."""
    if PAGED:
        d = tl.arange(0, BLOCK_D)
        at = ((slot.to(tl.int64) * HKV + kv_head) * D)[:, None] + d[None, :]
        return tl.load(source + at, mask=(d < D)[None, :], other=0.0)
    else:
        return source.load([row, 0])


@triton.jit
def _softmax_step(scores, row_max, row_sum, scale_log2):  # type: ignore[no-untyped-def]
    """Weights of a tile, what the sums so far shrink by, the new maxima and sums."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def _extend_kernel(  # type: ignore[no-untyped-def]
    q_ptr, keys, values, table_ptr, rows_ptr, starts_ptr, seq_lens_ptr, out_ptr, q_st, q_sh, table_sr, total,
    scale_log2,
    HKV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, OUT_ST: tl.constexpr,
):  # fmt: skip
    # The last blocks of a row see the longest context: start them first.
    kv_head, block_m, b = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    start, query_len, seq_len, origin = _span(starts_ptr, seq_lens_ptr, b, b >= 0, WINDOW, BLOCK_N)
    if block_m * BLOCK_M >= query_len * GROUPS:
        return
    first, token, head, live = _query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    at = (start + first).to(tl.int64) * q_st + (token * q_st + head * q_sh)[:, None] + d[None, :]
    q = tl.load(q_ptr + at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    if PAGED:
        table, shift = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_sr, 0
    else:
        shift = kv_head * total + _gathered_before(starts_ptr, seq_lens_ptr, b, WINDOW, BLOCK_N) - origin
    nearest = seq_len - query_len + first
    furthest = seq_len - query_len + tl.minimum((block_m * BLOCK_M + BLOCK_M - 1) // GROUPS, query_len - 1)
    position = nearest + token
    begin, oldest, masked_from = 0, 0, (nearest + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        oldest = tl.maximum(nearest - WINDOW + 1, 0)
        begin = oldest // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Finite, so that a query that has seen nothing yet has the weights exp2(-inf - row_max) = 0 and not NaN.
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # disable_licm: what is the same in all turns would cost registers if it were computed before the loop.
    for offset in tl.range(begin, furthest + 1, BLOCK_N, disable_licm=True):
        pos = offset + tl.arange(0, BLOCK_N)
        slot = 0
        if PAGED:
            # Keys that no query sees are multiplied by zero, and 0 * NaN is NaN: own ones stand in for them.
            slot = tl.load(table + tl.minimum(tl.maximum(pos, oldest), furthest))
        k = _tile(keys, slot, shift + offset, kv_head, HKV, D, BLOCK_D, PAGED).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        masked = offset >= masked_from
        if WINDOW > 0:
            masked |= offset <= furthest - WINDOW
        if masked:  # a loop of its own for these blocks makes ptxas serialize the matrix instructions of both
            visible = pos[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= position[:, None] - pos[None, :] < WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        weights, rescale, row_max, row_sum = _softmax_step(scores, row_max, row_sum, scale_log2)
        v = _tile(values, slot, shift + offset, kv_head, HKV, D, BLOCK_D, PAGED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    # Where the tile goes is computed anew, from values that the compiler cannot know to be the same: carried through
    # the loop, the addresses would cost it registers that it does not have.
    again = tl.load(starts_ptr + b, volatile=True)
    query_len = tl.load(starts_ptr + b + 1, volatile=True) - again
    block_m += tl.load(starts_ptr + b, volatile=True) - again
    first, token, head, live = _query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
    at = (again + first).to(tl.int64) * OUT_ST + (token * OUT_ST + head * D)[:, None] + d[None, :]
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=live[:, None] & (d < D)[None, :])


def attention_extend_triton(q: Tensor, kv: PagedKV, batch: AttentionPrompts, out: Tensor | None = None) -> Tensor:
    """`attention_extend` in one launch, or two where keys and values are copied together first."""
    k_cache, v_cache, req_to_token, scale, sliding_window = kv
    rows, query_start_loc, seq_lens, query_lens, seq_lens_host = batch
    query_heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    groups = query_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    out[sum(query_lens) :].zero_()
    longest = max(query_lens, default=0) * groups
    if not longest:
        return out
    blocks = _blocks(query_lens, seq_lens_host, sliding_window)
    many = sum(query_lens) * groups >= GATHER_FROM * len(query_lens)
    copied = 2 * BLOCK_N * sum(blocks) * kv_heads * max(16, triton.next_power_of_2(head_dim)) * q.element_size()
    gathered = _ample(q) and many and copied <= GATHER_MOST
    tile = _tile_of(q, kv_heads, query_lens, gathered)
    keys, values, total = k_cache, v_cache, 0
    where = (req_to_token, rows, query_start_loc, seq_lens)
    shape = {"HKV": kv_heads, "D": head_dim, "WINDOW": sliding_window or 0}
    if gathered:
        keys, values, total = _gather(k_cache, v_cache, where, blocks, q.dtype, tile["BLOCK_D"], shape)
    _extend_kernel[(kv_heads, triton.cdiv(longest, tile["BLOCK_M"]), len(query_lens))](
        q, keys, values, *where, out, q.stride(0), q.stride(1), req_to_token.stride(0), total,
        scale * math.log2(math.e), GROUPS=groups, PAGED=not gathered, PRECISION=dot_precision(q.dtype),
        OUT_ST=out.stride(0), **shape, **tile,
    )  # fmt: skip
    return out


def _ample(q: Tensor) -> bool:
    """Whether there are Hopper's shared memory and with it the tensor memory accelerator, and tiles that fit."""
    return shared_memory(q.device) >= H200_SHARED_MEMORY and q.element_size() == 2 and q.shape[-1] <= 256


def _tile_of(q: Tensor, kv_heads: int, query_lens: Sequence[int], gathered: bool) -> dict[str, int]:
    """Tile sizes and launch options, as measured on an H200.

    Four warps of up to 255 registers leave room for two gathered programs on a multiprocessor. With pages it takes
    eight of 128: addresses need registers too. Where tiles are too few for all multiprocessors, halves are more.
    """
    block_d, single = max(16, triton.next_power_of_2(q.shape[-1])), q.dtype == torch.float32
    wide, groups = block_d > 128, q.shape[1] // kv_heads
    few = kv_heads * sum(triton.cdiv(n * groups, BLOCK_M) for n in query_lens) <= multiprocessors(q.device)
    halvings = single + (not _ample(q) if wide else few and not single)
    block_m = min(max(16, triton.next_power_of_2(max(query_lens) * groups)), max(16, BLOCK_M >> halvings))
    tile = {"BLOCK_M": block_m, "BLOCK_N": max(16, BLOCK_N >> single), "BLOCK_D": block_d, "num_stages": 2}
    if gathered:
        return tile | {"num_warps": 8 if wide else 4, "num_stages": 3 if block_d <= 64 else 2}
    tile["num_warps"] = 8 if block_m * block_d > 8192 else 4
    if block_m * block_d >= 128 * 128 and _ample(q):
        return tile | {"num_stages": 3} | ({} if wide else {"maxnreg": 128})
    return tile


def _blocks(query_lens: Sequence[int], seq_lens: Sequence[int], sliding_window: int | None) -> list[int]:
    """Tiles that each row's keys fill at most."""
    blocks = [triton.cdiv(n, BLOCK_N) for n in seq_lens]
    if sliding_window is None:
        return blocks
    seen = (triton.cdiv(n + sliding_window - 1, BLOCK_N) + 1 for n in query_lens)
    return [min(pair) for pair in zip(blocks, seen, strict=True)]


def _gather(
    k_cache: Tensor,
    v_cache: Tensor,
    where: tuple[Tensor, ...],
    blocks: Sequence[int],
    dtype: torch.dtype,
    block_d: int,
    shape: dict[str, int],
) -> tuple[Any, Any, int]:
    """Copies the keys and values that a batch sees: descriptors of [Hkv * total, BLOCK_D], and total, the rows of one
    head. Behind each other lie the rows of the batch, in whole tiles."""
    kv_heads, total = k_cache.shape[2], BLOCK_N * sum(blocks)
    both = torch.empty(2, kv_heads * total, block_d, dtype=dtype, device=k_cache.device)
    _gather_kernel[(max(blocks), kv_heads, len(blocks))](
        k_cache, v_cache, *where, *both, where[0].stride(0), total,
        BLOCK_N=BLOCK_N, BLOCK_D=block_d, **shape, num_warps=8,
    )  # fmt: skip
    return *(TensorDescriptor.from_tensor(each, [BLOCK_N, block_d]) for each in both), total
