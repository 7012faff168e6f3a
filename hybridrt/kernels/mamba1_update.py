"""Recurrent Mamba-1 step for T new tokens of each row: decode (T = 1) and verify of a chain or a tree (T > 1).

    dt = softplus(dt + dt_bias)
    B, C = rms_norm(B), rms_norm(C)                     if there are norms (Falcon-Mamba, Jamba)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t            [I, N]: every channel and state has its own rate A
    y_t = (h_t C_t + D x_t) * silu(z_t)                 (Gu & Dao 2023)

B rows, T tokens a row, I channels of N states, R running requests, S slots.
"""

import torch
from torch import Tensor

from hybridrt.kernels.mamba2_common import skip_and_gate, time_step
from hybridrt.kernels.operation import by, operation
from hybridrt.kernels.records import NO_LIMIT, BCNorms, IntermediateStates, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.rms_norm import rms_norm
from hybridrt.kernels.slots import pad_mask, parent_states, read_rows, write_rows


@operation(by("triton"))
def mamba1_update(
    inputs: SSMInputs,
    weights: SSMWeights,
    state: StateSlots,
    intermediate: IntermediateStates | None = None,
    norms: BCNorms | None = None,
) -> Tensor:
    """Advances each row's state by its T tokens. T tokens at once equal T calls of one token, rounding included.

    Args:
        inputs: of B rows with T tokens each; z, D and dt_bias are always there.
        intermediate: if given, the pool is left alone and the state after each token stored.
        norms: RMS norms of B and C over their N entries, whose results are rounded to B's dtype.

    Returns:
        [B, T, I] in x's dtype.
    """
    # A loop over T alone
    (x, dt, B, C, z), (A, D, dt_bias, _) = inputs, weights
    states, read_slots, write_slots = state
    stored, rows, parents = intermediate or (None, None, None)
    pad = pad_mask(read_slots, 3)
    # Padding rows decay by one and add nothing, so writing them back leaves the scratch row 0 as it was.
    step = time_step(dt, dt_bias, NO_LIMIT).masked_fill_(pad, 0.0)
    added = (x.float() * step).masked_fill_(pad, 0.0)
    if norms is not None:
        B, C = rms_norm.reference(B, norms.B_weight, norms.eps), rms_norm.reference(C, norms.C_weight, norms.eps)
    keys, queries = B.masked_fill(pad, 0.0).float(), C.float()
    y = torch.empty(x.shape, device=x.device)
    initial = current = read_rows(states, read_slots).float()
    stored_rows = None if rows is None else torch.where(read_slots < 0, -1, rows)
    for t in range(x.shape[1]):
        if parents is not None:
            assert stored is not None and rows is not None
            current = parent_states(initial, stored, rows, parents[:, t])
        current = (step[:, t, :, None] * A).exp_().mul_(current)
        current.addcmul_(added[:, t, :, None], keys[:, t, None])
        y[:, t] = torch.einsum("bin,bn->bi", current, queries[:, t])
        current = current.to(states.dtype)
        if stored is not None:
            assert stored_rows is not None
            write_rows(stored[:, t], stored_rows, current)
        current = current.float()
    if stored is None:
        states.index_copy_(0, write_slots.clamp(min=0).long(), current.to(states.dtype))
    # A channel is a head of one.
    y = skip_and_gate(y[..., None], x[..., None], D, None if z is None else z[..., None]).squeeze(3)
    return y.masked_fill_(pad, 0.0).to(x.dtype)
