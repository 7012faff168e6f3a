"""Softmax attention in plain torch: for CPUs, and the oracle of the other backends."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from hybridrt.attention.base import Layer
from hybridrt.attention.paged import PagedAttnBackend, PagedMetadata
from hybridrt.base.forward_batch import ForwardBatch, GraphView
from hybridrt.kernels.attention.paged_attention import (
    CellPlaces,
    RowContext,
    attend,
    cell_places,
    row_context,
    store_at,
)
from hybridrt.kernels.attention.rotary import rotate, rotations
from hybridrt.kernels.core.recording import live
from hybridrt.kernels.core.records import AttentionRows, PagedKV, Rope
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


@dataclass
class TorchPlan:
    """What the layers of a CPU step share, computed by the first layer that needs it.

    Attributes:
        rows: the decode rows; None without.
        contexts: of these, by window.
        rotations: cosines and sines, by the address of their table.
        places: where keys and values are written.
    """

    rows: AttentionRows | None
    contexts: dict[int | None, RowContext] = field(default_factory=dict)
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    places: CellPlaces | None = None


class TorchNativeAttnBackend(PagedAttnBackend):
    """Gathers a request's pages and calls scaled_dot_product_attention. On a CPU, what layers share
    is computed once a step."""

    provider = "torch"
    serves_latent = True
    auto_decode = auto_prefill = ("cpu",)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        self._shares = kv_pool.device.type == "cpu"  # a graph would keep values of the run before its capture
        if self._shares:
            self._decode = _attend

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        super().prepare(batch, graph=graph)
        if self._shares:
            step: PagedMetadata = batch.metadata[self]
            step.plan = TorchPlan(step.decode)
            step.decode = step.plan if step.decode else None

    def recording_key(self, batch: ForwardBatch) -> Hashable:
        """One key for all steps without padding: the rows' context is looked up in each step."""
        return True if min(batch.out_cache_loc.tolist()) >= self.kv_pool.page_size else None

    def decode(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Recordings call it again: the rows' context grows with each step."""
        return live(partial(super().decode, q, layer, batch, out))

    def rotate_and_save(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> Tensor:
        step: PagedMetadata = batch.metadata.get(self) or self.planned(batch)
        plan, spec, table = step.plan or TorchPlan(None), layer.spec, rope.cos_sin.data_ptr()
        if table not in plan.rotations:
            plan.rotations[table] = rotations(rope.cos_sin, batch.positions)
        if plan.places is None:
            plan.places = cell_places(batch.out_cache_loc, self.kv_pool.page_size)
        heads, kv_heads = (-1, spec.num_heads, spec.head_dim), (-1, spec.num_kv_heads, spec.head_dim)
        rotated, key = rotate(q.view(heads), k.view(kv_heads), rope, plan.rotations[table])
        k_cache, v_cache = self.kv_pool.layer(layer.layer_id)
        store_at(((k_cache, key), (v_cache, v.view(kv_heads))), plan.places)
        return rotated.flatten(1)


def _attend(q: Tensor, kv: PagedKV, plan: TorchPlan, out: Tensor | None = None) -> Tensor:
    """`attention_decode`, with one context for all layers of a window."""
    context = plan.contexts.get(kv.sliding_window)
    if context is None:
        assert plan.rows is not None, "a batch with decode rows"
        context = row_context(kv.req_to_token, plan.rows, q.shape[1], kv.sliding_window)
        plan.contexts[kv.sliding_window] = context
    return attend(q, kv, context, out)
