"""Triton kernels of paged prefill attention (flash attention, Dao et al. 2022).

Rows of a tile are ordered as in `paged_attention_triton.py`. Long chunks copy their keys and values first:
the tensor memory accelerator then loads whole tiles, without registers for addresses. Short chunks read pages
in place. `attention_extend_triton` takes the first way that serves: over copies, on GPUs of compute capability
9.0, `prefill_pipeline_triton.py`; few tiles, some of them cut into parts, `cut_prefill_triton.py`; the kernel of
this file, over copies or pages.

Keys have D + ROPE numbers, values DV. The last ROPE numbers are separate, so that each width is a
power of two: in a latent cache, and in copies of it for all heads (latent_attention_triton.py).

Copies hold the numbers of e4m3 codes, which every dtype has. Scales are applied to scores and sums.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hybridrt.base.device import multiprocessors, shared_memory
from hybridrt.kernels.attention import cut_prefill_triton as cut
from hybridrt.kernels.attention.graph_copies import BLOCK_N, DIM, GRAPH_COPY_FROM, MOST_ROWS, copied_tokens
from hybridrt.kernels.attention.kv_codes_triton import for_products
from hybridrt.kernels.attention.prefill_tiles_triton import (
    PIPELINE_BLOCK,
    KeySources,
    copied_before,
    load_tile,
    query_rows,
    softmax_step,
    span,
)
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import (
    LARGE_SHARED_MEMORY,
    cdiv,
    dot_precision,
    dot_width,
    zero_after,
)
from hybridrt.kernels.core.records import AttentionPrompts, PagedKV
from hybridrt.kernels.core.tiles_triton import LOG2_E
from hybridrt.kernels.dense.pipeline_tiles import has_pipeline

BLOCK_M = 128  # query rows of a tile, of BLOCK_N context positions; halved for float32
COPY_FROM = 8192  # mean query rows per key/value head and request
ROUNDS = 3  # tiles of BLOCK_M rows for each multiprocessor
MOST_COPIED = 1 << 30  # bytes of copied keys and values; longer contexts are read in place


# Their alignment depends on the number of decode rows before them.
@jit_kernel(do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr"])
def _attention_copy_kernel(  # type: ignore[no-untyped-def]
    k_cache_ptr, v_cache_ptr, table_ptr, rows_ptr, starts_ptr, seq_lens_ptr, k_ptr, v_ptr, table_sr, total,
    HKV: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Tiles of one row and key/value head; zeros outside the row, its window and the head's
    width."""
    kv_head, b = tl.program_id(1), tl.program_id(2)
    _, query_len, seq_len, origin = span(starts_ptr, seq_lens_ptr, b, b >= 0, WINDOW, BLOCK_N)
    if origin + tl.program_id(0) * BLOCK_N >= seq_len:
        return
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    table = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_sr
    first = kv_head.to(tl.int64) * total + copied_before(starts_ptr, seq_lens_ptr, b, WINDOW, BLOCK_N)
    for block in range(tl.program_id(0), tl.cdiv(seq_len - origin, BLOCK_N), tl.num_programs(0)):
        offset = block * BLOCK_N + tl.arange(0, BLOCK_N)
        pos = origin + offset
        kept = pos < seq_len
        if WINDOW > 0:
            kept &= pos > seq_len - query_len - WINDOW  # earlier pages may be another request's by now
        slot = tl.load(table + pos, mask=kept, other=0).to(tl.int64)
        source, row = ((slot * HKV + kv_head) * STRIDE)[:, None], first + offset
        k = tl.load(k_cache_ptr + source + d[None, :], mask=kept[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_cache_ptr + source + e[None, :], mask=kept[:, None] & (e < DV)[None, :], other=0.0)
        tl.store(k_ptr + row[:, None] * BLOCK_D + d[None, :], k.to(k_ptr.dtype.element_ty))
        tl.store(v_ptr + row[:, None] * BLOCK_V + e[None, :], v.to(v_ptr.dtype.element_ty))


@jit_kernel(do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr"])
def _attention_extend_kernel(  # type: ignore[no-untyped-def]
    q_ptr, keys, values, ropes, table_ptr, rows_ptr, starts_ptr, seq_lens_ptr, sinks_ptr, out_ptr, q_st, q_sh,
    table_sr, total, scale_log2, v_scale,
    HKV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROPE: tl.constexpr,
    WINDOW: tl.constexpr, PAGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr, OUT_ST: tl.constexpr,
):  # fmt: skip
    # The last blocks of a row start first: they have the longest context.
    kv_head, block_m, b = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    start, query_len, seq_len, origin = span(starts_ptr, seq_lens_ptr, b, b >= 0, WINDOW, BLOCK_N)
    if block_m * BLOCK_M >= query_len * GROUPS:
        return
    first, token, head, live = query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    at = (start + first).to(tl.int64) * q_st + (token * q_st + head * q_sh)[:, None] + d[None, :]
    q = tl.load(q_ptr + at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    if ROPE > 0:
        r = tl.arange(0, BLOCK_R)
        at = (start + first).to(tl.int64) * q_st + D + (token * q_st + head * q_sh)[:, None] + r[None, :]
        q_rope = tl.load(q_ptr + at, mask=live[:, None] & (r < ROPE)[None, :], other=0.0)
    if PAGED:
        q = for_products(q, keys.dtype.element_ty)
        if ROPE > 0:
            q_rope = for_products(q_rope, keys.dtype.element_ty)
        table, shift, base = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_sr, 0, 0
    else:
        base = copied_before(starts_ptr, seq_lens_ptr, b, WINDOW, BLOCK_N) - origin
        shift = kv_head * total + base
    nearest = seq_len - query_len + first
    furthest = seq_len - query_len + tl.minimum((block_m * BLOCK_M + BLOCK_M - 1) // GROUPS, query_len - 1)
    position = nearest + token
    begin, oldest, masked_from = 0, 0, (nearest + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        oldest = tl.maximum(nearest - WINDOW + 1, 0)
        begin = oldest // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Finite: a query that has seen nothing gets weights of 0, not NaN.
    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        row_max = tl.maximum(tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E, row_max)
        row_sum += 1.0
    # disable_licm: hoisted loop invariants would cost registers.
    for offset in tl.range(begin, furthest + 1, BLOCK_N, disable_licm=True):
        pos = offset + tl.arange(0, BLOCK_N)
        slot = 0
        if PAGED:
            # Keys that no query sees are multiplied by zero, and 0 * NaN is NaN: own ones replace
            # them.
            slot = tl.load(table + tl.minimum(tl.maximum(pos, oldest), furthest))
        k = load_tile(keys, slot, shift + offset, kv_head, HKV, D + ROPE, D, BLOCK_D, PAGED).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if ROPE > 0:
            k_rope = load_tile(ropes, slot, base + offset, kv_head, HKV, D + ROPE, ROPE, BLOCK_R, PAGED).to(q.dtype)
            scores = tl.dot(q_rope, k_rope.T, scores, input_precision=PRECISION)
        masked = offset >= masked_from
        if WINDOW > 0:
            masked |= offset <= furthest - WINDOW
        if masked:  # a separate loop would serialize both loops' matrix instructions
            visible = pos[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= position[:, None] - pos[None, :] < WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        weights, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum, scale_log2)
        if PAGED and ROPE > 0:
            v = k
        else:
            v = load_tile(values, slot, shift + offset, kv_head, HKV, DV, DV, BLOCK_V, PAGED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    # Addresses from volatile loads: carried through the loop, they would need registers. What is added to block_m is
    # 0, which the compiler cannot know.
    again = tl.load(starts_ptr + b, volatile=True)
    query_len = tl.load(starts_ptr + b + 1, volatile=True) - again
    block_m += tl.load(starts_ptr + b, volatile=True) - again
    first, token, head, live = query_rows(block_m, query_len, kv_head, GROUPS, BLOCK_M)
    e = tl.arange(0, BLOCK_V)
    at = (again + first).to(tl.int64) * OUT_ST + (token * OUT_ST + head * DV)[:, None] + e[None, :]
    acc /= row_sum[:, None]
    if v_scale is not None:
        acc *= v_scale
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (e < DV)[None, :])


def attention_extend_triton(q: Tensor, kv: PagedKV, batch: AttentionPrompts, out: Tensor | None = None) -> Tensor:
    """One launch; another one before it if keys and values are copied, and one after it if tiles are cut."""
    kv_heads, dim = kv.v_cache.shape[2:]
    rope = kv.k_cache.shape[3] - dim
    out = q.new_empty(*q.shape[:2], dim) if out is None else out
    zero_after(out, sum(batch.query_lens))
    if not any(batch.query_lens):
        return out
    if takes_pipeline(q, kv, batch):
        # Here, so that the other kernels need nothing that is experimental in Triton.
        from hybridrt.kernels.attention.prefill_pipeline_triton import attention_pipeline

        keys, values, total = copy_keys(kv.k_cache, kv.v_cache, kv, batch, q.dtype, PIPELINE_BLOCK[dim])
        attention_pipeline(q, KeySources(keys, values, total=total), kv, batch, out)
        return out
    copied = _copied(q, kv, batch)
    sources = copied or KeySources(kv.k_cache, kv.v_cache, kv.k_cache[..., dim:] if rope else None)
    if _may_cut(q, kv, batch):
        found = cut.cut_of(q, kv_heads, batch)
        if found.parts > 1 or (copied and not batch.seq_lens_host):
            cut.run_cut(q, sources, kv, batch, found, out)
            return out
    tile = tile_of(q, dim, kv_heads, batch.query_lens, copied is not None)
    if kv.coded and copied is None:
        tile = coded_tile(tile, dot_width(dim))
    run_extend(q, sources, kv, batch, (kv_heads, dim, dim, rope), tile, out)
    return out


def _may_cut(q: Tensor, kv: PagedKV, batch: AttentionPrompts) -> bool:
    """Whether `cut_prefill_triton` serves these prompts: heads of DIM, no window, and few tiles for the device."""
    (kv_heads, dim), lens = kv.v_cache.shape[2:], batch.query_lens
    served = q.shape[-1] == dim == DIM and kv.sliding_window is None and len(lens) <= MOST_ROWS and ample(q)
    return served and cut.tiles_of(lens, q.shape[1], kv_heads, BLOCK_M) <= ROUNDS * multiprocessors(q.device)


def takes_pipeline(q: Tensor, kv: PagedKV, batch: AttentionPrompts) -> bool:
    """Whether `attention_pipeline` serves these prompts: copies of their keys pay, and tiles are not cut."""
    dim = kv.v_cache.shape[3]
    served = q.shape[-1] == kv.k_cache.shape[3] == dim and dim in PIPELINE_BLOCK and kv.sliding_window is None
    if not (served and has_pipeline(q.device) and ample(q) and batch.seq_lens_host):
        return False
    return not _may_cut(q, kv, batch) and _copies_pay(q, kv, batch, PIPELINE_BLOCK[dim])


def _copies_pay(q: Tensor, kv: PagedKV, batch: AttentionPrompts, block: int) -> bool:
    """Outside of graphs. block: keys of a tile."""
    kv_heads, dim = kv.v_cache.shape[2:]
    if sum(batch.query_lens) * (q.shape[1] // kv_heads) < COPY_FROM * len(batch.query_lens):
        return False
    blocks = key_blocks(batch.query_lens, batch.seq_lens_host, kv.sliding_window, block)
    return 2 * block * sum(blocks) * kv_heads * dot_width(dim) * q.element_size() <= MOST_COPIED


def _copied(q: Tensor, kv: PagedKV, batch: AttentionPrompts) -> KeySources | None:
    """Copies of keys and values, if these pay; None: they are read in place."""
    caches, (kv_heads, dim), query_lens = (kv.k_cache, kv.v_cache), kv.v_cache.shape[2:], batch.query_lens
    rows = sum(query_lens) * (q.shape[1] // kv_heads)
    if kv.k_cache.shape[3] > dim or not ample(q):
        return None
    if not batch.seq_lens_host:  # in a graph, lengths are unknown
        if batch.copies is None or rows < GRAPH_COPY_FROM or not _may_cut(q, kv, batch):
            return None
        total = copied_tokens(len(batch.copies), kv_heads)
        keys, values = batch.copies[: 2 * kv_heads * total * dim].view(2, kv_heads * total, dim)
        _copy_into(keys, values, *caches, kv, batch, total, cdiv(2 * multiprocessors(q.device), kv_heads), BLOCK_N)
    else:
        if not _copies_pay(q, kv, batch, BLOCK_N):
            return None
        keys, values, total = copy_keys(*caches, kv, batch, q.dtype, BLOCK_N)
    return KeySources(described(keys), described(values), total=total)


def run_extend(
    q: Tensor,
    sources: KeySources,
    kv: PagedKV,
    batch: AttentionPrompts,
    shape: tuple[int, int, int, int],
    tile: dict[str, int],
    out: Tensor,
) -> None:
    """Launches the kernel over q [T, Hq, D + ROPE] into out [T, Hq, DV].

    Args:
        shape: key/value heads, D, DV and ROPE. tile: result of `tile_of`.
    """
    kv_heads, dim, value_dim, rope = shape
    groups = q.shape[1] // kv_heads
    blocks = cdiv(max(batch.query_lens) * groups, tile["BLOCK_M"])
    _attention_extend_kernel[(kv_heads, blocks, len(batch.query_lens))](
        q, *sources[:3], kv.req_to_token, batch.rows, batch.query_start_loc, batch.seq_lens, kv.sinks, out,
        q.stride(0), q.stride(1), kv.req_to_token.stride(0), sources.total, kv.score_scale * LOG2_E.value,
        kv.v_scale if kv.coded else None,
        HKV=kv_heads, GROUPS=groups, D=dim, DV=value_dim, ROPE=rope, WINDOW=kv.sliding_window or 0,
        PAGED=not sources.total, BLOCK_D=dot_width(dim), BLOCK_V=dot_width(value_dim), BLOCK_R=dot_width(rope),
        PRECISION=dot_precision(q.dtype), OUT_ST=out.stride(0), **tile,
    )  # fmt: skip


def ample(q: Tensor) -> bool:
    """Whether the largest tiles of q fit a program's shared memory. Such devices have the tensor
    memory accelerator too."""
    return shared_memory(q.device) >= LARGE_SHARED_MEMORY and q.element_size() == 2 and q.shape[-1] <= 256


def tile_of(q: Tensor, dim: int, kv_heads: int, query_lens: Sequence[int], copied: bool) -> dict[str, int]:
    """Tile sizes and launch options for keys and values of `dim` numbers, as measured on an H200.

    Four warps of up to 255 registers let two programs over copies share a multiprocessor. Pages need
    eight of 128, for addresses. Tiles are halved if too few for all multiprocessors. Those over copies are
    smaller up to ROUNDS for each multiprocessor: in the last round of larger ones many of these have nothing
    to do, which costs most after a long context.
    """
    block_d, single = dot_width(dim), q.dtype == torch.float32
    wide, groups, device = block_d > 128, q.shape[1] // kv_heads, multiprocessors(q.device)
    tiles = kv_heads * sum(cdiv(n * groups, BLOCK_M) for n in query_lens)
    few = tiles <= device
    halvings = single + (not ample(q) if wide else few and not single)
    block_m = min(dot_width(max(query_lens) * groups), max(16, BLOCK_M >> halvings))
    latent = q.shape[-1] > dim > 256
    if latent and not single and shared_memory(q.device) >= LARGE_SHARED_MEMORY:
        return {"BLOCK_M": min(block_m, 32), "BLOCK_N": BLOCK_N, "num_stages": 2, "num_warps": 4}
    if latent and not single:  # compiled for sm_89: the only tile of 32 queries that stays in registers
        return {"BLOCK_M": min(block_m, 32), "BLOCK_N": 16, "num_stages": 2, "num_warps": 8}
    tile = {"BLOCK_M": block_m, "BLOCK_N": max(16, BLOCK_N >> (single + (block_d > 256))), "num_stages": 2}
    if copied and q.shape[-1] == block_d == 128 and tiles <= ROUNDS * device:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4}
    if copied:
        return tile | {"num_warps": 8 if wide else 4, "num_stages": 3 if block_d <= 64 else 2}
    tile["num_warps"] = 8 if block_m * block_d > 8192 else 4
    if block_m * block_d >= 128 * 128 and ample(q):
        return tile | {"num_stages": 3} | ({} if wide else {"maxnreg": 128})
    return tile


def coded_tile(tile: dict[str, int], block_d: int) -> dict[str, int]:
    """For pages of codes, which are converted in registers: larger tiles would fill these (compiled
    for sm_90)."""
    wide = block_d > 128
    block_m = min(tile["BLOCK_M"], 32 if block_d > 256 else 64)
    warps = 8 if wide and block_m * block_d > 8192 else 4
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": min(tile["BLOCK_N"], 32 if wide else 64),
        "num_stages": 3,
        "num_warps": warps,
    }


def key_blocks(query_lens: Sequence[int], seq_lens: Sequence[int], sliding_window: int | None, block: int) -> list[int]:
    """Upper bound of the tiles of each row's keys. block: keys of a tile."""
    blocks = [cdiv(n, block) for n in seq_lens]
    if sliding_window is None:
        return blocks
    seen = (cdiv(n + sliding_window - 1, block) + 1 for n in query_lens)
    return [min(pair) for pair in zip(blocks, seen, strict=True)]


def copy_keys(
    k_cache: Tensor, v_cache: Tensor, kv: PagedKV, batch: AttentionPrompts, dtype: torch.dtype, block: int
) -> tuple[Tensor, Tensor, int]:
    """Copies what a batch sees of two caches, or of two parts of one cache's vectors.

    Returns two copies [Hkv * total, width] and total, the rows of one head. Batch rows follow each
    other in whole tiles of `block` keys.
    """
    blocks = key_blocks(batch.query_lens, batch.seq_lens_host, kv.sliding_window, block)
    kv_heads, total, dims = k_cache.shape[2], block * sum(blocks), (k_cache.shape[3], v_cache.shape[3])
    keys, values = (k_cache.new_empty(kv_heads * total, dot_width(dim), dtype=dtype) for dim in dims)
    _copy_into(keys, values, k_cache, v_cache, kv, batch, total, max(blocks), block)
    return keys, values, total


def _copy_into(
    keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor, kv: PagedKV, batch: AttentionPrompts, total: int,
    programs: int, block: int,
) -> None:  # fmt: skip
    """`total`: rows of one head in the copies. `programs`: of a batch row and head. `block`: keys of a tile."""
    kv_heads, dims = k_cache.shape[2], (k_cache.shape[3], v_cache.shape[3])
    _attention_copy_kernel[(programs, kv_heads, len(batch.query_lens))](
        k_cache, v_cache, kv.req_to_token, batch.rows, batch.query_start_loc, batch.seq_lens, keys, values,
        kv.req_to_token.stride(0), total,
        HKV=kv_heads, STRIDE=k_cache.stride(2), D=dims[0], DV=dims[1], WINDOW=kv.sliding_window or 0, BLOCK_N=block,
        BLOCK_D=keys.shape[1], BLOCK_V=values.shape[1], num_warps=8,
    )  # fmt: skip


def described(copy: Tensor) -> TensorDescriptor:
    """A copy [rows, width] for tile-wise reads by the kernel."""
    return TensorDescriptor.from_tensor(copy, [BLOCK_N, copy.shape[1]])
