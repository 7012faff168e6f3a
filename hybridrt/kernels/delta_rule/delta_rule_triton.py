"""Triton kernels of the chunked gated delta rule (arXiv:2412.06464, section 3.3), two launches.

1. `_prepare_kernel`: what depends on a chunk's tokens alone: gates, solved system, scores, decays.
2. `_pass_kernel`: walks each row's chunks with a block of V of the state [V, K] on the chip.

With G the running sum of g in a chunk, kappa_j = 1 / |k_j|, rho_i = K^-0.5 / |q_i|, and S the state
before the chunk (A for i > j, P for i >= j):

    u = (I + A)^-1 beta (v - exp(G) kappa k S^T)
    A_ij = beta_i kappa_i kappa_j exp(G_i - G_j) k_i k_j
    out = exp(G) rho q S^T + P u
    P_ij = rho_i kappa_j exp(G_i - G_j) q_i k_j
    S <- exp(G_end) S + u^T exp(G_end - G) kappa k

`solved` is (I + A)^-1 diag(beta), and `scores` is P. G = M + R: `split_gates` splits each gate into
a multiple of a unit and a rest, M and R are their running sums, and exp(R) is applied to a token.

Factors are applied to products, not to k, q and v: asynchronous copies can then move tiles from
memory to the tensor cores. `factors` has three rows for each head of a chunk:

    exp(G) kappa            of k, when it reads the state
    exp(G) rho              of q, when it reads the state
    exp(G_end - G) kappa    of k, when it is added to the state

In Kimi Delta Attention factors differ by channel: there `kda_chunks_triton.py` is the first launch
and passes scaled q and k on.
"""

from itertools import product as combinations
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors, shared_memory
from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.chunk_plan import ChunkPlan
from hybridrt.kernels.core.decay_sums_triton import split_gates
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import (
    LARGE_SHARED_MEMORY,
    cdiv,
    dot_precision,
    dot_width,
    zero_after,
)
from hybridrt.kernels.core.launch_choice import LaunchChoice, Values, unique
from hybridrt.kernels.core.records import DeltaInputs, GateWeights, Prompts, StateSlots
from hybridrt.kernels.core.tiles_triton import tile_mask
from hybridrt.kernels.delta_rule.delta_chunks_triton import PreparedChunks, unit_inverse
from hybridrt.kernels.delta_rule.kda_chunks_triton import prepare_channels
from hybridrt.kernels.state.conv_and_gates_triton import L2_EPS, log_decay, strides

MAX_CHUNK = 64
PREFETCH_BYTES = 213_000  # bytes of chunks on the way to a program; the rest of its 227 KB holds operands
SMALL_BASE = 62_208, 70_144  # bytes of a program with two chunks on smaller GPUs; in Kimi Delta Attention


