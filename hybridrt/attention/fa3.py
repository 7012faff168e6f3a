"""Softmax attention by FlashAttention 3 (Shah et al. 2024), from sglang-kernel."""

from importlib import import_module

import torch
from torch import Tensor

from hybridrt.attention.base import Layer
from hybridrt.attention.paged import PagedAttnBackend, PagedMetadata
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.providers import select
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


class Fa3AttnBackend(PagedAttnBackend):
    """For Hopper. Only the pages of prefill are planned on the host. 16-bit KV; no drafts
    that fork.

    FlashAttention 3 takes a cache of codes only with queries and softmax weights in e4m3 too, which
    are less exact. Long prompts therefore convert the codes to the model's dtype first. Our kernels
    serve the other prompts, and decode.
    """

    provider, captures_prompts, serves_codes = "sgl_kernel", False, True
    head_dims, architectures = (64, 96, 128, 192, 256), (8, 9)
    auto_prefill = ("cuda",)  # faster than our kernels (benchmarks/log/libraries.md)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        # The class can be inspected without the library.
        self._library = import_module("hybridrt.kernels.libraries.sgl_kernel")
        self._coded = any(spec.query_dtype for spec in kv_pool.specs.values())
        if self._coded:
            device = kv_pool.device.type
            self._decode, self._extend = (
                select(op, device, "triton") for op in ("attention_decode", "attention_extend")
            )

    def extend(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        step: PagedMetadata = self.metadata_of(batch)
        assert step.extend is not None
        if not any(step.extend.query_lens):
            return torch.zeros_like(q)
        if self._coded and not self._library.copies_pay(step.extend):
            return super().extend(q, layer, batch, out)
        kv, heads = self.layer_kv(layer.layer_id), q.view(-1, layer.spec.num_heads, layer.spec.head_dim)
        group = self.kv_pool.group_of(layer.layer_id)
        if group not in step.plans:  # in the group's first layer, when the page table is complete
            step.plans[group] = self._library.plan_extend(kv, step.extend)
        result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        self._library.run_extend(step.plans[group], heads, kv, result.view(heads.shape))
        return result
