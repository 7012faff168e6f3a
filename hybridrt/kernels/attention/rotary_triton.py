"""Triton kernel of per-head norms, rotary embedding and the KV write."""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.attention.kv_codes_triton import as_stored, inverse_scale
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import KVPlaces, Rope
from hybridrt.kernels.state.conv_and_gates_triton import strides


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr, x_strides: tl.constexpr, out_ptr, out_strides: tl.constexpr, slots_ptr, positions_ptr, axis_stride,
    cos_sin_ptr, weight_ptr, eps, inverse, first, tokens, SECTIONS: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalizes and rotates BLOCK_R heads from `first`, counted through all tokens. A thread holds
    both halves of a pair, so out may be x.
    """
    line = first + tl.arange(0, BLOCK_R)
    t, h = line // HEADS, line % HEADS
    live = t < tokens
    place, kept = t, live
    if slots_ptr is not None:
        place = tl.load(slots_ptr + t, mask=live, other=0)
        kept = place >= PAGE
    x = x_ptr + (t.to(tl.int64) * x_strides[0] + h * x_strides[1])[:, None]
    out = out_ptr + (place.to(tl.int64) * out_strides[0] + h * out_strides[1])[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = live[:, None] & (i < HALF)
    position = tl.load(positions_ptr + t, mask=live, other=0)[:, None]
    if axis_stride is not None:  # time's; then the pairs of rows and of columns
        row = tl.load(positions_ptr + axis_stride + t, mask=live, other=0)[:, None]
        column = tl.load(positions_ptr + 2 * axis_stride + t, mask=live, other=0)[:, None]
        position = tl.where((i % 3 == 1) & (i < 3 * SECTIONS[1]), row, position)
        position = tl.where((i % 3 == 2) & (i < 3 * SECTIONS[2]), column, position)
    angles = cos_sin_ptr + position.to(tl.int64) * (2 * HALF) + i
    cos, sin = tl.load(angles, mask=mask, other=0.0), tl.load(angles + HALF, mask=mask, other=0.0)
    begin(PDL)
    first_half = tl.load(x + i, mask=mask, other=0.0).to(tl.float32)
    second_half = tl.load(x + HALF + i, mask=mask, other=0.0).to(tl.float32)
    j = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = live[:, None] & (j < D)
    rest = tl.load(x + j, mask=rest_mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        total = tl.sum(first_half * first_half, 1) + tl.sum(second_half * second_half, 1) + tl.sum(rest * rest, 1)
        scale = (1.0 / tl.sqrt(total / D + eps))[:, None]
        first_half *= scale * tl.load(weight_ptr + i, mask=i < HALF, other=0.0)
        second_half *= scale * tl.load(weight_ptr + HALF + i, mask=i < HALF, other=0.0)
        rest *= scale * tl.load(weight_ptr + j, mask=j < D, other=0.0)
    dtype = out_ptr.dtype.element_ty
    mask, rest_mask = mask & kept[:, None], rest_mask & kept[:, None]
    tl.store(out + i, as_stored(first_half * cos - second_half * sin, inverse, dtype), mask=mask)
    tl.store(out + HALF + i, as_stored(second_half * cos + first_half * sin, inverse, dtype), mask=mask)
    tl.store(out + j, as_stored(rest, inverse, dtype), mask=rest_mask)


@jit_kernel(do_not_specialize=["tokens", "axis_stride"])
def _rotary_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, positions_ptr, axis_stride, cos_sin_ptr, q_weight_ptr, k_weight_ptr,
    k_cache_ptr, v_cache_ptr, slots_ptr, tokens, eps, k_inverse, v_inverse, SECTIONS: tl.constexpr,
    q_strides: tl.constexpr, k_strides: tl.constexpr, v_strides: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks of BLOCK_R heads: of queries, keys, then values, which are copied."""
    block = tl.program_id(0)
    q_blocks, kv_blocks = tl.cdiv(tokens * HQ, BLOCK_R), tl.cdiv(tokens * HKV, BLOCK_R)
    if block < q_blocks:
        _rotate(q_ptr, q_strides, q_ptr, q_strides, None, positions_ptr, axis_stride, cos_sin_ptr, q_weight_ptr, eps,
                None, block * BLOCK_R, tokens, SECTIONS, HQ, D, HALF, PAGE,
                BLOCK_R, BLOCK_HALF, BLOCK_REST, PDL)  # fmt: skip
        return
    first = (block - q_blocks) * BLOCK_R
    if slots_ptr is None:
        _rotate(k_ptr, k_strides, k_ptr, k_strides, None, positions_ptr, axis_stride, cos_sin_ptr, k_weight_ptr, eps,
                None, first, tokens, SECTIONS, HKV, D, HALF, PAGE, BLOCK_R, BLOCK_HALF, BLOCK_REST, PDL)  # fmt: skip
    else:
        if block < q_blocks + kv_blocks:
            _rotate(k_ptr, k_strides, k_cache_ptr, (HKV * D, D), slots_ptr, positions_ptr, axis_stride, cos_sin_ptr,
                    k_weight_ptr, eps, k_inverse, first, tokens, SECTIONS, HKV, D, HALF, PAGE,
                    BLOCK_R, BLOCK_HALF, BLOCK_REST, PDL)  # fmt: skip
        else:
            row = first - kv_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
            t, h = row // HKV, row % HKV
            d = tl.arange(0, BLOCK_D)[None, :]
            slot = tl.load(slots_ptr + t, mask=t < tokens, other=0).to(tl.int64)
            begin(PDL)
            mask = (slot >= PAGE)[:, None] & (d < D)
            x = tl.load(v_ptr + (t.to(tl.int64) * v_strides[0] + h * v_strides[1])[:, None] + d, mask=mask)
            x = as_stored(x, v_inverse, v_cache_ptr.dtype.element_ty)
            tl.store(v_cache_ptr + ((slot * HKV + h) * D)[:, None] + d, x, mask=mask)


