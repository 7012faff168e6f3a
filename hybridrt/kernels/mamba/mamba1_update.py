"""Recurrent Mamba-1 step of T new tokens a row: decode (T = 1), verify (T > 1).

    dt = softplus(dt + dt_bias)
    B, C = rms_norm(B), rms_norm(C)                     if there are norms (Falcon-Mamba, Jamba)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t            [I, N]: each channel and state has a rate A
    y_t = (h_t C_t + D x_t) * silu(z_t)                 (Gu & Dao 2023)

B rows, I channels of N states.
"""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import NO_LIMIT, BCNorms, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.core.slots import advance_states, pad_mask
from hybridrt.kernels.dense.norm_activation import rms_norm
from hybridrt.kernels.mamba.mamba2_scan import skip_and_gate, time_step


@operation(By("triton"))
def mamba1_update(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, norms: BCNorms | None = None) -> Tensor:
    """Advances each row's state by T tokens. The result equals T calls of one token, bit for bit.

    Args:
        inputs: records of B rows with T tokens each; z, D and dt_bias are always there.
        norms: RMS norms of B and C over N; the results are rounded to B's dtype.

    Returns:
        [B, T, I] in x's dtype.
    """
    x, B, C, z = inputs.x, inputs.B, inputs.C, inputs.z
    step = time_step(inputs.dt, weights.dt_bias, NO_LIMIT)
    added = x.float() * step
    if norms is not None:
        B, C = rms_norm.reference(B, norms.B_weight, norms.eps), rms_norm.reference(C, norms.C_weight, norms.eps)
    keys, queries = B.float(), C.float()
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)

    def token(t: int, before: Tensor) -> Tensor:
        after = (step[:, t, :, None] * weights.A).exp_().mul_(before)
        after.addcmul_(added[:, t, :, None], keys[:, t, None])
        y[:, t] = torch.einsum("bin,bn->bi", after, queries[:, t])
        return after

    advance_states(state, x.shape[1], token)
    # A channel is a head of one.
    y = skip_and_gate(y[..., None], x[..., None], weights.D, None if z is None else z[..., None]).squeeze(3)
    return y.masked_fill_(pad_mask(state.read_state_slots, 3), 0.0).to(x.dtype)
