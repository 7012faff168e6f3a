"""Triton kernel of `commit_intermediate`: one launch, no gathered temporary."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.pdl_triton import begin, pdl
from hybridrt.kernels.records import IntermediateStates

_BLOCK = 4096


@triton.jit
def _commit_kernel(  # type: ignore[no-untyped-def]
    temporal_ptr, intermediate_ptr, slots_ptr, rows_ptr, accepted_ptr,
    temporal_ss: tl.constexpr, intermediate_sr: tl.constexpr, intermediate_st: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(1)
    slot = tl.load(slots_ptr + b).to(tl.int64)
    accepted = tl.load(accepted_ptr + b).to(tl.int64)
    if (slot < 0) | (accepted <= 0):
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = intermediate_ptr + tl.load(rows_ptr + b).to(tl.int64) * intermediate_sr + (accepted - 1) * intermediate_st
    tl.store(temporal_ptr + slot * temporal_ss + i, tl.load(source + i, mask=i < SIZE), mask=i < SIZE)


def commit_intermediate_triton(
    states: Tensor, intermediate: IntermediateStates, state_slots: Tensor, accepted: Tensor
) -> None:
    """`commit_intermediate`; each state is contiguous in its pool."""
    stored, rows, _ = intermediate
    size = states[0].numel()
    _commit_kernel[triton.cdiv(size, _BLOCK), len(state_slots)](
        states, stored, state_slots, rows, accepted, states.stride(0), *stored.stride()[:2],
        SIZE=size, BLOCK=_BLOCK, num_warps=4, **pdl(states.device),
    )  # fmt: skip
