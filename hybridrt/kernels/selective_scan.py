"""Selective scan of Mamba-1 over ragged prompts (Gu & Dao 2023, algorithm 2).

    dt = softplus(dt + dt_bias)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t            [I, N]: every channel and state has its own rate A
    y_t = (h_t C_t + D x_t) * silu(z_t)

T tokens in all, B requests, I channels of N states.
"""

from math import gcd

import torch
from torch import Tensor

from hybridrt.kernels.chunk_plan import chunk_tokens, ith_chunks
from hybridrt.kernels.mamba2_common import skip_and_gate, time_step
from hybridrt.kernels.operation import By, operation
from hybridrt.kernels.records import NO_LIMIT, Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.slots import initial_states, live_tokens, write_rows

# Tokens of a block of the plain-torch scan: it runs BLOCK + chunk / BLOCK vectorised steps a chunk.
_BLOCK = 4


@operation(By("triton"))
def selective_scan(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts) -> Tensor:
    """Scans the new tokens of each request from its state and leaves the state after them in the pool.

    Inputs are packed; z, D and dt_bias are always there. Returns [T, I] in x's dtype.
    """
    # The i-th chunks of all requests at once, for each i
    (x, dt, B, C, z), (A, D, dt_bias, _) = inputs, weights
    states, read_slots, write_slots, _ = state
    query_start_loc, has_initial_state, plan, saves = prompts
    num_tokens = x.shape[0]
    dt = time_step(dt, dt_bias, NO_LIMIT)
    current = initial_states(states, read_slots, has_initial_state)
    # One spare token at the end takes the output of positions that pad a chunk.
    out = torch.empty(num_tokens + 1, x.shape[1], device=x.device)
    for i in range(plan.max_chunks_per_seq):
        rows, chunk = ith_chunks(plan, i)
        token, inside = chunk_tokens(plan, chunk)
        step = torch.where(inside[:, :, None], dt[token], 0.0)
        decay = (step[..., None] * A).exp_()
        added = (step * x[token].float())[..., None] * B[token].float()[:, :, None]
        after = _scan_chunk(decay, added, current[rows])
        out[torch.where(inside, token, num_tokens)] = torch.einsum("bqin,bqn->bqi", after, C[token].float())
        current[rows] = after[:, -1]
        if saves is not None:
            kept = saves.chunk_slots[chunk]
            write_rows(states, torch.where(kept > 0, kept, -1), after[:, -1])
    write_rows(states, write_slots, current)
    dead = ~live_tokens(read_slots, query_start_loc, num_tokens)
    # A channel is a head of one.
    y = skip_and_gate(out[:-1, :, None], x[:, :, None], D, None if z is None else z[:, :, None])
    return y.squeeze(2).masked_fill_(dead[:, None], 0.0).to(x.dtype)


def _scan_chunk(decay: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    """h_t = decay_t h_{t-1} + inputs_t from `state` [b, I, N]: all h_t. decay, inputs [b, Q, I, N] are overwritten.

    In blocks: the short recurrence of all blocks at once from zero, then block by block the state at its head, whose
    decayed rest is added to each token. Only products of decays occur, never quotients, so nothing can overflow.
    """
    size = gcd(inputs.shape[1], _BLOCK)
    decay, local = (t.unflatten(1, (-1, size)) for t in (decay, inputs))
    for t in range(1, size):
        local[:, :, t].addcmul_(decay[:, :, t], local[:, :, t - 1])
        decay[:, :, t].mul_(decay[:, :, t - 1])
    heads = torch.empty_like(local[:, :, 0])
    for block in range(local.shape[1]):
        heads[:, block] = state
        state = torch.addcmul(local[:, block, -1], decay[:, block, -1], state)
    return local.addcmul_(decay, heads[:, :, None]).flatten(1, 2)
