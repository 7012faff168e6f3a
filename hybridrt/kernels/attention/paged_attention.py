"""Softmax attention over a paged KV cache, and rotary positions of its queries and keys.

Shapes: B rows, T tokens per row, Hq query and Hkv key/value heads (query head h reads key head h //
(Hq // Hkv)), D dim of queries and keys, Dv of values (see PagedKV), L the longest context. Token
slot: page * page_size + offset, as in `req_to_token[row, position]`. Page 0 is padding and never
written. No row reads another row's entries, so NaN in one request reaches no other.

With sinks, a head's softmax is over its keys and one more score, whose value is zero.

Rotary position embedding (Su et al. 2021) is in NeoX order: dimension i pairs with i + rot / 2.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.attention.kv_codes import as_bytes, encode, numbers
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import AttentionPrompts, AttentionRows, KVPlaces, PagedKV, Rope
from hybridrt.kernels.dense.norm_activation import rms_norm

SCORES = 1 << 26  # at most so many scores of prompts with sinks are computed at once


@operation(By("triton"))
def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor, k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:  # fmt: skip
    """Stores k, v `[T, Hkv, D]` at token slots out_cache_loc `[T]` of the caches `[pages, page,
    Hkv, D]`, in place; in float8_e4m3fn caches as codes (`kv_codes.py`). Page 0 is padding and not
    written."""
    store(((k_cache, k, k_scale), (v_cache, v, v_scale)), out_cache_loc)


NewCells = Iterable[tuple[Tensor, Tensor, float]]  # a cache, what enters it, and the scale of codes


def store(caches: NewCells, out_cache_loc: Tensor) -> None:
    """`write_kv` in plain torch."""
    caches = tuple(caches)
    store_at(caches, cell_places(out_cache_loc, caches[0][0].shape[1]))


class CellPlaces(NamedTuple):
    """Places of tokens in the cells [pages * page, ...] of a cache, equal in all layers of a step.

    Attributes:
        cells: [T] int64; 0 for padding.
        padding: [T] bool; None if it is known that there is none.
    """

    cells: Tensor
    padding: Tensor | None


def cell_places(out_cache_loc: Tensor, page: int) -> CellPlaces:
    """The places of token slots [T] in pages of `page` tokens."""
    slots = out_cache_loc.long()
    if slots.device.type == "cpu" and (slots.numpy() >= page).all():
        return CellPlaces(slots, None)
    padding = slots < page
    return CellPlaces(slots.masked_fill(padding, 0), padding)


def store_at(caches: NewCells, places: CellPlaces) -> None:
    for cache, new, scale in caches:
        cells = cache.view(-1, *cache.shape[2:])
        if cells.dtype == torch.float8_e4m3fn:
            cells, values = as_bytes(cells), as_bytes(encode(new, scale))
        else:
            values = new.to(cells.dtype)
        if places.padding is not None:
            values = torch.where(places.padding[:, None, None], cells[:1], values)
        cells.index_copy_(0, places.cells, values)


@operation(By("triton"), By("sgl_kernel", priority=5))
def attention_decode(q: Tensor, kv: PagedKV, batch: AttentionRows, out: Tensor | None = None) -> Tensor:
    """Attention of T new tokens per row, already in the cache, over each row's whole context.

    q `[B, T, Hq, D]`. Token t sees the first seq_len - T + t + 1 keys; with a mask the first
    seq_len - T, and those of the T tokens that its mask names. Keys of padding drafts, and keys before
    every token's window, are not read, because their table entries may be stale. That seq_len is at
    most the table's width is not checked. Returns `[B, T, Hq, Dv]` in q's dtype, in `out` if given
    (heads contiguous, any token stride); padding rows (seq_len 0) are zeros. ConfigError: a kernel
    cannot write to the strides of `out`.
    """
    context = row_context(kv.req_to_token, batch, q.shape[1], kv.sliding_window)
    return attend(q, kv, {kv.req_to_token: context}, out)


@operation(
    By("triton", "hybridrt.kernels.attention.prefill_attention_triton:attention_extend_triton"),
    By("sgl_kernel", priority=5),
)
def attention_extend(q: Tensor, kv: PagedKV, batch: AttentionPrompts, out: Tensor | None = None) -> Tensor:
    """Causal attention of ragged chunks of new tokens, already in the cache, over prefix and chunk.

    q `[T, Hq, D]`: row b's last token is at position seq_lens[b] - 1. Returns `[T, Hq, Dv]` in q's
    dtype, in `out` (any token stride) if given; tokens past the last row are zeros.
    """
    sliding_window = kv.sliding_window
    out = q.new_zeros(*q.shape[:2], kv.v_cache.shape[3]) if out is None else out.zero_()
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens_host, strict=True)):
        end = start + query_len
        if query_len > 0:
            first = 0 if sliding_window is None else max(seq_len - query_len - sliding_window + 1, 0)
            slots = kv.req_to_token[:, first:seq_len].index_select(0, batch.rows[row : row + 1]).view(-1)
            keys, values = _by_head((kv.k_cache, kv.v_cache), slots, 1, q.dtype)
            query = q[start:end].transpose(0, 1).unsqueeze(0)
            attention = _causal_attention(query, keys, values, kv)
            out[start:end] = attention[0].transpose(0, 1)
        start = end
    return out if kv.v_scale == 1.0 else out.mul_(kv.v_scale)


class RowContext(NamedTuple):
    """The keys of B rows of T tokens, equal in all layers of a page table.

    Attributes:
        slots: [B * L] token slots; a slice on a CPU if adjacent and all visible.
        visible: [B, T, L] bool, which of them each token sees; None for all.
        seq_lens: [B], as in AttentionRows.
    """

    slots: Tensor | slice
    visible: Tensor | None
    seq_lens: Tensor


def row_context(req_to_token: Tensor, batch: AttentionRows, tokens: int, sliding_window: int | None) -> RowContext:
    seq_lens = batch.seq_lens
    slots, position = _last_slots(req_to_token, batch.rows, seq_lens, tokens, sliding_window, batch.max_len)
    looks = tokens == 1 and sliding_window is None and not seq_lens.is_cuda  # on a GPU it would wait
    if looks and seq_lens.tolist() == [slots.shape[1]] * len(seq_lens):  # every row sees the whole table: no mask
        return RowContext(_run(slots), None, seq_lens)
    last = seq_lens - 1 if batch.num_drafts is None else seq_lens - tokens + batch.num_drafts
    in_context = (position >= 0) & (position <= last.unsqueeze(1))
    # Other slots may be stale. Masked values are still multiplied by zero, and 0 * NaN is NaN: the
    # row's own last key replaces them.
    stand_in = slots.gather(1, (last - position[:, 0]).clamp(min=0).long().unsqueeze(1))
    slots = torch.where(in_context, slots, stand_in).view(-1)
    if tokens == 1:
        return RowContext(slots, in_context.unsqueeze(1), seq_lens)
    node = position - (seq_lens.unsqueeze(1) - tokens)
    return RowContext(slots, _visible(in_context, node, tokens, sliding_window, batch.mask), seq_lens)


class RowContexts(dict[Tensor, RowContext]):
    """The contexts of a step's rows by page table, computed by the first layer of each. `windows` has
    the window of each table's layers; the other arguments are those of `row_context`."""

    def __init__(self, windows: Mapping[Tensor, int | None], batch: AttentionRows, tokens: int) -> None:
        super().__init__()
        self._windows, self._step = windows, (batch, tokens)

    def __missing__(self, table: Tensor) -> RowContext:
        found = self[table] = row_context(table, *self._step, self._windows[table])
        return found


