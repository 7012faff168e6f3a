"""Operations of mamba-ssm: the chunked scan, the state update of one token and the grouped gated norm."""

from itertools import groupby

import torch
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update as mamba_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from hybridrt.kernels.libraries.common import broadcast_heads, clamped, refuse
from hybridrt.kernels.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.slots import initial_states, live_tokens, pad_mask, write_rows

LIBRARY = "mamba-ssm"


def mamba2_chunk_scan(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, out: Tensor | None = None
) -> Tensor:
    """`mamba2_chunk_scan`: neighbours of equal length in one call; its own ragged form takes no states."""
    (A, D, dt_bias, dt_limit), (states, read_slots, write_slots, _) = weights, state
    query_start_loc, has_initial_state, plan, _ = prompts
    out = torch.zeros(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device) if out is None else out.zero_()
    before = initial_states(states, read_slots, has_initial_state).to(states.dtype)
    row = start = 0
    for length, group in groupby(plan.lengths):
        count = len(list(group))
        tokens, rows = slice(start, start + count * length), slice(row, row + count)
        row, start = rows.stop, tokens.stop
        if length == 0:
            continue
        x, dt, B, C, z = (None if t is None else t[tokens].unflatten(0, (count, length)) for t in inputs)
        y, before[rows] = mamba_chunk_scan_combined(
            x, dt, A, B, C, plan.chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True, z=z, dt_limit=dt_limit,
            initial_states=before[rows], return_final_states=True,
        )  # fmt: skip
        out[tokens] = y.flatten(0, 1)
    write_rows(states, write_slots, before)
    return out.masked_fill_(~live_tokens(read_slots, query_start_loc, len(out))[:, None, None], 0.0)


def selective_state_update(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, out: Tensor | None = None
) -> Tensor:
    """`selective_state_update` of one token. It has no padding: such rows update the scratch slot 0."""
    (x, dt, B, C, z), (A, D, dt_bias, dt_limit) = inputs, weights
    states, read_slots, write_slots, intermediate = state
    refuse(
        LIBRARY, "state update",
        "it takes one token" if x.shape[1] > 1 or intermediate is not None else None,
        "it reads and writes the same slot" if read_slots is not write_slots else None,
        clamped(dt_limit),
    )  # fmt: skip
    heads, dim, columns = states.shape[1:]
    y: Tensor = mamba_state_update(
        states, x[:, 0], broadcast_heads(dt[:, 0], dim), A[:, None, None].expand(heads, dim, columns), B[:, 0], C[:, 0],
        D=None if D is None else broadcast_heads(D, dim), z=None if z is None else z[:, 0],
        dt_bias=None if dt_bias is None else broadcast_heads(dt_bias, dim), dt_softplus=True,
        # int64: slot times state bytes passes 2^31.
        state_batch_indices=read_slots.clamp(min=0).long(),
    )  # fmt: skip
    y = y.unsqueeze(1).masked_fill_(pad_mask(read_slots, 4), 0.0)
    return y if out is None else out.copy_(y)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_before_gate: bool,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """`gated_rms_norm` with SiLU."""
    refuse(LIBRARY, "gated norm", None if activation == "silu" else f"its gate is SiLU, not {activation}")
    return rmsnorm_fn(x, weight, None, z=gate, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)