@jit_kernel
def _prepare_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, ends_ptr, solved_ptr, scores_ptr, factors_ptr, decay_ptr,
    q_strides: tl.constexpr, k_strides: tl.constexpr, g_st: tl.constexpr, beta_st: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr,
    BETA_SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid [value heads, chunks]. Gates are raw where there is an A_log."""
    h, chunk = tl.program_id(0), tl.program_id(1)
    key_head = h // (HV // HK)
    t, i = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    first, end = tl.load(ends_ptr + chunk).to(tl.int64), tl.load(ends_ptr + chunk + 1)
    if first == end:  # a graph has as many chunks as any step of its size
        return
    live = first + t < end
    mask = tile_mask(live, i, K, BLOCK_K)
    k = k_ptr + first * k_strides[0] + key_head * k_strides[1] + t[:, None] * k_strides[0] + i[None, :]
    q = q_ptr + first * q_strides[0] + key_head * q_strides[1] + t[:, None] * q_strides[0] + i[None, :]
    k, q = tl.load(k, mask=mask, other=0.0), tl.load(q, mask=mask, other=0.0)
    g = tl.load(g_ptr + first * g_st + t * g_st + h, mask=live, other=0.0)
    beta = tl.load(beta_ptr + first * beta_st + t * beta_st + h, mask=live, other=0.0)
    if A_log_ptr is not None:
        g = tl.where(live, log_decay(g, tl.load(A_log_ptr + h), tl.load(dt_bias_ptr + h)), 0.0)
        beta = BETA_SCALE * tl.sigmoid(beta.to(tl.float32))
    g, rest = split_gates(g, Q)
    sums, total = tl.cumsum(g, 0), tl.sum(g, 0)
    near, all_near = tl.exp(tl.cumsum(rest, 0)), tl.exp(tl.sum(rest, 0))
    k_norm = tl.sqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + L2_EPS)
    q_factor = K**-0.5 * near / tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + L2_EPS)
    k_factor, k_from = near / k_norm, 1.0 / (near * k_norm)
    factors = factors_ptr + (chunk.to(tl.int64) * HV + h) * (3 * Q) + t
    tl.store(factors, k_factor * tl.exp(sums))
    tl.store(factors + Q, q_factor * tl.exp(sums))
    tl.store(factors + 2 * Q, k_from * tl.exp(total - sums) * all_near)
    tl.store(decay_ptr + chunk * HV + h, tl.exp(total) * all_near)
    pair = tl.exp(sums[:, None] - sums[None, :]) * k_from[None, :]
    r, c = t[:, None], t[None, :]
    place = (chunk.to(tl.int64) * HV + h) * (Q * Q) + r * Q + c
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pair * q_factor[:, None]
    tl.store(scores_ptr + place, tl.where(r >= c, scores, 0.0).to(scores_ptr.dtype.element_ty))
    A = tl.dot(k, tl.trans(k), input_precision=PRECISION) * pair * (beta * k_factor)[:, None]
    # No entry is above 1, where float16 is as fine as TF32 and its products twice as fast.
    dtype: tl.constexpr = tl.float32 if k.dtype == tl.float32 else tl.float16
    inverse = unit_inverse(tl.where(r > c, A, 0.0).to(dtype), Q, LEVELS, PRECISION)
    tl.store(solved_ptr + place, (inverse * beta[None, :]).to(solved_ptr.dtype.element_ty))


@jit_kernel
def _pass_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, k_left_ptr, v_ptr, solved_ptr, scores_ptr, factors_ptr, decay_ptr, out_ptr, ends_ptr, first_chunk_ptr,
    last_chunk_ptr, states_ptr, read_slots_ptr, write_slots_ptr, has_initial_ptr,
    q_strides: tl.constexpr, k_strides: tl.constexpr, v_strides: tl.constexpr, states_ss: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of V, value heads, rows]. The tensors up to the decays are those of PreparedChunks."""
    CHANNELS: tl.constexpr = k_left_ptr is not None
    h, row = tl.program_id(1), tl.program_id(2)
    t, i, j = tl.arange(0, Q), tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    read, write = tl.load(read_slots_ptr + row), tl.load(write_slots_ptr + row)
    first, last = tl.load(first_chunk_ptr + row), tl.load(last_chunk_ptr + row)
    row_start, row_end = tl.load(ends_ptr + first), tl.load(ends_ptr + last + 1)
    out_ptr += h * V
    out_tile = t[:, None] * (HV * V) + j[None, :]
    if write < 0:
        for token in range(row_start.to(tl.int64), row_end, Q):
            zeros = tl.zeros([Q, BLOCK_V], out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * (HV * V) + out_tile, zeros, mask=tile_mask(token + t < row_end, j, V, BLOCK_V))
        return

    # 64-bit starts, 32-bit offsets: fewer registers.
    q_ptr += h // (HV // HK) * q_strides[1]
    k_ptr += h // (HV // HK) * k_strides[1]
    if CHANNELS:
        k_left_ptr += h * k_strides[1]
    v_ptr += h * v_strides[1]
    q_tile, k_tile = t[:, None] * q_strides[0] + i[None, :], t[:, None] * k_strides[0] + i[None, :]
    v_tile, pairs = t[:, None] * v_strides[0] + j[None, :], t[:, None] * Q + t[None, :]
    cells = states_ptr + h * (V * K) + j[None, :] * K + i[:, None]
    inside = (i < K)[:, None] & (j < V)[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if tl.load(has_initial_ptr + row) != 0:
        state += tl.load(cells + read.to(tl.int64) * states_ss, mask=inside, other=0.0).to(tl.float32)
    # Computed, in one number: addresses that wait for a load keep Triton from fetching ahead.
    boundary = tl.load(ends_ptr + tl.minimum(first, last) + 1)
    for chunk in range(first, last + 1):
        start = tl.maximum(boundary - CHUNK, row_start)
        live = t < tl.minimum(boundary, row_end) - start
        start, place = start.to(tl.int64), (chunk * HV + h).to(tl.int64)
        if CHANNELS:
            decay = tl.load(decay_ptr + place * K + i, mask=i < K, other=0.0)[:, None]
        else:
            decay = tl.load(decay_ptr + place)
        k = tl.load(k_ptr + start * k_strides[0] + k_tile, mask=tile_mask(live, i, K, BLOCK_K), other=0.0)
        q = tl.load(q_ptr + start * q_strides[0] + q_tile, mask=tile_mask(live, i, K, BLOCK_K), other=0.0)
        v = tl.load(v_ptr + start * v_strides[0] + v_tile, mask=tile_mask(live, j, V, BLOCK_V), other=0.0)
        solved = tl.load(solved_ptr + place * (Q * Q) + pairs)
        scores = tl.load(scores_ptr + place * (Q * Q) + pairs)
        if CHANNELS:
            left = k_left_ptr + start * k_strides[0] + k_tile
            k_left = tl.load(left, mask=tile_mask(live, i, K, BLOCK_K), other=0.0)
        else:
            k_from_start = tl.load(factors_ptr + place * (3 * Q) + t)
            q_from_start = tl.load(factors_ptr + place * (3 * Q) + Q + t)
            k_to_end = tl.load(factors_ptr + place * (3 * Q) + 2 * Q + t)
        # Zeros, unknown to the compiler: Triton fetches ahead the operands of products only.
        if CHANNELS:
            state += tl.minimum(decay, 0.0)
        else:
            k_from_start += tl.minimum(q_from_start, 0.0)
        held = state.to(k.dtype)
        if CHANNELS:
            out = tl.dot(q, held, input_precision=PRECISION)
            wrong = v.to(tl.float32) - tl.dot(k, held, input_precision=PRECISION)
        else:
            out = tl.dot(q, held, input_precision=PRECISION) * q_from_start[:, None]
            wrong = v.to(tl.float32) - tl.dot(k, held, input_precision=PRECISION) * k_from_start[:, None]
        u = tl.dot(solved, wrong.to(k.dtype), input_precision=PRECISION)
        out = tl.dot(scores, u.to(k.dtype), out, input_precision=PRECISION)
        out_rows = out_ptr + start * (HV * V) + out_tile
        tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=tile_mask(live, j, V, BLOCK_V))
        if CHANNELS:
            k, u = k_left, u.to(k.dtype)
        elif k.dtype == tl.float16:  # where u / |k| may overflow, and k / |k| does not
            k, u = (k.to(tl.float32) * k_to_end[:, None]).to(k.dtype), u.to(k.dtype)
        else:
            u = (u * k_to_end[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), u, state * decay, input_precision=PRECISION)
        boundary += CHUNK
    tl.store(cells + write.to(tl.int64) * states_ss, state.to(states_ptr.dtype.element_ty), mask=inside)


