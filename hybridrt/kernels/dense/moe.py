"""Mixture of experts: routers and the MLP of the routed experts.

Shapes: T tokens of width D, E experts of inner width I, k experts chosen per token.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.dense.linear import linear
from hybridrt.kernels.dense.norm_activation import biased_swiglu, clamped_silu_and_mul, relu2, silu_and_mul


class SoftmaxChoice(NamedTuple):
    """The choice of `router_softmax`: top_k experts, weights divided by their sum if `renormalize`,
    then the `shared` experts E, E + 1, ... of every token."""

    top_k: int
    renormalize: bool
    shared: int = 0


class GroupedChoice(NamedTuple):
    """The choice of `router_sigmoid_grouped`: top_k experts within the best topk_group of n_group
    groups.

    Weights are the scores, over their sum if `renormalize`, times `scaling`. The `shared` experts
    E, E + 1, ... of every token follow with weight 1.
    """

    top_k: int
    n_group: int
    topk_group: int
    renormalize: bool
    scaling: float
    shared: int = 0


class ExpertShare(NamedTuple):
    """The experts that this rank holds: `first` to `first + held`.

    Attributes:
        load: `[E]` int64. A router adds to it how many tokens have chosen each expert, those of all
            ranks, padding left out. None: it counts nothing.
    """

    first: int
    held: int
    load: Tensor | None = None


class ExpertStack(NamedTuple):
    """E routed experts of one layer.

    Attributes:
        w_up: `[E, 2I, D]` (gate rows, then up rows) of SwiGLU, else `[E, I, D]`; w_down: `[E, D,
            I]`.
        activation: "silu" for SwiGLU; "relu2" for squared ReLU, without a gate.
        limit: bound of a clamped SwiGLU (`clamped_silu_and_mul`), or None.
        alpha: with a limit, factor of a SwiGLU with clamped inputs (`biased_swiglu`), or None.
        b_up, b_down: biases `[E, 2I]` (or `[E, I]`) and `[E, D]`, contiguous, or None.
    """

    w_up: Tensor
    w_down: Tensor
    activation: Literal["silu", "relu2"]
    limit: float | None = None
    alpha: float | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None


@operation(By("triton", "hybridrt.kernels.dense.moe_router_triton:router_softmax_triton"))
def router_softmax(
    logits: Tensor, choice: SoftmaxChoice, shared_gate: Tensor | None = None, rows: Tensor | None = None,
    share: ExpertShare | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The top_k experts by softmax probability (Qwen3-Next, Jamba), then the shared ones.

    Args:
        logits: `[T, E]`, rows of any stride.
        shared_gate: `[T]`; its sigmoid is the weight of the shared experts.
        rows: `[B]` int32, each with T / B tokens. Tokens of row 0 are padding: weight 0, id -1.
        share: ids count from its first expert; those of other experts are -1. No expert is shared.

    Returns:
        weights `[T, k + shared]` float32 and ids `[T, k + shared]` int32.
    """
    (tokens, experts), ids_of_shared = logits.shape, torch.arange(choice.shared, device=logits.device)
    weights, ids = torch.softmax(logits, -1, dtype=torch.float32).topk(choice.top_k, -1)
    if choice.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if shared_gate is not None:
        weights = torch.cat((weights, torch.sigmoid(shared_gate.float()).unsqueeze(1).expand(-1, choice.shared)), 1)
        ids = torch.cat((ids, (experts + ids_of_shared).expand(tokens, -1)), 1)
    return _held(*_without_padding(weights, ids.int(), rows), share)


