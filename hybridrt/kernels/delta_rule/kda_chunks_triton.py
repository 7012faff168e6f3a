"""Triton kernel of Kimi Delta Attention's chunks (Moonshot AI 2025, section 3): what depends on their tokens alone.

With G the running sum of a chunk's gates [Q, K], and k and q normalised, a chunk needs

    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc) for i > j,
    P_ij = K^-0.5 sum_c q_ic k_jc exp(G_ic - G_jc) for i >= j.

Each channel has its own decay, so it cannot be taken out of the sum. It is split at the middle b of
a block of 2^(l+1) tokens that holds i and j, and each factor goes to a copy of k or q,

    exp(G_i - G_j) = exp(G_i - G_b) exp(G_b - G_j).

Where no sum between a token and the middle is past FAR, neither factor overflows, and one product
gives all pairs of the block. The kernel begins with the whole chunk. If a sum is too large, the
product gives only pairs of tokens in different halves, with factors of at most 1; then the halves
are the blocks, and so on.

Sums of gates are products of tensor cores with matrices of 1, -1 and 0. As operands, gates are
multiples of log(2) / SCALE, split into two numbers of float16, 22 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import is_capturing
from hybridrt.kernels.core.chunk_plan import ChunkPlan
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import dot_precision, dot_width
from hybridrt.kernels.core.records import DeltaInputs, GateWeights
from hybridrt.kernels.core.tiles_triton import LOG2_E
from hybridrt.kernels.delta_rule.delta_chunks_triton import PreparedChunks, unit_inverse
from hybridrt.kernels.state.conv_and_gates_triton import L2_EPS, strides

COLUMNS = 64  # channels of a key that a program computes at a time
SCALE = tl.constexpr(256.0)
LOWEST = tl.constexpr(-255.0 * 256.0)  # lowest gate: in float16's range, and its exponential is 0
FAR = 100.0  # a power of 2: 2^-FAR of a key is in float32's range, and so is 2^-26 of that
FAR_IN_FLOAT32 = 16.0  # larger differences lose more than float32 products
# log(1 + z) / z for 0 <= z <= 1, highest power first, to 2e-7.
LOG1P = tl.constexpr(
    (
        -0.008539208211004734, 0.044089630246162415, -0.10768171399831772, 0.17745241522789001,
        -0.24495463073253632, 0.33275479078292847, -0.4999740421772003, 0.9999998211860657,
    )
)  # fmt: skip

_kept_matrices: dict[tuple[int, torch.device], Tensor] = {}


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """Takes a third of the instructions of the decode kernels' softplus."""
    z = tl.exp2(-tl.abs(x) * LOG2_E)
    ratio = tl.full(x.shape, LOG1P[0], tl.float32)
    for n in tl.static_range(1, 8):
        ratio = ratio * z + LOG1P[n]
    return tl.maximum(x, 0.0) + ratio * z


@triton.jit
def _gates(  # type: ignore[no-untyped-def]
    a_ptr, A_log_ptr, dt_bias_ptr, h, i, mask, K: tl.constexpr, LOWER_BOUND: tl.constexpr
):
    """SCALE / log(2) times g of a tile [Q, columns i], 0 where masked: from raw a, or from g
    without A_log. Base 2, because tl.exp looks for small results first.
    """
    UNIT: tl.constexpr = SCALE * LOG2_E
    g = tl.load(a_ptr, mask=mask, other=0.0).to(tl.float32)
    if A_log_ptr is None:
        g *= UNIT
    else:
        g += tl.load(dt_bias_ptr + h * K + i, mask=i < K, other=0.0).to(tl.float32)[None, :]
        rate = tl.exp(tl.load(A_log_ptr + h).to(tl.float32))
        if LOWER_BOUND is None:
            g = _softplus(g) * (-rate * UNIT)
        else:
            g = (LOWER_BOUND * UNIT) / (1.0 + tl.exp2(g * (-rate * LOG2_E)))
        g = tl.where(mask, g, 0.0)
    return tl.maximum(g, LOWEST)


