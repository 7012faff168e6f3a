"""Triton kernel of Kimi Delta Attention's chunks (Moonshot AI 2025, section 3): what depends on their tokens alone.

With G the running sum of a chunk's gates [Q, K], and k and q normalised, a chunk needs

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc) for i > j,
    P_ij = K^-0.5 sum_c q_ic k_jc exp(G_ic - G_jc) for i >= j.

The decay of a pair cannot be taken out of the sum: each channel has its own. The factors exp(G_i) and exp(-G_j) could
overflow. So both are taken relative to a boundary between j and i. Let l be the highest bit in which i and j differ.
The boundary b is the middle of the block of 2^(l+1) tokens that holds both, and

    exp(G_i - G_j) = exp(G_i - G_b) exp(G_b - G_j),    both at most 1.

Tokens of a block's upper half need the first factor, those of the lower half the second one. So a level l takes one
scaled copy of k and one of q, and the product of each with that of k. Blocks of more than 16 tokens take products of
all pairs, of which the level keeps its own. Smaller blocks take products of 16 tokens each.
"""

import torch
import triton
import triton.language as tl

from hybridrt.kernels.chunk_plan import ChunkPlan
from hybridrt.kernels.delta_chunks_triton import PreparedChunks, unit_inverse
from hybridrt.kernels.launch import dot_precision
from hybridrt.kernels.mamba2_common_triton import L2_EPS, log_decay, strides
from hybridrt.kernels.records import DeltaInputs, GateWeights

COLUMNS = 32  # of a key that a program takes at a time


@triton.jit
def _gates(  # type: ignore[no-untyped-def]
    a_ptr, A_log_ptr, dt_bias_ptr, h, i, mask, K: tl.constexpr, LOWER_BOUND: tl.constexpr
):
    """g of a tile [Q, columns i], 0 where masked: computed from raw a, or loaded where there is no A_log."""
    g = tl.load(a_ptr, mask=mask, other=0.0).to(tl.float32)
    if A_log_ptr is not None:
        bias = tl.load(dt_bias_ptr + h * K + i, mask=i < K, other=0.0)[None, :]
        g = tl.where(mask, log_decay(g, tl.load(A_log_ptr + h), bias, LOWER_BOUND), 0.0)
    return g


