"""Softmax attention in plain torch: for CPUs, and the oracle of the other backends."""

from dataclasses import dataclass, field

from torch import Tensor

from hybridrt.attention.base import Layer
from hybridrt.attention.paged import PagedAttnBackend, PagedMetadata
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.attention.paged_attention import (
    CellPlaces,
    RowContext,
    attend,
    cell_places,
    row_context,
    store_at,
)
from hybridrt.kernels.attention.rotary import rotate, rotations
from hybridrt.kernels.core.records import Rope
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


@dataclass
class TorchPlan:
    """What the layers of a CPU step share, computed by the first layer that needs it.

    Attributes:
        contexts: the keys that decode rows see, by window.
        rotations: cosines and sines, by the address of their table.
        places: where keys and values are written, by page group.
    """

    contexts: dict[int | None, RowContext] = field(default_factory=dict)
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    places: dict[int, CellPlaces] = field(default_factory=dict)


class TorchNativeAttnBackend(PagedAttnBackend):
    """Gathers a request's pages and calls scaled_dot_product_attention. On a CPU, what layers share
    is computed once a step."""

    provider = "torch"
    serves_latent = serves_sinks = True
    auto_decode = auto_prefill = ("cpu",)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        self._decode = attend

    def rotate_and_save(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> Tensor:
        plan, spec, table = self._step(batch)[1], layer.spec, rope.cos_sin.data_ptr()
        if table not in plan.rotations:
            plan.rotations[table] = rotations(rope.cos_sin, batch.positions)
        group = self.kv_pool.group_of(layer.layer_id)
        if group not in plan.places:
            plan.places[group] = cell_places(self.layer_places(layer, batch), self.kv_pool.page_size)
        heads, kv_heads = (-1, spec.num_heads, spec.head_dim), (-1, spec.num_kv_heads, spec.head_dim)
        rotated, key = rotate(q.view(heads), k.view(kv_heads), rope, plan.rotations[table])
        k_cache, v_cache = self.kv_pool.layer(layer.layer_id)
        store_at(((k_cache, key), (v_cache, v.view(kv_heads))), plan.places[group])
        return rotated.flatten(1)

    def decode_rows(self, layer: Layer, batch: ForwardBatch) -> RowContext:
        (step, plan), window = self._step(batch), layer.spec.sliding_window
        if window not in plan.contexts:
            assert step.decode is not None, "a batch with decode rows"
            table = self.layer_table(layer)
            plan.contexts[window] = row_context(table, step.decode, batch.tokens_per_row, window)
        return plan.contexts[window]

    def _step(self, batch: ForwardBatch) -> tuple[PagedMetadata, TorchPlan]:
        step: PagedMetadata = batch.metadata.get(self) or self.planned(batch)
        if self.kv_pool.device.type == "cuda":  # a graph would keep values
            return step, TorchPlan()
        if 0 not in step.plans:
            step.plans[0] = TorchPlan()  # of all page groups
        return step, step.plans[0]