def qk_norm_rotary_triton(q: Tensor, k: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """`qk_norm_rotary` in one launch. Changes q and k in place."""
    _launch(q, k, None, positions, rope)
    return q, k


def rotary_write_kv_triton(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rope: Rope, places: KVPlaces) -> Tensor:
    """Rotates q in place; k and v are not changed."""
    _launch(q, k, v, positions, rope, places)
    return q


def _launch(
    q: Tensor, k: Tensor, v: Tensor | None, positions: Tensor, rope: Rope, places: KVPlaces | None = None
) -> None:
    k_cache = v_cache = k_inverse = v_inverse = None
    if places is not None:
        k_cache, v_cache = places.k_cache, places.v_cache
        k_inverse, v_inverse = inverse_scale(k_cache, places.k_scale), inverse_scale(v_cache, places.v_scale)
    (tokens, query_heads, head_dim), half = q.shape, rope.cos_sin.shape[1] // 2
    kv_heads, axis_stride = k.shape[1], positions.stride(0) if positions.dim() == 2 else None
    rows, warps = rotary_tile(tokens * query_heads, head_dim)
    kv_blocks = cdiv(tokens * kv_heads, rows)
    _rotary_kernel[(cdiv(tokens * query_heads, rows) + (1 if v is None else 2) * kv_blocks,)](
        q, k, v, positions, axis_stride, rope.cos_sin, rope.q_weight, rope.k_weight, k_cache, v_cache,
        None if places is None else places.out_cache_loc, tokens, rope.eps, k_inverse, v_inverse,
        None if axis_stride is None else rope.sections, strides(q), strides(k), strides(v),
        HQ=query_heads, HKV=kv_heads, D=head_dim, HALF=half, PAGE=0 if k_cache is None else k_cache.shape[1],
        BLOCK_R=rows, BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_D=next_power_of_2(head_dim),
        num_warps=warps, **pdl(q.device),
    )  # fmt: skip


def rotary_tile(rows: int, head_dim: int) -> tuple[int, int]:
    """Rows (heads of tokens) and warps of a program, as measured on an H200."""
    if rows <= 128:
        return 1, 1
    return (4, 2) if head_dim > 128 else (16, 4)
