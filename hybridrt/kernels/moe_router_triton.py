"""Triton kernels of the routers: a program chooses the experts of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _router_softmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, shared_gate_ptr, weights_ptr, ids_ptr, logits_sr, shared_gate_sr,
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
    chosen = t * (TOP_K + SHARED) + j
    tl.store(weights_ptr + chosen, weights, mask=j < TOP_K + SHARED)
    tl.store(ids_ptr + chosen, ids, mask=j < TOP_K + SHARED)


@triton.jit
def _router_sigmoid_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, logits_sr, scaling,
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
    tl.store(weights_ptr + t * TOP_K + j, weights * scaling, mask=j < TOP_K)
    tl.store(ids_ptr + t * TOP_K + j, chosen_ids, mask=j < TOP_K)


def router_softmax_triton(
    logits: Tensor, top_k: int, renormalize: bool, shared_gate: Tensor | None = None, shared: int = 0
) -> tuple[Tensor, Tensor]:
    weights, ids = _empty_routing(logits, top_k + shared)
    tokens, experts = logits.shape
    if tokens:
        _router_softmax_kernel[(tokens,)](
            logits, shared_gate, weights, ids, logits.stride(0), 0 if shared_gate is None else shared_gate.stride(0),
            E=experts, TOP_K=top_k, SHARED=shared, RENORMALIZE=renormalize,
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(top_k + shared),
            num_warps=1, **pdl(logits.device),
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
            BLOCK_K=triton.next_power_of_2(top_k), num_warps=4, **pdl(logits.device),
        )  # fmt: skip
    return weights, ids


def _empty_routing(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], chosen)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=logits.device)
