"""Shared by the Mamba operations: time step, skip and gate, and the reference loop over chunks."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import chunk_tokens, ith_chunks
from hybridrt.kernels.core.records import NO_LIMIT, Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.core.slots import initial_states, real_tokens, write_rows
from hybridrt.kernels.core.views import split_heads


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


def split_conv_channels(xBC: Tensor, state_shape: Sequence[int]) -> list[Tensor]:
    """Views x [..., H, P], B and C [..., G, N] of the conv's channels [..., C] for a pool of states [S+1, H, P, N]."""
    heads, dim, state_dim = state_shape[1:]
    groups = (xBC.shape[-1] - heads * dim) // (2 * state_dim), state_dim
    return split_heads(xBC, (heads, dim), groups, groups)


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
