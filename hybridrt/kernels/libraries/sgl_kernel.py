"""Operations of sglang-kernel: paged FlashAttention 3, norms, SwiGLU, depthwise convolution."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sgl_kernel import causal_conv1d_fwd, fused_add_rmsnorm
from sgl_kernel import causal_conv1d_update as sgl_conv_update
from sgl_kernel import rmsnorm as sgl_rmsnorm
from sgl_kernel import silu_and_mul as sgl_silu_and_mul
from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from hybridrt.kernels.attention.kv_codes import as_bytes
from hybridrt.kernels.core.records import (
    AttentionPrompts,
    AttentionRows,
    ConvState,
    ConvWeights,
    IntermediateStates,
    PagedKV,
    SavedStates,
)
from hybridrt.kernels.core.slots import pad_mask, read_rows, real_tokens, write_columns, write_rows
from hybridrt.kernels.libraries.common import page_numbers, page_table, refuse
from hybridrt.kernels.state.causal_conv1d import conv_window, save_windows

LIBRARY, TAPS, PADDING = "sglang-kernel", range(2, 5), -1
COPY_FROM = 512  # mean queries of a row
REACH = 2**32  # numbers from the first conv ring to the end of the last one


def attention_decode(q: Tensor, kv: PagedKV, batch: AttentionRows, out: Tensor | None = None) -> Tensor:
    """No drafts that fork. Context splits depend on the page table's width, so without `max_len` a graph's
    replay and an eager call agree."""
    refuse(
        LIBRARY, "attention", "it verifies no drafts that fork" if batch.mask is not None else None,
        "it multiplies e4m3 codes by e4m3 queries only" if kv.coded else None,
    )  # fmt: skip
    longest = batch.max_len or kv.req_to_token.shape[1]
    result: Tensor = flash_attn_with_kvcache(
        q, kv.k_cache, kv.v_cache, cache_seqlens=batch.seq_lens,
        page_table=page_table(kv.req_to_token, batch.rows, kv.k_cache.shape[1], longest),
        softmax_scale=kv.scale, causal=True, window_size=_window(kv.sliding_window),
    )  # fmt: skip
    return result if out is None else out.copy_(result)


@dataclass(frozen=True)
class ExtendPlan:
    """Places of a prefill step's keys, for all layers.

    Attributes:
        query_starts: [B + 1] int32; seq_lens: [B] int32; longest_query, longest: most new tokens
            and keys of a row.
        real: tokens of all rows.
        pages: page numbers, [B, n].
        key_starts: [B + 1], if keys and values are copied first: row b's begin at key_starts[b],
            and pages is [n].
    """

    query_starts: Tensor
    seq_lens: Tensor
    longest_query: int
    longest: int
    real: int
    pages: Tensor
    key_starts: Tensor | None


def copies_pay(batch: AttentionPrompts) -> bool:
    """Whether keys and values are copied first."""
    return sum(batch.query_lens) >= COPY_FROM * len(batch.query_lens)


def plan_extend(kv: PagedKV, batch: AttentionPrompts) -> ExtendPlan:
    """Needs a batch with at least one new token."""
    query_lens = batch.query_lens
    req_to_token, page_size = kv.req_to_token, kv.k_cache.shape[1]
    real, longest = sum(query_lens), max(batch.seq_lens_host)
    known = (batch.query_start_loc, batch.seq_lens, max(query_lens), longest, real)
    if not copies_pay(batch):
        refuse(LIBRARY, "attention", "it copies e4m3 codes of long prompts only" if kv.coded else None)
        return ExtendPlan(*known, page_table(req_to_token, batch.rows, page_size, longest), None)
    starts = F.pad(((batch.seq_lens + page_size - 1) // page_size).cumsum(0, dtype=torch.int32), (1, 0))
    count = sum(-(-length // page_size) for length in batch.seq_lens_host)
    return ExtendPlan(*known, page_numbers(req_to_token, batch.rows, starts, count, page_size), starts * page_size)


def run_extend(plan: ExtendPlan, q: Tensor, kv: PagedKV, out: Tensor) -> Tensor:
    """One layer: q [T, Hq, D] to `out` [T, Hq, D], of any token stride, zeros past the last row.

    With many queries, reading contiguous keys is faster and pays for copying them.
    """
    out[plan.real :].zero_()
    common: dict[str, Any] = {
        "cu_seqlens_q": plan.query_starts, "max_seqlen_q": plan.longest_query, "softmax_scale": kv.score_scale,
        "causal": True, "window_size": _window(kv.sliding_window), "out": out,
    }  # fmt: skip
    if plan.key_starts is None:
        caches = kv.k_cache, kv.v_cache
        flash_attn_with_kvcache(q, *caches, cache_seqlens=plan.seq_lens, page_table=plan.pages, **common)
        return out
    k, v = (_pages(cache, plan.pages, q.dtype) for cache in (kv.k_cache, kv.v_cache))
    keys = {"cu_seqlens_k": plan.key_starts, "seqused_k": plan.seq_lens, "max_seqlen_k": plan.longest}
    flash_attn_varlen_func(q, k, v, **keys, **common)
    return out.mul_(kv.v_scale) if kv.coded else out


def _pages(cache: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """[n * page, Hkv, D] numbers of pages [n]; codes without their scale."""
    taken = as_bytes(cache).index_select(0, pages).flatten(0, 1)
    return taken.view(cache.dtype).to(dtype) if cache.dtype == torch.float8_e4m3fn else taken


def attention_extend(q: Tensor, kv: PagedKV, batch: AttentionPrompts, out: Tensor | None = None) -> Tensor:
    """Plans for this call alone (hybridrt.attention.fa3 plans once for all layers)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    return run_extend(plan_extend(kv, batch), q, kv, out) if any(batch.query_lens) else out.zero_()


