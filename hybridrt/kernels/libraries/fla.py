"""The chunked gated delta rule of flash-linear-attention."""

from itertools import accumulate

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_chunk_gated_delta_rule
from torch import Tensor

from hybridrt.kernels.records import DeltaInputs, Prompts, StateSlots
from hybridrt.kernels.slots import initial_states, live_tokens, write_rows


def chunk_gated_delta_rule(inputs: DeltaInputs, state: StateSlots, prompts: Prompts) -> Tensor:
    """`chunk_gated_delta_rule`; its chunks start with the row, wherever the prefix ended."""
    (states, read_slots, write_slots, _), (query_start_loc, has_initial_state, plan) = state, prompts
    v, real = inputs.v, plan.num_tokens
    y, after = fla_chunk_gated_delta_rule(
        *(t[None, :real].contiguous() for t in inputs),
        initial_state=initial_states(states, read_slots, has_initial_state), output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=query_start_loc.long(),
        cu_seqlens_cpu=torch.tensor([*accumulate(plan.lengths, initial=0)]),
    )  # fmt: skip
    write_rows(states, write_slots, after)
    out = v.new_zeros(v.shape)
    out[:real] = y[0]
    return out.masked_fill_(~live_tokens(read_slots, query_start_loc, v.shape[0])[:, None, None], 0.0)
