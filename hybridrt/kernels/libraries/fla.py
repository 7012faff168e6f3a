"""The chunked gated delta rule of flash-linear-attention."""

from itertools import accumulate
from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from torch import Tensor

from hybridrt.kernels.core.records import DeltaInputs, GateWeights, Prompts, StateSlots
from hybridrt.kernels.core.slots import initial_states, real_tokens, write_rows
from hybridrt.kernels.delta_rule.delta_rule import with_gates


def chunk_gated_delta_rule(
    inputs: DeltaInputs, state: StateSlots, prompts: Prompts, weights: GateWeights | None = None
) -> Tensor:
    """Chunks start with the row, not at absolute positions."""
    v, real = inputs.v, prompts.plan.num_tokens
    if inputs.g.ndim > inputs.beta.ndim:
        chunks, options = chunk_kda, gate_arguments(weights)
    else:
        chunks, options, inputs = fla_chunk_gated_delta_rule, {}, with_gates(inputs, weights)
    y, after = chunks(
        *(t[None, :real].contiguous() for t in inputs),
        initial_state=initial_states(state.states, state.read_state_slots, prompts.has_initial_state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=prompts.query_start_loc.long(),
        cu_seqlens_cpu=torch.tensor([*accumulate(prompts.plan.lengths, initial=0)], dtype=torch.int64), **options,
    )  # fmt: skip
    write_rows(state.states, state.write_state_slots, after)
    out = v.new_zeros(v.shape)
    out[:real] = y[0]
    live = real_tokens(state.read_state_slots, prompts.query_start_loc, v.shape[0])
    return out.masked_fill(~live[:, None, None], 0.0)


def gate_arguments(weights: GateWeights | None) -> dict[str, Any]:
    """Arguments with which KDA's functions compute gates from raw inputs; empty without weights."""
    if weights is None:
        return {}
    return {
        "A_log": weights.A_log, "dt_bias": weights.dt_bias.flatten(), "lower_bound": weights.lower_bound,
        "safe_gate": weights.lower_bound is not None, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": weights.beta_scale == 2.0,
    }  # fmt: skip
