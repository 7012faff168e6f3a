"""Trials of decode attention over pages."""

from functools import partial

import torch
from torch import Tensor

from hybridrt.kernels.attention.paged_attention import attention_decode
from hybridrt.kernels.attention.paged_attention_triton import Decode, attention_decode_triton
from hybridrt.kernels.core.records import AttentionRows, PagedKV
from hybridrt.runtime.tune.trial import Trial, normal

CONTEXTS = 1024, 8192  # keys of each row; both count
PAGE = 16
MAX_KEYS = 1 << 18  # of all rows together: those of more rows are shared


def paged_decode(shape: Decode, device: torch.device) -> Trial:
    """Rows of equal contexts, of pages in no order. The last context is compared with the reference."""
    lengths = [min(length, shape.context) for length in CONTEXTS]
    pages = max(1, min(-(-max(lengths) * shape.rows // PAGE), MAX_KEYS // PAGE))
    kv = _cache(shape, pages, device)
    q = normal(device, shape.rows, shape.tokens, shape.query_heads, shape.head_dim + shape.rope, dtype=shape.dtype)
    rows = torch.arange(1, shape.rows + 1, dtype=torch.int32, device=device)
    batches = [AttentionRows(rows, torch.full_like(rows, max(length, shape.tokens))) for length in lengths]

    def reference() -> list[Tensor]:
        exact = kv._replace(k_cache=kv.k_cache.float(), v_cache=kv.v_cache.float())
        return [attention_decode.reference(q.float(), exact, batches[0])]

    calls = [partial(attention_decode_triton, q, kv, batch) for batch in batches]
    return Trial(calls, lambda: [attention_decode_triton(q, kv, batches[0])], reference)


def _cache(shape: Decode, pages: int, device: torch.device) -> PagedKV:
    """A cache whose first page no row has, and a table of `shape.context` positions."""
    width, dtype = shape.head_dim + shape.rope, torch.float8_e4m3fn if shape.coded else shape.dtype
    keys = normal(device, pages + 1, PAGE, shape.kv_heads, width, dtype=shape.dtype, seed=1).to(dtype)
    if shape.rope:
        values = keys[..., : shape.head_dim]
    else:
        values = normal(device, *keys.shape, dtype=shape.dtype, seed=2).to(dtype)
    generator = torch.Generator().manual_seed(3)
    used = min(max(CONTEXTS), shape.context)
    a_row = -(-used // PAGE)
    order = torch.cat([torch.randperm(pages, generator=generator) for _ in range(-(-a_row * shape.rows // pages))])
    firsts = (order[: a_row * shape.rows].view(shape.rows, a_row) + 1) * PAGE
    slots = (firsts[:, :, None] + torch.arange(PAGE)).view(shape.rows, -1)[:, :used]
    table = torch.zeros(shape.rows + 1, shape.context, dtype=torch.int32, device=device)
    table[1:, :used] = slots.to(device)
    return PagedKV(keys, values, table, width**-0.5, shape.window or None)
