"""Chunked scan of Mamba-2 over ragged prompts: the SSD form of Dao & Gu 2024, section 6.

    dt = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T          [P, N] per head
    y_t = (h_t C_t + D x_t) * silu(z_t)

T tokens in all, B requests, H heads of P channels, G groups of B and C, N state columns. The time
step, the gate and the loop over chunks serve the other Mamba operations too.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import chunk_tokens, decay_sums, finite_rates, ith_chunks
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import NO_LIMIT, Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.core.slots import initial_states, real_tokens, split_heads, write_rows


def time_step(dt: Tensor, dt_bias: Tensor | None, dt_limit: tuple[float, float]) -> Tensor:
    """clamp(softplus(dt + dt_bias), *dt_limit): raw dt [..., H], dt_bias [H] -> float32 [..., H]."""
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = F.softplus(dt)
    return dt if dt_limit == NO_LIMIT else dt.clamp(*dt_limit)


def skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + D * x) * silu(z) in float32, in place on y: y, x, z [..., H, P], D [H]."""
    if D is not None:
        y.addcmul_(x.float(), D.float()[:, None])
    return y if z is None else y.mul_(F.silu(z.float()))


def split_conv_channels(xBC: Tensor, state_shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Views x [..., H, P], B and C [..., G, N] of the conv's channels [..., C] for a pool of states [S+1, H, P, N]."""
    heads, dim, state_dim = state_shape[1:]
    groups = (xBC.shape[-1] - heads * dim) // (2 * state_dim), state_dim
    x, B, C = split_heads(xBC, (heads, dim), groups, groups)
    return x, B, C


def scan_prompts(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts,
    scan_chunks: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:  # fmt: skip
    """Scans packed prompts in plain torch; step i takes the i-th chunk of every prompt.

    The states after the prompts, and those that `prompts.saves` names, are written to the pool.

    Args:
        inputs: x and z [T, H, P], dt [T, H].
        scan_chunks: one chunk of each of b prompts, in float32. From x [b, Q, H, P], time steps
            [b, Q, H], B, C [b, Q, ...] and the states before it [b, *state] to y [b, Q, H, P] and
            the states after it.

    Returns:
        [T, H, P] in x's dtype, gated if there is a z.
    """
    x, dt, B, C, states, plan = inputs.x, inputs.dt, inputs.B, inputs.C, state.states, prompts.plan
    num_tokens = x.shape[0]
    dt = time_step(dt, weights.dt_bias, weights.dt_limit)
    current = initial_states(states, state.read_state_slots, prompts.has_initial_state)
    # One spare token at the end takes the output of positions that pad a chunk.
    y = torch.empty(num_tokens + 1, *x.shape[1:], dtype=torch.float32, device=x.device)
    for i in range(plan.max_chunks_per_seq):
        rows, chunk = ith_chunks(plan, i)
        token, inside = chunk_tokens(plan, chunk)
        step = torch.where(inside[:, :, None], dt[token], 0.0)
        part, current[rows] = scan_chunks(x[token].float(), step, B[token].float(), C[token].float(), current[rows])
        y[torch.where(inside, token, num_tokens)] = part
        if prompts.saves is not None:
            kept = prompts.saves.chunk_slots[chunk]
            write_rows(states, torch.where(kept > 0, kept, -1), current[rows])
    write_rows(states, state.write_state_slots, current)
    dead = ~real_tokens(state.read_state_slots, prompts.query_start_loc, num_tokens)
    return skip_and_gate(y[:-1], x, weights.D, inputs.z).masked_fill_(dead[:, None, None], 0.0).to(x.dtype)


@operation(By("triton"), By("mamba_ssm", priority=5, needs_host=True))
def mamba2_chunk_scan(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, out: Tensor | None = None
) -> Tensor:
    """Scans the new tokens of each request from its state; the state after them goes to the pool.

    Args:
        inputs: packed.
        out: [T, H, P] in x's dtype, of any token stride, for the result; None for a new tensor.

    Returns:
        [T, H, P] in x's dtype: `out`, if given.
    """
    # On a CPU this is fastest with chunks of 64 to 128 tokens.
    y = scan_prompts(inputs, weights, state, prompts, partial(_chunk_step, finite_rates(weights.A)))
    return y if out is None else out.copy_(y)


def _chunk_step(A: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of b rows: x [b,Q,H,P], dt [b,Q,H], B, C [b,Q,G,N], state [b,H,P,N] -> y [b,Q,H,P], new state."""
    batch, size, heads, dim = x.shape
    groups = B.shape[2]
    sums = decay_sums(dt * A, 1)
    # exp of the differences of all pairs [Q, Q] is float32. What rounding takes off the float64 sums is a factor of
    # each token instead: exp(sums_t - sums_s) = exp(cum_t - cum_s) * rest_t / rest_s.
    cum = sums.float()
    rest = (sums - cum).float().exp_()
    x = x * (dt / rest)[..., None]
    keys, queries = B.transpose(1, 2), C.transpose(1, 2)
    from_state = queries @ state.view(batch, groups, -1, state.shape[-1]).transpose(2, 3)
    y = from_state.transpose(1, 2).reshape(x.shape) * cum.exp()[..., None]

    scores = (queries @ keys.transpose(2, 3)).tril_()
    weights = _decays(cum).view(batch, groups, -1, size, size).mul_(scores[:, :, None])
    y += (weights.view(batch, heads, size, size) @ x.transpose(1, 2)).transpose(1, 2)
    y *= rest[..., None]

    to_end = (sums[:, -1:] - sums).float().exp_().mul_(rest)
    inputs = (x * to_end[..., None]).view(batch, size, groups, -1).permute(0, 2, 3, 1)
    decayed = state * sums[:, -1].float().exp_()[..., None, None]
    return y, decayed.add_((inputs @ keys).view(batch, heads, dim, -1))


def _decays(cum: Tensor) -> Tensor:
    """exp(cum_t - cum_s) where s <= t (elsewhere 1): cum [b, Q, H] -> [b, H, Q, Q]."""
    cum = cum.transpose(1, 2).contiguous()
    # exp is several times slower for subnormal results: e^-80 is nothing already.
    return (cum[..., :, None] - cum[..., None, :]).clamp_(-80.0, 0.0).exp_()
