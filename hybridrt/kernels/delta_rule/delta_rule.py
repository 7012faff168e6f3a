"""The gated delta rule (arXiv:2412.06464): gates, chunked prefill, recurrent step.

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t

In Kimi Delta Attention (arXiv:2510.26692) each channel of a key has its own gate: S_{t-1}
diag(exp(g_t)) replaces exp(g_t) S_{t-1}, and there are as many key heads as value heads.

Shapes: T tokens, B rows, Hk key heads of dim K, Hv value heads of dim V; value head h uses key head
h // (Hv // Hk). States are `[S+1, Hv, V, K]`. q and k are l2-normalised here, and q is scaled by
K^-0.5.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import ChunkPlan, chunk_tokens, decay_sums, exp_of, ith_chunks
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import L2_NORM_EPS, DeltaInputs, GateWeights, Prompts, StateSlots
from hybridrt.kernels.core.slots import advance_states, initial_states, pad_mask, write_rows


def gdn_gates(a: Tensor, b: Tensor, weights: GateWeights) -> tuple[Tensor, Tensor]:
    """(g, beta) in float32: g = -exp(A_log) softplus(a + dt_bias), the log of the decay, of a's
    shape, and beta = beta_scale sigmoid(b).

    a, b: `[..., Hv]` of any float dtype; a `[..., Hv, K]` in Kimi Delta Attention, whose safe gate
    is g = lower_bound sigmoid(exp(A_log) (a + dt_bias)).
    """
    rate, beta = weights.A_log.float().exp(), weights.beta_scale * torch.sigmoid(b.float())
    if a.ndim > b.ndim:
        rate = rate.unsqueeze(-1)
    a = a.float() + weights.dt_bias.float()
    return -rate * F.softplus(a) if weights.lower_bound is None else weights.lower_bound * torch.sigmoid(rate * a), beta


def with_gates(inputs: DeltaInputs, weights: GateWeights | None) -> DeltaInputs:
    """Inputs with g and beta: computed from raw a and b if there are `weights`, else as they are."""
    if weights is None:
        return inputs
    g, beta = gdn_gates(inputs.g, inputs.beta, weights)
    return inputs._replace(g=g, beta=beta)


@operation(By("triton"), By("fla", priority=5, needs_host=True))
def chunk_gated_delta_rule(
    inputs: DeltaInputs, state: StateSlots, prompts: Prompts, weights: GateWeights | None = None
) -> Tensor:
    """Prefill of several requests, packed along one axis. Returns `[T, Hv, V]` in v's dtype."""
    # The WY form (arXiv:2412.06464, section 3.3): within a chunk the corrected values solve a triangular system
    inputs, plan = with_gates(inputs, weights), prompts.plan
    q, v = inputs.q, inputs.v
    tokens = v.shape[0]
    index, valid = chunk_tokens(plan, torch.arange(len(plan.seq_idx), device=v.device))
    initial = initial_states(state.states, state.read_state_slots, prompts.has_initial_state)
    scaled_q = l2_normalize(q) * q.shape[-1] ** -0.5
    normed = inputs._replace(q=scaled_q, k=l2_normalize(inputs.k))
    chunks = _wy_chunks(*(_to_chunks(x, index, valid) for x in normed))
    out, final = _scan_chunks(chunks, initial, plan)
    write_rows(state.states, state.write_state_slots, final)
    out = out.masked_fill(pad_mask(state.write_state_slots, 4)[plan.seq_idx], 0)
    packed = v.new_zeros(tokens + 1, *v.shape[1:])
    packed[torch.where(valid, index, tokens)] = out.transpose(1, 2).to(v.dtype)
    return packed[:tokens]


@operation(By("triton", "hybridrt.kernels.delta_rule.decode_triton:recurrent_gated_delta_rule_triton"))
def recurrent_gated_delta_rule(inputs: DeltaInputs, state: StateSlots, weights: GateWeights | None = None) -> Tensor:
    """T tokens of each of B rows, one after the other: decode (T = 1) and verification (T > 1).

    The state is rounded to its dtype after every token, as T single steps would. Returns `[B, T, Hv, V]` in v's dtype.
    """
    inputs = with_gates(inputs, weights)
    q, k, v = inputs.q, inputs.k, inputs.v
    heads_per_key = v.shape[2] // k.shape[2]
    pairs = torch.stack((l2_normalize(k), l2_normalize(q) * q.shape[-1] ** -0.5), -2)
    pairs = pairs.repeat_interleave(heads_per_key, 2)
    decay, v, beta = inputs.g.float().exp(), v.float(), inputs.beta.float().unsqueeze(-1)
    decay = (decay if decay.ndim == v.ndim else decay.unsqueeze(-1)).unsqueeze(-2)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)

    def step(t: int, before: Tensor) -> Tensor:
        out[:, t], after = _delta_rule_step(before, pairs[:, t], v[:, t], decay[:, t], beta[:, t])
        return after

    advance_states(state, v.shape[1], step)
    return out.masked_fill_(pad_mask(state.read_state_slots, 4), 0).to(inputs.v.dtype)


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dim, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(L2_NORM_EPS))


