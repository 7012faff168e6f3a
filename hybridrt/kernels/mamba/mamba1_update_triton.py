"""Triton kernel of `mamba1_update`: a program keeps the states of BLOCK_I channels of one row in registers."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import BCNorms, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.state.conv_and_gates_triton import silu, softplus, state_before, strides

# Elements of a program's states: 8 a thread.
_TILE = 1024


@triton.jit
def _normed(source, weight, eps, mask, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """`source` [N] in float32; with weights, RMS-normed and rounded to its dtype."""
    raw = tl.load(source, mask=mask, other=0.0)
    out = raw.to(tl.float32)
    if weight is not None:
        out = (out * tl.rsqrt(tl.sum(out * out, axis=0) / N + eps) * weight).to(raw.dtype).to(tl.float32)
    return out


@jit_kernel
def _mamba1_update_kernel(  # type: ignore[no-untyped-def]
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, z_ptr, D_ptr, dt_bias_ptr, out_ptr, states_ptr, stored_ptr,
    read_slots_ptr, write_slots_ptr, rows_ptr, predecessors_ptr, B_norm_ptr, C_norm_ptr, norm_eps,
    x_strides: tl.constexpr, dt_strides: tl.constexpr, B_strides: tl.constexpr, C_strides: tl.constexpr,
    z_strides: tl.constexpr, states_ss: tl.constexpr, stored_strides: tl.constexpr, predecessors_sb: tl.constexpr,
    T: tl.constexpr, CHANNELS: tl.constexpr, N: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    n = tl.arange(0, BLOCK_N)
    i_mask, n_mask = i < CHANNELS, n < N
    mask = i_mask[:, None] & n_mask[None, :]
    tile = i[:, None] * N + n[None, :]
    A = tl.load(A_ptr + tile, mask=mask, other=0.0)
    D = tl.load(D_ptr + i, mask=i_mask, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + i, mask=i_mask, other=0.0).to(tl.float32)
    B_norm, C_norm = B_norm_ptr, C_norm_ptr
    if B_norm_ptr is not None:
        B_norm, C_norm = tl.load(B_norm_ptr + n, mask=n_mask), tl.load(C_norm_ptr + n, mask=n_mask)
    begin(PDL)
    out = out_ptr + b * (T * CHANNELS) + i
    read = tl.load(read_slots_ptr + b).to(tl.int64)
    if read < 0:
        for t in range(T):
            tl.store(out + t * CHANNELS, tl.zeros([BLOCK_I], out_ptr.dtype.element_ty), mask=i_mask)
        return

    initial = tl.load(states_ptr + read * states_ss + tile, mask=mask, other=0.0).to(tl.float32)
    state = initial
    stored = None if stored_ptr is None else stored_ptr + tl.load(rows_ptr + b).to(tl.int64) * stored_strides[0] + tile
    for t in range(T):
        if predecessors_ptr is not None:
            state = state_before(predecessors_ptr + b * predecessors_sb, stored, stored_strides[1], t, initial, mask)
        dt = tl.load(dt_ptr + b * dt_strides[0] + t * dt_strides[1] + i, mask=i_mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + b * x_strides[0] + t * x_strides[1] + i, mask=i_mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + b * z_strides[0] + t * z_strides[1] + i, mask=i_mask, other=0.0).to(tl.float32)
        key = _normed(B_ptr + b * B_strides[0] + t * B_strides[1] + n, B_norm, norm_eps, n_mask, N)
        query = _normed(C_ptr + b * C_strides[0] + t * C_strides[1] + n, C_norm, norm_eps, n_mask, N)
        step = softplus(dt + dt_bias)
        state = state * tl.exp(A * step[:, None]) + (step * x)[:, None] * key[None, :]
        y = (tl.sum(state * query[None, :], axis=1) + D * x) * silu(z)
        tl.store(out + t * CHANNELS, y.to(out_ptr.dtype.element_ty), mask=i_mask)
        rounded = state.to(states_ptr.dtype.element_ty)
        if stored_ptr is not None:
            tl.store(stored + t * stored_strides[1], rounded, mask=mask)
        state = rounded.to(tl.float32)
    if stored_ptr is None:
        write = tl.load(write_slots_ptr + b).to(tl.int64)
        tl.store(states_ptr + write * states_ss + tile, state.to(states_ptr.dtype.element_ty), mask=mask)


def mamba1_update_triton(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, norms: BCNorms | None = None
) -> Tensor:
    """`mamba1_update` in one launch."""
    x, states, kept = inputs.x, state.states, state.intermediate
    stored, rows, predecessors = (None, None, None) if kept is None else (kept.stored, kept.rows, kept.predecessors)
    batch, tokens, channels = x.shape
    out = x.new_empty((batch, tokens, channels))
    block_n = next_power_of_2(states.shape[2])
    block_i = max(1, _TILE // block_n)
    _mamba1_update_kernel[cdiv(channels, block_i), batch](
        x, inputs.dt, weights.A, inputs.B, inputs.C, inputs.z, weights.D, weights.dt_bias, out, states, stored,
        state.read_state_slots, state.write_state_slots, rows, predecessors,
        *(norms or (None, None, 0.0)),
        strides(x), strides(inputs.dt), strides(inputs.B), strides(inputs.C), strides(inputs.z), states.stride(0),
        strides(stored),
        strides(predecessors)[0], T=tokens, CHANNELS=channels, N=states.shape[2], BLOCK_I=block_i, BLOCK_N=block_n,
        num_warps=4, **pdl(x.device),
    )  # fmt: skip
    return out
