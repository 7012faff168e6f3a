"""Softmax attention by flashinfer: planned once a step on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridrt.attention.base import Layer
from hybridrt.attention.paged import PagedKVBackend
from hybridrt.base.device import PAST, DeviceEvent, record_event
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, GraphView
from hybridrt.base.model_config import AttentionSpec
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool

if TYPE_CHECKING:
    from hybridrt.kernels.libraries.flashinfer import GraphBuffers, HeadLayout, PagedAttention


@dataclass
class PlannedRows:
    """Rows that are planned together.

    Attributes:
        rows: [n] request rows, on the device. query_lens, seq_lens: on the host.
        plans: flashinfer's wrappers by head layout, kept for all steps.
        current: layout -> its first layer, which looks up the pages. Only layouts planned in this
            step.
        graph: (bs, buffers) of a graph's decode segment.
    """

    rows: Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    plans: "dict[HeadLayout, PagedAttention]"
    current: "dict[HeadLayout, int]"
    graph: "tuple[int, GraphBuffers] | None" = None


class FlashinferAttnBackend(PagedKVBackend):
    """Plans on the host need all lengths, so a replay waits for them. 16-bit KV; no drafts that fork.

    "auto" never chooses it: prompts take longer than with our kernels, and it compiles at the start
    (benchmarks/log/libraries.md).
    """

    provider, needs_host_lens, captures_prompts = "flashinfer", True, False
    head_dims, architectures = (64, 128, 256), (8, 9, 10, 12)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        # The class can be inspected without the library.
        self._library = import_module("hybridrt.kernels.libraries.flashinfer")
        self._workspace = torch.zeros(self._library.WORKSPACE_BYTES, dtype=torch.uint8, device=kv_pool.device)
        self._eager: dict[str, dict[HeadLayout, PagedAttention]] = {"decode": {}, "extend": {}}
        self._copied: DeviceEvent = PAST

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        super().prepare(batch, graph=graph)
        if batch.spec_info is not None and batch.spec_info.mask is not None:
            raise BackendError('flashinfer verifies no drafts that fork; use topk=1 or attention_backend="triton"')
        if graph is not None:
            batch.metadata[self] = {"decode": self._graph_segment(batch, graph)}
            return
        assert batch.seq_lens_cpu is not None and batch.query_lens_cpu is not None
        split, ends = batch.num_decode_rows, batch.batch_size
        batch.metadata[self] = {
            name: PlannedRows(batch.req_pool_indices[at], batch.query_lens_cpu[at], batch.seq_lens_cpu[at], plans, {})
            for (name, plans), at in zip(self._eager.items(), (slice(0, split), slice(split, ends)))
        }

    def decode(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        return self._run(self.metadata_of(batch)["decode"], q, layer)

    def extend(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        return self._run(self.metadata_of(batch)["extend"], q, layer)

    def _run(self, segment: PlannedRows, q: Tensor, layer: Layer) -> Tensor:
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
            attention.fill_pages(self.layer_table(layer), segment.rows, layout.page_size)
        out = attention.run(q.view(-1, spec.num_heads, spec.head_dim), k_cache, v_cache)
        return out.view(q.shape[0], -1)

    def _plan(self, segment: PlannedRows, layout: "HeadLayout") -> None:
        """Waits until the last plan was copied: this one overwrites its pinned memory."""
        self._copied.synchronize()
        segment.plans[layout].plan(segment.query_lens, segment.seq_lens, layout)
        self._copied = record_event(self._workspace.device)

    def allocate_graph(self, view: GraphView) -> None:
        pages_per_row = self.req_to_token_pool.max_context // self.kv_pool.page_size
        buffers = self._library.GraphBuffers.allocate(view.max_bs, pages_per_row, self._workspace.device)
        view.buffers[self] = buffers, dict[int, PlannedRows]()

    def _graph_segment(self, batch: ForwardBatch, view: GraphView) -> PlannedRows:
        """A capture's first pass over the layers plans padding rows; a replay plans the same
        layouts.
        """
        bs, real, tokens = batch.batch_size, batch.num_real, view.tokens_per_row
        buffers, segments = view.buffers[self]
        lens = [*(batch.seq_lens_cpu or ()), *[self.seq_len_fill + tokens - 1] * (bs - real)]
        if len(lens) != bs:
            raise BackendError("flashinfer plans on the host: seq_lens_cpu must hold the lengths of the real rows")
        if not real:
            segments[bs] = PlannedRows(batch.req_pool_indices, [tokens] * bs, lens, {}, {}, (bs, buffers))
        segment: PlannedRows = segments[bs]
        segment.seq_lens = lens
        for layout in segment.current:
            self._plan(segment, layout)
        return segment
