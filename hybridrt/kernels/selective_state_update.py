"""Recurrent Mamba-2 step for T new tokens of each row: decode (T = 1) and verify of a chain or a tree (T > 1).

    dt = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T          [P, N] per head
    y_t = (h_t C_t + D x_t) * silu(z_t)                 (Dao & Gu 2024)

B rows, T tokens a row, H heads of P channels, G groups of B and C, N state columns, R running requests, S slots.
"""

import torch
from torch import Tensor

from hybridrt.kernels.mamba2_common import skip_and_gate, time_step
from hybridrt.kernels.operation import by, operation
from hybridrt.kernels.slots import pad_mask, read_rows, write_rows


@operation(by("triton"), by("flashinfer", priority=5), by("mamba_ssm", priority=4))
def selective_state_update(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None,
    read_slots: Tensor,
    write_slots: Tensor,
    intermediate_states: Tensor | None = None,
    rows: Tensor | None = None,
    parents: Tensor | None = None,
) -> Tensor:
    """Advances each row's state by its T tokens. T tokens at once equal T calls of one token, rounding included.

    Args:
        states: [S+1, H, P, N] pool. A row whose slots are -1 gets zeros and touches no state.
        x, z: [B, T, H, P]; dt: [B, T, H] raw; B, C: [B, T, G, N]. Any token stride, last dimension contiguous.
        A: [H] float32, negative; D, dt_bias: [H].
        read_slots, write_slots: [B] int32, where the state before and after the step stands.
        intermediate_states: [R+1, T, H, P, N] in the pool's dtype. When given, `states` is left alone and the state
            after token t of row b is stored at [rows[b], t].
        rows: [B] int32, rows of `intermediate_states`.
        parents: [B, T] int32, a draft tree: parent node (< t) of each node, -1 for the state in the pool. Needs
            `intermediate_states`.

    Returns:
        [B, T, H, P] in x's dtype.
    """
    # A loop over T alone
    pad = pad_mask(read_slots, 4)
    # Padding rows decay by one and add nothing, so writing them back leaves the scratch row 0 as it was.
    step = time_step(dt, dt_bias, dt_limit).masked_fill_(pad[..., 0], 0.0)
    decay = (step * A).exp_()[..., None, None]
    inputs = (x.float() * step[..., None]).masked_fill_(pad, 0.0)
    keys, queries = B.masked_fill(pad, 0.0).float(), C.float()
    y = torch.empty(x.shape, device=x.device)
    initial = state = read_rows(states, read_slots).float()
    stored_rows = None if rows is None else torch.where(read_slots < 0, -1, rows)
    for t in range(x.shape[1]):
        if parents is not None:
            assert intermediate_states is not None and rows is not None
            state = _parent_state(initial, intermediate_states, rows, parents[:, t])
        y[:, t] = _token_step(state, decay[:, t], inputs[:, t], keys[:, t], queries[:, t])
        state = state.to(states.dtype)
        if intermediate_states is not None:
            assert stored_rows is not None
            write_rows(intermediate_states[:, t], stored_rows, state)
        state = state.float()
    if intermediate_states is None:
        states.index_copy_(0, write_slots.clamp(min=0).long(), state.to(states.dtype))
    return skip_and_gate(y, x, D, z).masked_fill_(pad, 0.0).to(x.dtype)


def _token_step(state: Tensor, decay: Tensor, inputs: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """state [B,H,P,N] (overwritten), decay [B,H,1,1], inputs dt*x [B,H,P], keys, queries [B,G,N] -> y [B,H,P]."""
    grouped = state.mul_(decay).view(len(keys), keys.shape[1], -1, keys.shape[2])
    grouped.addcmul_(inputs.reshape(*grouped.shape[:3], 1), keys[:, :, None])
    # Not `grouped @ queries[..., None]`: CPU matmul is ten times slower on a single column than this contraction.
    return torch.einsum("bgmn,bgn->bgm", grouped, queries).view(inputs.shape)


def _parent_state(initial: Tensor, intermediate: Tensor, rows: Tensor, parent: Tensor) -> Tensor:
    """State that each row's node starts from: its parent's, or the committed one where parent [B] is -1."""
    stored = intermediate[rows, parent.clamp(min=0)].float()
    return torch.where((parent < 0)[:, None, None, None], initial, stored)
