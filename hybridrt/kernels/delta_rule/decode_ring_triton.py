"""Triton `gdn_decode` with a state ring, in two launches.

A step multiplies the state with 2 T vectors x_n: the keys of its T tokens, then their queries. Only
the state is large. So the first kernel runs the conv of keys and queries, enters gates and keys
into the ring and reduces the ring's keys to scores,

    S x_n = decay_n S_0 x_n + sum_i scores[n, i] u_i,    scores[n, i] = exp(G_n - G_i) (k_i . x_n)

with S_0 the state in the pool, S that state at the vector's token, and i over the ring's entries and
the step's tokens. Queries stay as the conv gives them: decay_n and scores[n, :] of a query include
K^-0.5 / |q|. The second kernel runs the conv of v, multiplies S_0 with all vectors in one pass, and
computes the corrected values u = beta (v - S k) token by token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_precision, dot_width, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, begin_in_turn, pdl
from hybridrt.kernels.core.records import FusedStep, GateWeights
from hybridrt.kernels.delta_rule.kda_prepare_triton import prepare_channels_kernel
from hybridrt.kernels.state.conv_and_gates_triton import (
    L2_EPS,
    conv_one_token,
    conv_ring,
    conv_tokens,
    log_decay,
    push_inputs,
    step_input,
    strides,
)
from hybridrt.kernels.state.state_codes import SCALED
from hybridrt.kernels.state.state_codes_triton import TILE, decode_tile, load_scales, scale_strides, state_scales
from hybridrt.kernels.state.state_ring_triton import exact_dot, multiply_codes, multiply_state, products


@jit_kernel
def _prepare_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, conv_ptr, keys_ptr, gates_ptr,
    vectors_ptr, scores_ptr, decays_ptr, betas_ptr,
    slots_ptr, positions_ptr, rows_ptr, start_ptr, length_ptr,
    qkv_strides: tl.constexpr, a_strides: tl.constexpr, b_strides: tl.constexpr,
    conv_ss: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr,
    T: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    TAPS: tl.constexpr, WC: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr, BETA_SCALE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [rows, key heads], each with its value heads."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots_ptr + b).to(tl.int64), tl.load(positions_ptr + b)
    conv_row = conv_ptr + tl.maximum(slot, 0) * conv_ss
    source = qkv_ptr + b * qkv_strides[0]
    st: tl.constexpr = qkv_strides[1]
    k, w = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    BLOCK_T: tl.constexpr = 16 if T > 1 else 1
    t_all = tl.arange(0, BLOCK_T)
    k_mask, token_mask = k < K, t_all < T
    q_channel, k_channel = part * K + k, (HK + part) * K + k
    row = tl.load(rows_ptr + b).to(tl.int64)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    keys_row = keys_ptr + row * keys_sr + part * (W * K)
    old_cells = keys_row + ((start + w) % W)[:, None] * K + k[None, :]
    old_keys = tl.load(old_cells, mask=(w < length)[:, None] & k_mask[None, :], other=0.0)
    i = tl.arange(0, BLOCK_H)
    h, h_mask = part * (HV // HK) + i, i < HV // HK
    A_log = tl.load(A_log_ptr + h, mask=h_mask, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + h, mask=h_mask, other=0.0)
    gates_row = gates_ptr + row * gates_sr + h * W
    seen, later = h_mask[:, None] & (w < length)[None, :], h_mask[:, None] & (w + 1 < length)[None, :]
    old_gates = tl.load(gates_row[:, None] + ((start + w) % W)[None, :], mask=seen, other=0.0)
    later_gates = tl.load(gates_row[:, None] + ((start + w + 1) % W)[None, :], mask=later, other=0.0)
    k_ring, q_ring = None, None
    if T == 1 and TAPS > 0:
        k_ring, q_ring = conv_ring(conv_row, k_channel, k_mask, WC), conv_ring(conv_row, q_channel, k_mask, WC)
    begin_in_turn(PDL)
    if slot < 0:
        return

    raw = conv_tokens(
        source, st, conv_row, weight_ptr, bias_ptr, k_channel, k_mask, position, t_all, T, TAPS, WC, k_ring
    ).to(tl.float32)
    new_keys = (raw * tl.rsqrt(tl.sum(raw * raw, axis=1) + L2_EPS)[:, None]).to(vectors_ptr.dtype.element_ty)
    queries = conv_tokens(
        source, st, conv_row, weight_ptr, bias_ptr, q_channel, k_mask, position, t_all, T, TAPS, WC, q_ring
    )
    squares = queries.to(tl.float32) * queries.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=1) + L2_EPS) * (K**-0.5)
    queries = queries.to(vectors_ptr.dtype.element_ty)
    vectors = vectors_ptr + ((b * HK + part) * (2 * T) + t_all)[:, None] * K + k[None, :]
    vector_mask = token_mask[:, None] & k_mask[None, :]
    tl.store(vectors, new_keys, mask=vector_mask)
    tl.store(vectors + T * K, queries, mask=vector_mask)
    new_by_key, new_by_query = products(new_keys, new_keys, PRECISION), products(new_keys, queries, PRECISION)

    new_cells = keys_row + ((start + length + t_all) % W)[:, None] * K + k[None, :]
    tl.store(new_cells, new_keys.to(keys_ptr.dtype.element_ty), mask=vector_mask)
    old_by_key, old_by_query = products(old_keys, new_keys, PRECISION), products(old_keys, queries, PRECISION)
    # What is left of the state and of each ring entry, in logs.
    total, entry_decay = tl.sum(old_gates, axis=1), tl.cumsum(later_gates, axis=1, reverse=True)

    # New tokens in order.
    since = tl.zeros([BLOCK_H], tl.float32)
    fresh = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
    for t in range(T):
        raw_a = tl.load(a_ptr + b * a_strides[0] + t * a_strides[1] + h, mask=h_mask, other=0.0)
        raw_b = tl.load(b_ptr + b * b_strides[0] + t * b_strides[1] + h, mask=h_mask, other=0.0).to(tl.float32)
        gate = log_decay(raw_a, A_log, dt_bias)
        tl.store(betas_ptr + (b * T + t) * HV + h, BETA_SCALE * tl.sigmoid(raw_b), mask=h_mask)
        since += gate
        is_t = t_all == t
        fresh = fresh * tl.exp(gate)[:, None] + tl.where(is_t, 1.0, 0.0)[None, :]
        left = tl.exp(total + since)
        tl.store(gates_row + (start + length + t) % W, gate, mask=h_mask)
        history = tl.exp(entry_decay + since[:, None])
        for query in tl.static_range(2):
            n = (b * HV + h) * (2 * T) + t + query * T
            factor, new, old = 1.0, new_by_key, old_by_key
            if query == 1:
                factor, new, old = tl.sum(tl.where(is_t, scale, 0.0), axis=0), new_by_query, old_by_query
            new = tl.sum(tl.where(is_t[None, :], new, 0.0), axis=1) * factor
            tl.store(decays_ptr + n, left * factor, mask=h_mask)
            cells = scores_ptr + n[:, None] * W
            tl.store(cells + length + t_all[None, :], fresh * new[None, :], mask=h_mask[:, None] & token_mask[None, :])
            old = tl.sum(tl.where(is_t[None, :], old, 0.0), axis=1) * factor
            tl.store(cells + w[None, :], history * old[None, :], mask=seen)


@triton.jit
def _pieces(vector_ptr, k, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """A vector [K], BLOCK_K numbers at a time."""
    found = (tl.load(vector_ptr + k, mask=k < K, other=0.0),)
    for first in tl.static_range(BLOCK_K, K, BLOCK_K):
        found += (tl.load(vector_ptr + first + k, mask=k < K - first, other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def _entries(  # type: ignore[no-untyped-def]
    values_row, v, start, length, first, W: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK of a ring's values [BLOCK, channels v] from the `first` oldest on; zero where there are none."""
    w = first + tl.arange(0, BLOCK)
    cells = values_row + ((start + w) % W)[:, None] * V + v[None, :]
    return tl.load(cells, mask=(w < length)[:, None] & (v < V)[None, :], other=0.0)