@triton.jit
def _halves(g):  # type: ignore[no-untyped-def]
    high = g.to(tl.float16)
    return high, (g - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _sums(matrices_ptr, number, high, low):  # type: ignore[no-untyped-def]
    """A matrix [Q, Q] times gates [Q, columns]: sums of them as powers of 2."""
    Q: tl.constexpr = high.shape[0]
    t = tl.arange(0, Q)
    matrix = tl.load(matrices_ptr + number * (Q * Q) + t[:, None] * Q + t[None, :])
    return tl.dot(matrix, low, tl.dot(matrix, high))


@triton.jit
def _is_far(sums, FAR: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.max(tl.max(tl.abs(sums), 1), 0) > FAR


@triton.jit
def _nearest(x):  # type: ignore[no-untyped-def]
    """Rounds to the nearest TF32 number: products cut bits off."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def _products(x, y, z, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x_i y_j where i >= j, y_i z_j above the diagonal: scores, and transposed products of keys."""
    t = tl.arange(0, x.shape[0])
    of_keys = tl.dot(y, tl.trans(z), input_precision=PRECISION)
    of_queries = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    return tl.where(t[:, None] < t[None, :], of_keys, of_queries)


@jit_kernel
def _channels_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, ends_ptr, matrices_ptr,
    q_in_ptr, k_in_ptr, k_left_ptr, solved_ptr, scores_ptr, decay_ptr,
    q_strides: tl.constexpr, k_strides: tl.constexpr, a_strides: tl.constexpr, b_st: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr,
    FAR: tl.constexpr, BETA_SCALE: tl.constexpr, LOWER_BOUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid [heads, chunks]; Q = 2^LEVELS."""
    h, chunk = tl.program_id(0), tl.program_id(1)
    t, columns = tl.arange(0, Q), tl.arange(0, BLOCK_K)
    first, end = tl.load(ends_ptr + chunk).to(tl.int64), tl.load(ends_ptr + chunk + 1)
    live = first + t < end
    # 64-bit starts, 32-bit offsets: fewer registers.
    q_ptr += first * q_strides[0] + h * q_strides[1]
    k_ptr += first * k_strides[0] + h * k_strides[1]
    a_ptr += first * a_strides[0] + h * a_strides[1]
    place = (first * H + h) * K
    q_in_ptr += place
    k_in_ptr += place
    k_left_ptr += place
    decay_ptr += (chunk.to(tl.int64) * H + h) * K
    k_norm, q_norm = tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32)
    for start in range(0, K, BLOCK_K):
        i = start + columns
        mask = live[:, None] & (i < K)[None, :]
        k = tl.load(k_ptr + t[:, None] * k_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + t[:, None] * q_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32)
        k_norm += tl.sum(k * k, 1)
        q_norm += tl.sum(q * q, 1)
    k_factor, q_factor = tl.rsqrt(k_norm + L2_EPS)[:, None], (tl.rsqrt(q_norm + L2_EPS) * K**-0.5)[:, None]

    # float16 is as fine as TF32 for factors of at most 1, and twice as fast.
    dtype: tl.constexpr = tl.float32 if k_ptr.dtype.element_ty == tl.float32 else tl.float16
    r, c = t[:, None], t[None, :]
    both = tl.zeros([Q, Q], tl.float32)  # saves registers: see _products
    # disable_licm: hoisted loop invariants would spill registers.
    for start in tl.range(0, K, BLOCK_K, num_stages=1, disable_licm=True):
        i = start + columns
        mask = live[:, None] & (i < K)[None, :]
        raw = a_ptr + t[:, None] * a_strides[0] + i[None, :]
        g = _gates(raw, A_log_ptr, dt_bias_ptr, h, i, mask, K, LOWER_BOUND)
        k = tl.load(k_ptr + t[:, None] * k_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32) * k_factor
        q = tl.load(q_ptr + t[:, None] * q_strides[0] + i[None, :], mask=mask, other=0.0).to(tl.float32) * q_factor
        high, low = _halves(g)
        tl.store(decay_ptr + i, tl.exp2(tl.sum(g, 0) * (1.0 / SCALE)), mask=i < K)
        from_start, cells = tl.exp2(_sums(matrices_ptr, LEVELS + 1, high, low)), r * (H * K) + i[None, :]
        tl.store(k_in_ptr + cells, (k * from_start).to(k_in_ptr.dtype.element_ty), mask=mask)
        tl.store(q_in_ptr + cells, (q * from_start).to(q_in_ptr.dtype.element_ty), mask=mask)
        left = k * tl.exp2(_sums(matrices_ptr, LEVELS + 2, high, low))
        tl.store(k_left_ptr + cells, left.to(k_left_ptr.dtype.element_ty), mask=mask)

        level = LEVELS  # blocks have 2^level tokens
        sums = _sums(matrices_ptr, level, high, low)
        while _is_far(sums, FAR):
            decay = tl.exp2(-tl.abs(sums))
            x, y = (q * decay).to(dtype), (k * decay).to(dtype)
            level -= 1
            both += tl.where((r ^ c) >> level == 1, _products(x, y, y, PRECISION), 0.0)
            sums = _sums(matrices_ptr, level, high, low)
        grown = tl.exp2(sums)
        x, y, z = q * grown, k * tl.exp2(-sums), k * grown
        if dtype == tl.float16:
            x, y, z = _nearest(x), _nearest(y), _nearest(z)
        both += tl.where((r ^ c) >> level == 0, _products(x, y, z, PRECISION), 0.0)

    beta = tl.load(b_ptr + (first + t) * b_st + h, mask=live, other=0.0).to(tl.float32)
    if A_log_ptr is not None:
        beta = BETA_SCALE * tl.sigmoid(beta)
    pairs = (chunk.to(tl.int64) * H + h) * (Q * Q)
    scores = tl.where(r >= c, both, 0.0)
    tl.store(scores_ptr + pairs + r * Q + c, scores.to(scores_ptr.dtype.element_ty))
    inverse = unit_inverse(tl.where(r < c, both * beta[None, :], 0.0).to(dtype), Q, LEVELS, PRECISION)
    tl.store(solved_ptr + pairs + c * Q + r, (inverse * beta[:, None]).to(solved_ptr.dtype.element_ty))


def prepare_channels(inputs: DeltaInputs, weights: GateWeights | None, plan: ChunkPlan, size: int) -> PreparedChunks:
    """The first launch, of chunks of up to `size` tokens, for gates of channels; with `weights` from raw ones."""
    k, v = inputs.k, inputs.v
    chunks, (heads, key_dim), device = len(plan.seq_idx), k.shape[1:], v.device
    q_in, k_in, k_left = (torch.empty(k.shape, dtype=v.dtype, device=device) for _ in range(3))
    solved, scores = (torch.empty(chunks, heads, size, size, dtype=v.dtype, device=device) for _ in range(2))
    decay = torch.empty(chunks, heads, key_dim, dtype=torch.float32, device=device)
    A_log, dt_bias = (None, None) if weights is None else (weights.A_log, weights.dt_bias)
    beta_scale, lower_bound = (1.0, None) if weights is None else (weights.beta_scale, weights.lower_bound)
    if chunks:
        # 4 warps: with 8, Triton 3.6 lets warps read an operand of 64 rows past its end.
        _channels_kernel[heads, chunks](
            inputs.q, k, inputs.g, inputs.beta, A_log, dt_bias, plan.cu_chunk_seqlens, sum_matrices(size, device),
            q_in, k_in, k_left, solved, scores, decay,
            strides(inputs.q), strides(k), strides(inputs.g), inputs.beta.stride(0), H=heads, K=key_dim, Q=size,
            LEVELS=size.bit_length() - 1, BLOCK_K=min(COLUMNS, dot_width(key_dim)),
            FAR=FAR_IN_FLOAT32 if v.dtype == torch.float32 else FAR, BETA_SCALE=beta_scale, LOWER_BOUND=lower_bound,
            PRECISION=dot_precision(v.dtype), num_warps=4,
        )  # fmt: skip
    return PreparedChunks(q_in, k_in, k_left, v, solved, scores, None, decay)


def sum_matrices(size: int, device: torch.device) -> Tensor:
    """float16 [levels + 3, size, size], to multiply gates with.

    Row r of matrix l sums from the middle of its block of 2^l tokens to r, negative if r is in the
    lower half (nothing for l = 0). The last two sum up to r, and after r. Kept between calls, but
    not from within a graph's capture: those hold nothing before a replay.
    """
    if (kept := _kept_matrices.get((size, device))) is not None:
        return kept
    r, c = torch.arange(size, device=device)[:, None], torch.arange(size, device=device)[None, :]
    middles = [((r >> level) | 1) << level for level in range(size.bit_length() - 1)]
    rows = [(c <= r).half() - (c < middle).half() for middle in middles]
    made = torch.stack([torch.zeros_like(rows[0]), *rows, (c <= r).half(), (c > r).half()]) / SCALE.value
    if not is_capturing():
        _kept_matrices[size, device] = made
    return made
