"""Triton kernels of the routers: products with float32 weights, and the choice of experts."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import arrival_counters, cdiv, dot_width, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.moe import ExpertShare, GroupedChoice, SoftmaxChoice, router_product
from hybridrt.kernels.dense.skinny_linear_triton import Tile, matvec

PRODUCT_TOKENS = 256  # up to here launches bound a product
ROUTER_TILE = Tile(1, 4096, 8)
_LOWEST = tl.constexpr(-0x80000000)


@triton.jit
def _take_best(keys, ids):  # type: ignore[no-untyped-def]
    """The highest key, the lowest id that has it, and the other keys. Integers: a warp compares
    them in one step, and NaN equals itself.
    """
    best = tl.max(keys, 0)
    chosen = tl.min(tl.where(keys == best, ids, 0x7FFFFFFF), 0)
    return best, chosen, tl.where(ids == chosen, _LOWEST, keys)


@triton.jit
def _keys(x):  # type: ignore[no-untyped-def]
    """Integers in the order of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _store_routing(  # type: ignore[no-untyped-def]
    weights_ptr, ids_ptr, rows_ptr, load_ptr, weights, ids, t, j, COUNT: tl.constexpr, TOKENS: tl.constexpr,
    first_held, HELD: tl.constexpr,
):  # fmt: skip
    if rows_ptr is not None:
        real = tl.load(rows_ptr + t // TOKENS) != 0
        weights, ids = tl.where(real, weights, 0.0), tl.where(real, ids, -1)
    if load_ptr is not None:
        chosen = (j < COUNT) & (ids >= 0)
        tl.atomic_add(load_ptr + ids, tl.full(j.shape, 1, tl.int64), mask=chosen, sem="relaxed")
    own = ids - first_held
    ids = tl.where((own >= 0) & (own < HELD), own, -1)
    tl.store(weights_ptr + t * COUNT + j, weights, mask=j < COUNT)
    tl.store(ids_ptr + t * COUNT + j, ids, mask=j < COUNT)


@jit_kernel(do_not_specialize=["tokens"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, parts_ptr, arrivals_ptr, x_st, tokens, E, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [parts of K, blocks of experts, blocks of tokens]. The last part sums all in order."""
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    part, block = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    e, k = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    x_rows, w_rows = x_ptr + t.to(tl.int64)[:, None] * x_st, weight_ptr + tl.minimum(e, E - 1)[None, :] * K
    begin(PDL)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, K), BLOCK_K):
        column = start + k
        x = tl.load(x_rows + column[None, :], mask=(t < tokens)[:, None] & (column < K)[None, :], other=0.0)
        w = tl.load(w_rows + column[:, None], mask=(column < K)[:, None], other=0.0)
        acc = tl.dot(x.to(tl.float32), w, acc, input_precision="tf32x3")
    out = out_ptr + t.to(tl.int64)[:, None] * E + e[None, :]
    mask = (t < tokens)[:, None] & (e < E)[None, :]
    if SPLIT == 1:
        tl.store(out, acc, mask=mask)
    else:
        cells = parts_ptr + block.to(tl.int64) * (SPLIT * BLOCK_T * BLOCK_E)
        cells += tl.arange(0, BLOCK_T)[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
        tl.store(cells + part * (BLOCK_T * BLOCK_E), acc)
        tl.debug_barrier()  # publish stores
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals_ptr + block, 0)
            total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
            for other in range(SPLIT):
                total += tl.load(cells + other * (BLOCK_T * BLOCK_E), cache_modifier=".cg")
            tl.store(out, total, mask=mask)


@jit_kernel(do_not_specialize=["first_held"])
def _router_softmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, shared_gate_ptr, weights_ptr, ids_ptr, rows_ptr, load_ptr, logits_sr, shared_gate_sr, first_held,
    TOKENS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, RENORMALIZE: tl.constexpr,
    HELD: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    begin(PDL)
    gate = 0.0
    if SHARED > 0:
        gate = tl.load(shared_gate_ptr + t * shared_gate_sr).to(tl.float32)
    logits = tl.load(logits_ptr + t * logits_sr + e, mask=e < E, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, 0))
    scores = scores / tl.sum(scores, 0)
    bits = tl.where(e < E, scores.to(tl.int32, bitcast=True), _LOWEST)
    best_bits, ids = tl.zeros([BLOCK_K], tl.int32), E - TOP_K + j
    for k in tl.static_range(TOP_K):
        best, chosen, bits = _take_best(bits, e)
        best_bits, ids = tl.where(j == k, best, best_bits), tl.where(j == k, chosen, ids)
    weights = best_bits.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0)
    weights = tl.where(j < TOP_K, weights, tl.sigmoid(gate))
    _store_routing(
        weights_ptr, ids_ptr, rows_ptr, load_ptr, weights, ids, t, j, TOP_K + SHARED, TOKENS, first_held, HELD
    )


@jit_kernel(do_not_specialize=["first_held"])
def _router_sigmoid_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, rows_ptr, load_ptr, logits_sr, scaling, first_held,
    TOKENS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, HELD: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = E // GROUPS
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
    begin(PDL)
    scores = tl.sigmoid(tl.load(logits_ptr + t * logits_sr + e, mask=e < E, other=0.0).to(tl.float32))
    biased = tl.where(e < E, scores + bias, float("-inf"))
    if TOP_GROUPS < GROUPS:
        g = tl.arange(0, BLOCK_G)
        # A group's score is the sum of its two best.
        own = tl.where((e // size)[None, :] == g[:, None], biased[None, :], float("-inf"))
        first = tl.max(own, 1)
        first_id = tl.min(tl.where(own == first[:, None], e[None, :], 0x7FFFFFFF), 1)
        second = tl.max(tl.where(e[None, :] == first_id[:, None], float("-inf"), own), 1)
        strength = tl.where(g < GROUPS, _keys(first + second), _LOWEST)
        open_groups = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            _, group, strength = _take_best(strength, g)
            open_groups = tl.where(g == group, 1, open_groups)
        open_experts = tl.sum(tl.where((e // size)[None, :] == g[:, None], open_groups[:, None], 0), 0)
        biased = tl.where(open_experts > 0, biased, float("-inf"))
    keys, bits = tl.where(e < E, _keys(biased), _LOWEST), scores.to(tl.int32, bitcast=True)
    best_bits, ids = tl.zeros([BLOCK_K], tl.int32), E - TOP_K + j
    for k in tl.static_range(TOP_K):
        _, chosen, keys = _take_best(keys, e)
        best_bits = tl.where(j == k, tl.max(tl.where(e == chosen, bits, 0), 0), best_bits)
        ids = tl.where(j == k, chosen, ids)
    weights = best_bits.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0) + 1e-20
    weights = tl.where(j < TOP_K, weights * scaling, 1.0)
    _store_routing(
        weights_ptr, ids_ptr, rows_ptr, load_ptr, weights, ids, t, j, TOP_K + SHARED, TOKENS, first_held, HELD
    )


def router_product_triton(x: Tensor, weight: Tensor) -> Tensor:
    """One launch for a decode step's tokens; cuBLAS needs three, with a conversion and a sum."""
    (tokens, width), experts = x.shape, len(weight)
    if not 0 < tokens <= PRODUCT_TOKENS or x.stride(1) != 1:
        return router_product.reference(x, weight)
    if tokens == 1:
        return matvec(x, weight, ROUTER_TILE)
    block_t, block_e, block_k = 16, 32, min(128, dot_width(width))
    blocks = cdiv(experts, block_e), cdiv(tokens, block_t)
    count = blocks[0] * blocks[1]
    split = max(1, min(2 * multiprocessors(x.device) // count, width // block_k, 16))
    out, parts, arrivals = torch.empty(tokens, experts, dtype=torch.float32, device=x.device), None, None
    if split > 1:
        parts = torch.empty(count, split, block_t, block_e, dtype=torch.float32, device=x.device)
        arrivals = arrival_counters(weight, count)
    _product_kernel[(split, *blocks)](
        x, weight, out, parts, arrivals, x.stride(0), tokens, experts, K=width, BLOCK_T=block_t, BLOCK_E=block_e,
        BLOCK_K=block_k, SPLIT=split, num_warps=4, **pdl(x.device),
    )  # fmt: skip
    return out


def router_softmax_triton(
    logits: Tensor, choice: SoftmaxChoice, shared_gate: Tensor | None = None, rows: Tensor | None = None,
    share: ExpertShare | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gate_stride = 0 if shared_gate is None else shared_gate.stride(0)
    return _route(_router_softmax_kernel, logits, shared_gate, gate_stride, choice, rows, share, num_warps=1)


def router_sigmoid_grouped_triton(
    logits: Tensor, correction_bias: Tensor, choice: GroupedChoice, rows: Tensor | None = None,
    share: ExpertShare | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups, top_groups = choice.n_group, choice.topk_group
    return _route(
        _router_sigmoid_kernel, logits, correction_bias, choice.scaling, choice, rows, share, GROUPS=groups,
        TOP_GROUPS=top_groups, BLOCK_G=next_power_of_2(groups), num_warps=1 if groups == top_groups else 4,
    )  # fmt: skip


def _route(
    kernel: Any, logits: Tensor, of_experts: Tensor | None, number: float, choice: SoftmaxChoice | GroupedChoice,
    rows: Tensor | None, share: ExpertShare | None, **own: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (tokens, experts), chosen = logits.shape, choice.top_k + choice.shared
    share = share or ExpertShare(0, experts + choice.shared)
    weights = torch.empty((tokens, chosen), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, chosen), dtype=torch.int32, device=logits.device)
    if tokens:
        kernel[(tokens,)](
            logits, of_experts, weights, ids, rows, share.load, logits.stride(0), number, share.first,
            TOKENS=1 if rows is None else tokens // rows.shape[0], E=experts, TOP_K=choice.top_k, SHARED=choice.shared,
            RENORMALIZE=choice.renormalize, HELD=share.held, BLOCK_E=next_power_of_2(experts),
            BLOCK_K=next_power_of_2(chosen), **own, **pdl(logits.device),
        )  # fmt: skip
    return weights, ids
