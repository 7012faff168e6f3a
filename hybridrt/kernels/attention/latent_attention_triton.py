"""Triton kernels of multi-head latent attention: storing latent vectors, and prefill."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors, shared_memory
from hybridrt.kernels.attention import prefill_attention_triton as prefill
from hybridrt.kernels.attention.kv_codes_triton import as_stored, inverse_scale
from hybridrt.kernels.attention.latent_attention import from_latent, into_latent
from hybridrt.kernels.attention.prefill_attention_triton import described
from hybridrt.kernels.attention.prefill_tiles_triton import (
    PIPELINE_BLOCK,
    PIPELINE_LATENT,
    PIPELINE_ROWS,
    KeySources,
)
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_width, next_power_of_2, zero_after
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import AttentionPrompts, LatentWeights, PagedKV
from hybridrt.kernels.dense.pipeline_tiles import has_pipeline

FEW_TOKENS = 4  # up to here all heads' products take one launch
MAX_DECOMPRESSED = 1 << 28  # bytes of keys and values computed at a time
# A multiply-add of absorbed queries costs two others on an H200, in tiles of these rows.
ABSORBED_COST, ABSORBED_ROWS, MADE_ROWS = 2, 32, 64


@triton.jit
def _rotated(x, cos_sin_ptr, position, mask, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotated numbers at x [R]: two halves [R, BLOCK_HALF] float32."""
    i = tl.arange(0, BLOCK_HALF)[None, :]
    angles = cos_sin_ptr + position.to(tl.int64) * (2 * HALF) + i
    cos, sin = tl.load(angles, mask=i < HALF, other=0.0), tl.load(angles + HALF, mask=i < HALF, other=0.0)
    mask = mask[:, None] & (i < HALF)
    first = tl.load(x[:, None] + i, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x[:, None] + HALF + i, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, out, cos_sin_ptr, position, mask, inverse, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """A thread holds both halves of a pair, so out may be x."""
    first, second = _rotated(x, cos_sin_ptr, position, mask, HALF, BLOCK_HALF)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = mask[:, None] & (i < HALF)
    tl.store(out[:, None] + i, as_stored(first, inverse, out.dtype.element_ty), mask=mask)
    tl.store(out[:, None] + HALF + i, as_stored(second, inverse, out.dtype.element_ty), mask=mask)


@jit_kernel
def _write_latent_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, weight_ptr, positions_ptr, cos_sin_ptr, cache_ptr, slots_ptr, eps, inverse, q_st, q_sh, k_st,
    H: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [tokens, 1 or 2]: a token's first program stores its vector, the second rotates its
    queries."""
    t = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots_ptr + t).to(tl.int64), tl.load(positions_ptr + t)
    d = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + d, mask=d < RANK, other=0.0)
    begin(PDL)
    if HALF > 0:  # noqa: SIM102  # in one condition the branch would be compiled without cos_sin too
        if tl.program_id(1) == 1:
            h = tl.arange(0, BLOCK_H)
            x = q_ptr + t * q_st + NOPE + h * q_sh
            _turn(x, x, cos_sin_ptr, position, h < H, None, HALF, BLOCK_HALF)
            return
    if slot < PAGE:
        return
    source, target = k_ptr + t * k_st, cache_ptr + slot * (RANK + ROPE)
    r = 2 * HALF + tl.arange(0, BLOCK_R)
    x = tl.load(source + d, mask=d < RANK, other=0.0).to(tl.float32)
    rest = tl.load(source + RANK + r, mask=r < ROPE)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps)
    tl.store(target + d, as_stored(x * weight, inverse, cache_ptr.dtype.element_ty), mask=d < RANK)
    tl.store(target + RANK + r, as_stored(rest, inverse, cache_ptr.dtype.element_ty), mask=r < ROPE)
    if HALF > 0:
        one = tl.arange(0, 1)
        _turn(source + RANK + one, target + RANK + one, cos_sin_ptr, position, one < 1, inverse, HALF,
              BLOCK_HALF)  # fmt: skip


def write_latent_triton(
    q: Tensor, k: Tensor, weights: LatentWeights, positions: Tensor, cos_sin: Tensor | None, cache: Tensor,
    out_cache_loc: Tensor, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """One launch, in place."""
    (tokens, heads, query_dim), (_, nope, rank) = q.shape, weights.up_k.shape
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    if tokens:
        _write_latent_kernel[(tokens, 2 if half else 1)](
            q, k, weights.norm, positions, cos_sin, cache, out_cache_loc, weights.norm_eps, inverse_scale(cache, scale),
            q.stride(0), q.stride(1), k.stride(0),
            H=heads, NOPE=nope, RANK=rank, ROPE=query_dim - nope, HALF=half, PAGE=cache.shape[1],
            BLOCK_H=next_power_of_2(heads), BLOCK_D=next_power_of_2(rank),
            BLOCK_R=next_power_of_2(query_dim - nope), BLOCK_HALF=next_power_of_2(max(half, 1)),
            **pdl(q.device),
        )  # fmt: skip
    return q


@jit_kernel
def _latent_heads_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, out_ptr, x_st, x_sh, out_st, out_sh,
    K: tl.constexpr, N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [blocks of N, heads, tokens]: out[t, h, :N] = x[t, h, :K] w[h]; then copies TAIL
    numbers."""
    h, t = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    k, n = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (k < K)[:, None] & (n < N)[None, :]
    tile = tl.load(w_ptr + h * (K * N) + k[:, None] * N + n[None, :], mask=mask, other=0.0)
    begin(PDL)
    x, out = x_ptr + t * x_st + h * x_sh, out_ptr + t * out_st + h * out_sh
    vector = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    found = tl.sum(tile.to(tl.float32) * vector[:, None], 0)
    tl.store(out + n, found.to(out_ptr.dtype.element_ty), mask=n < N)
    if TAIL > 0:
        r = tl.arange(0, BLOCK_R)
        copied = r < tl.where(tl.program_id(0) == 0, TAIL, 0)
        tl.store(out + N + r, tl.load(x + K + r, mask=copied), mask=copied)


def into_latent_triton(q: Tensor, weights: LatentWeights) -> Tensor:
    heads, nope, rank = weights.up_k.shape
    tail = q.shape[-1] - nope
    flat = q.reshape(-1, heads, q.shape[-1])
    if not 0 < len(flat) <= FEW_TOKENS:
        return into_latent.reference(q, weights)
    out = q.new_empty(*q.shape[:-1], rank + tail)
    _multiply_heads(flat, weights.up_k, out.view(-1, heads, rank + tail), tail)
    return out


def from_latent_triton(x: Tensor, weights: LatentWeights) -> Tensor:
    heads, rank, value_dim = weights.up_v.shape
    flat = x.reshape(-1, heads, rank)
    if not 0 < len(flat) <= FEW_TOKENS:
        return from_latent.reference(x, weights)
    out = x.new_empty(*x.shape[:-1], value_dim)
    _multiply_heads(flat, weights.up_v, out.view(-1, heads, value_dim), 0)
    return out


def _multiply_heads(x: Tensor, matrices: Tensor, out: Tensor, tail: int) -> None:
    """out [T, H, N + tail] of x [T, H, K + tail] and contiguous matrices [H, K, N]."""
    heads, inputs, outputs = matrices.shape
    block_k = next_power_of_2(inputs)
    block_n = max(8, min(next_power_of_2(outputs), 16384 // block_k))
    _latent_heads_kernel[cdiv(outputs, block_n), heads, len(x)](
        x, matrices, out, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        K=inputs, N=outputs, TAIL=tail, BLOCK_K=block_k, BLOCK_N=block_n, BLOCK_R=next_power_of_2(max(tail, 1)),
        num_warps=4, **pdl(x.device),
    )  # fmt: skip


def latent_extend_triton(q: Tensor, kv: PagedKV, weights: LatentWeights, batch: AttentionPrompts) -> Tensor:
    """Absorbed for few tokens. Decompressed for many, if the device has a tensor memory accelerator
    and the copied vectors take at most MOST_COPIED bytes."""
    lens = batch.seq_lens_host
    copied = sum(lens) * kv.k_cache.shape[3] * q.element_size()
    allowed = bool(lens) and prefill.ample(q) and copied <= prefill.MOST_COPIED
    if allowed and decompressed_pays(q, weights, batch.query_lens, lens):
        return _decompressed(q, kv, weights, batch)
    return from_latent_triton(prefill.attention_extend_triton(into_latent_triton(q, weights), kv, batch), weights)


def decompressed_pays(q: Tensor, weights: LatentWeights, query_lens: Sequence[int], seq_lens: Sequence[int]) -> bool:
    """Whether decompressed attention is faster: by a head's multiply-adds and by idle
    multiprocessors, because one tile walks all keys of its row."""
    (heads, nope, rank), value_dim = weights.up_k.shape, weights.up_v.shape[2]
    rope, matrices, device = q.shape[2] - nope, rank * (nope + value_dim), multiprocessors(q.device)

    def pairs(rows: int, heads_of_tile: int, launched: int) -> float:
        tiles = [cdiv(n * heads_of_tile, rows) for n in query_lens]
        count = sum(t * rows / heads_of_tile * (k - n / 2) for t, n, k in zip(tiles, query_lens, seq_lens, strict=True))
        return count * max(device / max(launched * sum(tiles), 1), 1.0)

    absorbed = pairs(ABSORBED_ROWS, heads, 1) * (2 * rank + rope) * ABSORBED_COST + sum(query_lens) * matrices
    made = pairs(MADE_ROWS, 1, _heads_at_once(q, weights, sum(seq_lens))) * (nope + rope + value_dim)
    return made + sum(seq_lens) * matrices < absorbed


def _heads_at_once(q: Tensor, weights: LatentWeights, keys: int) -> int:
    (heads, nope, _), value_dim = weights.up_k.shape, weights.up_v.shape[2]
    row_bytes = (dot_width(nope) + dot_width(value_dim)) * q.element_size()
    return min(max(MAX_DECOMPRESSED // max(keys * row_bytes, 1), 1), heads)


def _decompressed(q: Tensor, kv: PagedKV, weights: LatentWeights, batch: AttentionPrompts) -> Tensor:
    (heads, nope, rank), value_dim = weights.up_k.shape, weights.up_v.shape[2]
    out = q.new_empty(*q.shape[:2], value_dim)
    zero_after(out, sum(batch.query_lens))
    parts = kv.k_cache[..., :rank], kv.k_cache[..., rank:]
    by_pipeline = _takes_pipeline(q, kv, weights, batch)
    block = PIPELINE_BLOCK[nope] if by_pipeline else prefill.BLOCK_N
    latents, tails, total = prefill.copy_keys(*parts, kv, batch, q.dtype, block)
    at_once = _heads_at_once(q, weights, total)
    for first in range(0, heads, at_once):
        mine = slice(first, first + at_once)
        keys = _made(latents[:, :rank], weights.up_k[mine].transpose(1, 2))
        values = _made(latents[:, :rank], weights.up_v[mine])
        if by_pipeline:
            # Here, so that the other kernels need nothing that is experimental in Triton.
            from hybridrt.kernels.attention.prefill_pipeline_triton import attention_pipeline

            attention_pipeline(q[:, mine], KeySources(keys, values, tails, total), kv, batch, out[:, mine])
            continue
        sources = KeySources(described(keys), described(values), described(tails), total)
        shape = (len(weights.up_k[mine]), nope, value_dim, q.shape[2] - nope)
        tile = _tile_of(q[:, mine], nope, value_dim, batch.query_lens)
        prefill.run_extend(q[:, mine], sources, kv, batch, shape, tile, out[:, mine])
    return out


def _takes_pipeline(q: Tensor, kv: PagedKV, weights: LatentWeights, batch: AttentionPrompts) -> bool:
    """Whether `attention_pipeline` serves these keys, and the programs of a launch fill the device."""
    nope, value_dim = weights.up_k.shape[1], weights.up_v.shape[2]
    served = (nope, q.shape[2] - nope) == PIPELINE_LATENT and value_dim == nope and prefill.ample(q)
    if not (served and kv.sliding_window is None and has_pipeline(q.device)):
        return False
    heads = _heads_at_once(q, weights, sum(batch.seq_lens_host))
    return heads * sum(cdiv(n, PIPELINE_ROWS) for n in batch.query_lens) >= multiprocessors(q.device)


def _tile_of(q: Tensor, nope: int, value_dim: int, query_lens: Sequence[int]) -> dict[str, int]:
    """Where `attention_pipeline` does not serve, as measured on an H200: in long prompts 256 queries share
    loads, if they fit; few queries have small tiles, two a multiprocessor.
    """
    (_, heads, query_dim), dim, device = q.shape, max(nope, value_dim), multiprocessors(q.device)
    tile = prefill.tile_of(q, dim, heads, query_lens, copied=True)

    def programs(rows: int) -> int:
        return heads * sum(cdiv(n, rows) for n in query_lens)

    if dim > 128 or max(query_lens) <= 64 or 2 * programs(128) <= device:
        return tile
    key = dot_width(nope) + dot_width(query_dim - nope)
    stages = 3 * tile["BLOCK_N"] * (key + dot_width(value_dim))
    room = shared_memory(q.device) - 1024  # barriers need some bytes
    fits = (256 * key + stages) * q.element_size() < room
    long = min(query_lens) >= 2048 and programs(256) >= 2 * device
    return tile | {"BLOCK_M": 256 if long and fits else 128, "num_warps": 8, "num_stages": 3}


def _made(latents: Tensor, matrices: Tensor) -> Tensor:
    """latents [total, rank] times matrices [h, rank, dim]: [h * total, width], zeros past dim."""
    heads, _, dim = matrices.shape
    made = torch.bmm(latents.expand(heads, -1, -1), matrices)  # matmul would leave it transposed
    return (made if dot_width(dim) == dim else F.pad(made, (0, dot_width(dim) - dim))).flatten(0, 1)