def chunk_gated_delta_rule_triton(
    inputs: DeltaInputs, state: StateSlots, prompts: Prompts, weights: GateWeights | None = None
) -> Tensor:
    """`chunk_gated_delta_rule` in two launches. Raises ConfigError for chunks of more than 64 tokens."""
    v, plan = inputs.v, prompts.plan
    if plan.chunk_size > MAX_CHUNK:
        raise ConfigError(
            f"chunks of {plan.chunk_size} tokens; the gated delta rule's kernels take {MAX_CHUNK} at most"
        )
    rows, (value_heads, value_dim), (key_heads, key_dim) = len(state.read_state_slots), v.shape[1:], inputs.k.shape[1:]
    out = v.new_empty(v.shape)
    zero_after(out, plan.num_tokens)
    size, block_k = dot_width(plan.chunk_size), dot_width(key_dim)
    if inputs.g.ndim > inputs.beta.ndim:
        chunks = prepare_channels(inputs, weights, plan, size)
    else:
        chunks = _prepare(inputs, weights, plan, size, block_k)
    by_channel = chunks.k_left is not None
    tile = PASSES(Pass(rows, value_heads, key_heads, key_dim, value_dim, size, by_channel, v.dtype), v.device)
    _pass_kernel[cdiv(value_dim, tile["BLOCK_V"]), value_heads, rows](
        *chunks, out, plan.cu_chunk_seqlens, plan.first_chunk, plan.last_chunk,
        state.states, state.read_state_slots, state.write_state_slots, prompts.has_initial_state,
        strides(chunks.q), strides(chunks.k), strides(v), state.states.stride(0),
        HK=key_heads, HV=value_heads, K=key_dim, V=value_dim, CHUNK=plan.chunk_size, Q=size, BLOCK_K=block_k,
        PRECISION=dot_precision(v.dtype), **tile,
    )  # fmt: skip
    return out


