"""Triton kernels of the routed experts.

Few token-expert pairs are bound by bandwidth: each gathers its own weight rows. Many are laid out
in blocks of one expert, and blocks are matrix products.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import shared_memory
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_precision, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, begin_in_turn, pdl
from hybridrt.kernels.dense.moe import ExpertStack

# Up to here comparing all pairs costs less than a sort.
COMPARED_PAIRS = 12288
WIDE_SHARED = 221 << 10  # bytes of shared memory of gates and what they gate in tiles of 256 columns


@triton.jit
def activate_experts(hidden, up, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):  # type: ignore[no-untyped-def]
    if ALPHA is not None:
        hidden, up = tl.minimum(hidden, LIMIT), tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
        hidden = hidden * tl.sigmoid(hidden * ALPHA) * (up + 1.0)
    elif GATED:
        hidden = hidden * tl.sigmoid(hidden)
        if LIMIT is not None:
            hidden, up = tl.minimum(hidden, LIMIT), tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
        hidden = hidden * up
    else:
        hidden = tl.maximum(hidden, 0.0)
        hidden = hidden * hidden
    return hidden


@jit_kernel
def _gathered_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, ids_ptr, hidden_ptr, x_sr, w_se, w_sr, TOP_K: tl.constexpr, D: tl.constexpr,
    INNER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [inner blocks, pairs]. A thread loads 16 bytes of each row."""
    begin_in_turn(PDL)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    i, d = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * x_sr + d
    # Past the last row it repeats: cheaper than a mask, and never written.
    w_rows = w_ptr + expert * w_se + tl.minimum(i, INNER - 1)[:, None] * w_sr + d[None, :]
    tile = tl.load(w_rows, mask=(d < D)[None, :], other=0.0)
    up_tile = tile
    if GATED:
        up_tile = tl.load(w_rows + INNER * w_sr, mask=(d < D)[None, :], other=0.0)
    hidden, up = tl.zeros([BLOCK_I, BLOCK_D // 8], tl.float32), tl.zeros([BLOCK_I, BLOCK_D // 8], tl.float32)
    for start in range(0, D, BLOCK_D):
        x = tl.load(x_row + start, mask=start + d < D, other=0.0).to(tl.float32)[None, :]
        hidden += _sum_by_8(tile.to(tl.float32) * x)
        if GATED:
            up += _sum_by_8(up_tile.to(tl.float32) * x)
        if BLOCK_D < D:
            # Last, to reuse the registers of this piece.
            following = start + BLOCK_D
            mask = (following + d < D)[None, :]
            tile = tl.load(w_rows + following, mask=mask, other=0.0)
            if GATED:
                up_tile = tl.load(w_rows + following + INNER * w_sr, mask=mask, other=0.0)
    total, total_up = tl.sum(hidden, 1), tl.sum(up, 1)
    if bias_ptr is not None:
        bias = bias_ptr + expert * (INNER * (2 if GATED else 1)) + i
        total += tl.load(bias, mask=i < INNER, other=0.0).to(tl.float32)
        if GATED:
            total_up += tl.load(bias + INNER, mask=i < INNER, other=0.0).to(tl.float32)
    out = activate_experts(total, total_up, GATED, LIMIT, ALPHA)
    tl.store(hidden_ptr + pair.to(tl.int64) * INNER + i, out.to(hidden_ptr.dtype.element_ty), mask=i < INNER)


@triton.jit
def _sum_by_8(x):  # type: ignore[no-untyped-def]
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 2)


@jit_kernel
def _gathered_down_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, w_ptr, bias_ptr, weights_ptr, ids_ptr, out_ptr, w_se, w_sr, TOP_K: tl.constexpr, D: tl.constexpr,
    INNER: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [tokens, output blocks]. A tile has a row for each expert and output."""
    PARTS: tl.constexpr = (INNER + BLOCK_I - 1) // BLOCK_I
    STEPS: tl.constexpr = (TOP_K + BLOCK_P - 1) // BLOCK_P * PARTS
    t = tl.program_id(0).to(tl.int64)
    r, i = tl.arange(0, BLOCK_P * BLOCK_D), tl.arange(0, BLOCK_I)
    p = r // BLOCK_D
    w_rows = w_ptr + tl.minimum(tl.program_id(1) * BLOCK_D + r % BLOCK_D, D - 1) * w_sr
    ids_row, weights_row = ids_ptr + t * TOP_K, weights_ptr + t * TOP_K
    # The experts were chosen before the previous kernel began: reading them early is safe.
    tile = _down_tile(w_rows, ids_row, w_se, p, i, TOP_K, INNER)
    begin(PDL)
    total = tl.zeros([BLOCK_P * BLOCK_D, BLOCK_I // 8], tl.float32)
    for step in range(STEPS):
        k, column = step // PARTS * BLOCK_P + p, step % PARTS * BLOCK_I + i
        weight = tl.load(weights_row + k, mask=k < TOP_K, other=0.0)
        live = (k < TOP_K) & (tl.load(ids_row + k, mask=k < TOP_K, other=-1) >= 0)
        hidden_rows = hidden_ptr + (t * TOP_K + k) * INNER
        mask = live[:, None] & (column < INNER)[None, :]
        hidden = tl.load(hidden_rows[:, None] + column[None, :], mask=mask, other=0.0)
        total += _sum_by_8(tile.to(tl.float32) * hidden.to(tl.float32)) * weight[:, None]
        if STEPS > 1:
            # Last, to reuse the registers of this tile.
            k, column = (step + 1) // PARTS * BLOCK_P + p, (step + 1) % PARTS * BLOCK_I + i
            tile = _down_tile(w_rows, ids_row, w_se, k, column, TOP_K, INNER)
    out = tl.sum(tl.reshape(tl.sum(total, 1), [BLOCK_P, BLOCK_D]), 0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if bias_ptr is not None:
        for k in tl.static_range(TOP_K):
            expert = tl.load(ids_row + k).to(tl.int64)
            bias = tl.load(bias_ptr + tl.maximum(expert, 0) * D + d, mask=d < D, other=0.0).to(tl.float32)
            out += tl.where(expert >= 0, bias * tl.load(weights_row + k), 0.0)
    tl.store(out_ptr + t * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _down_tile(w_rows, ids_row, w_se, k, column, TOP_K: tl.constexpr, INNER: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, columns] of the weights of experts k, zeros where there is none."""
    expert = tl.load(ids_row + k, mask=k < TOP_K, other=-1).to(tl.int64)
    mask = (expert >= 0)[:, None] & (column < INNER)[None, :]
    return tl.load((w_rows + expert * w_se)[:, None] + column[None, :], mask=mask, other=0.0)


@jit_kernel(do_not_specialize=["num_pairs"])
def _grouped_kernel(  # type: ignore[no-untyped-def]
    a_ptr, w_ptr, bias_ptr, pairs_ptr, block_expert_ptr, out_ptr, a_sr, w_se, w_sr, num_pairs, num_experts,
    PAIRS_PER_ROW: tl.constexpr, INNER: tl.constexpr, OUT: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = act(a[pair // PAIRS_PER_ROW] w[expert]^T + bias[expert]) for a block of one expert's pairs and
    BLOCK_N columns."""
    begin(PDL)
    block = tl.program_id(1)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert >= num_experts:
        return
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = pair < num_pairs
    n, k0 = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_rows = a_ptr + (pair // PAIRS_PER_ROW * a_sr)[:, None]
    w_rows = w_ptr + expert * w_se + n[None, :] * w_sr
    total, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k = start + k0
        a = tl.load(a_rows + k[None, :], mask=live[:, None] & (k < INNER)[None, :], other=0.0)
        mask = (k < INNER)[:, None] & (n < OUT)[None, :]
        total = tl.dot(a, tl.load(w_rows + k[:, None], mask=mask, other=0.0), total, input_precision=PRECISION)
        if GATED:
            w = tl.load(w_rows + OUT * w_sr + k[:, None], mask=mask, other=0.0)
            up = tl.dot(a, w, up, input_precision=PRECISION)
    if bias_ptr is not None:
        bias = bias_ptr + expert * (OUT * (2 if GATED else 1)) + n
        total += tl.load(bias, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + OUT, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    if ACTIVATE:
        total = activate_experts(total, up, GATED, LIMIT, ALPHA)
    mask = live[:, None] & (n < OUT)[None, :]
    tl.store(out_ptr + pair[:, None] * OUT + n[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


@jit_kernel
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr, weights_ptr, ids_ptr, out_ptr, TOP_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A thread adds the experts in order: no shared memory, all loads in flight at once."""
    begin(PDL)
    COLUMNS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    t = (tl.program_id(0) // COLUMNS).to(tl.int64)
    d = tl.program_id(0) % COLUMNS * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for p in tl.static_range(TOP_K):
        pair = t * TOP_K + p
        y = tl.load(y_ptr + pair * D + d, mask=d < D, other=0.0).to(tl.float32)
        # What no expert has written may be NaN.
        total += tl.where(tl.load(ids_ptr + pair) >= 0, y * tl.load(weights_ptr + pair), 0.0)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@jit_kernel(do_not_specialize=["pairs"])
def _rank_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, ranks_ptr, pairs, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, PDL: tl.constexpr
):
    """ranks[p]: how many pairs before p have the same expert."""
    begin(PDL)
    first = tl.program_id(0) * BLOCK_P
    p = first + tl.arange(0, BLOCK_P)
    expert = tl.load(ids_ptr + p, mask=p < pairs, other=-1)
    before = tl.zeros([BLOCK_P, BLOCK_Q], tl.int32)
    for start in range(0, first + BLOCK_P, BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        other = tl.load(ids_ptr + q, mask=q < pairs, other=-1)
        before += ((other[None, :] == expert[:, None]) & (q[None, :] < p[:, None])).to(tl.int32)
    tl.store(ranks_ptr + p, tl.sum(before, 1), mask=p < pairs)


@jit_kernel(do_not_specialize=["pairs", "blocks", "experts"])
def _place_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, ranks_ptr, layout_ptr, block_expert_ptr, pairs, blocks, experts,
    SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pair with a rank that is a multiple of SIZE opens a block."""
    begin(PDL)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    expert = tl.load(ids_ptr + p, mask=p < pairs, other=-1)
    rank = tl.load(ranks_ptr + p, mask=p < pairs, other=0)
    blocks_before, alike = tl.zeros([BLOCK_P, BLOCK_Q], tl.int32), tl.zeros([BLOCK_P, BLOCK_Q], tl.int32)
    all_blocks = tl.zeros([BLOCK_Q], tl.int32)
    for start in range(0, pairs, BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        other = tl.load(ids_ptr + q, mask=q < pairs, other=-1)
        opens = ((other >= 0) & (tl.load(ranks_ptr + q, mask=q < pairs, other=0) % SIZE == 0)).to(tl.int32)
        blocks_before += tl.where(other[None, :] < expert[:, None], opens[None, :], 0)
        alike += (other[None, :] == expert[:, None]).to(tl.int32)
        all_blocks += opens
    block, count, opened = tl.sum(blocks_before, 1) + rank // SIZE, tl.sum(alike, 1), tl.sum(all_blocks, 0)
    place = block * SIZE + rank % SIZE
    tl.store(layout_ptr + place, p, mask=expert >= 0)
    tl.store(block_expert_ptr + block, expert, mask=(expert >= 0) & (rank % SIZE == 0))
    # The rest of an expert's last block is empty. Blocks of no expert follow.
    gap = 1 + tl.arange(0, SIZE)
    empty = ((expert >= 0) & (rank == count - 1))[:, None] & ((rank % SIZE)[:, None] + gap[None, :] < SIZE)
    tl.store(layout_ptr + place[:, None] + gap[None, :], tl.full([BLOCK_P, SIZE], 0, tl.int32) + pairs, mask=empty)
    tl.store(block_expert_ptr + p, tl.zeros([BLOCK_P], tl.int32) + experts, mask=(p >= opened) & (p < blocks))


def fused_experts_triton(x: Tensor, experts: ExpertStack, weights: Tensor, ids: Tensor) -> Tensor:
    """Gathered products if most pairs have an expert of their own, else grouped ones."""
    out = x.new_empty(x.shape)
    hidden = x.new_empty(ids.numel(), experts.w_down.shape[2])
    run = _gathered if ids.numel() <= experts.w_up.shape[0] // 2 else _grouped
    run(x, experts, weights, ids, hidden, out)
    return out


def _gathered(x: Tensor, experts: ExpertStack, weights: Tensor, ids: Tensor, hidden: Tensor, out: Tensor) -> None:
    w_up, w_down = experts.w_up, experts.w_down
    gated = experts.activation == "silu"
    (tokens, width), (pairs, inner), top_k = x.shape, hidden.shape, ids.shape[1]
    up, down = gathered_tiles(width, inner, top_k, gated)
    _gathered_up_kernel[(cdiv(inner, up["BLOCK_I"]), pairs)](
        x, w_up, experts.b_up, ids, hidden, x.stride(0), w_up.stride(0), w_up.stride(1),
        TOP_K=top_k, D=width, INNER=inner, GATED=gated, LIMIT=experts.limit, ALPHA=experts.alpha, **up,
        **pdl(x.device),
    )  # fmt: skip
    _gathered_down_kernel[(tokens, cdiv(width, down["BLOCK_D"]))](
        hidden, w_down, experts.b_down, weights, ids, out, w_down.stride(0), w_down.stride(1), TOP_K=top_k, D=width,
        INNER=inner, **down, **pdl(x.device),
    )  # fmt: skip


def gathered_tiles(width: int, inner: int, top_k: int, gated: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles of the gathered products, up and down, as measured on an H200 for one token."""
    columns = next(size for size in (2048, 1024, 256) if width % size == 0 or size == 256)
    rows = 8 if columns == 256 else 2
    up = {"BLOCK_I": rows if gated else 2 * rows, "BLOCK_D": max(8, min(columns, next_power_of_2(width)))}
    up["num_warps"] = 8 if columns == 2048 else 4
    picks, columns = (2, 1024) if inner > 512 else (4, 512)
    down = {"BLOCK_P": min(picks, next_power_of_2(top_k)), "BLOCK_D": 2, "num_warps": 4}
    return up, down | {"BLOCK_I": max(8, min(columns, next_power_of_2(inner)))}


@dataclass(frozen=True)
class Blocks:
    """n blocks of one expert's pairs: `pairs` [n * size], the number of pairs for none; `experts`
    [n], E for none.
    """

    pairs: Tensor
    experts: Tensor
    size: int


def lay_out(ids: Tensor, experts: int, smallest: int = 16) -> Blocks:
    """Orders pairs by expert, then by number. Shapes depend on argument shapes alone. smallest: pairs of a block where
    nearly all experts have fewer; 8 or 16."""
    pairs = ids.numel()
    size = smallest if pairs <= 8 * experts else 16 if few_each(pairs, experts) else 64
    blocks = min(pairs, pairs // size + experts)
    if pairs > COMPARED_PAIRS:
        return _sorted_blocks(ids.flatten(), experts, size, blocks)
    ranks, layout, block_expert = (
        torch.empty(n, dtype=torch.int32, device=ids.device) for n in (pairs, blocks * size, blocks)
    )
    grid, tile = (cdiv(pairs, 8),), {"BLOCK_P": 8, "BLOCK_Q": 256, "num_warps": 4}
    _rank_kernel[grid](ids, ranks, pairs, **tile, **pdl(ids.device))
    _place_kernel[grid](ids, ranks, layout, block_expert, pairs, blocks, experts, SIZE=size, **tile, **pdl(ids.device))
    return Blocks(layout, block_expert, size)


def few_each(pairs: int, experts: int) -> bool:
    """Whether blocks are small."""
    return pairs <= 16 * experts


def _sorted_blocks(ids: Tensor, experts: int, size: int, blocks: int) -> Blocks:
    flat = torch.where(ids < 0, experts, ids).long()
    pairs = flat.shape[0]
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + size - 1) // size * size
    # A radix sort has a pass for each byte.
    order = (flat.short() if experts < 1 << 15 else flat).argsort(stable=True)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(pairs, device=ids.device) + shift[flat[order]]
    # Pairs without an expert share a spare place.
    layout = torch.full((blocks * size + 1,), pairs, dtype=torch.int64, device=ids.device)
    layout[place.clamp(max=blocks * size)] = order
    ends = padded[:experts].cumsum(0)
    first = torch.arange(blocks, device=ids.device) * size
    return Blocks(layout, torch.searchsorted(ends, first, right=True), size)


def _grouped(x: Tensor, experts: ExpertStack, weights: Tensor, ids: Tensor, hidden: Tensor, out: Tensor) -> None:
    blocks, width, top_k = lay_out(ids, experts.w_up.shape[0]), x.shape[1], ids.shape[1]
    y = x.new_empty(ids.numel(), width)
    act = {"ACTIVATE": True, "GATED": experts.activation == "silu", "LIMIT": experts.limit, "ALPHA": experts.alpha}
    none = {"ACTIVATE": False, "GATED": False, "LIMIT": None, "ALPHA": None}
    _launch_grouped(x, experts.w_up, experts.b_up, blocks, hidden, ids, PAIRS_PER_ROW=top_k, **act)
    _launch_grouped(hidden, experts.w_down, experts.b_down, blocks, y, ids, PAIRS_PER_ROW=1, **none)
    weighted_sum(y, weights, ids, out)


def weighted_sum(y: Tensor, weights: Tensor, ids: Tensor, out: Tensor) -> None:
    """sum_j weights[t, j] * y[t * k + j] over the pairs with an expert, into out [T, D]. y [T * k, D]."""
    (tokens, width), top_k = out.shape, ids.shape[1]
    block_d = min(512, next_power_of_2(width))
    _weighted_sum_kernel[(tokens * cdiv(width, block_d),)](
        y, weights, ids, out, TOP_K=top_k, D=width, BLOCK_D=block_d, num_warps=2, **pdl(out.device)
    )


def _launch_grouped(
    a: Tensor, w: Tensor, bias: Tensor | None, blocks: Blocks, out: Tensor, ids: Tensor, **meta: Any
) -> None:
    block_n, block_k = (64, 128) if blocks.size == 16 else (128, 64)
    block_k = block_k * 2 // a.dtype.itemsize  # so many bytes fit 99 KiB of shared memory
    wide = meta["GATED"] and a.dtype.itemsize == 2 and shared_memory(a.device) >= WIDE_SHARED
    if blocks.size > 16 and wide and out.shape[1] % 256 == 0:
        block_n = 256
    _grouped_kernel[(cdiv(out.shape[1], block_n), blocks.experts.shape[0])](
        a, w, bias, blocks.pairs, blocks.experts, out, a.stride(0), w.stride(0), w.stride(1), ids.numel(), w.shape[0],
        INNER=a.shape[1], OUT=out.shape[1], PRECISION=dot_precision(a.dtype),
        BLOCK_M=blocks.size, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4 if blocks.size == 16 else 8, num_stages=3,
        **meta, **pdl(a.device),
    )  # fmt: skip
