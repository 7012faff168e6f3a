"""Triton kernel before `gdn_decode`'s second launch with a state ring, for Kimi Delta Attention.

It replaces the first kernel of `decode_ring_triton.py`: each channel c of a key has its own decay,
so decays cannot be taken out of the sums. The vectors x_n (the keys of a step's tokens, then their
queries) include the decays of the state, and scores are summed here:

    vectors[n] = exp(G_n) x_n,      scores[n, i] = sum_c exp(G_n[c] - G_i[c]) k_i[c] x_n[c]

Both factors are carried from token to token and multiplied by decays of at most 1, so nothing
overflows. The vectors are float32: in the model's dtype they would depend on how tokens are grouped
into steps.
"""

import triton.language as tl

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.pdl_triton import begin_in_turn
from hybridrt.kernels.state.conv_and_gates_triton import L2_EPS, conv_tokens, log_decay
from hybridrt.kernels.state.state_ring_triton import decays_of_channels


@jit_kernel
def prepare_channels_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, a_ptr, b_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, conv_ptr, keys_ptr, gates_ptr,
    vectors_ptr, scores_ptr, decays_ptr, betas_ptr,
    slots_ptr, positions_ptr, rows_ptr, start_ptr, length_ptr,
    qkv_strides: tl.constexpr, a_strides: tl.constexpr, b_strides: tl.constexpr,
    conv_ss: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr,
    T: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    TAPS: tl.constexpr, WC: tl.constexpr, W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
    BETA_SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [rows, heads]."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots_ptr + b).to(tl.int64), tl.load(positions_ptr + b)
    conv_row = conv_ptr + tl.maximum(slot, 0) * conv_ss
    source = qkv_ptr + b * qkv_strides[0]
    st: tl.constexpr = qkv_strides[1]
    k, w = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    BLOCK_T: tl.constexpr = 16 if T > 1 else 1
    t_all = tl.arange(0, BLOCK_T)
    k_mask, token_mask = k < K, t_all < T
    row = tl.load(rows_ptr + b).to(tl.int64)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    past = w < length
    keys_row = keys_ptr + row * keys_sr + h * (W * K)
    gates_row = gates_ptr + row * gates_sr + h * (W * K)
    old_cells = keys_row + ((start + w) % W)[:, None] * K + k[None, :]
    old_keys = tl.load(old_cells, mask=past[:, None] & k_mask[None, :], other=0.0)
    since, total = decays_of_channels(gates_row, start, length, w, k, K, W)
    kept, left = old_keys.to(tl.float32) * tl.exp(since), tl.exp(total)
    begin_in_turn(PDL)
    if slot < 0:
        return

    raw = conv_tokens(
        source, st, conv_row, weight_ptr, bias_ptr, (HK + h) * K + k, k_mask, position, t_all, T, TAPS, WC
    ).to(tl.float32)
    new_keys = (raw * tl.rsqrt(tl.sum(raw * raw, axis=1) + L2_EPS)[:, None]).to(keys_ptr.dtype.element_ty)
    new_cells = keys_row + ((start + length + t_all) % W)[:, None] * K + k[None, :]
    tl.store(new_cells, new_keys, mask=token_mask[:, None] & k_mask[None, :])
    new_keys = new_keys.to(tl.float32)
    queries = conv_tokens(
        source, st, conv_row, weight_ptr, bias_ptr, h * K + k, k_mask, position, t_all, T, TAPS, WC
    ).to(tl.float32)
    queries *= (tl.rsqrt(tl.sum(queries * queries, axis=1) + L2_EPS) * (K**-0.5))[:, None]

    A_log, dt_bias = tl.load(A_log_ptr + h), tl.load(dt_bias_ptr + h * K + k, mask=k_mask, other=0.0)
    fresh = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)  # keys up to token t, decayed
    for t in range(T):
        raw_a = tl.load(a_ptr + b * a_strides[0] + t * a_strides[1] + h * a_strides[2] + k, mask=k_mask, other=0.0)
        raw_b = tl.load(b_ptr + b * b_strides[0] + t * b_strides[1] + h).to(tl.float32)
        gate = log_decay(raw_a, A_log, dt_bias, LOWER_BOUND)
        tl.store(gates_row + (start + length + t) % W * K + k, gate, mask=k_mask)
        tl.store(betas_ptr + (b * T + t) * HV + h, BETA_SCALE * tl.sigmoid(raw_b))
        decay, is_t = tl.exp(gate), (t_all == t)[:, None]
        kept, left = kept * decay[None, :], left * decay
        fresh = fresh * decay[None, :] + tl.where(is_t, new_keys, 0.0)
        for query in tl.static_range(2):
            x = tl.sum(tl.where(is_t, queries if query else new_keys, 0.0), axis=0)
            n = (b * HV + h) * (2 * T) + t + query * T
            tl.store(vectors_ptr + n * K + k, x * left, mask=k_mask)
            tl.store(decays_ptr + n, 1.0)
            tl.store(scores_ptr + n * W + w, tl.sum(kept * x[None, :], axis=1), mask=past)
            own = scores_ptr + n * W + length + t_all
            tl.store(own, tl.sum(fresh * x[None, :], axis=1), mask=token_mask)
