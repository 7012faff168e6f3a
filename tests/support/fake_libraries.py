"""Stand-ins for libraries that need a GPU: the calls that we make, in plain torch, with the libraries' own layouts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.attention import paged
from hybridrt.kernels.core import providers


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window_left: int) -> Tensor:
    """q [n, Hq, D] at the end of k, v [L, Hkv, D]; window_left: keys before its own that a query sees, -1 for all."""
    n, length = q.shape[0], k.shape[0]
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1).transpose(0, 1) for t in (k, v))
    mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    if window_left >= 0:
        mask = mask.triu(length - n - window_left)
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(0, 1)


class PagedWrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper. With `use_cuda_graph`, runs read its buffers, as graphs would."""

    def __init__(self, workspace: Tensor, layout: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
        assert layout == "NHD"
        buffers.pop("backend", None)
        self.static, self.buffers = use_cuda_graph, list(buffers.values())

    def plan(
        self, query_starts: Tensor, page_starts: Tensor, pages: Tensor, last_page: Tensor, heads: int, kv_heads: int,
        head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert options["causal"] and heads % kv_heads == 0 and not query_starts.is_cuda
        assert options["max_token_per_sequence"] == int(query_starts.diff().max())
        self.scale, self.window = options["sm_scale"], options["window_left"]
        parts = (query_starts, page_starts, pages, last_page)
        if not self.static:
            self.buffers = list(parts)
        for buffer, part in zip(self.buffers, parts):
            buffer[: len(part)].copy_(part)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        query_starts, page_starts, pages, last_page = (b.tolist() for b in self.buffers)
        assert len(q) == query_starts[-1]
        out, page_size = torch.full_like(q, torch.nan), caches[0].shape[1]
        for i, last in enumerate(last_page):
            mine = pages[page_starts[i] : page_starts[i + 1]]
            length = (len(mine) - 1) * page_size + last
            k, v = (cache[mine].flatten(0, 1)[:length] for cache in caches)
            rows = slice(query_starts[i], query_starts[i + 1])
            out[rows] = attend(q[rows], k, v, self.scale, self.window)
        return out


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, softmax_scale: float,
    causal: bool, window_size: tuple[int, int], cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """sgl_kernel.flash_attn: rows of equal length [B, T, H, D], or ragged ones [T, H, D] between cu_seqlens_q."""
    assert causal and window_size[1] == (0 if window_size[0] >= 0 else -1) and page_table.dtype == torch.int32
    flat = q.flatten(0, 1) if cu_seqlens_q is None else q
    starts = torch.arange(len(q) + 1) * q.shape[1] if cu_seqlens_q is None else cu_seqlens_q
    result = torch.empty_like(q) if out is None else out
    for i, (first, end) in enumerate(pairwise(starts.tolist())):
        assert max_seqlen_q is None or end - first <= max_seqlen_q
        length = int(cache_seqlens[i])
        pages = page_table[i, : -(-length // k_cache.shape[1])]
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        result.view(flat.shape)[first:end] = attend(flat[first:end], k, v, softmax_scale, window_size[0])
    return result


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], out: Tensor,
) -> Tensor:  # fmt: skip
    """sgl_kernel.flash_attn: rows of queries and of keys packed, of the latter the first `seqused_k`."""
    assert causal and k.is_contiguous() and v.is_contiguous() and cu_seqlens_k.dtype == torch.int32
    starts, keys, used = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), seqused_k.tolist()
    assert max(used) <= max_seqlen_k and keys[-1] == len(k)
    for i, (first, end) in enumerate(pairwise(starts)):
        assert end - first <= max_seqlen_q and keys[i] + used[i] <= keys[i + 1]
        row = slice(keys[i], keys[i] + used[i])
        out[first:end] = attend(q[first:end], k[row], v[row], softmax_scale, window_size[0])
    return out


def causal_conv1d_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, starts: Tensor, indices: None, started: Tensor,
    silu: bool, padding: int,
) -> None:  # fmt: skip
    """sgl_kernel: x [C, T], overwritten; windows [B, C, K-1], which get the last inputs."""
    assert x.is_contiguous() and started.all() and indices is None
    for i, (first, end) in enumerate(pairwise(starts.tolist())):
        history = torch.cat((windows[i], x[:, first:end]), 1)
        x[:, first:end] = convolved(history, weight, bias, silu)
        windows[i] = history[:, history.shape[1] - windows.shape[2] :]


def causal_conv1d_update(
    x: Tensor, ring: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, positions: Tensor, slots: Tensor,
    padding: int,
) -> None:  # fmt: skip
    """sgl_kernel: x [B, C, T], overwritten; ring [S, C, Wc] with the input of position p in column p mod Wc."""
    taps, width = weight.shape[1], ring.shape[2]
    for i, slot in enumerate(slots.tolist()):
        if slot == padding:
            continue
        columns = (torch.arange(1 - taps, x.shape[2]) + positions[i]) % width
        history = torch.cat((ring[slot][:, columns[: taps - 1]], x[i]), 1)
        ring[slot][:, columns[taps - 1 :]] = x[i]
        x[i] = convolved(history, weight, bias, silu)


def convolved(history: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    out = F.conv1d(history[None], weight[:, None], bias, groups=len(weight))[0]
    return F.silu(out) if silu else out


def library(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in contents.items():
        setattr(module, key, value)
    return module


def absent(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("no test calls this")


def modules() -> dict[str, ModuleType]:
    """By the names that hybridrt.kernels.libraries imports."""
    norms = dict.fromkeys(("rmsnorm", "fused_add_rmsnorm", "silu_and_mul"), absent)
    flash = {"flash_attn_with_kvcache": flash_attn_with_kvcache, "flash_attn_varlen_func": flash_attn_varlen_func}
    attention = library("sgl_kernel.flash_attn", **flash)
    convs = {"causal_conv1d_fwd": causal_conv1d_fwd, "causal_conv1d_update": causal_conv1d_update}
    filters = library("flashinfer.sampling", top_k_mask_logits=absent, top_p_renorm_probs=absent)
    return {
        "sgl_kernel": library("sgl_kernel", **norms, **convs), "sgl_kernel.flash_attn": attention,
        "flashinfer": library("flashinfer", BatchPrefillWithPagedKVCacheWrapper=PagedWrapper, **norms),
        "flashinfer.sampling": filters,
    }  # fmt: skip


@contextmanager
def installed() -> Iterator[None]:
    """The stand-ins, on a CPU and in float32."""
    ours = [f"hybridrt.kernels.libraries.{name}" for name in ("flashinfer", "sgl_kernel")]
    backends = [f"hybridrt.attention.{name}" for name in ("flashinfer", "fa3")]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        for name in (*ours, *backends):
            patch.delitem(sys.modules, name, raising=False)
        patch.setattr(providers, "provider_objection", lambda provider, device: None)
        patch.setattr(paged.PagedKVBackend, "objection", classmethod(lambda *_: None))
        patch.setattr(providers, "_missing", lambda provider: None)
        providers.select.cache_clear()
        try:
            yield
        finally:
            providers.select.cache_clear()
            for name in (*ours, *backends):
                sys.modules.pop(name, None)
