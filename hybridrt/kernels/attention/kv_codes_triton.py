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
        scaled = x.to(tl.float32) * inverse
        # The conversion saturates at 448, infinities too.
        return tl.where(tl.abs(scaled) < float("inf"), scaled, float("nan")).to(tl.float8e4nv)


@triton.jit
def for_products(q, CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries in the dtype of products with a cache. float16 has every e4m3 code, and the GPU converts to it in one
    instruction."""
    if CACHE == tl.float8e4nv and q.dtype == tl.bfloat16:  # noqa: SIM300
        return q.to(tl.float16)
    else:
        return q


@triton.jit
def numbers_of_pairs(pairs):  # type: ignore[no-untyped-def]
    """Codes in int16 words, two neighbours each: the first ones and the second ones in float16.

    Tensor cores want neighbouring rows in a register. From shared memory that is one instruction for words of 16 bits,
    and one for each code of 8.
    """
    return tl.inline_asm_elementwise(
        "{.reg .b32 both; .reg .b16 first, second; prmt.b32 both, $2, 0, 0x3120; mov.b32 {first, second}, both;"
        " cvt.rn.f16x2.e4m3x2 $0, first; cvt.rn.f16x2.e4m3x2 $1, second;}",
        "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


def inverse_scale(cache: Tensor, scale: float) -> float | None:
    """The argument `inverse` of `as_stored`."""
    return 1.0 / scale if cache.dtype == torch.float8_e4m3fn else None
