"""Softmax attention by flashinfer: planned once a step on the host, run in every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hybridrt.attention.paged import PagedKVBackend
from hybridrt.config import AttentionSpec
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.mem_cache.kv_pool import KVPool
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool

if TYPE_CHECKING:
    from hybridrt.kernels.libraries.flashinfer import GraphBuffers, HeadLayout, PagedAttention


@dataclass
class Segment:
    """Rows that are planned together.

    Attributes:
        rows: [n] request rows, on the device. query_lens, seq_lens: on the host.
        plans: by head layout; kept from step to step.
        current: layouts planned for this step, and the layer that each met first: it looks up the pages.
        graph: (bs, buffers) of a graph's decode segment.
    """

    rows: torch.Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    plans: "dict[HeadLayout, PagedAttention]"
    current: "dict[HeadLayout, int]"
    graph: "tuple[int, GraphBuffers] | None" = None


class FlashinferAttnBackend(PagedKVBackend):
    """Plans need the lengths of all rows on the host, so a replay waits for them; chains alone, 16-bit KV."""

    provider, needs_host_lens = "flashinfer", True
    operations = ("attention_extend",)
    auto_prefill = ("cuda",)  # it prefills faster than our kernels (docs/performance.md)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        # Imported once it is known to be installed: what this class says of itself needs no library.
        self._library = import_module("hybridrt.kernels.libraries.flashinfer")
        self._workspace = torch.zeros(self._library.WORKSPACE_BYTES, dtype=torch.uint8, device=kv_pool.device)
        self._eager: dict[str, dict[HeadLayout, PagedAttention]] = {"decode": {}, "extend": {}}
        self._graphs: dict[tuple[int, int], Segment] = {}
        self._segments: dict[str, Segment] = {}
        self._copied: torch.cuda.Event | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        _check_chain(batch.spec_info)
        assert batch.seq_lens_cpu is not None and batch.query_lens_cpu is not None
        split, ends = batch.num_decode_rows, batch.batch_size
        self._segments = {
            kind: Segment(batch.req_pool_indices[at], batch.query_lens_cpu[at], batch.seq_lens_cpu[at],
                          self._eager[kind], {})
            for kind, at in (("decode", slice(0, split)), ("extend", slice(split, ends)))
        }  # fmt: skip

    def forward_decode(self, q: torch.Tensor, layer: Any, batch: ForwardBatch, **kwargs: Any) -> torch.Tensor:
        return self._run(self._segments["decode"], q, layer)

    def forward_extend(self, q: torch.Tensor, layer: Any, batch: ForwardBatch, **kwargs: Any) -> torch.Tensor:
        return self._run(self._segments["extend"], q, layer)

    def _run(self, segment: Segment, q: torch.Tensor, layer: Any) -> torch.Tensor:
        k_cache, v_cache = self.kv_pool.layer(layer.layer_id)
        spec: AttentionSpec = layer.spec
        layout = self._library.HeadLayout(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, k_cache.shape[1], spec.scale, spec.sliding_window, q.dtype
        )
        if layout not in segment.plans:
            segment.plans[layout] = self._library.PagedAttention(self._workspace, *(segment.graph or ()))
        attention = segment.plans[layout]
        if layout not in segment.current:
            self._plan(segment, layout)
            segment.current[layout] = layer.layer_id
        if segment.current[layout] == layer.layer_id:
            attention.fill_pages(self.req_to_token_pool.req_to_token, segment.rows, layout.page_size)
        out = attention.run(q.view(-1, spec.num_heads, spec.head_dim), k_cache, v_cache)
        return out.view(q.shape[0], -1)

    def _plan(self, segment: Segment, layout: "HeadLayout") -> None:
        """A plan is copied from pinned memory that the next plan overwrites: it must have arrived by then."""
        if self._copied is not None:
            self._copied.synchronize()
        segment.plans[layout].plan(segment.query_lens, segment.seq_lens, layout)
        if self._workspace.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        pages_per_row = self.req_to_token_pool.max_context // self.kv_pool.page_size
        self._buffers = self._library.GraphBuffers.allocate(max_bs, pages_per_row, self._workspace.device)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
    ) -> None:
        """The first pass over the layers, before the recording, makes the plans."""
        super().init_forward_metadata_capture_cuda_graph(
            bs, num_tokens, req_pool_indices, seq_lens, forward_mode, spec_info
        )
        _check_chain(spec_info)
        tokens = num_tokens // bs
        lens = [self.get_cuda_graph_seq_len_fill_value() + tokens - 1] * bs
        segment = Segment(req_pool_indices[:bs], [tokens] * bs, lens, {}, {}, (bs, self._buffers))
        self._graphs[bs, tokens] = self._segments["decode"] = segment

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        num_real: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
        seq_lens_cpu: list[int] | None,
    ) -> None:
        super().init_forward_metadata_replay_cuda_graph(
            bs, num_real, req_pool_indices, seq_lens, forward_mode, spec_info, seq_lens_cpu
        )
        if seq_lens_cpu is None:
            raise BackendError("flashinfer plans on the host: seq_lens_cpu must hold the lengths of the real rows")
        tokens = spec_info.tokens_per_row if spec_info else 1
        segment = self._segments["decode"] = self._graphs[bs, tokens]
        fill = self.get_cuda_graph_seq_len_fill_value() + tokens - 1
        segment.seq_lens = [*seq_lens_cpu, *[fill] * (bs - num_real)]
        for layout in segment.current:
            self._plan(segment, layout)


def _check_chain(spec_info: SpecInfo | None) -> None:
    if spec_info is not None and spec_info.tree_mask is not None:
        raise BackendError('flashinfer verifies chains alone here; use topk=1 or attention_backend="triton"')
