"""Softmax attention by FlashAttention 3 (Shah et al. 2024), as sglang-kernel brings it."""

from importlib import import_module

import torch
from torch import Tensor

from hybridrt.attention.base import Layer
from hybridrt.attention.paged import PagedAttnBackend, PagedMetadata
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


class Fa3AttnBackend(PagedAttnBackend):
    """Hopper's own matrix instructions; nothing is planned on the host but prefill's pages. 16-bit KV, chains alone."""

    provider, captures_prompts = "sgl_kernel", False
    head_dims, architectures = (64, 96, 128, 192, 256), (8, 9)
    auto_prefill = ("cuda",)  # it prefills faster than our kernels (benchmarks/log/libraries.md)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        # Imported once it is known to be installed: what this class says of itself needs no library.
        self._library = import_module("hybridrt.kernels.libraries.sgl_kernel")

    def extend(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        step: PagedMetadata = self.planned(batch)
        assert step.extend is not None
        if not any(step.extend.query_lens):
            return torch.zeros_like(q)
        kv, heads = self.layer_kv(layer), q.view(-1, layer.spec.num_heads, layer.spec.head_dim)
        if step.plan is None:  # the first layer makes it: the page table is complete by then
            step.plan = self._library.plan_extend(kv, step.extend)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        self._library.run_extend(step.plan, heads, kv, out.view(heads.shape))
        return out
