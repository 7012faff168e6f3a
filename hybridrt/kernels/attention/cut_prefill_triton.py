"""Triton kernels of prompt attention for chunks of so few tiles that many multiprocessors would have nothing to do.

A GPU runs PER_MULTIPROCESSOR tiles on each multiprocessor at a time, and a chunk of some hundred to some thousand
tokens has one to three times as many tiles. They run in rounds, and a last round of few tiles takes as long as a full
one. So the tiles of full rounds are left whole; the context of each further one is cut into parts, one for each
program, which a second launch joins (flash decoding, Dao et al. 2023). What may be cut depends on the chunk alone, so
graphs replay it; the device leaves tiles of short contexts whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.attention.graph_copies import BLOCK_N, MOST_ROWS
from hybridrt.kernels.attention.kv_codes_triton import for_products
from hybridrt.kernels.attention.prefill_tiles_triton import (
    KeySources,
    copied_before,
    load_tile,
    query_rows,
    softmax_step,
    span,
)
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_precision
from hybridrt.kernels.core.records import AttentionPrompts, PagedKV
from hybridrt.kernels.core.tiles_triton import LOG2_E

# Measured on an H200 with heads of graph_copies.DIM: the tile, and how many programs of it share a multiprocessor.
BLOCK_M, WARPS, STAGES, PER_MULTIPROCESSOR = 64, 4, 3, 2
MOST_PARTS = 16  # of a tile
# A round of parts and their join take 20 us in addition to the keys. PART_COST: as a fraction of a round of whole tiles
# of 14,000 keys. PART_BLOCKS: as blocks of keys of a part.
PART_COST, PART_BLOCKS = 0.085, 24
LEAST_BLOCKS = 4  # of a part
JOINED = 4  # rows of a tile that a program joins


class Cut(NamedTuple):
    """How the tiles of a chunk are cut.

    Attributes:
        whole: tiles that stay whole; rest: further ones.
        parts: of each of these.
        least: blocks of keys that such a tile has at least, or it stays whole.
    """

    whole: int
    rest: int
    parts: int
    least: int

    @classmethod
    def of(cls, tiles: int, spare: int, at_once: int) -> "Cut":
        """Cuts `tiles` tiles for a GPU that runs `at_once` at a time. `spare`: further ones that a graph may have."""
        whole = tiles // at_once * at_once
        left = tiles - whole

        def rounds(parts: int) -> int:
            return cdiv(left * parts, at_once)

        def cost(parts: int) -> float:
            return rounds(parts) / parts + PART_COST * rounds(parts) * (parts > 1)

        parts = min(range(1, MOST_PARTS + 1), key=cost) if left else 1
        if parts == 1:
            return cls(tiles, spare, 1, 0)
        # A tile saves blocks * (1 - rounds / parts), and a round costs PART_BLOCKS: with `least` both are equal.
        gained = parts - rounds(parts)
        return cls(
            whole, left + spare, parts,
            max(cdiv(PART_BLOCKS * rounds(parts) * parts, gained), LEAST_BLOCKS * parts),
        )  # fmt: skip


@triton.jit
def _tile_at(  # type: ignore[no-untyped-def]
    tile, starts_ptr, seq_lens_ptr, num_rows, HKV: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A tile's row (at least num_rows: there is no such tile), head of keys, and place within these. The last tiles of
    a row come first: they have the longest context."""
    i = tl.arange(0, BLOCK_B)
    _, query_len, _, _ = span(starts_ptr, seq_lens_ptr, i, i < num_rows, 0, BLOCK_N)
    tiles = HKV * tl.cdiv(query_len * GROUPS, BLOCK_M)
    b = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    tile -= tl.sum(tl.where(i < b, tiles, 0), 0)
    last = tl.sum(tl.where(i == b, tiles, 0), 0) // HKV - 1
    return b, tile % HKV, last - tile // HKV


