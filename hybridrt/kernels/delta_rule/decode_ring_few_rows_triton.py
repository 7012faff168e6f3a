"""Triton `gdn_decode` of one token of few rows with a state ring, in one launch.

The formulas are in `decode_ring_triton.py`. Each program computes its head's scores for one tile of
the state: for few rows that is faster than a second launch.
"""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import FusedStep, GateWeights
from hybridrt.kernels.delta_rule.decode_classic_triton import tile_rows
from hybridrt.kernels.state.conv_and_gates_triton import (
    L2_EPS,
    conv_of_operands,
    conv_ring,
    conv_taps,
    log_decay,
    push_operands,
    strides,
)
from hybridrt.kernels.state.state_codes_triton import decode_tile, load_scales, scale_strides, state_scales

FEW_PROGRAMS = 512  # an H200 has room for some 600


@triton.jit
def _sums(a0, a1, b0, b1):  # type: ignore[no-untyped-def]
    return a0 + b0, a1 + b1


@jit_kernel
def _few_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, out_ptr, conv_ptr, states_ptr, scales_ptr,
    values_ptr, keys_ptr, gates_ptr, slots_ptr, positions_ptr, rows_ptr, start_ptr, length_ptr,
    qkv_strides: tl.constexpr, a_strides: tl.constexpr, b_strides: tl.constexpr, conv_ss: tl.constexpr,
    states_ss: tl.constexpr, states_sh: tl.constexpr, scales_ss: tl.constexpr, scales_sh: tl.constexpr,
    values_sr: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr,
    WC: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BETA_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of V, value heads, rows]."""
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    v, k, w = part * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    v_mask, k_mask = v < V, k < K
    slot, position = tl.load(slots_ptr + b).to(tl.int64), tl.load(positions_ptr + b)
    row, start, length = tl.load(rows_ptr + b).to(tl.int64), tl.load(start_ptr + b), tl.load(length_ptr + b)
    safe_slot, past, column, newest = tl.maximum(slot, 0), w < length, (start + w) % W, (start + length) % W

    state_cells = states_ptr + safe_slot * states_ss + h * states_sh + v[:, None] * K + k[None, :]
    state = tl.load(state_cells, mask=v_mask[:, None] & k_mask[None, :], other=0.0)
    if scales_ptr is not None:
        scales = load_scales(scales_ptr + safe_slot * scales_ss + h * scales_sh, v, 0, V, K, BLOCK_K)
    head, per_key_head = h // (HV // HK), HV // HK
    keys_row = keys_ptr + row * keys_sr + head * (W * K)
    keys = tl.load(keys_row + column[:, None] * K + k[None, :], mask=past[:, None] & k_mask[None, :], other=0.0)
    values_row = values_ptr + row * values_sr + h * (W * V) + v
    values = tl.load(values_row[None, :] + column[:, None] * V, mask=past[:, None] & v_mask[None, :], other=0.0)
    gates_row = gates_ptr + row * gates_sr + h * W
    total = tl.sum(tl.load(gates_row + column, mask=past, other=0.0), axis=0)
    later = tl.load(gates_row + (start + w + 1) % W, mask=w + 1 < length, other=0.0)
    source, conv_row = qkv_ptr + b * qkv_strides[0], conv_ptr + safe_slot * conv_ss
    q_channel, k_channel, v_channel = head * K + k, (HK + head) * K + k, 2 * HK * K + h * V + v
    k_ring, q_ring = conv_ring(conv_row, k_channel, k_mask, WC), conv_ring(conv_row, q_channel, k_mask, WC)
    v_ring = conv_ring(conv_row, v_channel, v_mask, WC)
    k_taps = conv_taps(weight_ptr, k_channel, k_mask, TAPS, WC)
    q_taps = conv_taps(weight_ptr, q_channel, k_mask, TAPS, WC)
    v_taps = conv_taps(weight_ptr, v_channel, v_mask, TAPS, WC)
    A_log, dt_bias = tl.load(A_log_ptr + h), tl.load(dt_bias_ptr + h)
    begin(PDL)
    out = out_ptr + b * (HV * V) + h * V + v
    if slot < 0:
        tl.store(out, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=v_mask)
        return

    k_new = tl.load(source + k_channel, mask=k_mask, other=0.0)
    q_new = tl.load(source + q_channel, mask=k_mask, other=0.0)
    v_new = tl.load(source + v_channel, mask=v_mask, other=0.0)
    gate = log_decay(tl.load(a_ptr + b * a_strides[0] + h), A_log, dt_bias)
    beta = BETA_SCALE * tl.sigmoid(tl.load(b_ptr + b * b_strides[0] + h).to(tl.float32))
    key = conv_of_operands(k_new, k_ring, k_taps, None, bias_ptr, k_channel, k_mask, position, TAPS, WC).to(tl.float32)
    query = conv_of_operands(q_new, q_ring, q_taps, None, bias_ptr, q_channel, k_mask, position, TAPS, WC).to(
        tl.float32
    )
    value = conv_of_operands(v_new, v_ring, v_taps, None, bias_ptr, v_channel, v_mask, position, TAPS, WC).to(
        tl.float32
    )
    k_norm, q_norm = tl.reduce((key * key, query * query), 0, _sums)
    ring_key = (key * tl.rsqrt(k_norm + L2_EPS)).to(keys_ptr.dtype.element_ty)
    query = query.to(keys_ptr.dtype.element_ty).to(tl.float32)
    key, scale = ring_key.to(tl.float32), tl.rsqrt(q_norm + L2_EPS) * (K**-0.5)

    left, history = tl.exp(total + gate), tl.exp(tl.cumsum(later, axis=0, reverse=True) + gate)
    keys, values = keys.to(tl.float32), values.to(tl.float32)
    if scales_ptr is None:
        state = state.to(tl.float32)
    else:
        state = decode_tile(state, scales)
    key_scores = tl.sum(keys * key[None, :], axis=1) * history
    query_scores = tl.sum(keys * query[None, :], axis=1) * history
    by_key = left * tl.sum(state * key[None, :], axis=1) + tl.sum(values * key_scores[:, None], axis=0)
    by_query = left * tl.sum(state * query[None, :], axis=1) + tl.sum(values * query_scores[:, None], axis=0)
    stored = (beta * (value - by_key)).to(values_ptr.dtype.element_ty)
    result = scale * (by_query + tl.sum(key * query, axis=0) * stored.to(tl.float32))
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=v_mask)
    tl.store(values_row + newest * V, stored, mask=v_mask)
    push_operands(v_new, v_ring, conv_row, v_channel, v_mask, position, False, TAPS, WC)
    if part == 0:
        tl.store(gates_row + newest, gate)
        if h % per_key_head == 0:
            tl.store(keys_row + newest * K + k, ring_key, mask=k_mask)
            push_operands(k_new, k_ring, conv_row, k_channel, k_mask, position, False, TAPS, WC)
            push_operands(q_new, q_ring, conv_row, q_channel, k_mask, position, False, TAPS, WC)


def is_few(qkv: Tensor, a: Tensor, conv_weight: Tensor, states: Tensor) -> bool:
    """Whether one launch is faster than two: one token each of few rows, with a decay for a head and a conv."""
    (batch, tokens, _), (_, heads, value_dim, _) = qkv.shape, states.shape
    fit = batch * heads * cdiv(value_dim, tile_rows(states)) <= FEW_PROGRAMS
    return fit and tokens == 1 and a.ndim == 3 and conv_weight.shape[1] > 0


def gdn_few_triton(qkv: Tensor, a: Tensor, b: Tensor, weights: GateWeights, step: FusedStep) -> Tensor:
    """`gdn_decode` of one token of few rows with a ring."""
    conv, states, ring = step.conv_state.conv, step.state.states, step.ring
    assert ring is not None
    batch, _, channels = qkv.shape
    _, value_heads, value_dim, key_dim = states.shape
    out = qkv.new_empty((batch, 1, value_heads, value_dim))
    block_v, scales = tile_rows(states), state_scales(step.state)
    _few_kernel[cdiv(value_dim, block_v), value_heads, batch](
        qkv, a, b, step.conv_weights.weight, step.conv_weights.bias, weights.A_log, weights.dt_bias, out, conv, states,
        scales, ring.values, ring.keys, ring.gates,
        step.conv_state.read_state_slots, step.conv_state.start_positions, ring.rows, ring.start, ring.length,
        strides(qkv), strides(a), strides(b),
        conv.stride(0), states.stride(0), states.stride(1), *scale_strides(scales),
        ring.values.stride(0), ring.keys.stride(0), ring.gates.stride(0),
        HK=(channels - value_heads * value_dim) // (2 * key_dim), HV=value_heads, K=key_dim, V=value_dim,
        W=ring.gates.shape[2], TAPS=step.conv_weights.weight.shape[1], WC=conv.shape[2], BLOCK_V=block_v,
        BLOCK_K=next_power_of_2(key_dim), BLOCK_W=next_power_of_2(ring.gates.shape[2]),
        BETA_SCALE=weights.beta_scale, num_warps=4, **pdl(qkv.device),
    )  # fmt: skip
    return out
