"""Softmax attention by our own Triton kernels."""

from collections.abc import Collection

import torch

from hybridrt.attention.graph_copies import copied, copies_in_graphs, copy_numbers, first_copied, longest_context
from hybridrt.attention.paged import PagedAttnBackend
from hybridrt.base.forward_batch import GraphView
from hybridrt.base.model_config import AttentionSpec


class TritonAttnBackend(PagedAttnBackend):
    """Decode is split over the KV length, on the device. Prefill is a flash kernel over pages, or over
    copies of keys and values; graphs of prompts have room for these."""

    provider = "triton"
    serves_latent = serves_sinks = serves_codes = True
    auto_decode = auto_prefill = ("cuda",)

    @classmethod
    def prompt_graph_bytes(cls, device: torch.device, specs: Collection[AttentionSpec], context: int) -> int:
        return 2 * copy_numbers(specs, context) if copies_in_graphs(device) else 0

    def allocate_graph(self, view: GraphView) -> None:
        pool, table = self.kv_pool, self.req_to_token_pool
        specs = [spec for spec in pool.specs.values() if copied(spec)]
        if not view.prompts or not specs or not copies_in_graphs(pool.device):
            return
        numbers = copy_numbers(specs, min(table.max_context, max(pool.num_pages) * pool.page_size))
        dtype = specs[0].query_dtype or specs[0].dtype
        view.buffers[self] = torch.empty(numbers, dtype=dtype, device=pool.device)
        view.most_context, view.limited_from = longest_context(specs, numbers), first_copied(specs)
