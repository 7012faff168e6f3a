"""Operations of flashinfer: paged attention, norms, SwiGLU, sampling filters."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import flashinfer
import torch
from flashinfer.sampling import top_k_mask_logits, top_p_renorm_probs
from torch import Tensor

from hybridrt.kernels.libraries.common import page_numbers
from hybridrt.kernels.sampling.sampling import MIN_TEMPERATURE, LogitFilters
from hybridrt.kernels.sampling.sampling import filtered_logits as filtered_logits_op
from hybridrt.kernels.sampling.sampling import sample as sample_op

WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class HeadLayout:
    """Attention layers that a plan serves. `window`: keys that a query sees, None for all."""

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None
    dtype: torch.dtype


@dataclass(frozen=True)
class GraphBuffers:
    """Plans of graphs, shared by all graphs because each replay plans anew.

    Attributes:
        query_starts, page_starts: [max_bs + 1] int32; last_page: [max_bs] int32; pages: [n] int32.
    """

    query_starts: Tensor
    page_starts: Tensor
    last_page: Tensor
    pages: Tensor

    @classmethod
    def allocate(cls, max_bs: int, pages_per_row: int, device: torch.device) -> "GraphBuffers":
        sizes = (max_bs + 1, max_bs + 1, max_bs, max_bs * pages_per_row)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


class PagedAttention:
    """flashinfer's paged attention of one batch: `plan` on the host, `fill_pages` on the device,
    `run` per layer.

    Args:
        workspace: [n] uint8, 128 MiB; shared by batches that never run at the same time.
        bs, buffers: rows and plan buffers of a graph; None for eager steps.
    """

    def __init__(self, workspace: Tensor, bs: int = 0, buffers: GraphBuffers | None = None) -> None:
        self._device, self._static = workspace.device, buffers is not None
        if buffers is None:
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            return
        pages_per_row = buffers.pages.shape[0] // buffers.last_page.shape[0]
        self._pages, self._page_starts = buffers.pages[: bs * pages_per_row], buffers.page_starts[: bs + 1]
        # fa3 does not split long contexts among programs.
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, backend="fa2", qo_indptr_buf=buffers.query_starts[: bs + 1],
            paged_kv_indptr_buf=self._page_starts, paged_kv_indices_buf=self._pages,
            paged_kv_last_page_len_buf=buffers.last_page[:bs],
        )  # fmt: skip

    def plan(self, query_lens: Sequence[int], seq_lens: Sequence[int], heads: HeadLayout) -> None:
        """For rows of `query_lens` new tokens that end at `seq_lens`. Pages are filled in later: a
        graph finds the newest only when it runs."""
        page = heads.page_size
        counts = [max(-(-length // page), 1) for length in seq_lens]  # a row without keys reads one of page 0
        last_page = [max(length - (count - 1) * page, 1) for length, count in zip(seq_lens, counts, strict=True)]
        query_starts, page_starts = (self._staged([0, *accumulate(each)]) for each in (query_lens, counts))
        if not self._static:
            self._pages = torch.zeros(sum(counts), dtype=torch.int32, device=self._device)
            self._page_starts = page_starts.to(self._device, non_blocking=True)
        self._wrapper.plan(
            query_starts, page_starts, self._pages[:0] if self._static else self._pages, self._staged(last_page),
            heads.query_heads, heads.kv_heads, heads.head_dim, page, causal=True, sm_scale=heads.scale,
            window_left=-1 if heads.window is None else heads.window - 1, q_data_type=heads.dtype,
            max_token_per_sequence=max(query_lens),
        )  # fmt: skip

    def _staged(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def fill_pages(self, req_to_token: Tensor, rows: Tensor, page_size: int) -> None:
        """Looks up the pages of request rows `rows` [B]; a graph contains this."""
        numbers = page_numbers(req_to_token, rows, self._page_starts, self._pages.shape[0], page_size)
        self._pages.copy_(numbers)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[T, Hq, D] queries of all rows to their outputs."""
        return self._wrapper.run(q, (k_cache, v_cache))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rounds the weight to x's dtype."""
    normed: Tensor = flashinfer.rmsnorm(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), eps)
    return normed.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rounds the weight to x's dtype."""
    normed = x.clone(memory_format=torch.contiguous_format)
    flashinfer.fused_add_rmsnorm(normed, residual, weight.to(x.dtype), eps)
    return normed, residual


def silu_and_mul(x: Tensor) -> Tensor:
    return flashinfer.silu_and_mul(x.contiguous())


def filtered_logits(logits: Tensor, filters: LogitFilters) -> Tensor:
    """top-k and top-p by flashinfer, the rest by plain torch."""
    top_k, top_p, min_p = filters.top_k, filters.top_p, filters.min_p
    rest = filtered_logits_op.reference(logits, filters._replace(top_k=None, top_p=None, min_p=None))
    if top_k is not None:
        vocabulary = rest.shape[1]
        rest = top_k_mask_logits(rest, torch.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k))
    if top_p is not None:
        kept = top_p_renorm_probs(rest.softmax(-1), top_p) > 0
        rest = rest.masked_fill(~kept & (top_p < 1)[:, None], -torch.inf)
    ones = torch.ones_like(filters.temperature)
    return rest if min_p is None else filtered_logits_op.reference(rest, LogitFilters(ones, min_p=min_p))


def sample(logits: Tensor, filters: LogitFilters, seeds: Tensor, indices: Tensor) -> Tensor:
    """flashinfer filters; the draw is ours. Its own draws depend on a generator's state, so a
    batch's other rows would change them."""
    tempered = LogitFilters(torch.where(filters.temperature < MIN_TEMPERATURE, 0.0, 1.0))
    return sample_op.reference(filtered_logits(logits, filters), tempered, seeds, indices)
