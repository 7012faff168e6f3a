"""Triton kernels of the routers: a program chooses the experts of one token. A step of one token takes one launch for
the norm, the router's product and the choice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.launch import arrival_counters, multiprocessors
from hybridrt.kernels.moe import GroupedChoice, RoutedToken, SoftmaxChoice, routed_rows, router_product
from hybridrt.kernels.pdl_triton import begin, pdl
from hybridrt.kernels.skinny_linear import InputNorm
from hybridrt.kernels.skinny_linear_triton import token_products

PRODUCT_TOKENS = 256  # up to here the float32 product of a router is bound by its launches
_LOWEST = tl.constexpr(-0x80000000)


@triton.jit
def _take_best(keys, ids):  # type: ignore[no-untyped-def]
    """The highest key, the lowest id that has it, and the keys without that one. Keys are integers, which a warp
    compares in one step, and all of them equal themselves, those of NaN too."""
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
    weights_ptr, ids_ptr, rows_ptr, weights, ids, t, COUNT: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Token t's weights and ids; where its row is 0, padding, those of no expert."""
    j = tl.arange(0, BLOCK_K)
    if rows_ptr is not None:
        real = tl.load(rows_ptr + t // TOKENS) != 0
        weights, ids = tl.where(real, weights, 0.0), tl.where(real, ids, -1)
    tl.store(weights_ptr + t * COUNT + j, weights, mask=j < COUNT)
    tl.store(ids_ptr + t * COUNT + j, ids, mask=j < COUNT)


@triton.jit
def _choose_softmax(  # type: ignore[no-untyped-def]
    logits_ptr, gate_ptr, E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights and ids [BLOCK_K] by the logits [E] of a token; gate_ptr: the shared experts'."""
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    gate = 0.0
    if SHARED > 0:
        gate = tl.load(gate_ptr).to(tl.float32)
    logits = tl.load(logits_ptr + e, mask=e < E, other=float("-inf")).to(tl.float32)
    scores = tl.exp(logits - tl.max(logits, 0))
    scores = scores / tl.sum(scores, 0)
    # Bits of numbers that are not negative are ordered as the numbers are.
    bits = tl.where(e < E, scores.to(tl.int32, bitcast=True), _LOWEST)
    best_bits, ids = tl.zeros([BLOCK_K], tl.int32), E - TOP_K + j
    for k in tl.static_range(TOP_K):
        best, chosen, bits = _take_best(bits, e)
        best_bits, ids = tl.where(j == k, best, best_bits), tl.where(j == k, chosen, ids)
    weights = best_bits.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0)
    return tl.where(j < TOP_K, weights, tl.sigmoid(gate)), ids


@triton.jit
def _choose_sigmoid(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, scaling, E: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights and ids [BLOCK_K] by the logits [E] of a token."""
    size: tl.constexpr = E // GROUPS
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    scores = tl.sigmoid(tl.load(logits_ptr + e, mask=e < E, other=0.0).to(tl.float32))
    biased = tl.where(e < E, scores + tl.load(bias_ptr + e, mask=e < E, other=0.0), float("-inf"))
    if TOP_GROUPS < GROUPS:
        g = tl.arange(0, BLOCK_G)
        # A group's strength is the sum of its two best; [BLOCK_G, BLOCK_E], -inf outside the group.
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
    return tl.where(j < TOP_K, weights * scaling, 1.0), ids


@triton.jit(do_not_specialize=["tokens"])
def _product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, parts_ptr, arrivals_ptr, x_st, tokens, E, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [parts of K, blocks of experts, blocks of tokens]; the last part to end sums all parts, in their order."""
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
        tl.debug_barrier()  # the arrival below publishes what all threads stored
        if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals_ptr + block, 0)
            total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
            for other in range(SPLIT):
                total += tl.load(cells + other * (BLOCK_T * BLOCK_E), cache_modifier=".cg")
            tl.store(out, total, mask=mask)


@triton.jit
def _router_softmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, shared_gate_ptr, weights_ptr, ids_ptr, rows_ptr, logits_sr, shared_gate_sr, TOKENS: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    begin(PDL)
    gate = shared_gate_ptr
    if SHARED > 0:
        gate += t * shared_gate_sr
    weights, ids = _choose_softmax(logits_ptr + t * logits_sr, gate, E, TOP_K, SHARED, RENORMALIZE, BLOCK_E, BLOCK_K)
    _store_routing(weights_ptr, ids_ptr, rows_ptr, weights, ids, t, TOP_K + SHARED, TOKENS, BLOCK_K)


@triton.jit
def _router_sigmoid_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, rows_ptr, logits_sr, scaling, TOKENS: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    begin(PDL)
    weights, ids = _choose_sigmoid(
        logits_ptr + t * logits_sr, bias_ptr, scaling, E, TOP_K, GROUPS, TOP_GROUPS, RENORMALIZE,
        BLOCK_G, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    _store_routing(weights_ptr, ids_ptr, rows_ptr, weights, ids, t, TOP_K + SHARED, TOKENS, BLOCK_K)


@triton.jit
def _route_token_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, normed_ptr, total_ptr, logits_ptr, arrivals_ptr,
    weights_ptr, ids_ptr, rows_ptr, N, eps, scaling,
    K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of one warp, which needs no barrier to find the best: each computes BLOCK_N of the N logits, the last to
    end chooses. The first writes the normed token too."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y, scale = token_products(
        x_ptr, None, residual_ptr, norm_ptr, None, None, weight_ptr, total_ptr, tl.minimum(n, N - 1), K, eps,
        K, 0, False, BLOCK_K, PDL,
    )  # fmt: skip
    tl.store(logits_ptr + n, y, mask=n < N)
    tl.debug_barrier()  # the arrival below publishes what all threads stored
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr, 0)
        if SIGMOID:
            weights, ids = _choose_sigmoid(
                logits_ptr, bias_ptr, scaling, E, TOP_K, GROUPS, TOP_GROUPS, RENORMALIZE, BLOCK_G, BLOCK_E, BLOCK_J,
            )  # fmt: skip
        else:
            weights, ids = _choose_softmax(logits_ptr, logits_ptr + E, E, TOP_K, SHARED, RENORMALIZE, BLOCK_E, BLOCK_J)
        _store_routing(weights_ptr, ids_ptr, rows_ptr, weights, ids, 0, TOP_K + SHARED, 1, BLOCK_J)
    if tl.program_id(0) == 0:
        k = tl.arange(0, BLOCK_K)
        for start in range(0, K, BLOCK_K):
            mask = start + k < K
            x = tl.load(x_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
            if residual_ptr is not None:
                x += tl.load(residual_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
                x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
            x *= scale * tl.load(norm_ptr + start + k, mask=mask, other=0.0)
            tl.store(normed_ptr + start + k, x.to(normed_ptr.dtype.element_ty), mask=mask)


def router_product_triton(x: Tensor, weight: Tensor) -> Tensor:
    """`router_product`, of a decode step's tokens in one launch: cuBLAS takes three, with a conversion and a sum."""
    (tokens, width), experts = x.shape, len(weight)
    if not 0 < tokens <= PRODUCT_TOKENS or x.stride(1) != 1:
        return router_product.reference(x, weight)
    block_t, block_e, block_k = 16, 32, min(128, max(16, triton.next_power_of_2(width)))
    blocks = triton.cdiv(experts, block_e), triton.cdiv(tokens, block_t)
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
    top_k, n_group, topk_group, renormalize, scaling, shared = choice
    weights, ids = _empty_routing(logits, top_k + shared)
    tokens, experts = logits.shape
    if tokens:
        _router_sigmoid_kernel[(tokens,)](
            logits, correction_bias, weights, ids, rows, logits.stride(0), scaling,
            TOKENS=_tokens_per_row(tokens, rows), E=experts, TOP_K=top_k, SHARED=shared, GROUPS=n_group,
            TOP_GROUPS=topk_group, RENORMALIZE=renormalize, BLOCK_G=triton.next_power_of_2(n_group),
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(top_k + shared),
            num_warps=1 if n_group == topk_group else 4, **pdl(logits.device),
        )  # fmt: skip
    return weights, ids


def route_token_triton(
    x: Tensor, weight: Tensor, norm: InputNorm, choice: SoftmaxChoice | GroupedChoice,
    correction_bias: Tensor | None = None, rows: Tensor | None = None,
) -> RoutedToken:  # fmt: skip
    """`route_token` in one launch."""
    experts, width, residual = routed_rows(weight, choice), weight.shape[1], norm.residual
    weights, ids = _empty_routing(x, choice.top_k + choice.shared)
    normed, total = torch.empty_like(x), x if residual is None else torch.empty_like(residual)
    sigmoid = isinstance(choice, GroupedChoice)
    logits = experts + (choice.shared > 0 and not sigmoid)
    block_n, (block_k, warps) = 1, route_tile(width, weight.element_size())
    _route_token_kernel[(triton.cdiv(logits, block_n),)](
        x, residual, norm.norm_weight, weight, correction_bias, normed, total,
        torch.empty(logits, dtype=torch.float32, device=x.device), arrival_counters(weight, 1),
        weights, ids, rows, logits, norm.eps, choice.scaling if isinstance(choice, GroupedChoice) else 1.0,
        K=width, E=experts, TOP_K=choice.top_k, SHARED=choice.shared, SIGMOID=sigmoid,
        GROUPS=choice.n_group if isinstance(choice, GroupedChoice) else 1,
        TOP_GROUPS=choice.topk_group if isinstance(choice, GroupedChoice) else 1, RENORMALIZE=choice.renormalize,
        BLOCK_G=triton.next_power_of_2(choice.n_group) if isinstance(choice, GroupedChoice) else 1,
        BLOCK_E=triton.next_power_of_2(experts), BLOCK_J=triton.next_power_of_2(choice.top_k + choice.shared),
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, **pdl(x.device),
    )  # fmt: skip
    return RoutedToken(normed, total, weights, ids)


def route_tile(width: int, bytes_each: int) -> tuple[int, int]:
    """Columns at a time and warps of a program of `route_token`."""
    whole = triton.next_power_of_2(width)
    return max(8, min(whole, 2048 if whole <= 2048 or bytes_each < 4 else 1024)), 1


def _empty_routing(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], chosen)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=logits.device)


def _tokens_per_row(tokens: int, rows: Tensor | None) -> int:
    return 1 if rows is None else tokens // rows.shape[0]
