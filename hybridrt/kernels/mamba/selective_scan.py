"""Selective scan of Mamba-1 over ragged prompts (Gu & Dao 2023, algorithm 2).

    dt = softplus(dt + dt_bias)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t            [I, N]: every channel and state has its own rate A
    y_t = (h_t C_t + D x_t) * silu(z_t)

T tokens in all, B requests, I channels of N states.
"""

from math import gcd

import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import finite_rates
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.mamba.mamba2_scan import scan_prompts

# Tokens of a block: a chunk runs BLOCK + chunk / BLOCK vectorised steps.
_BLOCK = 4


@operation(By("triton"))
def selective_scan(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts) -> Tensor:
    """Scans the new tokens of each request from its state and leaves the state after them in the pool.

    Inputs are packed; z, D and dt_bias are always there. Returns [T, I] in x's dtype.
    """
    A, x, z = finite_rates(weights.A), inputs.x[:, :, None], None if inputs.z is None else inputs.z[:, :, None]

    def scan_chunks(x: Tensor, step: Tensor, B: Tensor, C: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        decay = (step[..., None] * A).exp_()
        after = _scan_chunk(decay, (step[..., None] * x) * B[:, :, None], before)
        return torch.einsum("bqin,bqn->bqi", after, C)[..., None], after[:, -1]

    return scan_prompts(inputs._replace(x=x, z=z), weights, state, prompts, scan_chunks).squeeze(2)


def _scan_chunk(decay: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    """All h_t = decay_t h_{t-1} + inputs_t from `state` [b, I, N]. Overwrites [b, Q, I, N].

    First all blocks at once from zero; then, block by block, the decayed state before it is added.
    No quotients of decays occur: nothing overflows.
    """
    size = gcd(inputs.shape[1], _BLOCK)
    decay, local = (t.unflatten(1, (-1, size)) for t in (decay, inputs))
    for t in range(1, size):
        local[:, :, t].addcmul_(decay[:, :, t], local[:, :, t - 1])
        decay[:, :, t].mul_(decay[:, :, t - 1])
    entry_states = torch.empty_like(local[:, :, 0])
    for block in range(local.shape[1]):
        entry_states[:, block] = state
        state = torch.addcmul(local[:, block, -1], decay[:, block, -1], state)
    return local.addcmul_(decay, entry_states[:, :, None]).flatten(1, 2)
