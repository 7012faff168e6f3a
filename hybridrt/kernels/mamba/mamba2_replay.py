"""Plain-torch `mamba2_decode` after the conv, in replay mode: reads the checkpoint and the ring.

With s_j the sum of A dt over the ring up to entry j, and S the checkpoint:

    y_t = exp(s_t) S C_t + sum_{j <= t} exp(s_t - s_j) dt_j (B_j . C_t) x_j
"""

import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import decay_sums, exp_of, finite_rates
from hybridrt.kernels.core.records import SSMInputs, SSMWeights, StateRing, StateSlots
from hybridrt.kernels.core.slots import pad_mask, write_columns
from hybridrt.kernels.mamba.mamba2_scan import skip_and_gate, time_step
from hybridrt.kernels.state.state_codes import read_states
from hybridrt.kernels.state.state_ring import ring_entries


def mamba2_replay(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, ring: StateRing) -> Tensor:
    """Outputs of T new tokens of each of B rows, [B, T, H, P] in x's dtype.

    Their inputs enter the ring at (start + length + t) mod W. The checkpoints in `state` are only
    read.
    """
    x, slots, gates, length = inputs.x, state.read_state_slots, ring.gates, ring.length
    new = torch.arange(x.shape[1], device=x.device)
    column = (ring.start[:, None] + length[:, None] + new) % gates.shape[2]
    step = time_step(inputs.dt, weights.dt_bias, weights.dt_limit)
    for tensor, entries in ((ring.values, x), (ring.keys, inputs.B), (gates, step)):
        write_columns(tensor, slots, column, entries, ring.rows)
    v, k, g = ring_entries(ring.values, ring.keys, gates, ring.rows, ring.start, length + x.shape[1])
    y = _read(read_states(state), v, k, g, weights.A, inputs.C.float(), length[:, None] + new)
    return skip_and_gate(y, x, weights.D, inputs.z).masked_fill_(pad_mask(slots, 4), 0.0).to(x.dtype)


def _read(state: Tensor, v: Tensor, k: Tensor, g: Tensor, A: Tensor, C: Tensor, end: Tensor) -> Tensor:
    """Returns [B, T, H, P]. Queries C [B, T, G, N] see the state and the ring's entries up to end
    [B, T].
    """
    entry = torch.arange(g.shape[1], device=g.device)
    sums = decay_sums(g * finite_rates(A), 1)
    at_end = sums.gather(1, end.long()[:, :, None].expand(-1, -1, g.shape[2]))
    unseen = (entry > end[:, :, None])[..., None]
    weight = exp_of((at_end[:, :, None] - sums[:, None]).masked_fill_(unseen, -torch.inf)) * g[:, None]

    scores = torch.einsum("btgn,bwgn->btwg", C, k)[..., None]
    weight = (weight.unflatten(3, (k.shape[2], -1)) * scores).flatten(3)
    from_state = torch.einsum("bgmn,btgn->btgm", state.view(len(C), C.shape[2], -1, C.shape[3]), C)
    y = torch.einsum("btwh,bwhp->bthp", weight, v)
    return y.addcmul_(from_state.reshape(y.shape), exp_of(at_end)[..., None])