@triton.jit
def _all_whole(seq_lens_ptr, num_rows, least, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether all contexts are so short that no tile is cut: then programs of further parts end soon."""
    i = tl.arange(0, BLOCK_B)
    return tl.max(tl.load(seq_lens_ptr + i, mask=i < num_rows, other=0), 0) <= (least - 1) * BLOCK_N


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    starts_ptr, seq_lens_ptr, b, block_m, parts, least, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The last position that a tile sees, its blocks of keys, and those of each of its parts."""
    _, query_len, seq_len, _ = span(starts_ptr, seq_lens_ptr, b, b >= 0, 0, BLOCK_N)
    furthest = seq_len - query_len + tl.minimum((block_m * BLOCK_M + BLOCK_M - 1) // GROUPS, query_len - 1)
    blocks = furthest // BLOCK_N + 1
    return furthest, blocks, tl.cdiv(blocks, tl.where(blocks >= least, parts, 1))


@jit_kernel(
    do_not_specialize=["num_rows", "whole", "rest", "parts", "least"],
    do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr"],
)
def _part_kernel(  # type: ignore[no-untyped-def]
    q_ptr, keys, values, table_ptr, rows_ptr, starts_ptr, seq_lens_ptr, sinks_ptr, out_ptr, parts_ptr, maxima_ptr,
    sums_ptr, q_st, q_sh, table_sr, total, scale_log2, v_scale, num_rows, whole, rest, parts, least,
    HKV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, OUT_ST: tl.constexpr,
):  # fmt: skip
    """Grid [whole + rest * parts]: first the same part of all tiles, so that programs that run together read the same
    keys."""
    program = tl.program_id(0)
    further = program - whole
    if (further >= rest) & _all_whole(seq_lens_ptr, num_rows, least, BLOCK_N, BLOCK_B):
        return
    tile = tl.where(further < 0, program, whole + further % rest)
    part = tl.where(further < 0, 0, further // rest)
    b, kv_head, block_m = _tile_at(tile, starts_ptr, seq_lens_ptr, num_rows, HKV, GROUPS, BLOCK_M, BLOCK_N, BLOCK_B)
    if b >= num_rows:
        return
    furthest, blocks, each = _cut(
        starts_ptr, seq_lens_ptr, b, block_m, tl.where(further < 0, 1, parts), least, GROUPS, BLOCK_M, BLOCK_N
    )
    begin, end = part * each, tl.minimum(part * each + each, blocks)
    if begin >= end:
        return
    start, query_len, seq_len, _ = span(starts_ptr, seq_lens_ptr, b, b >= 0, 0, BLOCK_N)
    first, token, head, live = query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
    d = tl.arange(0, D)
    at = (start + first).to(tl.int64) * q_st + (token * q_st + head * q_sh)[:, None] + d[None, :]
    q = tl.load(q_ptr + at, mask=live[:, None], other=0.0)
    table, shift = table_ptr, 0
    if PAGED:
        q = for_products(q, keys.dtype.element_ty)
        table += tl.load(rows_ptr + b).to(tl.int64) * table_sr
    else:
        shift = kv_head * total + copied_before(starts_ptr, seq_lens_ptr, b, 0, BLOCK_N)
    nearest = seq_len - query_len + first
    position, masked_from = nearest + token, (nearest + 1) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    # Finite: a query that has seen nothing gets weights of 0, not NaN.
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E
        row_max = tl.where(part == 0, tl.maximum(sink, row_max), row_max)
        row_sum += (part == 0).to(tl.float32)
    # disable_licm: hoisted loop invariants would cost registers.
    for offset in tl.range(begin * BLOCK_N, tl.minimum(end * BLOCK_N, furthest + 1), BLOCK_N, disable_licm=True):
        pos = offset + tl.arange(0, BLOCK_N)
        slot = 0
        if PAGED:
            # Keys that no query sees are multiplied by zero, and 0 * NaN is NaN: own ones replace them.
            slot = tl.load(table + tl.minimum(pos, furthest))
        k = load_tile(keys, slot, shift + offset, kv_head, HKV, D, D, D, PAGED).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if offset >= masked_from:  # a separate loop would serialize both loops' matrix instructions
            scores = tl.where(pos[None, :] <= position[:, None], scores, float("-inf"))
        weights, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        v = load_tile(values, slot, shift + offset, kv_head, HKV, D, D, D, PAGED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    # From volatile loads: carried through the loop, addresses would need registers.
    again = tl.load(starts_ptr + b, volatile=True)
    query_len = tl.load(starts_ptr + b + 1, volatile=True) - again
    block_m += tl.load(starts_ptr + b, volatile=True) - again
    if each == blocks:
        first, token, head, live = query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
        acc /= row_sum[:, None]
        if v_scale is not None:
            acc *= v_scale
        at = (again + first).to(tl.int64) * OUT_ST + (token * OUT_ST + head * D)[:, None] + d[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        m = tl.arange(0, BLOCK_M)
        place = further.to(tl.int64) * BLOCK_M
        tl.store(maxima_ptr + place + m, row_max)
        tl.store(sums_ptr + place + m, row_sum)
        tl.store(parts_ptr + place * D + m[:, None] * D + d[None, :], acc)


@jit_kernel(
    do_not_specialize=["num_rows", "whole", "rest", "parts", "least"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def _join_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, seq_lens_ptr, out_ptr, parts_ptr, maxima_ptr, sums_ptr, v_scale, num_rows, whole, rest, parts, least,
    HKV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, OUT_ST: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile that was cut. Grid [rest, BLOCK_M / ROWS]."""
    further = tl.program_id(0)
    if _all_whole(seq_lens_ptr, num_rows, least, BLOCK_N, BLOCK_B):
        return
    b, kv_head, block_m = _tile_at(
        whole + further, starts_ptr, seq_lens_ptr, num_rows, HKV, GROUPS, BLOCK_M, BLOCK_N, BLOCK_B
    )
    if b >= num_rows:
        return
    _, blocks, each = _cut(starts_ptr, seq_lens_ptr, b, block_m, parts, least, GROUPS, BLOCK_M, BLOCK_N)
    if each == blocks:
        return
    m, p, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_P), tl.arange(0, D)
    at = (further + p * rest).to(tl.int64)[:, None] * BLOCK_M + m[None, :]
    there = (p < tl.cdiv(blocks, each))[:, None]
    maxima = tl.load(maxima_ptr + at, mask=there, other=-1e30)
    sums = tl.load(sums_ptr + at, mask=there, other=0.0)
    found = tl.load(parts_ptr + at[:, :, None] * D + d[None, None, :], mask=there[:, :, None], other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, 0)[None, :])
    acc = tl.sum(found * weights[:, :, None], 0) / tl.sum(sums * weights, 0)[:, None]
    if v_scale is not None:
        acc *= v_scale
    start, query_len, _, _ = span(starts_ptr, seq_lens_ptr, b, b >= 0, 0, BLOCK_N)
    row = block_m * BLOCK_M + m
    token, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    at = (start + token).to(tl.int64)[:, None] * OUT_ST + (head * D)[:, None] + d[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(row < query_len * GROUPS)[:, None])


def tiles_of(query_lens: Sequence[int], heads: int, kv_heads: int, rows: int) -> int:
    """Tiles of `rows` query rows for each head of keys."""
    return kv_heads * sum(cdiv(n * (heads // kv_heads), rows) for n in query_lens)


def cut_of(q: Tensor, kv_heads: int, batch: AttentionPrompts) -> Cut:
    """How tiles are cut. In a graph rows may share the tokens in any way: each has a tile that is not full."""
    spare = 0 if batch.seq_lens_host else kv_heads * (len(batch.query_lens) - 1)
    tiles = tiles_of(batch.query_lens, q.shape[1], kv_heads, BLOCK_M)
    return Cut.of(tiles, spare, PER_MULTIPROCESSOR * multiprocessors(q.device))


def run_cut(q: Tensor, sources: KeySources, kv: PagedKV, batch: AttentionPrompts, cut: Cut, out: Tensor) -> None:
    """Attention of q [T, Hq, D] over caches or copied keys and values into out [T, Hq, D], D a power of two. At most
    MOST_ROWS rows, no window. `cut`: result of `cut_of`."""
    kv_heads, dim = kv.v_cache.shape[2:]
    rows = len(batch.query_lens)
    lens, v_scale = (batch.query_start_loc, batch.seq_lens), kv.v_scale if kv.coded else None
    shape = {
        "HKV": kv_heads, "GROUPS": q.shape[1] // kv_heads, "D": dim, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N,
        "BLOCK_B": MOST_ROWS, "OUT_ST": out.stride(0),
    }  # fmt: skip
    places = cut.rest * cut.parts if cut.parts > 1 else 0
    parts = q.new_empty(places, BLOCK_M, dim, dtype=torch.float32)
    maxima, sums = q.new_empty(2, places, BLOCK_M, dtype=torch.float32)
    _part_kernel[(cut.whole + cut.rest * cut.parts,)](
        q, sources.keys, sources.values, kv.req_to_token, batch.rows, *lens, kv.sinks, out, parts, maxima, sums,
        q.stride(0), q.stride(1), kv.req_to_token.stride(0), sources.total, kv.score_scale * LOG2_E.value, v_scale,
        rows, cut.whole, max(cut.rest, 1),  # the kernel divides by it
        cut.parts, cut.least, PAGED=not sources.total,
        PRECISION=dot_precision(q.dtype), num_warps=WARPS, num_stages=STAGES, **shape,
    )  # fmt: skip
    if cut.parts > 1:
        _join_kernel[(cut.rest, BLOCK_M // JOINED)](
            *lens, out, parts, maxima, sums, v_scale, rows, *cut, ROWS=JOINED, BLOCK_P=MOST_PARTS, num_warps=4, **shape
        )  # fmt: skip