@dataclass(frozen=True)
class _Chunks:
    """n chunks of Q tokens, float32: everything that does not depend on the incoming state.

    Attributes:
        new_values: `[n, Hv, Q, V]`, the corrected values beta (v - S k) for a zero incoming state.
        state_keys: `[n, Hv, Q, K]`; the corrected values are new_values - state_keys S^T.
        queries: `[n, Hv, Q, K]`, q times the decay since the chunk's start.
        keys: `[n, Hv, Q, K]`, k times the decay until the chunk's end.
        scores: `[n, Hv, Q, Q]`, the causal, decayed q k^T.
        decay: `[n, Hv, 1, 1 or K]`, of the whole chunk.
    """

    new_values: Tensor
    state_keys: Tensor
    queries: Tensor
    keys: Tensor
    scores: Tensor
    decay: Tensor


def _to_chunks(x: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """Cuts x `[T, H, ...]` to `[n, H, Q, ...]` float32, zero where there is no token."""
    gathered = x[index].float()
    return gathered.masked_fill(~valid.view(*valid.shape, *[1] * (x.ndim - 1)), 0).transpose(1, 2)


def _wy_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Chunks:
    heads_per_key = v.shape[1] // k.shape[1]
    sums = decay_sums(g if g.ndim == q.ndim else g.unsqueeze(-1), -2)
    scores, products = (decayed_products(x, k, sums) for x in (q, k))
    q, k = q.repeat_interleave(heads_per_key, 1), k.repeat_interleave(heads_per_key, 1)
    from_start = exp_of(sums)
    right = torch.cat((v, k * from_start), -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(products * beta.unsqueeze(-1), right, upper=False, unitriangular=True)
    new_values, state_keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    to_end = exp_of(sums[..., -1:, :] - sums)
    return _Chunks(new_values, state_keys, q * from_start, k * to_end, scores, from_start[..., -1:, :])


def decayed_products(x: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """x_i . k_j, decayed from token j to i, where j <= i, else 0: `[n, Hv, Q, Q]` of x, k `[n, Hk, Q, K]` and the
    `decay_sums` of gates, `[n, Hv, Q, 1 or K]`."""
    tokens, heads_per_key = x.shape[-2], sums.shape[1] // k.shape[1]
    if sums.shape[-1] == 1:
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        apart = (sums - sums.transpose(-1, -2)).masked_fill_(~causal, -torch.inf)
        return (x @ k.transpose(-1, -2)).repeat_interleave(heads_per_key, 1).mul_(exp_of(apart))
    out = x.new_zeros(*x.shape[:-1], tokens)
    for j in range(tokens):  # all columns at once would take Q times the memory of the keys
        decay = exp_of(sums[..., j:, :] - sums[..., j : j + 1, :])
        out[..., j:, j] = (x[..., j:, :] * k[..., j : j + 1, :] * decay).sum(-1)
    return out


def _scan_chunks(chunks: _Chunks, state: Tensor, plan: ChunkPlan) -> tuple[Tensor, Tensor]:
    """Carries the rows' states `[B, Hv, V, K]` through their chunks, in place. Returns outputs `[n, Hv, Q, V]` and the
    states."""
    out = torch.empty_like(chunks.new_values)
    for i in range(plan.max_chunks_per_seq):
        rows, chunk = ith_chunks(plan, i)
        transposed = state[rows].transpose(-1, -2)
        values = chunks.new_values[chunk] - chunks.state_keys[chunk] @ transposed
        out[chunk] = chunks.queries[chunk] @ transposed + chunks.scores[chunk] @ values
        state[rows] = chunks.decay[chunk] * state[rows] + values.transpose(-1, -2) @ chunks.keys[chunk]
    return out, state


def _delta_rule_step(state: Tensor, pairs: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Output and state of one token: state `[B, Hv, V, K]` (overwritten), pairs `[B, Hv, 2, K]` of
    (k, q), decay `[B, Hv, 1, 1 or K]`.
    """
    key, query = pairs.unbind(-2)
    read_key, read_query = ((pairs * decay) @ state.transpose(-1, -2)).unbind(-2)
    value = (v - read_key).mul_(beta)
    out = read_query.addcmul(value, (key * query).sum(-1, keepdim=True))
    return out, state.mul_(decay).addcmul_(value.unsqueeze(-1), key.unsqueeze(-2))
