"""Triton `gdn_decode` of one token without a state ring, in one launch.

A program advances a few tiles [BLOCK_V, K] of one value head's state S. With S as it is read,

    u = beta (v - decay S k),    S' = decay S + u k^T,    S' q = decay S q + (k . q) u,

so a tile is read once and written once. In Kimi Delta Attention each column of S has its own decay,
and k and q are multiplied by it first. Every program of a key head computes the head's q and k; one
of them writes their raw inputs to the conv ring.
"""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import FusedStep, GateWeights
from hybridrt.kernels.state.conv_and_gates_triton import (
    L2_EPS,
    conv_of_operands,
    conv_ring,
    conv_taps,
    log_decay,
    push_operands,
    strides,
)

TILE_BYTES = 4096


@triton.jit
def _add(a0, a1, a2, b0, b1, b2):  # type: ignore[no-untyped-def]
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _left(read, decay, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Product of a vector and the decayed state. Decays by channel are in the vector."""
    return read if CHANNELS else decay * read


@jit_kernel
def _classic_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, out_ptr, conv_ptr, states_ptr,
    read_slots_ptr, write_slots_ptr, positions_ptr,
    qkv_strides: tl.constexpr, a_strides: tl.constexpr, b_strides: tl.constexpr,
    conv_ss: tl.constexpr, states_ss: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr, WC: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    BETA_SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [parts of V, value heads, rows]: neighbours stream through neighbouring memory."""
    part, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ROWS: tl.constexpr = TILES * BLOCK_V
    v, k = part * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    v_mask, k_mask = v < V, k < K
    out = out_ptr + row * (HV * V) + h * V
    slot, write = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(write_slots_ptr + row).to(tl.int64)
    position, read = tl.load(positions_ptr + row), tl.maximum(slot, 0)

    # All loads come before the first use, most before the wait.
    i = tl.arange(0, BLOCK_V)
    tile = states_ptr + h * (V * K) + (part * ROWS + i)[:, None] * K + k[None, :]
    read_tile, write_tile = tile + read * states_ss, tile + write * states_ss
    if TILES == 1:
        only_state = tl.load(read_tile, mask=v_mask[:, None] & k_mask[None, :], other=0.0)
    head, per_key_head = h // (HV // HK), HV // HK
    source, conv_row, write_row = qkv_ptr + row * qkv_strides[0], conv_ptr + read * conv_ss, conv_ptr + write * conv_ss
    q_channel, k_channel, v_channel = head * K + k, (HK + head) * K + k, 2 * HK * K + h * V + v
    k_ring, q_ring = conv_ring(conv_row, k_channel, k_mask, WC), conv_ring(conv_row, q_channel, k_mask, WC)
    v_ring = conv_ring(conv_row, v_channel, v_mask, WC)
    k_taps = conv_taps(weight_ptr, k_channel, k_mask, TAPS, WC)
    q_taps = conv_taps(weight_ptr, q_channel, k_mask, TAPS, WC)
    v_taps = conv_taps(weight_ptr, v_channel, v_mask, TAPS, WC)
    begin(PDL)
    if slot < 0:
        tl.store(out + v, tl.zeros([ROWS], out_ptr.dtype.element_ty), mask=v_mask)
        return

    k_new = tl.load(source + k_channel, mask=k_mask, other=0.0)
    q_new = tl.load(source + q_channel, mask=k_mask, other=0.0)
    v_new = tl.load(source + v_channel, mask=v_mask, other=0.0)
    beta = BETA_SCALE * tl.sigmoid(tl.load(b_ptr + row * b_strides[0] + h).to(tl.float32))
    if CHANNELS:
        a = tl.load(a_ptr + row * a_strides[0] + h * a_strides[2] + k, mask=k_mask, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + h * K + k, mask=k_mask, other=0.0)
        decay = tl.exp(log_decay(a, tl.load(A_log_ptr + h), dt_bias, LOWER_BOUND))
    else:
        a = tl.load(a_ptr + row * a_strides[0] + h)
        decay = tl.exp(log_decay(a, tl.load(A_log_ptr + h), tl.load(dt_bias_ptr + h)))

    key = conv_of_operands(k_new, k_ring, k_taps, None, bias_ptr, k_channel, k_mask, position, TAPS, WC).to(tl.float32)
    query = conv_of_operands(q_new, q_ring, q_taps, None, bias_ptr, q_channel, k_mask, position, TAPS, WC).to(
        tl.float32
    )
    values = conv_of_operands(v_new, v_ring, v_taps, None, bias_ptr, v_channel, v_mask, position, TAPS, WC).to(
        tl.float32
    )
    k_norm, q_norm, product = tl.reduce((key * key, query * query, key * query), 0, _add)
    k_scale, q_scale = tl.rsqrt(k_norm + L2_EPS), tl.rsqrt(q_norm + L2_EPS) * (K**-0.5)
    key, query, product = key * k_scale, query * q_scale, product * (k_scale * q_scale)
    moved = read != write
    if (part == 0) & (h % per_key_head == 0):
        push_operands(k_new, k_ring, write_row, k_channel, k_mask, position, moved, TAPS, WC)
        push_operands(q_new, q_ring, write_row, q_channel, k_mask, position, moved, TAPS, WC)
    push_operands(v_new, v_ring, write_row, v_channel, v_mask, position, moved, TAPS, WC)

    new_key = key
    if CHANNELS:
        key, query, decay = key * decay, query * decay, decay[None, :]
    for first in tl.range(0, ROWS, BLOCK_V, num_stages=STAGES):
        live = part * ROWS + first + i < V
        mask = live[:, None] & k_mask[None, :]
        if TILES == 1:
            state = only_state.to(tl.float32)
        else:
            state = tl.load(read_tile + first * K, mask=mask, other=0.0).to(tl.float32)
        value = tl.gather(values, first + i, 0)
        by_key, by_query = tl.sum(state * key[None, :], axis=1), tl.sum(state * query[None, :], axis=1)
        corrected = beta * (value - _left(by_key, decay, CHANNELS))
        result = _left(by_query, decay, CHANNELS) + product * corrected
        state = state * decay + corrected[:, None] * new_key[None, :]
        tl.store(out + part * ROWS + first + i, result.to(out_ptr.dtype.element_ty), mask=live)
        tl.store(write_tile + first * K, state.to(states_ptr.dtype.element_ty), mask=mask)


def decode_classic(qkv: Tensor, a: Tensor, b: Tensor, weights: GateWeights, step: FusedStep) -> Tensor:
    """`gdn_decode` of one token without a ring."""
    conv, states = step.conv_state.conv, step.state.states
    batch, _, channels = qkv.shape
    _, value_heads, value_dim, key_dim = states.shape
    out = qkv.new_empty((batch, 1, value_heads, value_dim))
    tile, by_channel = classic_tile(batch, states), a.ndim == 4
    # Decays by channel are one more vector: too much for 64 registers.
    registers = 80 if by_channel and states.element_size() < 4 else 64
    _classic_kernel[cdiv(value_dim, tile["BLOCK_V"] * tile["TILES"]), value_heads, batch](
        qkv, a, b, step.conv_weights.weight, step.conv_weights.bias, weights.A_log, weights.dt_bias, out, conv, states,
        step.conv_state.read_state_slots, step.conv_state.write_state_slots, step.conv_state.start_positions,
        strides(qkv), strides(a), strides(b), conv.stride(0), states.stride(0),
        HK=(channels - value_heads * value_dim) // (2 * key_dim), HV=value_heads, K=key_dim, V=value_dim,
        TAPS=step.conv_weights.weight.shape[1], WC=conv.shape[2], BETA_SCALE=weights.beta_scale,
        LOWER_BOUND=weights.lower_bound, CHANNELS=by_channel, num_warps=4, maxnreg=registers, **tile, **pdl(qkv.device),
    )  # fmt: skip
    return out


def classic_tile(batch: int, states: Tensor) -> dict[str, int]:
    """Tiles of the states [S+1, Hv, V, K], as measured on an H200.

    Three tiles are loaded into shared memory while one is computed, so that registers leave room
    for eight programs on a multiprocessor. A small batch ends before such a pipeline is full: it
    gets more programs instead.
    """
    heads, columns = states.shape[1], next_power_of_2(states.shape[3])
    tile = {"BLOCK_V": tile_rows(states), "BLOCK_K": columns}
    return tile | ({"TILES": 1, "STAGES": 1} if batch * heads <= 128 else {"TILES": 4, "STAGES": 4})


def tile_rows(states: Tensor) -> int:
    """Rows of a state [V, K] that fill TILE_BYTES, of states [S+1, Hv, V, K]."""
    return max(1, TILE_BYTES // (next_power_of_2(states.shape[3]) * states.element_size()))
