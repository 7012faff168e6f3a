"""Softmax attention by FlashAttention 3 (Shah et al. 2024), as sglang-kernel brings it."""

from typing import Any

import torch
from torch import Tensor

from hybridrt.attention.paged import PagedAttnBackend
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.libraries.sgl_kernel import plan_extend, run_extend


class Fa3AttnBackend(PagedAttnBackend):
    """Hopper's own matrix instructions; nothing is planned on the host but prefill's pages. 16-bit KV, chains alone."""

    provider = "sgl_kernel"

    def extend(self, q: Tensor, layer: Any, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        segment = self.planned(batch).extend
        if not any(segment["query_lens"]):
            return torch.zeros_like(q)
        plan = segment.get("plan")
        if plan is None:  # the first layer makes it: the page table is complete by then
            table, page_size = self.req_to_token_pool.req_to_token, self.kv_pool.page_size
            plan = segment["plan"] = plan_extend(table, **segment, page_size=page_size)
        heads = q.view(-1, layer.num_heads, layer.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        window = (layer.scale, layer.sliding_window)
        run_extend(plan, heads, *self.kv_pool.layer(layer.layer_id), *window, out.view(heads.shape))
        return out
