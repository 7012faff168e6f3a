"""Operations of sglang-kernel: FlashAttention 3 over pages, norms, SwiGLU and the depthwise convolution."""

from collections.abc import Sequence

import torch
from sgl_kernel import causal_conv1d_fwd, fused_add_rmsnorm
from sgl_kernel import causal_conv1d_update as sgl_conv_update
from sgl_kernel import rmsnorm as sgl_rmsnorm
from sgl_kernel import silu_and_mul as sgl_silu_and_mul
from sgl_kernel.flash_attn import flash_attn_with_kvcache
from torch import Tensor

from hybridrt.kernels.causal_conv1d import Activation, conv_window
from hybridrt.kernels.libraries.common import page_table, refuse
from hybridrt.kernels.slots import live_tokens, pad_mask, write_columns

LIBRARY, WIDEST_CONV, PADDING = "sglang-kernel", 4, -1


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    tree_mask: Tensor | None = None,
    max_len: int | None = None,
) -> Tensor:
    """`attention_decode` of chains. How the context is split depends on the width of the page table, so without
    `max_len` a graph's replay and an eager call agree."""
    refuse(LIBRARY, "attention", "it knows no draft trees" if tree_mask is not None else None)
    longest = max_len or req_to_token.shape[1]
    out: Tensor = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=seq_lens,
        page_table=page_table(req_to_token, rows, k_cache.shape[1], longest),
        softmax_scale=scale, causal=True, window_size=_window(sliding_window),
    )  # fmt: skip
    return out


def attention_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    query_lens: Sequence[int],
    seq_lens_host: Sequence[int],
) -> Tensor:
    """`attention_extend`."""
    longest = max(query_lens, default=0)
    allocate = torch.empty if sum(query_lens) == q.shape[0] else torch.zeros
    out = allocate(q.shape, dtype=q.dtype, device=q.device)
    if longest:
        flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=seq_lens,
            page_table=page_table(req_to_token, rows, k_cache.shape[1], max(seq_lens_host)),
            cu_seqlens_q=query_start_loc, max_seqlen_q=longest, softmax_scale=scale, causal=True,
            window_size=_window(sliding_window), out=out,
        )  # fmt: skip
    return out


def _window(sliding_window: int | None) -> tuple[int, int]:
    """Keys before and after its own that a query sees; -1 for all of them (behind the query the mask hides them)."""
    return (-1, -1) if sliding_window is None else (sliding_window - 1, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm`, with the weight rounded to x's dtype."""
    normed: Tensor = sgl_rmsnorm(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), eps)
    return normed.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, with the weight rounded to x's dtype."""
    normed = x.clone(memory_format=torch.contiguous_format)
    fused_add_rmsnorm(normed, residual, weight.to(x.dtype), eps)
    return normed, residual


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu_and_mul`."""
    out: Tensor = sgl_silu_and_mul(x.contiguous())
    return out


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    query_start_loc: Tensor,
    start_positions: Tensor,
    *,
    activation: Activation = "silu",
) -> Tensor:
    """`causal_conv1d_varlen`. The library wants channels first and linear windows: both are copied there and back."""
    taps = weight.shape[1]
    refuse(LIBRARY, "convolution", _too_wide(taps))
    windows = conv_window(conv, read_slots, start_positions, taps)
    started = torch.ones(len(windows), dtype=torch.bool, device=x.device)
    channels = x.t().contiguous()
    starts = query_start_loc.contiguous()
    causal_conv1d_fwd(channels, weight, bias, windows, starts, None, started, activation == "silu", PADDING)
    ends = start_positions + query_start_loc.diff()
    columns = (ends[:, None] + torch.arange(1 - taps, 0, device=x.device)) & (conv.shape[2] - 1)
    write_columns(conv, write_slots, columns, windows.transpose(1, 2))
    dead = ~live_tokens(read_slots, query_start_loc, x.shape[0])
    return channels.t().contiguous().masked_fill_(dead[:, None], 0.0)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    start_positions: Tensor,
    *,
    activation: Activation = "silu",
    parents: Tensor | None = None,
    windows: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_update` of chains, in place in the ring (whose columns of negative positions must be zero)."""
    refuse(
        LIBRARY, "convolution", _too_wide(weight.shape[1]),
        "it knows no draft trees" if parents is not None or windows is not None else None,
        "it reads and writes the same slot" if read_slots is not write_slots else None,
    )  # fmt: skip
    out = x.clone(memory_format=torch.contiguous_format)
    sgl_conv_update(out.transpose(1, 2), conv, weight, bias, activation == "silu", start_positions, read_slots, PADDING)
    return out.masked_fill_(pad_mask(read_slots, 3), 0.0)


def _too_wide(taps: int) -> str | None:
    return f"{taps} taps, at most {WIDEST_CONV}" if taps > WIDEST_CONV else None
