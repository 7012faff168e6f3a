"""Operations of mamba-ssm: the chunked scan and the grouped gated norm."""

from itertools import groupby

import torch
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from hybridrt.kernels.core.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.core.slots import initial_states, real_tokens, write_rows
from hybridrt.kernels.libraries.common import refuse

LIBRARY = "mamba-ssm"


def mamba2_chunk_scan(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, out: Tensor | None = None
) -> Tensor:
    """Neighbours of equal length go in one call: the library's ragged form accepts no states."""
    states = state.states
    out = torch.zeros(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device) if out is None else out.zero_()
    before = initial_states(states, state.read_state_slots, prompts.has_initial_state).to(states.dtype)
    row = start = 0
    for length, group in groupby(prompts.plan.lengths):
        count = len(list(group))
        tokens, rows = slice(start, start + count * length), slice(row, row + count)
        row, start = rows.stop, tokens.stop
        if length == 0:
            continue
        x, dt, B, C, z = (None if t is None else t[tokens].unflatten(0, (count, length)) for t in inputs)
        y, before[rows] = mamba_chunk_scan_combined(
            x, dt, weights.A, B, C, prompts.plan.chunk_size, D=weights.D, dt_bias=weights.dt_bias, dt_softplus=True,
            z=z, dt_limit=weights.dt_limit, initial_states=before[rows], return_final_states=True,
        )  # fmt: skip
        out[tokens] = y.flatten(0, 1)
    write_rows(states, state.write_state_slots, before)
    return out.masked_fill_(~real_tokens(state.read_state_slots, prompts.query_start_loc, len(out))[:, None, None], 0.0)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_before_gate: bool,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    refuse(LIBRARY, "gated norm", None if activation == "silu" else f"its gate is SiLU, not {activation}")
    return rmsnorm_fn(x, weight, None, z=gate, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)
