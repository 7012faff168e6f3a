"""Softmax attention by FlashAttention 3 (Shah et al. 2024), as sglang-kernel brings it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hybridrt.attention.paged import PagedAttnBackend
from hybridrt.forward_batch import ForwardBatch
from hybridrt.mem_cache.kv_pool import KVPool
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool

if TYPE_CHECKING:
    from hybridrt.kernels.libraries.sgl_kernel import ExtendPlan


class Fa3AttnBackend(PagedAttnBackend):
    """Hopper's own matrix instructions; nothing is planned on the host but prefill's pages. 16-bit KV, chains alone."""

    provider = "sgl_kernel"
    auto_prefill = ("cuda",)  # it prefills faster than our kernels (docs/performance.md)
    _plan: "ExtendPlan | None" = None

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        # Imported once it is known to be installed: what this class says of itself needs no library.
        self._library = import_module("hybridrt.kernels.libraries.sgl_kernel")

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self._plan = None  # the first layer makes it: the page table is complete by then

    def forward_extend(
        self, q: torch.Tensor, layer: Any, batch: ForwardBatch, *, out: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        meta, split = self._metadata(), batch.num_decode_rows
        if not any(meta.query_lens):
            return torch.zeros_like(q)
        if self._plan is None:
            assert meta.query_start_loc is not None
            self._plan = self._library.plan_extend(
                self.req_to_token_pool.req_to_token, meta.rows[split:],
                meta.query_start_loc[split:] - batch.num_decode_tokens, meta.seq_lens[split:], meta.query_lens,
                meta.seq_lens_host, self.kv_pool.page_size,
            )  # fmt: skip
        spec = layer.spec
        heads = q.view(-1, spec.num_heads, spec.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        caches, window = self.kv_pool.layer(layer.layer_id), (spec.scale, spec.sliding_window)
        self._library.run_extend(self._plan, heads, *caches, *window, out.view(heads.shape))
        return out
