"""Triton kernels of the mixture of experts.

Few token-expert pairs: bandwidth decides, and each pair gathers its own rows of the weights. Many: pairs are laid out
in blocks of one expert each, and blocks are matrix products.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.launch import dot_precision


@triton.jit
def _take_best(scores, ids):  # type: ignore[no-untyped-def]
    """The highest score, the lowest id that has it, and the scores without that one."""
    best = tl.max(scores, 0)
    chosen = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), 0)
    return best, chosen, tl.where(ids == chosen, float("-inf"), scores)


@triton.jit
def _router_softmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, weights_ptr, ids_ptr, logits_sr, E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + t * logits_sr + e, mask=e < E, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, 0))
    scores = tl.where(e < E, scores / tl.sum(scores, 0), float("-inf"))
    weights, chosen_ids = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        best, chosen, scores = _take_best(scores, e)
        weights, chosen_ids = tl.where(j == k, best, weights), tl.where(j == k, chosen, chosen_ids)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0)
    tl.store(weights_ptr + t * TOP_K + j, weights, mask=j < TOP_K)
    tl.store(ids_ptr + t * TOP_K + j, chosen_ids, mask=j < TOP_K)


@triton.jit
def _router_sigmoid_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, logits_sr, scaling,
    E: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = E // GROUPS
    g, e, j = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    scores = tl.sigmoid(tl.load(logits_ptr + t * logits_sr + e, mask=e < E, other=0.0).to(tl.float32))
    biased = tl.where(e < E, scores + tl.load(bias_ptr + e, mask=e < E, other=0.0), float("-inf"))
    # A group's strength is the sum of its two best; [BLOCK_G, BLOCK_E], -inf outside the group.
    own = tl.where((e // size)[None, :] == g[:, None], biased[None, :], float("-inf"))
    first = tl.max(own, 1)
    first_id = tl.min(tl.where(own == first[:, None], e[None, :], 0x7FFFFFFF), 1)
    second = tl.max(tl.where(e[None, :] == first_id[:, None], float("-inf"), own), 1)
    strength = tl.where(g < GROUPS, first + second, float("-inf"))
    open_groups = tl.zeros([BLOCK_G], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        _, group, strength = _take_best(strength, g)
        open_groups = tl.where(g == group, 1, open_groups)
    open_experts = tl.sum(tl.where((e // size)[None, :] == g[:, None], open_groups[:, None], 0), 0)
    biased = tl.where(open_experts > 0, biased, float("-inf"))
    weights, chosen_ids = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        _, chosen, biased = _take_best(biased, e)
        weights = tl.where(j == k, tl.sum(tl.where(e == chosen, scores, 0.0), 0), weights)
        chosen_ids = tl.where(j == k, chosen, chosen_ids)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0) + 1e-20
    tl.store(weights_ptr + t * TOP_K + j, weights * scaling, mask=j < TOP_K)
    tl.store(ids_ptr + t * TOP_K + j, chosen_ids, mask=j < TOP_K)


@triton.jit
def _activate(hidden, up, RELU2: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    if RELU2:
        hidden = tl.maximum(hidden, 0.0)
        hidden = hidden * hidden
    else:
        hidden = hidden * tl.sigmoid(hidden)
    if GATED:
        hidden = hidden * up
    return hidden


@triton.jit
def _gathered_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, ids_ptr, hidden_ptr, x_sr, w_se, w_sr, TOP_K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr,
    RELU2: tl.constexpr, GATED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    i, d0 = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    x_row, w_rows = x_ptr + (pair // TOP_K).to(tl.int64) * x_sr, w_ptr + expert * w_se + i[:, None] * w_sr
    hidden, up = tl.zeros([BLOCK_I, BLOCK_D], tl.float32), tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + d0
        x = tl.load(x_row + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        mask = (i < INNER)[:, None] & (d < D)[None, :]
        hidden += tl.load(w_rows + d[None, :], mask=mask, other=0.0).to(tl.float32) * x
        if GATED:
            up += tl.load(w_rows + INNER * w_sr + d[None, :], mask=mask, other=0.0).to(tl.float32) * x
    out = _activate(tl.sum(hidden, 1), tl.sum(up, 1), RELU2, GATED)
    tl.store(hidden_ptr + pair.to(tl.int64) * INNER + i, out.to(hidden_ptr.dtype.element_ty), mask=i < INNER)


@triton.jit
def _gathered_down_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr, w_ptr, weights_ptr, ids_ptr, out_ptr, w_se, w_sr, TOP_K: tl.constexpr, D: tl.constexpr,
    INNER: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d, i0 = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_D, BLOCK_I], tl.float32)
    for k in range(TOP_K):
        expert = tl.load(ids_ptr + t * TOP_K + k).to(tl.int64)
        if expert >= 0:
            weight = tl.load(weights_ptr + t * TOP_K + k)
            for start in range(0, INNER, BLOCK_I):
                i = start + i0
                hidden = tl.load(hidden_ptr + (t * TOP_K + k) * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
                mask = (d < D)[:, None] & (i < INNER)[None, :]
                w = tl.load(w_ptr + expert * w_se + d[:, None] * w_sr + i[None, :], mask=mask, other=0.0)
                total += w.to(tl.float32) * (weight * hidden)[None, :]
    tl.store(out_ptr + t * D + d, tl.sum(total, 1).to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_kernel(  # type: ignore[no-untyped-def]
    a_ptr, w_ptr, pairs_ptr, block_expert_ptr, out_ptr, a_sr, w_se, w_sr, num_pairs, num_experts,
    PAIRS_PER_ROW: tl.constexpr, INNER: tl.constexpr, OUT: tl.constexpr, ACTIVATE: tl.constexpr, RELU2: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[pair] = act(a[pair // PAIRS_PER_ROW] w[expert]^T) for a block of pairs of one expert and BLOCK_N columns."""
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
    if ACTIVATE:
        total = _activate(total, up, RELU2, GATED)
    mask = live[:, None] & (n < OUT)[None, :]
    tl.store(out_ptr + pair[:, None] * OUT + n[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr, weights_ptr, ids_ptr, out_ptr, TOP_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in range(TOP_K):
        pair = t * TOP_K + k
        if tl.load(ids_ptr + pair) >= 0:
            y = tl.load(y_ptr + pair * D + d, mask=d < D, other=0.0).to(tl.float32)
            total += y * tl.load(weights_ptr + pair)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def router_softmax_triton(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, ids = _empty_routing(logits, top_k)
    experts = logits.shape[1]
    if logits.shape[0]:
        _router_softmax_kernel[(logits.shape[0],)](
            logits, weights, ids, logits.stride(0), E=experts, TOP_K=top_k, RENORMALIZE=renormalize,
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(top_k), num_warps=2,
        )  # fmt: skip
    return weights, ids


def router_sigmoid_grouped_triton(
    logits: Tensor,
    correction_bias: Tensor,
    top_k: int,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    weights, ids = _empty_routing(logits, top_k)
    experts = logits.shape[1]
    if logits.shape[0]:
        _router_sigmoid_kernel[(logits.shape[0],)](
            logits, correction_bias, weights, ids, logits.stride(0), scaling,
            E=experts, TOP_K=top_k, GROUPS=n_group, TOP_GROUPS=topk_group, RENORMALIZE=renormalize,
            BLOCK_G=triton.next_power_of_2(n_group), BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k), num_warps=4,
        )  # fmt: skip
    return weights, ids


def _empty_routing(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=logits.device)


def fused_experts_triton(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    activation: Literal["silu", "relu2"],
    gated: bool,
) -> Tensor:
    """Two launches where most pairs meet an expert of their own, else the grouped products."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = torch.empty(ids.numel(), w_down.shape[2], dtype=x.dtype, device=x.device)
    if ids.numel() == 0:
        return out
    meta = {"RELU2": activation == "relu2", "GATED": gated}
    if ids.numel() <= w_up.shape[0] // 2:
        _gathered(x, w_up, w_down, weights, ids, hidden, out, meta)
    else:
        _grouped(x, w_up, w_down, weights, ids, hidden, out, meta)
    return out


def _gathered(
    x: Tensor, w_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor, out: Tensor, meta: dict
) -> None:
    (tokens, width), (pairs, inner), top_k = x.shape, hidden.shape, ids.shape[1]
    block_i, block_d = min(16, triton.next_power_of_2(inner)), min(256, triton.next_power_of_2(width))
    _gathered_up_kernel[(pairs, triton.cdiv(inner, block_i))](
        x, w_up, ids, hidden, x.stride(0), w_up.stride(0), w_up.stride(1),
        TOP_K=top_k, D=width, INNER=inner, BLOCK_I=block_i, BLOCK_D=block_d, **meta,
    )  # fmt: skip
    block_i, block_d = min(256, triton.next_power_of_2(inner)), min(16, triton.next_power_of_2(width))
    _gathered_down_kernel[(tokens, triton.cdiv(width, block_d))](
        hidden, w_down, weights, ids, out, w_down.stride(0), w_down.stride(1),
        TOP_K=top_k, D=width, INNER=inner, BLOCK_I=block_i, BLOCK_D=block_d,
    )  # fmt: skip


@dataclass(frozen=True)
class _Blocks:
    """n blocks of `size` pairs of one expert: `pairs` [n * size + 1], the number of pairs where there is none, and
    `experts` [n], E for a block of none."""

    pairs: Tensor
    experts: Tensor
    size: int


def _lay_out(ids: Tensor, experts: int) -> _Blocks:
    """Blocks of pairs of one expert each. The shapes depend on those of the arguments alone."""
    flat = ids.flatten().long()
    flat = torch.where(flat < 0, experts, flat)
    pairs = flat.shape[0]
    size = 16 if pairs <= 16 * experts else 64
    blocks = triton.cdiv(pairs, size) + min(experts, pairs)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + size - 1) // size * size
    order = flat.argsort(stable=True)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # from the place in `order` to that in the layout
    place = torch.arange(pairs, device=ids.device) + shift[flat[order]]
    # Pairs without an expert come last, and what the layout does not hold of them falls on one spare place behind it.
    layout = torch.full((blocks * size + 1,), pairs, dtype=torch.int64, device=ids.device)
    layout[place.clamp(max=blocks * size)] = order
    ends = padded[:experts].cumsum(0)
    first = torch.arange(blocks, device=ids.device) * size
    return _Blocks(layout, torch.searchsorted(ends, first, right=True), size)


def _grouped(
    x: Tensor, w_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor, out: Tensor, meta: dict
) -> None:
    blocks, (tokens, width) = _lay_out(ids, w_up.shape[0]), x.shape
    y = torch.empty(ids.numel(), width, dtype=x.dtype, device=x.device)
    _launch_grouped(x, w_up, blocks, hidden, ids, {**meta, "PAIRS_PER_ROW": ids.shape[1], "ACTIVATE": True})
    _launch_grouped(
        hidden, w_down, blocks, y, ids, {"PAIRS_PER_ROW": 1, "ACTIVATE": False, "RELU2": False, "GATED": False}
    )
    block_d = min(1024, triton.next_power_of_2(width))
    _weighted_sum_kernel[(tokens, triton.cdiv(width, block_d))](
        y, weights, ids, out, TOP_K=ids.shape[1], D=width, BLOCK_D=block_d
    )


def _launch_grouped(a: Tensor, w: Tensor, blocks: _Blocks, out: Tensor, ids: Tensor, meta: dict) -> None:
    block_n, block_k = (64, 128) if blocks.size == 16 else (128, 64)
    _grouped_kernel[(triton.cdiv(out.shape[1], block_n), blocks.experts.shape[0])](
        a, w, blocks.pairs, blocks.experts, out, a.stride(0), w.stride(0), w.stride(1), ids.numel(), w.shape[0],
        INNER=a.shape[1], OUT=out.shape[1], PRECISION=dot_precision(a.dtype),
        BLOCK_M=blocks.size, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4 if blocks.size == 16 else 8, num_stages=3,
        **meta,
    )  # fmt: skip
