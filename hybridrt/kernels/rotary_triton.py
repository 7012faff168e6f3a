"""Triton kernel of rotary embedding, with per-head norms before it and the KV write behind it."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.pdl_triton import begin, pdl


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    x_ptr, x_sh, out_ptr, out_sh, weight_ptr, cos, sin, eps,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one token's heads. A thread holds both halves of a pair, so that out may be x."""
    h, i = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    mask = (h < HEADS) & (i < HALF)
    first = tl.load(x_ptr + h * x_sh + i, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + h * x_sh + HALF + i, mask=mask, other=0.0).to(tl.float32)
    j = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = (h < HEADS) & (j < D)
    rest = tl.load(x_ptr + h * x_sh + j, mask=rest_mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        scale = (1.0 / tl.sqrt(total / D + eps))[:, None]
        first *= scale * tl.load(weight_ptr + i, mask=i < HALF, other=0.0)
        second *= scale * tl.load(weight_ptr + HALF + i, mask=i < HALF, other=0.0)
        rest *= scale * tl.load(weight_ptr + j, mask=j < D, other=0.0)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + h * out_sh + i, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_ptr + h * out_sh + HALF + i, (second * cos + first * sin).to(dtype), mask=mask)
    tl.store(out_ptr + h * out_sh + j, rest.to(dtype), mask=rest_mask)


@triton.jit
def _rotary_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr,
    k_cache_ptr, v_cache_ptr, slots_ptr, q_st, q_sh, k_st, k_sh, v_st, v_sh, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HQ: tl.constexpr,
    BLOCK_HKV: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, 0) does the query heads, (token, 1) the key heads, (token, 2) copies the value heads."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin(PDL)
    if slots_ptr is not None:  # noqa: SIM102  # alone it is known when compiling, and without caches nothing is
        if part == 2:
            h, d = tl.arange(0, BLOCK_HKV)[:, None], tl.arange(0, BLOCK_D)[None, :]
            mask = (h < HKV) & (d < D)
            target = v_cache_ptr + tl.load(slots_ptr + t).to(tl.int64) * (HKV * D) + h * D + d
            v = tl.load(v_ptr + t * v_st + h * v_sh + d, mask=mask)
            tl.store(target, v.to(v_cache_ptr.dtype.element_ty), mask=mask)
            return
    i = tl.arange(0, BLOCK_HALF)[None, :]
    angles = cos_sin_ptr + tl.load(positions_ptr + t).to(tl.int64) * (2 * HALF) + i
    cos = tl.load(angles, mask=i < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=i < HALF, other=0.0)
    if part == 0:
        q = q_ptr + t * q_st
        _rotate_heads(q, q_sh, q, q_sh, q_weight_ptr, cos, sin, eps, HQ, D, HALF, BLOCK_HQ, BLOCK_HALF, BLOCK_REST)
    else:
        k = k_ptr + t * k_st
        if slots_ptr is None:
            target, stride = k, k_sh
        else:
            target, stride = k_cache_ptr + tl.load(slots_ptr + t).to(tl.int64) * (HKV * D), D
        _rotate_heads(k, k_sh, target, stride, k_weight_ptr, cos, sin, eps, HKV, D, HALF, BLOCK_HKV, BLOCK_HALF,
                      BLOCK_REST)  # fmt: skip


def qk_norm_rotary_triton(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rotary`, in place."""
    _launch(q, k, None, positions, cos_sin, q_weight, k_weight, eps, None, None, None)
    return q, k


def rotary_write_kv_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
) -> Tensor:
    """`rotary_write_kv`; q is rotated in place, k and v are left alone."""
    _launch(q, k, v, positions, cos_sin, q_weight, k_weight, eps, k_cache, v_cache, out_cache_loc)
    return q


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    out_cache_loc: Tensor | None,
) -> None:
    (tokens, query_heads, head_dim), half = q.shape, cos_sin.shape[1] // 2
    if tokens == 0:
        return
    v_st, v_sh = (0, 0) if v is None else v.stride()[:2]
    _rotary_kernel[(tokens, 2 if v is None else 3)](
        q, k, v, positions, cos_sin, q_weight, k_weight, k_cache, v_cache, out_cache_loc,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v_st, v_sh, eps,
        HQ=query_heads, HKV=k.shape[1], D=head_dim, HALF=half, BLOCK_HQ=triton.next_power_of_2(query_heads),
        BLOCK_HKV=triton.next_power_of_2(k.shape[1]), BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_D=triton.next_power_of_2(head_dim),
        **pdl(q.device),
    )  # fmt: skip
