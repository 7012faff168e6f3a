"""Multi-head latent attention over a paged cache of latent vectors (DeepSeek-AI 2024, section 2.1).

The cache holds rank + rope numbers per token. Each head computes keys and values from the first
rank numbers; all heads share the rope numbers as a part of the key. There are two ways to attend:

    absorbed      a head's query is multiplied by its key matrix and attends to the vectors; the
                  weighted sum is multiplied by its value matrix (`paged_attention.py`)
    decompressed  keys and values of all heads are computed first: a query-key pair costs a third,
                  a key more, so it is faster if many queries see the same keys

Shapes: T new tokens, H query heads on this rank, nope + rope numbers a query, `value` a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.attention.kv_codes import as_bytes, numbers
from hybridrt.kernels.attention.paged_attention import qk_norm_rotary, store
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import AttentionPrompts, LatentWeights, PagedKV, Rope
from hybridrt.kernels.dense.norm_activation import rms_norm


@operation(By("triton"))
def write_latent(
    q: Tensor, k: Tensor, weights: LatentWeights, positions: Tensor, cos_sin: Tensor | None, cache: Tensor,
    out_cache_loc: Tensor, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Normalizes and rotates latent vectors, stores them, and rotates queries.

    k `[T, rank + rope]`: the first rank numbers are normalized, the others rotated by positions
    `[T]`, like the last rope numbers of q `[T, H, nope + rope]`; without cos_sin (see Rope) nothing
    is rotated. k goes to token slots out_cache_loc `[T]` of the cache `[pages, page, 1, rank +
    rope]`, except to page 0 (padding), as codes with `scale` in a float8_e4m3fn cache. Returns q,
    possibly rotated in place.
    """
    (_, nope, rank), tail = weights.up_k.shape, k
    latent, tail = rms_norm.reference(k[:, :rank], weights.norm, weights.norm_eps), k[:, rank:]
    if cos_sin is not None:
        q_tail, turned = qk_norm_rotary.reference(q[..., nope:], tail.unsqueeze(1), positions, Rope(cos_sin))
        q, tail = torch.cat((q[..., :nope], q_tail), dim=-1), turned.squeeze(1)
    store([(cache, torch.cat((latent, tail), dim=-1).unsqueeze(1), scale)], out_cache_loc)
    return q


@operation(By("triton"))
def latent_extend(q: Tensor, kv: PagedKV, weights: LatentWeights, batch: AttentionPrompts) -> Tensor:
    """Causal attention of ragged chunks of new tokens, already in the cache, over prefix and chunk.

    q `[T, H, nope + rope]`. Returns `[T, H, value]` in q's dtype; tokens past the last row are
    zeros.
    """
    up_k = weights.up_k
    rank = up_k.shape[2]
    out = q.new_zeros(*q.shape[:2], weights.up_v.shape[2])
    cells, start, scale = as_bytes(kv.k_cache.flatten(0, 2)), 0, kv.score_scale
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens_host, strict=True)):
        end, before = start + query_len, seq_len - query_len
        if query_len > 0:
            first = 0 if kv.sliding_window is None else max(before - kv.sliding_window + 1, 0)
            slots = kv.req_to_token[:, first:seq_len].index_select(0, batch.rows[row : row + 1]).view(-1)
            vectors = numbers(cells.index_select(0, slots).view(kv.k_cache.dtype), q.dtype)
            latents, tail = vectors[:, :rank], vectors[:, rank:].expand(len(up_k), -1, -1)
            keys = torch.cat((latents @ up_k.transpose(1, 2), tail), dim=-1)
            mask = torch.ones(query_len, seq_len - first, dtype=torch.bool, device=q.device).tril_(before - first)
            if kv.sliding_window is not None:
                mask.triu_(before - first - kv.sliding_window + 1)
            query = q[start:end].transpose(0, 1)
            result = F.scaled_dot_product_attention(query, keys, latents @ weights.up_v, attn_mask=mask, scale=scale)
            out[start:end] = result.transpose(0, 1)
        start = end
    return out.mul_(kv.v_scale) if kv.coded else out


@operation(By("triton"))
def into_latent(q: Tensor, weights: LatentWeights) -> Tensor:
    """Queries [..., H, nope + rope] times their key matrices: [..., H, rank + rope]."""
    heads, nope, rank = weights.up_k.shape
    found = q.new_empty(*q.shape[:-1], rank + q.shape[-1] - nope)
    flat, into = q.reshape(-1, heads, q.shape[-1]), found.view(-1, heads, found.shape[-1])
    torch.bmm(flat[..., :nope].transpose(0, 1), weights.up_k, out=into[..., :rank].transpose(0, 1))
    into[..., rank:] = flat[..., nope:]
    return found


@operation(By("triton"))
def from_latent(x: Tensor, weights: LatentWeights) -> Tensor:
    """Weighted sums of latent vectors [..., H, rank] times the value matrices: [..., H, value]."""
    heads, rank, value_dim = weights.up_v.shape
    out = x.new_empty(*x.shape[:-1], value_dim)
    torch.bmm(
        x.reshape(-1, heads, rank).transpose(0, 1), weights.up_v, out=out.view(-1, heads, value_dim).transpose(0, 1)
    )
    return out
