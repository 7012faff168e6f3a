"""Triton kernels of prefill attention that cut tiles, so that all multiprocessors end at about the same time (as
in Stream-K, Osama et al. 2023).

A chunk of some thousand tokens has one to three tiles for each program that a GPU runs at a time. With whole tiles
many multiprocessors have nothing to do in the end, which costs a third of the time after a long context. Here the
blocks of keys of all tiles are numbered, tile by tile, and tiles are cut at multiples of a share: what each program
would walk if all walked equally many. A tile that is cut has a program for each part, and a second launch joins them.

Keys and values were gathered (`prefill_attention_triton.py`). A tile counts as many blocks as its row has, though
its last queries alone see all of them: parts are equal where the context is much longer than the chunk.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.attention.prefill_tiles_triton import (
    LOG2_E,
    KeySources,
    gathered_before,
    query_rows,
    softmax_step,
    span,
)
from hybridrt.kernels.core.launch import dot_precision
from hybridrt.kernels.core.records import AttentionPrompts, PagedKV

BLOCK_M, BLOCK_N, WARPS, STAGES, JOINED_ROWS = 128, 64, 4, 2, 32
PER_MULTIPROCESSOR = 2  # programs at a time
GAIN = 1.1  # least ratio of the times with whole tiles and with cut ones
LEAST_SHARE = 24  # blocks of keys: joining parts takes as long as a few of them
MOST_ROWS = 128  # of a batch
DIMS = (64, 128)  # heads of which so many programs fit


@triton.jit
def _tile_at(  # type: ignore[no-untyped-def]
    tile, starts_ptr, seq_lens_ptr, num_rows, share, HKV: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """A tile's row, head of keys, place within its tiles, blocks that its first share has before it, and its blocks.
    AGAIN: loads them anew, so that nothing is kept in registers."""
    i = tl.arange(0, BLOCK_B)
    starts = tl.load(starts_ptr + i, mask=i < num_rows, other=0, volatile=AGAIN)
    ends = tl.load(starts_ptr + i + 1, mask=i < num_rows, other=0, volatile=AGAIN)
    blocks = tl.cdiv(tl.load(seq_lens_ptr + i, mask=i < num_rows, other=0, volatile=AGAIN), BLOCK_N)
    tiles = HKV * tl.cdiv((ends - starts) * GROUPS, BLOCK_M)
    b = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    tile -= tl.sum(tl.where(i < b, tiles, 0), 0)
    mine = tl.sum(tl.where(i == b, blocks, 0), 0)
    before = tl.sum(tl.where(i < b, tiles * blocks, 0), 0) + tile * mine
    in_head = tl.sum(tl.where(i == b, tiles, 0), 0) // HKV
    return b, tile // in_head, tile % in_head, before % share, mine


@triton.jit(do_not_specialize=["total", "num_rows", "share"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _part_kernel(  # type: ignore[no-untyped-def]
    q_ptr, keys, values, starts_ptr, seq_lens_ptr, sinks_ptr, out_ptr, parts_ptr, maxima_ptr, sums_ptr, q_st, q_sh,
    total, scale_log2, v_scale, num_rows, share,
    HKV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, OUT_ST: tl.constexpr,
):  # fmt: skip
    """Grid [tiles, parts of a tile at most]."""
    tile, part = tl.program_id(0), tl.program_id(1)
    b, kv_head, block_m, phase, blocks = _tile_at(
        tile, starts_ptr, seq_lens_ptr, num_rows, share, HKV, GROUPS, BLOCK_M, BLOCK_N, BLOCK_B, False
    )
    begin, end = tl.maximum(part * share - phase, 0), tl.minimum((part + 1) * share - phase, blocks)
    if begin >= end:
        return
    start, query_len, seq_len, _ = span(starts_ptr, seq_lens_ptr, b, b >= 0, 0, BLOCK_N)
    first, token, head, live = query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
    d = tl.arange(0, D)
    at = (start + first).to(tl.int64) * q_st + (token * q_st + head * q_sh)[:, None] + d[None, :]
    q = tl.load(q_ptr + at, mask=live[:, None], other=0.0)
    shift = kv_head * total + gathered_before(starts_ptr, seq_lens_ptr, b, 0, BLOCK_N)
    nearest = seq_len - query_len + first
    furthest = seq_len - query_len + tl.minimum((block_m * BLOCK_M + BLOCK_M - 1) // GROUPS, query_len - 1)
    position, masked_from = nearest + token, (nearest + 1) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        row_max = tl.where(begin == 0, tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E, row_max)
        row_sum += (begin == 0).to(tl.float32)
    for offset in tl.range(begin * BLOCK_N, tl.minimum(end * BLOCK_N, furthest + 1), BLOCK_N, disable_licm=True):
        k = keys.load([shift + offset, 0]).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if offset >= masked_from:
            visible = (offset + tl.arange(0, BLOCK_N))[None, :] <= position[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        weights, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        v = values.load([shift + offset, 0]).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    # Carried through the loop, these would need registers.
    b, kv_head, block_m, phase, blocks = _tile_at(
        tile, starts_ptr, seq_lens_ptr, num_rows, share, HKV, GROUPS, BLOCK_M, BLOCK_N, BLOCK_B, True
    )
    m = tl.arange(0, BLOCK_M)
    if (part * share <= phase) & ((part + 1) * share - phase >= blocks):
        start = tl.load(starts_ptr + b, volatile=True)
        query_len = tl.load(starts_ptr + b + 1, volatile=True) - start
        first, token, head, live = query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
        acc /= row_sum[:, None]
        if v_scale is not None:
            acc *= v_scale
        at = (start + first).to(tl.int64) * OUT_ST + (token * OUT_ST + head * D)[:, None] + d[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        slot = (tile * tl.num_programs(1) + part).to(tl.int64)
        tl.store(maxima_ptr + slot * BLOCK_M + m, row_max)
        tl.store(sums_ptr + slot * BLOCK_M + m, row_sum)
        tl.store(parts_ptr + slot * BLOCK_M * D + m[:, None] * D + d[None, :], acc)


@triton.jit(do_not_specialize=["num_rows", "share", "parts"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _join_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, seq_lens_ptr, out_ptr, parts_ptr, maxima_ptr, sums_ptr, v_scale, num_rows, share, parts,
    HKV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, OUT_ST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile that was cut. Grid [tiles, BLOCK_M / ROWS]."""
    tile = tl.program_id(0)
    b, kv_head, block_m, phase, blocks = _tile_at(
        tile, starts_ptr, seq_lens_ptr, num_rows, share, HKV, GROUPS, BLOCK_M, BLOCK_N, BLOCK_B, False
    )
    count = tl.cdiv(phase + blocks, share)
    if count == 1:
        return
    m, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    acc = tl.zeros([ROWS, D], tl.float32)
    row_max, row_sum = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    for part in range(count):
        slot = (tile * parts + part).to(tl.int64) * BLOCK_M
        maxima = tl.load(maxima_ptr + slot + m)
        joined = tl.maximum(row_max, maxima)
        old, new = tl.exp2(row_max - joined), tl.exp2(maxima - joined)
        row_max, row_sum = joined, row_sum * old + tl.load(sums_ptr + slot + m) * new
        acc = acc * old[:, None] + tl.load(parts_ptr + slot * D + m[:, None] * D + d[None, :]) * new[:, None]
    start, query_len, _, _ = span(starts_ptr, seq_lens_ptr, b, b >= 0, 0, BLOCK_N)
    row = block_m * BLOCK_M + m
    token, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    acc /= row_sum[:, None]
    if v_scale is not None:
        acc *= v_scale
    at = (start + token).to(tl.int64)[:, None] * OUT_ST + (head * D)[:, None] + d[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(row < query_len * GROUPS)[:, None])