def attend(q: Tensor, kv: PagedKV, contexts: Mapping[Tensor, RowContext], out: Tensor | None = None) -> Tensor:
    """`attention_decode` with known contexts, by page table."""
    k_cache, v_cache, context = kv.k_cache, kv.v_cache, contexts[kv.req_to_token]
    scale = kv.scale * kv.k_scale
    num_rows, tokens, query_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    groups = query_heads // kv_heads
    slots, visible = context.slots, context.visible
    if visible is not None:
        visible = visible.unsqueeze(1)
        if tokens > 1:
            visible = visible.expand(-1, groups, -1, -1).reshape(num_rows, 1, groups * tokens, -1)
    keys, values = _by_head((k_cache, v_cache), slots, num_rows, q.dtype)
    if tokens == 1:
        query = q.view(num_rows, kv_heads, groups, head_dim)
    else:
        query = q.view(num_rows, tokens, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if kv.sinks is None:
        result = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scale)
    else:
        sinks = kv.sinks.view(kv_heads, groups).repeat_interleave(tokens, 1)
        result = _attention_with_sinks(query, keys, values, visible, scale, sinks)
    if kv.v_scale != 1.0:
        result *= kv.v_scale
    if visible is not None:
        result.masked_fill_((context.seq_lens == 0).view(-1, 1, 1, 1), 0)
    if out is None:
        out = q.new_empty(num_rows, tokens, query_heads, v_cache.shape[3])
    if tokens == 1:
        out.view(num_rows, kv_heads, groups, -1).copy_(result)
    else:
        out.copy_(result.unflatten(2, (groups, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3))
    return out


def _run(slots: Tensor) -> Tensor | slice:
    """CPU slots [B, L] as a slice, without a copy, if adjacent, else [B * L]."""
    numbers = slots.numpy().reshape(-1)
    first, end = int(numbers[0]), int(numbers[0]) + len(numbers)
    return slice(first, end) if numbers[-1] == end - 1 and (np.diff(numbers) == 1).all() else slots.view(-1)


def _by_head(caches: Iterable[Tensor], slots: Tensor | slice, num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """[B, Hkv, L, D] of each cache: its entries at slots [B * L]."""
    found = []
    for cache in caches:
        heads, dim = cache.shape[2:]
        if isinstance(slots, slice):
            (_, token, head, element), length = cache.stride(), (slots.stop - slots.start) // num_rows
            shape, strides = (num_rows, heads, length, dim), (length * token, head, token, element)
            cells = cache.as_strided(shape, strides, cache.storage_offset() + slots.start * token)
        else:
            movable = as_bytes(cache) if cache.dtype == torch.float8_e4m3fn else cache
            taken = movable.view(-1, heads * dim).index_select(0, slots).view(cache.dtype)
            cells = taken.view(num_rows, -1, heads, dim).transpose(1, 2)
        found.append(cells if cells.dtype == dtype else numbers(cells, dtype))
    return found


def _last_slots(
    req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, tokens: int, sliding_window: int | None, max_len: int | None
) -> tuple[Tensor, Tensor]:
    """Token slots `[B, L]` in the window of a row's last `tokens`, and positions. Undefined outside
    [0, seq_len)."""
    if sliding_window is None:
        slots = req_to_token[:, :max_len].index_select(0, rows)
        return slots, torch.arange(slots.shape[1], device=rows.device).expand_as(slots)
    span = min(sliding_window + tokens - 1, max_len or req_to_token.shape[1])
    position = seq_lens.unsqueeze(1) - span + torch.arange(span, device=rows.device)
    return req_to_token[rows.unsqueeze(1), position.clamp(min=0)], position


def _visible(in_context: Tensor, node: Tensor, tokens: int, sliding_window: int | None, mask: Tensor | None) -> Tensor:
    """`[B, T, L]` bool; node `[B, L]`: a key's token, negative in the prefix."""
    if mask is None:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=node.device).tril()
        mask = mask.expand(len(node), -1, -1)
    clamped = node.clamp(0, tokens - 1).unsqueeze(1)
    named = mask.gather(2, clamped.expand(-1, tokens, -1))
    visible = in_context.unsqueeze(1) & ((node < 0).unsqueeze(1) | named)
    if sliding_window is None:
        return visible
    depth = mask.sum(-1) - 1
    key_depth = torch.where(node < 0, node, depth.gather(1, clamped.squeeze(1)))
    return visible & (depth.unsqueeze(2) - key_depth.unsqueeze(1) < sliding_window)


def _causal_attention(query: Tensor, keys: Tensor, values: Tensor, kv: PagedKV) -> Tensor:
    """[1, Hq, T, Dv] of the last T of L tokens: query [1, Hq, T, D], keys and values [1, Hkv, L, D]."""
    query_len, context, sliding_window = query.shape[2], keys.shape[2], kv.sliding_window
    mask = None
    if query_len < context or (sliding_window is not None and sliding_window < context) or kv.sinks is not None:
        mask = torch.ones(query_len, context, dtype=torch.bool, device=query.device).tril_(context - query_len)
        if sliding_window is not None:
            mask.triu_(context - query_len - sliding_window + 1)
    if kv.sinks is None or mask is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=kv.scale * kv.k_scale, enable_gqa=True
        )
    out = query.new_empty(*query.shape[:3], values.shape[3])
    rows = max(SCORES // (query.shape[1] * context), 1)
    for part in range(0, query_len, rows):
        tokens = query[:, :, part : part + rows].unflatten(1, (keys.shape[1], -1))
        sinks = kv.sinks.view(1, keys.shape[1], -1, 1)
        found = _attention_with_sinks(
            tokens, keys.unsqueeze(2), values.unsqueeze(2), mask[part : part + rows], kv.scale * kv.k_scale, sinks
        )
        out[:, :, part : part + rows] = found.flatten(1, 2)
    return out


def _attention_with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Softmax attention with one more score for each query, `sinks` [..., T], whose value is zero.
    Sums are float32."""
    scores = (query.float() @ keys.float().transpose(-1, -2)) * scale
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    last = sinks.float().unsqueeze(-1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, last), -1).softmax(-1)[..., :-1]
    return (weights @ values.float()).to(query.dtype)


def rotations(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, rot / 2] at `positions` [T] or [3, T], equal in all layers of a
    table."""
    found = rope.cos_sin.index_select(0, positions.flatten())
    if positions.dim() == 2:
        half = torch.arange(rope.cos_sin.shape[1] // 2, device=found.device)
        axes = torch.zeros_like(half)
        for axis in (1, 2):
            axes[(half % 3 == axis) & (half < 3 * rope.sections[axis])] = axis
        by_axis = found.view(*positions.shape, -1)
        found = by_axis.gather(0, axes.repeat(2).expand(1, *by_axis.shape[1:]))[0]
    cos, sin = found.unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def rotate(q: Tensor, k: Tensor, rope: Rope, by: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`qk_norm_rotary` in plain torch, by the tokens' cosines and sines."""
    cos, sin = by
    normed_q = q if rope.q_weight is None else rms_norm.reference(q, rope.q_weight, rope.eps)
    normed_k = k if rope.k_weight is None else rms_norm.reference(k, rope.k_weight, rope.eps)
    # One tensor halves the operations, which bound a decode step on a CPU.
    heads, half = torch.cat((normed_q, normed_k), dim=1).float(), cos.shape[2]
    first, second, _ = heads.split_with_sizes((half, half, heads.shape[2] - 2 * half), dim=-1)
    rotated = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
    rotated_q, rotated_k = heads.to(q.dtype).split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    return rotated_q, rotated_k


@operation(By("triton", "hybridrt.kernels.attention.rotary_triton:qk_norm_rotary_triton"))
def qk_norm_rotary(q: Tensor, k: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Normalizes q and k per head if there are weights (Qwen3-Next), then rotates the first `rot`
    dims by position.

    q `[T, Hq, D]`, k `[T, Hkv, D]` (strided views are fine), positions `[T]` or `[3, T]` int32 or
    int64: `Rope.sections` says which axis turns a pair.
    Returns (q, k) in their dtypes: changed in place, or possibly views of one tensor.
    """
    return rotate(q, k, rope, rotations(rope, positions))


@operation(By("triton", "hybridrt.kernels.attention.rotary_triton:rotary_write_kv_triton"))
def rotary_write_kv(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rope: Rope, places: KVPlaces) -> Tensor:
    """`qk_norm_rotary`, then `write_kv` of the rotated k and of v `[T, Hkv, D]`. Returns the
    rotated q."""
    q, k = qk_norm_rotary.reference(q, k, positions, rope)
    write_kv.reference(k, v, *places)
    return q
