"""e4m3 codes of keys and values within kernels (`kv_codes.py` is the reference)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def as_stored(x, inverse, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """x in a cache's dtype. `inverse`: 1 / scale of codes; None for plain numbers."""
    if inverse is None:
        return x.to(DTYPE)
    else:
        return _encode(x.to(tl.float32) * inverse)


@triton.jit
def _encode(x):  # type: ignore[no-untyped-def]
    """By integers, since conversions differ: the interpreter's rounds down and knows no NaN."""
    bits, size = x.to(tl.int32, bitcast=True), tl.abs(x)
    inside = tl.minimum(size, 448.0)
    rounded = inside.to(tl.int32, bitcast=True)
    normal = (rounded + 0x7FFFF + ((rounded >> 20) & 1) - (120 << 23)) >> 20
    # A sum with 2^14 is a multiple of 2^-9, the distance of the least codes.
    least = (inside + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(inside < 0.015625, least, normal)
    code = tl.where(size < float("inf"), code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def for_products(q, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries in the dtype of products with a cache. float16 has every e4m3 code, and the GPU converts to it in one
    instruction."""
    if CACHE == tl.float8e4nv and q.dtype == tl.bfloat16:  # noqa: SIM300
        return q.to(tl.float16)
    else:
        return q


def inverse_scale(cache: Tensor, scale: float) -> float | None:
    """The argument `inverse` of `as_stored`."""
    return 1.0 / scale if cache.dtype == torch.float8_e4m3fn else None