@triton.jit
def _weighted(scores_ptr, older, newer, length, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of a ring's values, each times its score, float32. In halves fewer lanes share a channel."""
    w = tl.arange(0, HALF)
    total = older.to(tl.float32) * tl.load(scores_ptr + w, mask=w < length, other=0.0)[:, None]
    total += newer.to(tl.float32) * tl.load(scores_ptr + HALF + w, mask=HALF + w < length, other=0.0)[:, None]
    return tl.sum(total, axis=0)


@jit_kernel
def _stream_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, weight_ptr, bias_ptr, out_ptr, conv_ptr, states_ptr, scales_ptr, values_ptr,
    vectors_ptr, scores_ptr, decays_ptr, betas_ptr,
    slots_ptr, positions_ptr, rows_ptr, start_ptr, length_ptr,
    qkv_strides: tl.constexpr, conv_ss: tl.constexpr, states_ss: tl.constexpr, states_sh: tl.constexpr,
    scales_ss: tl.constexpr, scales_sh: tl.constexpr, values_sr: tl.constexpr,
    T: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TAPS: tl.constexpr, WC: tl.constexpr, W: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [rows, value heads, tiles of V]: a state [V, K] is read once for 2 T vectors. BLOCK_N is
    2 for products by element, else at least 16. In other products of codes, a tile of K has one scale.

    Products by element load all of K before the wait, BLOCK_K columns at a time: few lanes share a row then, and its
    sum crosses few of them.
    """
    b, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n, k, w = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    v_mask, n_mask = v < V, n < 2 * T
    slot, position = tl.load(slots_ptr + b).to(tl.int64), tl.load(positions_ptr + b)
    safe_slot = tl.maximum(slot, 0)
    cells = states_ptr + safe_slot * states_ss + h * states_sh + v[:, None] * K + k[None, :]
    CODES: tl.constexpr = scales_ptr is not None
    if CODES:
        scales_row = scales_ptr + safe_slot * scales_ss + h * scales_sh
    # The kernel before writes neither states nor v, and waits for all earlier ones.
    WHOLE: tl.constexpr = BLOCK_K >= K
    if BLOCK_N == 2:
        tiles = (tl.load(cells, mask=v_mask[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first"),)
        for first in tl.static_range(BLOCK_K, K, BLOCK_K):
            mask = v_mask[:, None] & (k < K - first)[None, :]
            tiles += (tl.load(cells + first, mask=mask, other=0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        if CODES:
            scales = load_scales(scales_row, v, 0, V, K, BLOCK_K)
    elif WHOLE:
        state = tl.load(cells, mask=v_mask[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
        if CODES:
            scales = load_scales(scales_row, v, 0, V, K, BLOCK_K)
    st: tl.constexpr = qkv_strides[1]
    channel, live = 2 * HK * K + h * V + v, v < tl.where(slot < 0, 0, V)
    source, conv_row = qkv_ptr + b * qkv_strides[0] + channel, conv_ptr + safe_slot * conv_ss
    conv_cells = None
    if BLOCK_N == 2:
        if TAPS > 0:
            conv_cells = conv_ring(conv_row, channel, live, WC)
    elif T == 1:
        raw = conv_one_token(source, conv_row, weight_ptr, bias_ptr, channel, live, position, TAPS, WC).to(tl.float32)
    else:
        if TAPS >= 0:
            push_inputs(source, st, conv_row, channel, live, position, T, WC)
        raw = step_input(source, st, conv_row, weight_ptr, bias_ptr, channel, live, position, 0, TAPS, WC)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    past = w < length
    values_row = values_ptr + tl.load(rows_ptr + b).to(tl.int64) * values_sr + h * (W * V)
    if BLOCK_N == 2:
        older = _entries(values_row, v, start, length, 0, W, V, BLOCK_W // 2)
        newer = _entries(values_row, v, start, length, BLOCK_W // 2, W, V, BLOCK_W // 2)
    else:
        values = _entries(values_row, v, start, length, 0, W, V, BLOCK_W)
    begin(PDL)
    out = out_ptr + b * (T * HV * V) + h * V + v
    if slot < 0:
        for t in tl.static_range(T):
            tl.store(out + t * (HV * V), tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=v_mask)
        return

    # What is read once is loaded first: it arrives after the first block of K of the state [V, K].
    head = (b * HV + h) * (2 * T)
    vectors_row = vectors_ptr + (b * HK + h // (HV // HK)) * (2 * T * K)
    decays = tl.load(decays_ptr + head + n, mask=n_mask, other=0.0)
    if BLOCK_N == 2:
        by_key, by_query = tl.zeros([BLOCK_V, BLOCK_K], tl.float32), tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
        of_key = _weighted(scores_ptr + head * W, older, newer, length, BLOCK_W // 2)
        of_query = _weighted(scores_ptr + (head + 1) * W, older, newer, length, BLOCK_W // 2)
        keys, queries = _pieces(vectors_row, k, K, BLOCK_K), _pieces(vectors_row + K, k, K, BLOCK_K)
        # The conv stores its inputs, and no load is moved before a store: it comes after the loads.
        raw = conv_one_token(source, conv_row, weight_ptr, bias_ptr, channel, live, position, TAPS, WC, conv_cells)
        raw = raw.to(tl.float32)
        for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
            numbers = decode_tile(tiles[i], scales) if CODES else tiles[i].to(tl.float32)
            by_key += numbers * keys[i].to(tl.float32)[None, :]
            by_query += numbers * queries[i].to(tl.float32)[None, :]
        is_key = (n == 0)[:, None]
        read = tl.where(is_key, tl.sum(by_key, axis=1)[None, :], tl.sum(by_query, axis=1)[None, :]) * decays[:, None]
        read += tl.where(is_key, of_key[None, :], of_query[None, :])
    else:
        acc = tl.zeros([BLOCK_V, BLOCK_N], tl.float32)
        vectors = vectors_row + n[:, None] * K + k[None, :]
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask = k < K - first
            if not WHOLE:
                state = tl.load(
                    cells + first, mask=v_mask[:, None] & mask[None, :], other=0.0, eviction_policy="evict_first"
                )
                if CODES:
                    scales = load_scales(scales_row, v, first, V, K, BLOCK_K)
            tile = tl.load(vectors + first, mask=n_mask[:, None] & mask[None, :], other=0.0)
            acc = multiply_codes(state, scales, tile, acc) if CODES else multiply_state(state, tile, acc)
        scores_cells = scores_ptr + (head + n)[:, None] * W + w[None, :]
        scores = tl.load(scores_cells, mask=n_mask[:, None] & past[None, :], other=0.0)
        read = tl.trans(acc) * decays[:, None] + exact_dot(scores, values)

    # read [BLOCK_N, BLOCK_V]: S x without the step's own tokens.
    for t in range(T):
        beta = tl.load(betas_ptr + (b * T + t) * HV + h)
        corrected = beta * (raw - tl.sum(tl.where((n == t)[:, None], read, 0.0), axis=0))
        stored = corrected.to(values_ptr.dtype.element_ty)
        tl.store(values_row + ((start + length + t) % W) * V + v, stored, mask=v_mask)
        corrected = stored.to(tl.float32)
        own = tl.load(scores_ptr + (head + n) * W + length + t, mask=n_mask, other=0.0)
        read += own[:, None] * corrected[None, :]
        if T > 1:
            live = v_mask & (t + 1 < T)
            raw = step_input(source, st, conv_row, weight_ptr, bias_ptr, channel, live, position, t + 1, TAPS, WC)
    for t in range(T):
        result = tl.sum(tl.where((n == T + t)[:, None], read, 0.0), axis=0)
        tl.store(out + t * (HV * V), result.to(out_ptr.dtype.element_ty), mask=v_mask)


def gdn_ring_triton(qkv: Tensor, a: Tensor, b: Tensor, weights: GateWeights, step: FusedStep) -> Tensor:
    """`gdn_decode` with a state ring, in two launches: the state is read once, in the second."""
    weight, conv, states, ring = step.conv_weights.weight, step.conv_state.conv, step.state.states, step.ring
    assert ring is not None
    batch, tokens, channels = qkv.shape
    _, value_heads, value_dim, key_dim = states.shape
    key_heads, device = (channels - value_heads * value_dim) // (2 * key_dim), qkv.device
    out = torch.empty((batch, tokens, value_heads, value_dim), dtype=qkv.dtype, device=device)
    scales = state_scales(step.state)
    width = ring.gates.shape[2]
    by_channel = a.ndim == 4
    dtype = torch.float32 if by_channel else ring.keys.dtype
    vectors = torch.empty((batch, key_heads, 2 * tokens, key_dim), dtype=dtype, device=device)
    scores = torch.empty((batch, value_heads, 2 * tokens, width), dtype=torch.float32, device=device)
    decays = torch.empty((batch, value_heads, 2 * tokens), dtype=torch.float32, device=device)
    betas = torch.empty((batch, tokens, value_heads), dtype=torch.float32, device=device)
    sizes = {"T": tokens, "HK": key_heads, "HV": value_heads, "K": key_dim, "W": width}
    sizes["BLOCK_W"] = dot_width(width)
    sizes |= {"TAPS": -1 if step.conv_weights.applied_before else weight.shape[1], "WC": conv.shape[2]}
    rows = step.conv_state.read_state_slots, step.conv_state.start_positions, ring.rows, ring.start, ring.length
    own = {"BLOCK_H": next_power_of_2(value_heads // key_heads), "PRECISION": dot_precision(ring.keys.dtype)}
    prepare = prepare_channels_kernel if by_channel else _prepare_kernel
    prepare[batch, key_heads](
        qkv, a, b, weight, step.conv_weights.bias, weights.A_log, weights.dt_bias, conv, ring.keys, ring.gates,
        vectors, scores, decays, betas,
        *rows, strides(qkv), strides(a), strides(b), conv.stride(0), ring.keys.stride(0), ring.gates.stride(0),
        BLOCK_K=dot_width(key_dim), BETA_SCALE=weights.beta_scale,
        # One token's few sums stay within a warp; several tokens are products of tiles.
        num_warps=1 if tokens == 1 and not by_channel else 4, **sizes,
        **({"LOWER_BOUND": weights.lower_bound} if by_channel else own), **pdl(device),
    )  # fmt: skip
    tile = stream_tile(batch, tokens, states, by_channel) if scales is None else codes_tile(tokens, states)
    _stream_kernel[batch, value_heads, cdiv(value_dim, tile["BLOCK_V"])](
        qkv, weight, step.conv_weights.bias, out, conv, states, scales, ring.values, vectors, scores, decays, betas,
        *rows, strides(qkv), conv.stride(0), states.stride(0), states.stride(1), *scale_strides(scales),
        ring.values.stride(0), V=value_dim, **tile, **sizes,
        **pdl(device),
    )  # fmt: skip
    return out


def codes_tile(tokens: int, states: Tensor) -> dict[str, int]:
    """Tiles of codes in the second kernel: one token's products are taken element by element, of decoded numbers. Those
    of several tokens are of whole codes, each block before its scale."""
    rows, columns = (dot_width(size) for size in states.shape[2:])
    if tokens == 1:
        block_v = min(rows, max(16, TILE // columns))
        return {"BLOCK_N": 2, "BLOCK_K": columns, "BLOCK_V": block_v, "STAGES": 1, "num_warps": 4}
    tile = {"BLOCK_N": dot_width(2 * tokens), "BLOCK_K": min(columns, SCALED)}
    return tile | {"BLOCK_V": min(rows, 64), "STAGES": 3, "num_warps": 4}


def stream_tile(batch: int, tokens: int, states: Tensor, by_channel: bool = False) -> dict[str, int]:
    """Tiles of the states [S+1, Hv, V, K] in the second kernel, as measured on an H200.

    One token is multiplied element by element if state or vectors are float32: three tensor-core
    products would cost more than the bytes. Such tiles, and others with all of K, are loaded before the
    wait for the kernel in front.
    """
    _, heads, value_dim, key_dim = states.shape
    wide = states.element_size() == 4
    rows, columns = (dot_width(size) for size in (value_dim, key_dim))
    by_elements = tokens == 1 and (wide or by_channel)
    if by_elements:
        return {"BLOCK_N": 2, "BLOCK_K": min(columns, 32), "BLOCK_V": 16, "STAGES": 1, "num_warps": 1}
    tile = {"BLOCK_N": dot_width(2 * tokens), "BLOCK_K": columns}
    of_states = batch * heads * value_dim
    if of_states <= (1 << 14 if tokens == 1 else 1 << 16):
        return tile | {"BLOCK_V": 16, "STAGES": 1, "num_warps": 2}
    if of_states <= 1 << 18 and not wide:
        return tile | {"BLOCK_V": min(rows, 64), "STAGES": 1, "num_warps": 4}
    block_v, block_k = (64, 32) if wide else (128, 64)
    tile |= {"BLOCK_V": min(rows, block_v), "BLOCK_K": min(columns, block_k)}
    return tile | {"STAGES": 3 if wide else 2, "num_warps": 4}
