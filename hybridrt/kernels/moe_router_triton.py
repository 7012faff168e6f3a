"""Triton kernels of the routers: a program chooses the experts of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.moe import GroupedChoice, SoftmaxChoice
from hybridrt.kernels.pdl_triton import begin, pdl


@triton.jit
def _take_best(scores, ids):  # type: ignore[no-untyped-def]
    """The highest score, the lowest id that has it, and the scores without that one."""
    best = tl.max(scores, 0)
    chosen = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), 0)
    if scores.dtype == tl.int32:
        scores = tl.where(ids == chosen, -1, scores)
    else:
        scores = tl.where(ids == chosen, float("-inf"), scores)
    return best, chosen, scores


@triton.jit
def _store_routing(  # type: ignore[no-untyped-def]
    weights_ptr, ids_ptr, rows_ptr, weights, ids, t, j, COUNT: tl.constexpr, TOKENS: tl.constexpr
):
    """Token t's weights and ids; where its row is 0, padding, those of no expert."""
    if rows_ptr is not None:
        real = tl.load(rows_ptr + t // TOKENS) != 0
        weights, ids = tl.where(real, weights, 0.0), tl.where(real, ids, -1)
    tl.store(weights_ptr + t * COUNT + j, weights, mask=j < COUNT)
    tl.store(ids_ptr + t * COUNT + j, ids, mask=j < COUNT)


@triton.jit
def _router_softmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, shared_gate_ptr, weights_ptr, ids_ptr, rows_ptr, logits_sr, shared_gate_sr, TOKENS: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    begin(PDL)
    logits = tl.load(logits_ptr + t * logits_sr + e, mask=e < E, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, 0))
    scores = scores / tl.sum(scores, 0)
    # Bits of numbers that are not negative are ordered as the numbers are, and a warp compares integers in one step.
    bits = tl.where(e < E, scores.to(tl.int32, bitcast=True), -1)
    best_bits, ids = tl.zeros([BLOCK_K], tl.int32), E - TOP_K + j
    for k in tl.static_range(TOP_K):
        best, chosen, bits = _take_best(bits, e)
        best_bits, ids = tl.where(j == k, best, best_bits), tl.where(j == k, chosen, ids)
    weights = best_bits.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0)
    if SHARED > 0:
        gate = tl.load(shared_gate_ptr + t * shared_gate_sr).to(tl.float32)
        weights = tl.where(j < TOP_K, weights, tl.sigmoid(gate))
    _store_routing(weights_ptr, ids_ptr, rows_ptr, weights, ids, t, j, TOP_K + SHARED, TOKENS)


@triton.jit
def _router_sigmoid_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, rows_ptr, logits_sr, scaling, TOKENS: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = E // GROUPS
    g, e, j = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    begin(PDL)
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
    _store_routing(weights_ptr, ids_ptr, rows_ptr, weights * scaling, chosen_ids, t, j, TOP_K, TOKENS)


def router_softmax_triton(
    logits: Tensor, choice: SoftmaxChoice, shared_gate: Tensor | None = None, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    top_k, renormalize, shared = choice
    weights, ids = _empty_routing(logits, top_k + shared)
    tokens, experts = logits.shape
    if tokens:
        _router_softmax_kernel[(tokens,)](
            logits, shared_gate, weights, ids, rows, logits.stride(0),
            0 if shared_gate is None else shared_gate.stride(0),
            TOKENS=_tokens_per_row(tokens, rows), E=experts, TOP_K=top_k, SHARED=shared, RENORMALIZE=renormalize,
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(top_k + shared),
            num_warps=1, **pdl(logits.device),
        )  # fmt: skip
    return weights, ids


def router_sigmoid_grouped_triton(
    logits: Tensor, correction_bias: Tensor, choice: GroupedChoice, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    top_k, n_group, topk_group, renormalize, scaling = choice
    weights, ids = _empty_routing(logits, top_k)
    tokens, experts = logits.shape
    if tokens:
        _router_sigmoid_kernel[(tokens,)](
            logits, correction_bias, weights, ids, rows, logits.stride(0), scaling,
            TOKENS=_tokens_per_row(tokens, rows), E=experts, TOP_K=top_k, GROUPS=n_group, TOP_GROUPS=topk_group,
            RENORMALIZE=renormalize, BLOCK_G=triton.next_power_of_2(n_group), BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k), num_warps=4, **pdl(logits.device),
        )  # fmt: skip
    return weights, ids


def _empty_routing(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], chosen)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=logits.device)


def _tokens_per_row(tokens: int, rows: Tensor | None) -> int:
    return 1 if rows is None else tokens // rows.shape[0]
