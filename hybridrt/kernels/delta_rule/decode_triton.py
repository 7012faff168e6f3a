"""Triton kernel of the recurrent gated delta rule, and the choice of kernels for `gdn_decode`.

A program keeps BLOCK_V rows of a head's state in registers over the T tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import DeltaInputs, FusedStep, GateWeights, StateSlots
from hybridrt.kernels.delta_rule.decode import conved_inputs, split_qkv
from hybridrt.kernels.delta_rule.decode_classic_triton import decode_classic, tile_rows
from hybridrt.kernels.delta_rule.decode_ring_few_rows_triton import gdn_few_triton, is_few
from hybridrt.kernels.delta_rule.decode_ring_triton import gdn_ring_triton
from hybridrt.kernels.state.causal_conv1d_triton import causal_conv1d_update_triton
from hybridrt.kernels.state.conv_and_gates_triton import L2_EPS, log_decay, state_before, strides


@triton.jit
def _normalized(pointers, mask):  # type: ignore[no-untyped-def]
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + L2_EPS))


@jit_kernel
def _recurrent_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, out_ptr, A_log_ptr, dt_bias_ptr,
    states_ptr, stored_ptr, read_slots_ptr, write_slots_ptr, rows_ptr, predecessors_ptr,
    q_s: tl.constexpr, k_s: tl.constexpr, v_s: tl.constexpr, a_s: tl.constexpr, b_s: tl.constexpr,
    states_ss: tl.constexpr, stored_s: tl.constexpr, predecessors_sb: tl.constexpr,
    T: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BETA_SCALE: tl.constexpr,
    LOWER_BOUND: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = h // (HV // HK)
    i, j = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    i_mask, j_mask = i < K, j < V
    out = out_ptr + row * (T * HV * V) + h * V + j
    read, write = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(write_slots_ptr + row).to(tl.int64)
    if read < 0:
        for t in tl.static_range(T):
            tl.store(out + t * (HV * V), tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=j_mask)
        return
    q, k = q_ptr + row * q_s[0] + key_head * q_s[2] + i, k_ptr + row * k_s[0] + key_head * k_s[2] + i
    v = v_ptr + row * v_s[0] + h * v_s[2] + j
    tile = h * (V * K) + j[:, None] * K + i[None, :]
    mask = j_mask[:, None] & i_mask[None, :]
    initial = tl.load(states_ptr + read * states_ss + tile, mask=mask, other=0.0).to(tl.float32)
    state = initial
    stored = None if stored_ptr is None else stored_ptr + tl.load(rows_ptr + row).to(tl.int64) * stored_s[0] + tile
    for t in range(T):
        if predecessors_ptr is not None:
            state = state_before(predecessors_ptr + row * predecessors_sb, stored, stored_s[1], t, initial, mask)
        a_token = a_ptr + row * a_s[0] + t * a_s[1] + (h * a_s[2] if CHANNELS else h)
        b_token = b_ptr + row * b_s[0] + t * b_s[1] + h
        g = tl.load(a_token + i, mask=i_mask, other=0.0) if CHANNELS else tl.load(a_token)
        g, beta = g.to(tl.float32), tl.load(b_token).to(tl.float32)
        if A_log_ptr is not None:
            dt_bias = tl.load(dt_bias_ptr + h * K + i, mask=i_mask, other=0.0) if CHANNELS else tl.load(dt_bias_ptr + h)
            g = log_decay(g, tl.load(A_log_ptr + h), dt_bias, LOWER_BOUND)
            beta = BETA_SCALE * tl.sigmoid(beta)
        if CHANNELS:
            g = g[None, :]
        query, key = _normalized(q + t * q_s[1], i_mask), _normalized(k + t * k_s[1], i_mask)
        value = tl.load(v + t * v_s[1], mask=j_mask, other=0.0).to(tl.float32)
        state *= tl.exp(g)
        corrected = beta * (value - tl.sum(state * key[None, :], 1))
        state += corrected[:, None] * key[None, :]
        result = tl.sum(state * query[None, :], 1) * (K**-0.5)
        tl.store(out + t * (HV * V), result.to(out_ptr.dtype.element_ty), mask=j_mask)
        rounded = state.to(states_ptr.dtype.element_ty)
        if stored_ptr is not None:
            tl.store(stored + t * stored_s[1], rounded, mask=mask)
        state = rounded.to(tl.float32)
    if stored_ptr is None:
        tl.store(states_ptr + write * states_ss + tile, state.to(states_ptr.dtype.element_ty), mask=mask)


def gdn_decode_triton(qkv: Tensor, a: Tensor, b: Tensor, *, weights: GateWeights, step: FusedStep) -> Tensor:
    """Chooses the launches of `gdn_decode`: with a state ring, of one token without a ring, or of several."""
    if step.ring is not None:
        run = gdn_few_triton if is_few(qkv, a, step.conv_weights.weight, step.state.states) else gdn_ring_triton
        return run(qkv, a, b, weights, step)
    if step.state.intermediate is None and qkv.shape[1] == 1 and not step.conv_weights.applied_before:
        return decode_classic(qkv, a, b, weights, step)
    # Two launches: one would repeat the conv for every tile of the state.
    conved = conved_inputs(qkv, step, causal_conv1d_update_triton)
    inputs = DeltaInputs(*split_qkv(conved, step.state.states), a, b)
    return recurrent_gated_delta_rule_triton(inputs, step.state, weights)


def recurrent_gated_delta_rule_triton(
    inputs: DeltaInputs, state: StateSlots, weights: GateWeights | None = None
) -> Tensor:
    """`recurrent_gated_delta_rule` in one launch."""
    v, states, kept = inputs.v, state.states, state.intermediate
    stored, rows, predecessors = (None, None, None) if kept is None else (kept.stored, kept.rows, kept.predecessors)
    A_log, dt_bias = (None, None) if weights is None else (weights.A_log, weights.dt_bias)
    beta_scale, lower_bound = (1.0, None) if weights is None else (weights.beta_scale, weights.lower_bound)
    _, value_heads, value_dim, key_dim = states.shape
    out, tile = v.new_empty(v.shape), recurrent_tile(states)
    _recurrent_kernel[len(v), value_heads, cdiv(value_dim, tile["BLOCK_V"])](
        *inputs, out, A_log, dt_bias, states, stored, state.read_state_slots, state.write_state_slots, rows,
        predecessors, *map(strides, inputs), states.stride(0), strides(stored), strides(predecessors)[0],
        T=v.shape[1], HK=inputs.q.shape[2], HV=value_heads, K=key_dim, V=value_dim,
        BETA_SCALE=beta_scale, LOWER_BOUND=lower_bound, CHANNELS=inputs.g.ndim > inputs.beta.ndim, **tile,
        **pdl(v.device),
    )  # fmt: skip
    return out


def recurrent_tile(states: Tensor) -> dict[str, int]:
    """How a program cuts the states [S+1, Hv, V, K], as measured on an H200. A warp has whole rows then."""
    rows, columns = (next_power_of_2(size) for size in states.shape[2:])
    return {"BLOCK_V": min(tile_rows(states), rows), "BLOCK_K": columns, "num_warps": 2}