def _window(sliding_window: int | None) -> tuple[int, int]:
    """Visible keys before and after a query's own; -1 for all."""
    return (-1, -1) if sliding_window is None else (sliding_window - 1, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds the weight to x's dtype."""
    normed: Tensor = sgl_rmsnorm(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), eps)
    return normed.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rounds the weight to x's dtype."""
    normed = x.clone(memory_format=torch.contiguous_format)
    fused_add_rmsnorm(normed, residual, weight.to(x.dtype), eps)
    return normed, residual


def silu_and_mul(x: Tensor) -> Tensor:
    return sgl_silu_and_mul(x.contiguous())


def causal_conv1d_varlen(
    x: Tensor, weights: ConvWeights, state: ConvState, query_start_loc: Tensor, saves: SavedStates | None = None
) -> Tensor:
    """The library needs channels first and linear windows: both are copied there and back."""
    conv = state.conv
    taps = weights.weight.shape[1]
    refuse(LIBRARY, "convolution", _other_taps(taps))
    if saves is not None:
        save_windows(x, taps, state, query_start_loc, saves)
    windows = conv_window(conv, state.read_state_slots, state.start_positions, taps)
    started = torch.ones(len(windows), dtype=torch.bool, device=x.device)
    channels = x.t().contiguous()
    starts = query_start_loc.contiguous()
    silu = weights.activation == "silu"
    causal_conv1d_fwd(channels, weights.weight, weights.bias, windows, starts, None, started, silu, PADDING)
    ends = state.start_positions + query_start_loc.diff()
    columns = (ends[:, None] + torch.arange(1 - taps, 0, device=x.device)) & (conv.shape[2] - 1)
    write_columns(conv, state.write_state_slots, columns, windows.transpose(1, 2))
    dead = ~real_tokens(state.read_state_slots, query_start_loc, x.shape[0])
    return channels.t().contiguous().masked_fill_(dead[:, None], 0.0)


def causal_conv1d_update(
    x: Tensor, weights: ConvWeights, state: ConvState, intermediate: IntermediateStates | None = None
) -> Tensor:
    """Chains only, in place in the ring (columns of negative positions must be zero). The library's
    offsets have 32 bits, so rings that are farther apart are copied there and back."""
    conv, read_slots = state.conv, state.read_state_slots
    refuse(
        LIBRARY, "convolution", _other_taps(weights.weight.shape[1]),
        "it verifies no drafts that fork" if intermediate is not None else None,
        "it reads and writes the same slot" if read_slots is not state.write_state_slots else None,
    )  # fmt: skip
    out, slots = x.clone(memory_format=torch.contiguous_format), read_slots
    if far := len(conv) * conv.stride(0) > REACH:
        conv = read_rows(conv, read_slots)
        slots = torch.arange(len(conv), dtype=torch.int32, device=x.device).masked_fill_(read_slots < 0, PADDING)
    sgl_conv_update(
        out.transpose(1, 2), conv, weights.weight, weights.bias, weights.activation == "silu", state.start_positions,
        slots, PADDING,
    )  # fmt: skip
    if far:
        write_rows(state.conv, read_slots, conv)
    return out.masked_fill_(pad_mask(read_slots, 3), 0.0)


def _other_taps(taps: int) -> str | None:
    return None if taps in TAPS else f"{taps} taps, from {TAPS[0]} to {TAPS[-1]}"