@triton.jit
def _to_middle(sums, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The decay between each row of running sums [Q, columns] and the middle of its block of 2^(LEVEL + 1) rows."""
    blocks: tl.constexpr = sums.shape[0] >> (LEVEL + 1)
    rows: tl.constexpr = 2 << LEVEL
    apart = tl.reshape(sums, [blocks, rows, sums.shape[1]])
    is_middle = tl.arange(0, rows)[None, :, None] == rows // 2 - 1
    apart -= tl.sum(tl.where(is_middle, apart, 0.0), axis=1, keep_dims=True)
    return tl.exp(-tl.abs(tl.reshape(apart, sums.shape)))


@triton.jit
def _add_products(total, x, y, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """total [n, m, m] + x y^T of each m rows of x and y [n m, columns]."""
    blocks: tl.constexpr = total.shape[0]
    rows: tl.constexpr = total.shape[1]
    x, y = tl.reshape(x, [blocks, rows, x.shape[1]]), tl.reshape(y, [blocks, rows, y.shape[1]])
    return tl.dot(x, tl.permute(y, [0, 2, 1]), total, input_precision=PRECISION)


@triton.jit
def _place(tiles):  # type: ignore[no-untyped-def]
    """Tiles [n, m, m] along the diagonal of a matrix [n m, n m] of zeros."""
    blocks: tl.constexpr = tiles.shape[0]
    size: tl.constexpr = blocks * tiles.shape[1]
    same = tl.arange(0, blocks)[:, None, None, None] == tl.arange(0, blocks)[None, None, :, None]
    return tl.reshape(tl.where(same, tiles[:, :, None, :], 0.0), [size, size])


@triton.jit
def _join(near, half, whole):  # type: ignore[no-untyped-def]
    """Each pair of the tokens of `whole` [Q, Q] from its level: pairs within a block of 16 tokens from `near`, others
    within one of 32 from `half`."""
    t = tl.arange(0, whole.shape[0])
    apart = t[:, None] ^ t[None, :]
    return tl.where(apart < 16, _place(near), tl.where(apart < 32, _place(half), whole))


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, ends_ptr,
    q_in_ptr, k_in_ptr, k_left_ptr, solved_ptr, scores_ptr, decay_ptr,
    q_strides: tl.constexpr, k_strides: tl.constexpr, a_strides: tl.constexpr, b_st: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr,
    BETA_SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid [heads, chunks]; Q = 2^LEVELS."""
    h, chunk = tl.program_id(0), tl.program_id(1)
    t, columns = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    first, end = tl.load(ends_ptr + chunk).to(tl.int64), tl.load(ends_ptr + chunk + 1)
    live = first + t < end  # none in the spare chunks of a graph: to end at once would take registers that spill
    # Where a chunk begins has 64 bits, offsets within it 32: addresses then take fewer registers.
    q_ptr += first * q_strides[0] + h * q_strides[1]
    k_ptr += first * k_strides[0] + h * k_strides[1]
    a_ptr += first * a_strides[0] + h * a_strides[1]
    place = (first * H + h) * K
    decay_ptr += (chunk.to(tl.int64) * H + h) * K
    k_norm, q_norm = tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32)
    for start in range(0, K, BLOCK_K):
        i = start + columns
        mask = live[:, None] & (i < K)[None, :]
        k = tl.load(k_ptr + t[:, None] * k_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + t[:, None] * q_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32)
        k_norm += tl.sum(k * k, 1)
        q_norm += tl.sum(q * q, 1)
    k_factor, q_factor = tl.rsqrt(k_norm + L2_EPS)[:, None], tl.rsqrt(q_norm + L2_EPS)[:, None] * K**-0.5

    # No entry is above 1, where float16 is as fine as TF32 and its products twice as fast.
    dtype: tl.constexpr = tl.float32 if k_ptr.dtype.element_ty == tl.float32 else tl.float16
    near_apart = tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :]
    near_keys, near_scores = tl.zeros([Q // 16, 16, 16], tl.float32), tl.zeros([Q // 16, 16, 16], tl.float32)
    HALF: tl.constexpr = min(Q, 32)
    half_keys, half_scores = (
        tl.zeros([Q // HALF, HALF, HALF], tl.float32),
        tl.zeros([Q // HALF, HALF, HALF], tl.float32),
    )
    keys, scores = tl.zeros([Q, Q], tl.float32), tl.zeros([Q, Q], tl.float32)
    own = tl.zeros([Q], tl.float32)
    # disable_licm: values that are the same in all iterations are computed again. To keep them would spill others.
    for start in tl.range(0, K, BLOCK_K, num_stages=1, disable_licm=True):
        i = start + columns
        mask = live[:, None] & (i < K)[None, :]
        k = tl.load(k_ptr + t[:, None] * k_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32) * k_factor
        q = tl.load(q_ptr + t[:, None] * q_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32) * q_factor
        g = _gates(a_ptr + t[:, None] * a_strides[0] + i[None, :], A_log_ptr, dt_bias_ptr, h, i, mask, K, LOWER_BOUND)
        sums, total = tl.cumsum(g, 0), tl.sum(g, 0)
        from_start, cells = tl.exp(sums), t[:, None] * (H * K) + i[None, :]
        tl.store(q_in_ptr + place + cells, (q * from_start).to(q_in_ptr.dtype.element_ty), mask=mask)
        tl.store(k_in_ptr + place + cells, (k * from_start).to(k_in_ptr.dtype.element_ty), mask=mask)
        left = k * tl.exp(tl.minimum(total[None, :] - sums, 0.0))
        tl.store(k_left_ptr + place + cells, left.to(k_left_ptr.dtype.element_ty), mask=mask)
        tl.store(decay_ptr + i, tl.exp(total), mask=i < K)
        own += tl.sum(q * k, 1)
        for level in tl.static_range(LEVELS):
            decay = _to_middle(sums, level)
            scaled_k, scaled_q = (k * decay).to(dtype), (q * decay).to(dtype)
            if level < 4:
                meant, zero = (near_apart >> level == 1)[None, :, :], tl.zeros_like(near_keys)
                near_keys += tl.where(meant, _add_products(zero, scaled_k, scaled_k, PRECISION), 0.0)
                near_scores += tl.where(meant, _add_products(zero, scaled_q, scaled_k, PRECISION), 0.0)
            elif level == 4:
                half_keys = _add_products(half_keys, scaled_k, scaled_k, PRECISION)
                half_scores = _add_products(half_scores, scaled_q, scaled_k, PRECISION)
            else:
                keys = tl.dot(scaled_k, tl.trans(scaled_k), keys, input_precision=PRECISION)
                scores = tl.dot(scaled_q, tl.trans(scaled_k), scores, input_precision=PRECISION)

    beta = tl.load(b_ptr + (first + t) * b_st + h, mask=live, other=0.0).to(tl.float32)
    if A_log_ptr is not None:
        beta = BETA_SCALE * tl.sigmoid(beta)
    r, c = t[:, None], t[None, :]
    keys = _join(near_keys, half_keys, keys) * beta[:, None]
    scores = tl.where(r > c, _join(near_scores, half_scores, scores), tl.where(r == c, own[:, None], 0.0))
    pairs = (chunk.to(tl.int64) * H + h) * (Q * Q) + r * Q + c
    tl.store(scores_ptr + pairs, scores.to(scores_ptr.dtype.element_ty))
    inverse = unit_inverse(tl.where(r > c, keys, 0.0).to(dtype), Q, LEVELS, PRECISION)
    tl.store(solved_ptr + pairs, (inverse * beta[None, :]).to(solved_ptr.dtype.element_ty))


def prepare_channels(inputs: DeltaInputs, weights: GateWeights | None, plan: ChunkPlan, size: int) -> PreparedChunks:
    """The first launch, of chunks of up to `size` tokens, for gates of channels; with `weights` from raw ones."""
    q, k, v, g, beta = inputs
    chunks, (heads, key_dim) = len(plan.seq_idx), k.shape[1:]
    q_in, k_in, k_left = (torch.empty(k.shape, dtype=v.dtype, device=v.device) for _ in range(3))
    solved, scores = (torch.empty(chunks, heads, size, size, dtype=v.dtype, device=v.device) for _ in range(2))
    decay = torch.empty(chunks, heads, key_dim, dtype=torch.float32, device=v.device)
    A_log, dt_bias, beta_scale, lower_bound = weights or (None, None, 1.0, None)
    if chunks:
        _prepare_kernel[heads, chunks](
            q, k, g, beta, A_log, dt_bias, plan.cu_chunk_seqlens, q_in, k_in, k_left, solved, scores, decay,
            strides(q), strides(k), strides(g), beta.stride(0), H=heads, K=key_dim, Q=size,
            LEVELS=size.bit_length() - 1, BLOCK_K=min(COLUMNS, max(16, triton.next_power_of_2(key_dim))),
            BETA_SCALE=beta_scale, LOWER_BOUND=lower_bound, PRECISION=dot_precision(v.dtype), num_warps=8,
        )  # fmt: skip
    return PreparedChunks(q_in, k_in, k_left, v, solved, scores, None, decay)
