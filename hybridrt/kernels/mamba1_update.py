"""Recurrent Mamba-1 step for T new tokens of each row: decode (T = 1) and verify of a chain or a tree (T > 1).

    dt = softplus(dt + dt_bias)
    B, C = rms_norm(B), rms_norm(C)                     if there are norms (Falcon-Mamba, Jamba)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t            [I, N]: every channel and state has its own rate A
    y_t = (h_t C_t + D x_t) * silu(z_t)                 (Gu & Dao 2023)

B rows, T tokens a row, I channels of N states, R running requests, S slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrt.kernels.mamba2_common import NO_LIMIT, skip_and_gate, time_step
from hybridrt.kernels.operation import by, operation
from hybridrt.kernels.rms_norm import rms_norm
from hybridrt.kernels.slots import pad_mask, read_rows, write_rows


class BCNorms(NamedTuple):
    """Weights [N] float32 of the RMS norms of B and C, and their epsilon."""

    B: Tensor
    C: Tensor
    eps: float


@operation(by("triton"))
def mamba1_update(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor,
    norms: BCNorms | None = None,
    read_slots: Tensor,
    write_slots: Tensor,
    intermediate_states: Tensor | None = None,
    rows: Tensor | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """Advances each row's state by its T tokens. T tokens at once equal T calls of one token, rounding included.

    Args:
        states: [S+1, I, N] pool. A row whose slots are -1 gets zeros and touches no state.
        x, z: [B, T, I]; dt: [B, T, I] raw; B, C: [B, T, N]. Any row and token stride, last dimension contiguous.
        A: [I, N] float32, negative; D, dt_bias: [I].
        norms: RMS norms of B and C over their N entries, whose results are rounded to B's dtype.
        read_slots, write_slots: [B] int32, where the state before and after the step stands.
        intermediate_states: [R+1, T, I, N] in the pool's dtype. When given, `states` is left alone and the state after
            token t of row b is stored at [rows[b], t].
        rows: [B] int32, rows of `intermediate_states`.
        parents: [B, T] int32, a draft tree: parent node (< t) of each node, -1 for the state in the pool. Needs
            `intermediate_states`.

    Returns:
        [B, T, I] in x's dtype.
    """
    # A loop over T alone
    pad = pad_mask(read_slots, 3)
    # Padding rows decay by one and add nothing, so writing them back leaves the scratch row 0 as it was.
    step = time_step(dt, dt_bias, NO_LIMIT).masked_fill_(pad, 0.0)
    inputs = (x.float() * step).masked_fill_(pad, 0.0)
    if norms is not None:
        B, C = rms_norm.reference(B, norms.B, norms.eps), rms_norm.reference(C, norms.C, norms.eps)
    keys, queries = B.masked_fill(pad, 0.0).float(), C.float()
    y = torch.empty(x.shape, device=x.device)
    initial = state = read_rows(states, read_slots).float()
    stored_rows = None if rows is None else torch.where(read_slots < 0, -1, rows)
    for t in range(x.shape[1]):
        if parents is not None:
            assert intermediate_states is not None and rows is not None
            stored = intermediate_states[rows, parents[:, t].clamp(min=0)].float()
            state = torch.where(pad_mask(parents[:, t], 3), initial, stored)
        state = (step[:, t, :, None] * A).exp_().mul_(state)
        state.addcmul_(inputs[:, t, :, None], keys[:, t, None])
        y[:, t] = torch.einsum("bin,bn->bi", state, queries[:, t])
        state = state.to(states.dtype)
        if intermediate_states is not None:
            assert stored_rows is not None
            write_rows(intermediate_states[:, t], stored_rows, state)
        state = state.float()
    if intermediate_states is None:
        states.index_copy_(0, write_slots.clamp(min=0).long(), state.to(states.dtype))
    # A channel is a head of one.
    y = skip_and_gate(y[..., None], x[..., None], D, z[..., None]).squeeze(3)
    return y.masked_fill_(pad, 0.0).to(x.dtype)