def pays(q: Tensor, kv: PagedKV, batch: AttentionPrompts) -> bool:
    """Whether cut tiles of gathered keys are faster than whole ones, as measured on an H200."""
    query_lens, seq_lens, (kv_heads, dim) = batch.query_lens, batch.seq_lens_host, kv.v_cache.shape[2:]
    if kv.sliding_window is not None or dim not in DIMS or len(query_lens) > MOST_ROWS:
        return False
    tiles, at_once = _tiles(query_lens, q.shape[1], kv_heads), PER_MULTIPROCESSOR * multiprocessors(q.device)
    counted = sum(n * length for n, length in zip(tiles, seq_lens))
    needed = sum(n * (length - query / 2) for n, length, query in zip(tiles, seq_lens, query_lens))
    rounds = -(-sum(tiles) // at_once) * at_once / sum(tiles)
    return rounds * needed >= GAIN * counted and counted >= LEAST_SHARE * BLOCK_N * at_once


def _tiles(query_lens: Sequence[int], heads: int, kv_heads: int) -> list[int]:
    """Of each row."""
    return [kv_heads * -(-n * (heads // kv_heads) // BLOCK_M) for n in query_lens]


def run_balanced(q: Tensor, sources: KeySources, kv: PagedKV, batch: AttentionPrompts, out: Tensor) -> None:
    """Attention of q [T, Hq, D] over gathered keys and values into out [T, Hq, D]. No window; D is a power of two."""
    kv_heads, dim = kv.v_cache.shape[2:]
    tiles, blocks = _tiles(batch.query_lens, q.shape[1], kv_heads), [-(-n // BLOCK_N) for n in batch.seq_lens_host]
    work = sum(n * each for n, each in zip(tiles, blocks))
    share = -(-work // (PER_MULTIPROCESSOR * multiprocessors(q.device)))
    parts = (max(blocks) - 2) // share + 2  # of a tile, which may begin at the end of a share
    found = q.new_empty(sum(tiles) * parts, BLOCK_M, dim, dtype=torch.float32)
    maxima, sums = q.new_empty(2, sum(tiles) * parts, BLOCK_M, dtype=torch.float32)
    rows, v_scale = len(batch.query_lens), kv.v_scale if kv.coded else None
    shape = {
        "HKV": kv_heads, "GROUPS": q.shape[1] // kv_heads, "D": dim, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
        "BLOCK_B": max(2, triton.next_power_of_2(rows)), "OUT_ST": out.stride(0),
    }  # fmt: skip
    _part_kernel[(sum(tiles), parts)](
        q, sources.keys, sources.values, batch.query_start_loc, batch.seq_lens, kv.sinks, out, found, maxima, sums,
        q.stride(0), q.stride(1), sources.total, kv.score_scale * LOG2_E.value, v_scale, rows, share,
        PRECISION=dot_precision(q.dtype), num_warps=WARPS, num_stages=STAGES, **shape,
    )  # fmt: skip
    at_once = min(JOINED_ROWS, BLOCK_M)
    _join_kernel[(sum(tiles), BLOCK_M // at_once)](
        batch.query_start_loc, batch.seq_lens, out, found, maxima, sums, v_scale, rows, share, parts, ROWS=at_once,
        num_warps=4, **shape,
    )  # fmt: skip
