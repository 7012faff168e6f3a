"""Triton kernels of the chunked gated delta rule (Yang et al. 2024; the split into kernels follows the same group's
flash-linear-attention): per chunk and head the triangular system, then states from chunk to chunk, then outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.errors import ConfigError
from hybridrt.kernels.chunk_plan import ChunkPlan
from hybridrt.kernels.gated_delta_rule import L2_NORM_EPS
from hybridrt.kernels.launch import dot_precision
from hybridrt.kernels.mamba2_common_triton import softplus

MAX_CHUNK = 64
STATE_BLOCK_V, OUTPUT_BLOCK_V = 32, 64
_EPS = tl.constexpr(L2_NORM_EPS)
_TILE = tl.constexpr(16)  # of the triangular solve


@triton.jit
def _gates_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, a_sr, b_sr, HV: tl.constexpr, BLOCK: tl.constexpr
):
    row, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = h < HV
    a = tl.load(a_ptr + row * a_sr + h, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_sr + h, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + h, mask=mask, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + h, mask=mask, other=0.0).to(tl.float32)
    tl.store(g_ptr + row * HV + h, -rate * softplus(a + bias), mask=mask)
    tl.store(beta_ptr + row * HV + h, tl.sigmoid(b), mask=mask)


@triton.jit
def _unit_rows(ptr, stride, token, live, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """l2-normalised rows [Q, K] of q or k, float32."""
    i = tl.arange(0, BLOCK_K)
    mask = live[:, None] & (i < K)[None, :]
    x = tl.load(ptr + token[:, None] * stride + i[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 1) + _EPS))[:, None]


@triton.jit
def _invert_diagonal(A_ptr, T_ptr, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inverses of the unit lower triangular diagonal tiles of I + A, by forward substitution, all tiles at once."""
    tiles: tl.constexpr = Q // _TILE
    b, r, c = tl.arange(0, tiles)[:, None, None], tl.arange(0, _TILE)[None, :, None], tl.arange(0, _TILE)[None, None, :]
    place = (b * _TILE + r) * Q + b * _TILE + c
    A = tl.load(A_ptr + place)
    inverse = tl.where(r == c, 1.0, 0.0) + tl.zeros([tiles, _TILE, _TILE], tl.float32)
    for row in range(1, _TILE):
        factors = tl.sum(tl.where(r == row, A, 0.0), 1)  # [tiles, columns]
        correction = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(r == row, inverse - correction[:, None, :], inverse)
    tl.store(T_ptr + place, inverse)


