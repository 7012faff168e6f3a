"""Triton kernel that stores new keys and values of a paged KV cache."""

import triton.language as tl
from torch import Tensor

from hybridrt.kernels.attention.kv_codes_triton import as_stored, inverse_scale
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl


@jit_kernel
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_inverse, v_inverse, k_st, k_sh, v_st, v_sh,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < PAGE:
        return
    mask = (h < HKV) & (d < D)
    target = slot * (HKV * D) + h * D + d
    k = tl.load(k_ptr + t * k_st + h * k_sh + d, mask=mask)
    v = tl.load(v_ptr + t * v_st + h * v_sh + d, mask=mask)
    tl.store(k_cache_ptr + target, as_stored(k, k_inverse, k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + target, as_stored(v, v_inverse, v_cache_ptr.dtype.element_ty), mask=mask)


def write_kv_triton(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor, k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:  # fmt: skip
    """One program a token."""
    tokens, kv_heads, head_dim = k.shape
    _write_kv_kernel[(tokens,)](
        k, v, k_cache, v_cache, out_cache_loc, inverse_scale(k_cache, k_scale), inverse_scale(v_cache, v_scale),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HKV=kv_heads, D=head_dim, PAGE=k_cache.shape[1], BLOCK_H=next_power_of_2(kv_heads),
        BLOCK_D=next_power_of_2(head_dim), **pdl(k.device),
    )  # fmt: skip
