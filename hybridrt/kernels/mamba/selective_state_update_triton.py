"""Triton kernel of `selective_state_update`: a program keeps rows of a head's state in registers."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_width, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.state.conv_and_gates_triton import silu, state_before, strides, time_step


@jit_kernel
def _state_update_kernel(  # type: ignore[no-untyped-def]
    x_ptr, B_ptr, C_ptr, dt_ptr, z_ptr, out_ptr, A_ptr, D_ptr, dt_bias_ptr,
    states_ptr, stored_ptr, read_slots_ptr, write_slots_ptr, rows_ptr, predecessors_ptr,
    x_strides: tl.constexpr, B_strides: tl.constexpr, C_strides: tl.constexpr, dt_strides: tl.constexpr,
    z_strides: tl.constexpr, out_strides: tl.constexpr, states_ss: tl.constexpr, stored_strides: tl.constexpr,
    predecessors_sb: tl.constexpr, dt_min, dt_max,
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    g = h // HEADS_PER_GROUP
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_mask, n_mask = p < P, n < N
    mask = p_mask[:, None] & n_mask[None, :]
    out = out_ptr + b * out_strides[0] + h * P + p
    read = tl.load(read_slots_ptr + b).to(tl.int64)
    if read < 0:
        for t in range(T):
            tl.store(out + t * out_strides[1], tl.zeros([BLOCK_P], out_ptr.dtype.element_ty), mask=p_mask)
        return

    write = tl.load(write_slots_ptr + b).to(tl.int64)
    tile = h * (P * N) + p[:, None] * N + n[None, :]
    A = tl.load(A_ptr + h)
    initial = tl.load(states_ptr + read * states_ss + tile, mask=mask, other=0.0).to(tl.float32)
    state = initial
    stored = None if stored_ptr is None else stored_ptr + tl.load(rows_ptr + b).to(tl.int64) * stored_strides[0] + tile
    for t in range(T):
        if predecessors_ptr is not None:
            state = state_before(predecessors_ptr + b * predecessors_sb, stored, stored_strides[1], t, initial, mask)
        dt = time_step(dt_ptr + b * dt_strides[0] + t * dt_strides[1] + h, dt_bias_ptr, h, None, dt_min, dt_max)
        x = _load(x_ptr + b * x_strides[0] + t * x_strides[1] + h * x_strides[2] + p, p_mask, SILU)
        key = _load(B_ptr + b * B_strides[0] + t * B_strides[1] + g * B_strides[2] + n, n_mask, SILU)
        query = _load(C_ptr + b * C_strides[0] + t * C_strides[1] + g * C_strides[2] + n, n_mask, SILU)
        state = state * tl.exp(A * dt) + (dt * x)[:, None] * key[None, :]
        y = tl.sum(state * query[None, :], axis=1)
        if D_ptr is not None:
            y += tl.load(D_ptr + h).to(tl.float32) * x
        if z_ptr is not None:
            y *= silu(_load(z_ptr + b * z_strides[0] + t * z_strides[1] + h * z_strides[2] + p, p_mask, False))
        tl.store(out + t * out_strides[1], y.to(out_ptr.dtype.element_ty), mask=p_mask)
        rounded = state.to(states_ptr.dtype.element_ty)
        if stored_ptr is not None:
            tl.store(stored + t * stored_strides[1], rounded, mask=mask)
        state = rounded.to(tl.float32)
    if stored_ptr is None:
        tl.store(states_ptr + write * states_ss + tile, state.to(states_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load(pointer, mask, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        value = silu(value).to(pointer.dtype.element_ty).to(tl.float32)
    return value


def selective_state_update_triton(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, out: Tensor | None = None, *, silu_inputs: bool = False
) -> Tensor:
    """`selective_state_update` in one launch. With `silu_inputs` x, B and C are taken before their SiLU."""
    x, B, states, kept = inputs.x, inputs.B, state.states, state.intermediate
    stored, rows, predecessors = (None, None, None) if kept is None else (kept.stored, kept.rows, kept.predecessors)
    batch, tokens, heads, dim = x.shape
    if out is None:
        out = x.new_empty((batch, tokens, heads, dim))
    tile = update_tile(tokens, states)
    _state_update_kernel[cdiv(dim, tile["BLOCK_P"]), heads, batch](
        x, B, inputs.C, inputs.dt, inputs.z, out, weights.A, weights.D, weights.dt_bias, states, stored,
        state.read_state_slots, state.write_state_slots, rows, predecessors,
        strides(x), strides(B), strides(inputs.C), strides(inputs.dt), strides(inputs.z), strides(out),
        states.stride(0), strides(stored), strides(predecessors)[0], *weights.dt_limit,
        T=tokens, H=heads, P=dim, N=states.shape[3], HEADS_PER_GROUP=heads // B.shape[2], SILU=silu_inputs, **tile,
        **pdl(x.device),
    )  # fmt: skip
    return out


def update_tile(tokens: int, states: Tensor) -> dict[str, int]:
    """Rows of a head's state [P, N] in one program: 4 KiB of them, as measured on an H200; with
    several tokens as many as registers hold during the loop.
    """
    _, _, dim, state_dim = states.shape
    block_n = dot_width(state_dim)
    numbers = 4096 if tokens > 1 else 4096 // states.element_size()
    warps = 2 if tokens == 1 else 8 if block_n > 128 else 4
    return {
        "BLOCK_P": min(next_power_of_2(dim), max(1, numbers // block_n)), "BLOCK_N": block_n, "num_warps": warps,
    }  # fmt: skip
