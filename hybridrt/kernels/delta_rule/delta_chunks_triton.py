"""Shared by the kernels of chunked delta rules: the record between launches, a triangular inverse."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class PreparedChunks(NamedTuple):
    """What does not depend on the state, of n chunks of up to Q tokens: the first arguments of the pass over them.

    Attributes:
        q, k: `[T, Hk, K]` unscaled, or normalised and scaled by the decay from the chunk's start to their token.
        k_left: `[T, Hk, K]` k, normalised and scaled by the decay from its token to the chunk's end; None if q and k
            are unscaled.
        v: `[T, Hv, V]`.
        solved: `[n, Hv, Q, Q]` in v's dtype, (I + A)^-1 diag(beta) of `delta_rule_triton.py`.
        scores: `[n, Hv, Q, Q]` in v's dtype, its P.
        factors: `[n, Hv, 3, Q]` float32 scales of unscaled k and q, in its order; None for scaled ones.
        decay: `[n, Hv]` or `[n, Hv, K]` float32, the decay of a state over the whole chunk.
    """

    q: Tensor
    k: Tensor
    k_left: Tensor | None
    v: Tensor
    solved: Tensor
    scores: Tensor
    factors: Tensor | None
    decay: Tensor


@triton.jit
def _widen(inverse, A, FROM: tl.constexpr, TO: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + A)^-1 for A [..., n, n] cut to diagonal blocks of 2^TO, given it for blocks of 2^FROM.

    With B the part of A between the two halves, (T^-1 + B)^-1 = T - T B T.
    """
    n: tl.constexpr = A.shape[-1]
    apart = tl.arange(0, n)[:, None] ^ tl.arange(0, n)[None, :]
    for level in tl.static_range(FROM, TO):
        between = tl.where(apart >> level == 1, A, 0.0)
        narrow = inverse.to(A.dtype)
        product = tl.dot(narrow, between, input_precision=PRECISION).to(A.dtype)
        inverse -= tl.dot(product, narrow, input_precision=PRECISION)
    return inverse


@triton.jit
def unit_inverse(A, Q: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + A)^-1, float32, of strictly lower triangular A [Q, Q], Q = 2^LEVELS: first in blocks of 16 that small tensor
    core products take side by side, then whole."""
    blocks: tl.constexpr = Q // 16
    same = tl.arange(0, blocks)[:, None, None, None] == tl.arange(0, blocks)[None, None, :, None]
    tiles = tl.sum(tl.where(same, tl.reshape(A, [blocks, 16, blocks, 16]), 0.0), 2).to(A.dtype)
    apart = tl.arange(0, 16)[:, None] ^ tl.arange(0, 16)[None, :]
    pairs = tl.where(apart == 0, 1.0, tl.where(apart == 1, -tiles, 0.0).to(tl.float32))
    inverse = _widen(pairs, tiles, 1, 4, PRECISION)
    inverse = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [Q, Q])
    return _widen(inverse, A, 4, LEVELS, PRECISION)