@operation(By("triton", "hybridrt.kernels.dense.moe_router_triton:router_sigmoid_grouped_triton"))
def router_sigmoid_grouped(
    logits: Tensor, correction_bias: Tensor, choice: GroupedChoice, rows: Tensor | None = None,
    share: ExpertShare | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The top_k experts within the topk_group best groups (DeepSeek-V3, section 2.1.2; Nemotron-H).

    A group's score is the sum of its two best scores.

    Args:
        logits: `[T, E]`.
        correction_bias: `[E]` float32, added to the sigmoid scores for the choice, not for weights.
        rows, share: those of `router_softmax`.

    Returns:
        weights `[T, k + shared]` float32 and ids `[T, k + shared]` int32.
    """
    shared = choice.shared
    scores = torch.sigmoid(logits.float())
    grouped = (scores + correction_bias).unflatten(1, (choice.n_group, scores.shape[1] // choice.n_group))
    best_groups = grouped.topk(2, -1).values.sum(-1).topk(choice.topk_group, -1).indices
    excluded = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best_groups, False)
    ids = grouped.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(1).topk(choice.top_k, -1).indices
    weights = scores.gather(1, ids)
    if choice.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights *= choice.scaling
    if shared:
        tokens, experts = logits.shape
        weights = torch.cat((weights, weights.new_ones(tokens, shared)), 1)
        ids = torch.cat((ids, torch.arange(experts, experts + shared, device=ids.device).expand(tokens, -1)), 1)
    return _held(*_without_padding(weights, ids.int(), rows), share)


@operation(By("triton", "hybridrt.kernels.dense.moe_router_triton:router_product_triton"))
def router_product(x: Tensor, weight: Tensor) -> Tensor:
    """Logits `[T, E]` float32 of x `[T, D]` in any dtype and a contiguous weight `[E, D]` float32."""
    return F.linear(x.float(), weight)


@operation(By("triton"))
def fused_experts(x: Tensor, experts: ExpertStack, weights: Tensor, ids: Tensor) -> Tensor:
    """sum_j weights[t, j] * (w_down[e] act(w_up[e] x[t] + b_up[e]) + b_down[e]) over each token's
    experts e = ids[t, j].

    x `[T, D]`; weights `[T, k]` float32; ids `[T, k]` int32, -1 for none. Returns `[T, D]` in x's
    dtype, summed in float32.
    """
    return each_expert(x, len(experts.w_up), partial(expert_mlp, experts), weights, ids)


def each_expert(x: Tensor, count: int, mlp: Callable[[int, Tensor], Tensor], weights: Tensor, ids: Tensor) -> Tensor:
    """`fused_experts` of `count` experts by mlp(e, x of expert e's tokens). Reads on the host how many
    tokens each has."""
    top_k = ids.shape[1]
    flat = ids.flatten().long()
    order = torch.where(flat < 0, count, flat).argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=count + 1)[1:].tolist()
    tokens, pair_weights = order // top_k, weights.flatten()[order].unsqueeze(-1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, length in enumerate(counts):
        if length == 0:
            continue
        chosen = tokens[start : start + length]
        out.index_add_(0, chosen, mlp(expert, x[chosen]) * pair_weights[start : start + length])
        start += length
    return out.to(x.dtype)


def expert_mlp(experts: ExpertStack, expert: int, x: Tensor) -> Tensor:
    """w_down act(w_up x + b_up) + b_down of one expert, without its weight: [T, D]."""
    b_up, b_down = (None if bias is None else bias[expert] for bias in (experts.b_up, experts.b_down))
    hidden = linear(x, experts.w_up[expert], b_up)
    hidden = activate(hidden, experts.activation, experts.limit, experts.alpha)
    return linear(hidden, experts.w_down[expert], b_down)


def _without_padding(weights: Tensor, ids: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    if rows is None or not rows.shape[0]:
        return weights, ids
    padding = (rows == 0).repeat_interleave(ids.shape[0] // rows.shape[0]).unsqueeze(1)
    return weights.masked_fill(padding, 0.0), ids.masked_fill(padding, -1)


def _held(weights: Tensor, ids: Tensor, share: ExpertShare | None) -> tuple[Tensor, Tensor]:
    if share is None:
        return weights, ids
    if share.load is not None:
        flat = ids.flatten().long()
        share.load.scatter_add_(0, flat.clamp(min=0), (flat >= 0).long())
    own = ids - share.first
    return weights, own.masked_fill((own < 0) | (own >= share.held), -1)


def activate(hidden: Tensor, activation: Literal["silu", "relu2"], limit: float | None, alpha: float | None) -> Tensor:
    """The activation of `ExpertStack`."""
    if limit is not None and alpha is not None:
        return biased_swiglu(hidden, limit, alpha)
    if limit is not None:
        return clamped_silu_and_mul.reference(hidden, limit)
    return silu_and_mul.reference(hidden) if activation == "silu" else relu2.reference(hidden)
