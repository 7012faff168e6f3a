"""Triton kernels of `commit_intermediate` and `commit_conv_window`: one launch for all layers."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import IntermediateStates

_BLOCK, _CHANNELS = 4096, 256


@triton.jit
def _stored(stored_ptr, layer_stride, strides: tl.constexpr, rows_ptr, b, node):  # type: ignore[no-untyped-def]
    """Points at a node of row b, in the program's layer; `strides` of rows and nodes."""
    row, layer = tl.load(rows_ptr + b).to(tl.int64), tl.program_id(2).to(tl.int64)
    return stored_ptr + layer * layer_stride + row * strides[0] + node * strides[1]


@jit_kernel
def _commit_states_kernel(  # type: ignore[no-untyped-def]
    states_ptr, stored_ptr, slots_ptr, rows_ptr, last_ptr, states_sl, stored_sl,
    states_ss: tl.constexpr, stored_strides: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, last = tl.load(slots_ptr + b).to(tl.int64), tl.load(last_ptr + b).to(tl.int64)
    if (slot < 0) | (last <= 0):
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = _stored(stored_ptr, stored_sl, stored_strides, rows_ptr, b, last - 1)
    target = states_ptr + layer * states_sl + slot * states_ss
    tl.store(target + i, tl.load(source + i, mask=i < SIZE), mask=i < SIZE)


@jit_kernel
def _commit_windows_kernel(  # type: ignore[no-untyped-def]
    conv_ptr, stored_ptr, slots_ptr, rows_ptr, last_ptr, positions_ptr, conv_sl, stored_sl,
    conv_ss: tl.constexpr, stored_strides: tl.constexpr, C: tl.constexpr, WC: tl.constexpr, INPUTS: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot, last = tl.load(slots_ptr + b).to(tl.int64), tl.load(last_ptr + b).to(tl.int64)
    if (slot < 0) | (last <= 0):
        return
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    source = _stored(stored_ptr, stored_sl, stored_strides, rows_ptr, b, last - 1) + channel * INPUTS
    ring = conv_ptr + layer * conv_sl + slot * conv_ss + channel * WC
    position = tl.load(positions_ptr + b)
    for t in tl.static_range(INPUTS):
        column = (position + (t - (INPUTS - 1))) & (WC - 1)
        tl.store(ring + column, tl.load(source + t, mask=channel < C), mask=channel < C)


def commit_intermediate_triton(
    states: Tensor, intermediate: IntermediateStates, state_slots: Tensor, last: Tensor
) -> None:
    """`commit_intermediate`; each state is contiguous in its pool."""
    stored = intermediate.stored
    size = states[0, 0].numel()
    _commit_states_kernel[cdiv(size, _BLOCK), len(state_slots), len(states)](
        states, stored, state_slots, intermediate.rows, last, states.stride(0), stored.stride(0), states.stride(1),
        stored.stride()[1:3], SIZE=size, BLOCK=_BLOCK, num_warps=4, **pdl(states.device),
    )  # fmt: skip


def commit_conv_window_triton(
    conv: Tensor, intermediate: IntermediateStates, state_slots: Tensor, last: Tensor, positions: Tensor
) -> None:
    """`commit_conv_window`; rings and windows are contiguous."""
    stored, (layers, _, channels, width) = intermediate.stored, conv.shape
    _commit_windows_kernel[cdiv(channels, _CHANNELS), len(state_slots), layers](
        conv, stored, state_slots, intermediate.rows, last, positions, conv.stride(0), stored.stride(0),
        conv.stride(1), stored.stride()[1:3], C=channels, WC=width, INPUTS=stored.shape[-1], BLOCK_C=_CHANNELS,
        num_warps=4, **pdl(conv.device),
    )  # fmt: skip