@triton.jit
def _invert(A_ptr, T_ptr, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """T = (I + A)^-1 for strictly lower triangular A, both [Q, Q] in memory: diagonal tiles, then band by band."""
    tiles: tl.constexpr = Q // _TILE
    place = tl.arange(0, _TILE)[:, None] * Q + tl.arange(0, _TILE)[None, :]
    _invert_diagonal(A_ptr, T_ptr, Q)
    tl.debug_barrier()
    for band in tl.static_range(1, tiles):
        for row in tl.static_range(band, tiles):
            total = tl.zeros([_TILE, _TILE], tl.float32)
            for middle in tl.static_range(row - band, row):
                left = tl.load(A_ptr + (row * Q + middle) * _TILE + place)
                right = tl.load(T_ptr + (middle * Q + row - band) * _TILE + place)
                total = tl.dot(left, right, total, input_precision="ieee")
            diagonal = tl.load(T_ptr + (row * Q + row) * _TILE + place)
            result = -tl.dot(diagonal, total, input_precision="ieee")
            tl.store(T_ptr + (row * Q + row - band) * _TILE + place, result)
        tl.debug_barrier()


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, g_ptr, beta_ptr, ends_ptr, seq_idx_ptr, slots_ptr, log_decay_ptr, u_ptr, w_ptr, scratch_ptr,
    k_st, k_sh, v_st, v_sh, g_st, beta_st,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """u = T (beta v) and w = T (beta exp(G) k), T = (I + A)^-1, A_ij = beta_i exp(G_i - G_j) k_i k_j for i > j."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    if tl.load(slots_ptr + tl.load(seq_idx_ptr + chunk)) < 0:
        return
    r, c = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :]
    first = tl.load(ends_ptr + chunk).to(tl.int64)
    token = first + tl.arange(0, Q)
    live = token < tl.load(ends_ptr + chunk + 1)
    log_decay = tl.cumsum(tl.load(g_ptr + token * g_st + h, mask=live, other=0.0), 0)
    tl.store(log_decay_ptr + token * HV + h, log_decay, mask=live)
    beta = tl.load(beta_ptr + token * beta_st + h, mask=live, other=0.0)
    dtype = u_ptr.dtype.element_ty
    k = _unit_rows(k_ptr + h // (HV // HK) * k_sh, k_st, token, live, K, BLOCK_K)
    products = tl.dot(k.to(dtype), tl.trans(k.to(dtype)), input_precision=PRECISION)
    decay = tl.exp(log_decay[:, None] - log_decay[None, :])
    A_ptr = scratch_ptr + (chunk.to(tl.int64) * HV + h) * (2 * Q * Q)
    tl.store(A_ptr + r * Q + c, tl.where(r > c, products * decay * beta[:, None], 0.0))
    tl.store(A_ptr + Q * Q + r * Q + c, tl.zeros([Q, Q], tl.float32))
    tl.debug_barrier()
    _invert(A_ptr, A_ptr + Q * Q, Q)
    T = tl.load(A_ptr + Q * Q + r * Q + c).to(dtype)
    i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_mask, v_mask = live[:, None] & (i < K)[None, :], live[:, None] & (j < V)[None, :]
    v = tl.load(v_ptr + (token * v_st + h * v_sh)[:, None] + j[None, :], mask=v_mask, other=0.0).to(tl.float32)
    u = tl.dot(T, (v * beta[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(u_ptr + ((token * HV + h) * V)[:, None] + j[None, :], u.to(dtype), mask=v_mask)
    w = tl.dot(T, (k * (beta * tl.exp(log_decay))[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(w_ptr + ((token * HV + h) * K)[:, None] + i[None, :], w.to(dtype), mask=k_mask)


@triton.jit
def _state_kernel(  # type: ignore[no-untyped-def]
    k_ptr, u_ptr, w_ptr, log_decay_ptr, ends_ptr, first_chunk_ptr, last_chunk_ptr, states_ptr, read_slots_ptr,
    write_slots_ptr, has_initial_ptr, incoming_ptr, k_st, k_sh, states_ss,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A row's chunks in order: keep the state before each, turn u into the corrected values u - w S^T, in place."""
    j, h, row = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V), tl.program_id(1), tl.program_id(2)
    read, write = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(write_slots_ptr + row).to(tl.int64)
    if write < 0:
        return
    i = tl.arange(0, BLOCK_K)
    tile = h * (V * K) + j[:, None] * K + i[None, :]
    mask = (j < V)[:, None] & (i < K)[None, :]
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if tl.load(has_initial_ptr + row) != 0:
        state += tl.load(states_ptr + read * states_ss + tile, mask=mask, other=0.0).to(tl.float32)
    dtype = u_ptr.dtype.element_ty
    first = tl.load(first_chunk_ptr + row)
    incoming = incoming_ptr + first.to(tl.int64) * (HV * V * K) + tile
    for chunk in range(first, tl.load(last_chunk_ptr + row) + 1):
        tl.store(incoming, state.to(dtype), mask=mask)
        incoming += HV * V * K
        end = tl.load(ends_ptr + chunk + 1).to(tl.int64)
        token = tl.load(ends_ptr + chunk).to(tl.int64) + tl.arange(0, Q)
        live = token < end
        head_row = token * HV + h
        w_mask = live[:, None] & (i < K)[None, :]
        w = tl.load(w_ptr + (head_row * K)[:, None] + i[None, :], mask=w_mask, other=0.0)
        u_mask = live[:, None] & (j < V)[None, :]
        u = tl.load(u_ptr + (head_row * V)[:, None] + j[None, :], mask=u_mask, other=0.0).to(tl.float32)
        u -= tl.dot(w, tl.trans(state.to(dtype)), input_precision=PRECISION)
        tl.store(u_ptr + (head_row * V)[:, None] + j[None, :], u.to(dtype), mask=u_mask)
        total = tl.load(log_decay_ptr + (end - 1) * HV + h)
        to_end = tl.exp(total - tl.load(log_decay_ptr + head_row, mask=live, other=0.0))
        k = _unit_rows(k_ptr + h // (HV // HK) * k_sh, k_st, token, live, K, BLOCK_K) * to_end[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(u.to(dtype)), k.to(dtype), input_precision=PRECISION)
    tl.store(states_ptr + write * states_ss + tile, state.to(states_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _output_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, u_ptr, log_decay_ptr, ends_ptr, seq_idx_ptr, slots_ptr, incoming_ptr, out_ptr,
    q_st, q_sh, k_st, k_sh,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """out = exp(G) q S^T + (causal, decayed q k^T) u, S the state before the chunk and u the corrected values."""
    chunk, h, j = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if tl.load(slots_ptr + tl.load(seq_idx_ptr + chunk)) < 0:
        return
    r, c, i = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :], tl.arange(0, BLOCK_K)
    token = tl.load(ends_ptr + chunk).to(tl.int64) + tl.arange(0, Q)
    live = token < tl.load(ends_ptr + chunk + 1)
    key_head = h // (HV // HK)
    dtype = u_ptr.dtype.element_ty
    q = (_unit_rows(q_ptr + key_head * q_sh, q_st, token, live, K, BLOCK_K) * (K**-0.5)).to(dtype)
    k = _unit_rows(k_ptr + key_head * k_sh, k_st, token, live, K, BLOCK_K).to(dtype)
    log_decay = tl.load(log_decay_ptr + token * HV + h, mask=live, other=0.0)
    state_mask = (j < V)[:, None] & (i < K)[None, :]
    state = incoming_ptr + (chunk.to(tl.int64) * HV + h) * (V * K) + j[:, None] * K + i[None, :]
    state = tl.load(state, mask=state_mask, other=0.0)
    out = tl.dot(q, tl.trans(state), input_precision=PRECISION) * tl.exp(log_decay)[:, None]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(log_decay[:, None] - log_decay[None, :])
    scores = tl.where((r >= c) & live[:, None], scores, 0.0)
    place = ((token * HV + h) * V)[:, None] + j[None, :]
    mask = live[:, None] & (j < V)[None, :]
    u = tl.load(u_ptr + place, mask=mask, other=0.0)
    out += tl.dot(scores.to(dtype), u, input_precision=PRECISION)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


def gdn_gates_triton(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    heads = a.shape[-1]
    a, b = a.reshape(-1, heads), b.reshape(-1, heads)
    if a.numel():
        _gates_kernel[(a.shape[0],)](
            a, b, A_log, dt_bias, g, beta, a.stride(0), b.stride(0),
            HV=heads, BLOCK=triton.next_power_of_2(heads), num_warps=1,
        )  # fmt: skip
    return g, beta


def chunk_gated_delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    plan: ChunkPlan,
) -> Tensor:
    """`chunk_gated_delta_rule` in three launches. Raises ConfigError for chunks of more than 64 tokens."""
    if plan.chunk_size > MAX_CHUNK:
        raise ConfigError(
            f"chunks of {plan.chunk_size} tokens; the gated delta rule's kernels take {MAX_CHUNK} at most"
        )
    (tokens, value_heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]
    chunks, device = plan.seq_idx.shape[0], v.device
    size = max(16, triton.next_power_of_2(plan.chunk_size))
    shape = {"HK": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim, "Q": size,
             "BLOCK_K": max(16, triton.next_power_of_2(key_dim)), "PRECISION": dot_precision(v.dtype)}  # fmt: skip
    out = torch.zeros(v.shape, dtype=v.dtype, device=device)
    u, w = torch.empty_like(out), torch.empty(tokens, value_heads, key_dim, dtype=v.dtype, device=device)
    log_decay = torch.empty(tokens, value_heads, dtype=torch.float32, device=device)
    scratch = torch.empty(chunks, value_heads, 2, size, size, dtype=torch.float32, device=device)
    incoming = torch.empty(chunks, value_heads, value_dim, key_dim, dtype=v.dtype, device=device)
    if chunks:
        _prepare_kernel[(chunks, value_heads)](
            k, v, g, beta, plan.cu_chunk_seqlens, plan.seq_idx, write_slots, log_decay, u, w, scratch,
            *k.stride()[:2], *v.stride()[:2], g.stride(0), beta.stride(0),
            BLOCK_V=max(16, triton.next_power_of_2(value_dim)), **shape, num_warps=8,
        )  # fmt: skip
    block_v = min(STATE_BLOCK_V, max(16, triton.next_power_of_2(value_dim)))
    if read_slots.shape[0]:
        _state_kernel[(triton.cdiv(value_dim, block_v), value_heads, read_slots.shape[0])](
            k, u, w, log_decay, plan.cu_chunk_seqlens, plan.first_chunk, plan.last_chunk, states, read_slots,
            write_slots, has_initial_state, incoming, *k.stride()[:2], states.stride(0),
            BLOCK_V=block_v, **shape, num_warps=4, num_stages=2,
        )  # fmt: skip
    block_v = min(OUTPUT_BLOCK_V, max(16, triton.next_power_of_2(value_dim)))
    if chunks:
        _output_kernel[(chunks, value_heads, triton.cdiv(value_dim, block_v))](
            q, k, u, log_decay, plan.cu_chunk_seqlens, plan.seq_idx, write_slots, incoming, out,
            *q.stride()[:2], *k.stride()[:2], BLOCK_V=block_v, **shape, num_warps=4,
        )  # fmt: skip
    return out
