"""Recurrent Mamba-2 step of T new tokens a row: decode (T = 1), verify (T > 1).

    dt = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T          [P, N] per head
    y_t = (h_t C_t + D x_t) * silu(z_t)                 (Dao & Gu 2024)

B rows, T tokens a row, H heads of P channels, G groups of B and C, N state columns.
"""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.core.slots import advance_states, pad_mask
from hybridrt.kernels.mamba.mamba2_scan import skip_and_gate, time_step


@operation(By("triton"))
def selective_state_update(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, out: Tensor | None = None
) -> Tensor:
    """Advances each row's state by T tokens. The result equals T calls of one token, bit for bit.

    Args:
        inputs: records of B rows with T tokens each.
        out: [B, T, H, P] of any row and token stride, for the result.

    Returns:
        [B, T, H, P] in x's dtype.
    """
    x = inputs.x
    step = time_step(inputs.dt, weights.dt_bias, weights.dt_limit)
    decay = (step * weights.A).exp_()[..., None, None]
    added, keys, queries = x.float() * step[..., None], inputs.B.float(), inputs.C.float()
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)

    def token(t: int, current: Tensor) -> Tensor:
        y[:, t] = _token_step(current, decay[:, t], added[:, t], keys[:, t], queries[:, t])
        return current

    advance_states(state, x.shape[1], token)
    y = skip_and_gate(y, x, weights.D, inputs.z).masked_fill_(pad_mask(state.read_state_slots, 4), 0.0).to(x.dtype)
    return y if out is None else out.copy_(y)


def _token_step(state: Tensor, decay: Tensor, inputs: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """state [B,H,P,N] (overwritten), decay [B,H,1,1], inputs dt*x [B,H,P], keys, queries [B,G,N] -> y [B,H,P]."""
    grouped = state.mul_(decay).view(len(keys), keys.shape[1], -1, keys.shape[2])
    grouped.addcmul_(inputs.reshape(*grouped.shape[:3], 1), keys[:, :, None])
    # CPU matmul is ten times slower on a single column.
    return torch.einsum("bgmn,bgn->bgm", grouped, queries).view(inputs.shape)