def _prepare(
    inputs: DeltaInputs, weights: GateWeights | None, plan: ChunkPlan, size: int, block_k: int
) -> PreparedChunks:
    q, k, v = inputs.q, inputs.k, inputs.v
    A_log, dt_bias = (None, None) if weights is None else (weights.A_log, weights.dt_bias)
    chunks, (key_heads, key_dim), value_heads, device = len(plan.seq_idx), k.shape[1:], v.shape[1], v.device
    solved = torch.empty(chunks, value_heads, size, size, dtype=v.dtype, device=device)
    scores = torch.empty_like(solved)
    factors = torch.empty(chunks, value_heads, 3, size, dtype=torch.float32, device=device)
    decay = torch.empty(chunks, value_heads, dtype=torch.float32, device=device)
    _prepare_kernel[value_heads, chunks](
        q, k, inputs.g, inputs.beta, A_log, dt_bias, plan.cu_chunk_seqlens, solved, scores, factors, decay,
        strides(q), strides(k), inputs.g.stride(0), inputs.beta.stride(0), HK=key_heads, HV=value_heads, K=key_dim,
        Q=size, LEVELS=size.bit_length() - 1, BLOCK_K=block_k,
        BETA_SCALE=1.0 if weights is None else weights.beta_scale, PRECISION=dot_precision(v.dtype), num_warps=4,
    )  # fmt: skip
    return PreparedChunks(q, k, None, v, solved, scores, factors, decay)


class Pass(NamedTuple):
    """What the tile of a pass over rows' chunks of `size` tokens may depend on. by_channel: as in Kimi Delta
    Attention."""

    rows: int
    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    size: int
    by_channel: bool
    dtype: torch.dtype

    @property
    def block_k(self) -> int:
        return dot_width(self.key_dim)


def pass_tile(shape: Pass, device: torch.device) -> dict[str, int]:
    """The block of V of a program, and how many chunks it prefetches. On an H200 a chunk takes 1.5 us
    with a block of 32 and 2.0 us with 64: the latter where 32 would make programs wait for others to
    end.
    """
    states, itemsize = shape.rows * shape.value_heads, shape.dtype.itemsize
    if shared_memory(device) < LARGE_SHARED_MEMORY:
        return _small_pass_tile(shape, shared_memory(device))
    narrow = itemsize > 2 or states * shape.value_dim <= 32 * multiprocessors(device)
    block_v = min(32 if narrow else 64, dot_width(shape.value_dim))
    widths = shape.block_k * (3 if shape.by_channel else 2) + 2 * shape.size
    chunk_bytes = shape.size * (widths + block_v) * itemsize
    return {"BLOCK_V": block_v, "num_warps": 4, "num_stages": min(4, max(2, PREFETCH_BYTES // chunk_bytes))}


def _small_pass_tile(shape: Pass, room: int) -> dict[str, int]:
    """For GPUs without tensor cores that read shared memory. Compiled for sm_80, sm_89 and sm_120: a block of 64 does
    not fit into registers, two chunks take the bytes of SMALL_BASE, and each further one those of its tiles."""
    scale = shape.dtype.itemsize * shape.block_k // 128 / 2
    block_v = min(32 if scale <= 1 else 16, dot_width(shape.value_dim))
    chunk = shape.size * (shape.block_k * (3 if shape.by_channel else 2) + block_v) * shape.dtype.itemsize + 768
    left = room - round(SMALL_BASE[shape.by_channel] * scale)
    return {"BLOCK_V": block_v, "num_warps": 4, "num_stages": min(4, max(1, 2 + left // chunk))}


def _candidates(shape: Pass, device: torch.device) -> list[Values]:
    """One stage is for tensor cores that do not read shared memory. Elsewhere its tiles have fixed places, whose
    descriptors are too many for uniform registers: with ptxas of Triton 3.6 products of 16 and 32 columns then read
    other places.
    """
    stages = (1, 2, 3, 4) if shared_memory(device) < LARGE_SHARED_MEMORY else (2, 3, 4)
    most = dot_width(shape.value_dim)
    tiles: list[Values] = [
        {"BLOCK_V": min(v, most), "num_warps": warps, "num_stages": chunks}
        for v, warps, chunks in combinations((16, 32, 64), (4, 8), stages)
    ]
    return unique(tiles)


PASSES: LaunchChoice[Pass, dict[str, int]] = LaunchChoice(
    "chunk_gated_delta_rule: pass", Pass, pass_tile, _candidates, dict
)
