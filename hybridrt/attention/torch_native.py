"""Softmax attention in plain torch: the CPU path, and the oracle of the other backends."""

from typing import Any

from hybridrt.attention.paged import PagedAttnBackend, PagedMetadata
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.paged_attention import RowContext, attend, row_context
from hybridrt.mem_cache.kv_pool import KVPool
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool


class TorchNativeAttnBackend(PagedAttnBackend):
    """Gathers a request's pages and calls scaled_dot_product_attention. The decode rows' pages are looked up once for
    all layers of a window."""

    provider = "torch"
    latent_operations = ("latent_extend", "attention_decode")
    auto_decode = auto_prefill = ("cpu",)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        self._decode = attend

    def decode_rows(self, layer: Any, batch: ForwardBatch) -> RowContext:
        step: PagedMetadata = self.planned(batch)
        assert step.decode is not None
        table, window = self.req_to_token_pool.req_to_token, layer.spec.sliding_window
        by_window: dict[int | None, RowContext] = step.plan or {}
        if window not in by_window:
            by_window[window] = row_context(table, step.decode, batch.tokens_per_row, window)
            step.plan = by_window
        return by_window[window]
