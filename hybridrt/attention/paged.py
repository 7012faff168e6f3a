"""Softmax attention over KVPool: writes, metadata of a step, and backends that plan nothing on the host."""

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybridrt.attention.base import AttentionBackend, AttentionInputs, Branch, Layer
from hybridrt.attention.checks import check_eager_batch, check_graph_batch, check_own, check_written_places
from hybridrt.base.device import capability
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, GraphView
from hybridrt.base.model_config import AttentionSpec
from hybridrt.kernels.attention.latent_attention import from_latent, into_latent
from hybridrt.kernels.attention.paged_attention import (
    CellPlaces,
    RowContexts,
    attend,
    cell_places,
    qk_norm_rotary,
    rotate,
    rotations,
    store_at,
)
from hybridrt.kernels.core.providers import provider_objection, require, select
from hybridrt.kernels.core.records import AttentionPrompts, AttentionRows, KVPlaces, PagedKV, Rope
from hybridrt.kernels.core.slots import by_head, check_range
from hybridrt.kernels.state.state_commit import move_kv
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


@dataclass
class PagedMetadata:
    """What a step's kernels read, apart from queries, keys and values.

    Attributes:
        decode, extend: one for each segment; None without rows. `decode` is what the backend's
            kernels take as rows.
        plans: a library's own, by page group.
        copies: a graph's room for copies of keys and values (`AttentionPrompts.copies`).
    """

    decode: Any
    extend: AttentionPrompts | None
    plans: dict[int, Any] = field(default_factory=dict)
    copies: Tensor | None = None


class SegmentedAttnBackend(AttentionBackend):
    """Softmax attention with one method for decode rows and one for extend rows.

    Attributes:
        provider: library of its kernels, a name of hybridrt.kernels.core.providers; None: ours.
        auto_decode, auto_prefill: device types on which "auto" may choose it for decode rows or prompts. The
            first such backend in hybridrt.recurrent.backends is chosen.
        serves_sinks: has kernels for attention sinks.
        serves_codes: reads and writes KV caches of e4m3 codes.
        branch: in a captured step, runs the decode rows on a second stream if it has a GPU.
    """

    provider: ClassVar[str | None] = None
    auto_decode: ClassVar[tuple[str, ...]] = ()
    auto_prefill: ClassVar[tuple[str, ...]] = ()
    serves_sinks: ClassVar[bool] = False
    serves_codes: ClassVar[bool] = False
    branch = Branch(torch.device("cpu"))

    @classmethod
    def objection(cls, device: torch.device, specs: Collection[AttentionSpec]) -> str | None:
        """Why this backend cannot serve layers of `specs` on a device; None if it can."""
        if any(spec.sinks for spec in specs) and not cls.serves_sinks:
            return f'{cls.__name__} has no kernels for attention sinks; use "triton" or "torch"'
        if any(spec.query_dtype for spec in specs) and not cls.serves_codes:
            return f'{cls.__name__} reads no KV cache of fp8_e4m3; use "triton" or "torch"'
        return None

    @classmethod
    def prompt_graph_bytes(cls, device: torch.device, specs: Collection[AttentionSpec], context: int) -> int:
        """Bytes that `allocate_graph` takes at most for graphs of prompts of `context` tokens in all; small buffers do
        not count."""
        return 0

    def run(self, layer: Layer, batch: ForwardBatch, inputs: AttentionInputs, out: Tensor | None = None) -> Tensor:
        """Runs softmax attention of one layer for all rows.

        Args:
            layer: `layer_id` and `spec`; variant "mla" also has `weights`.
            out: of the result's shape, where it may be written. Use the returned tensor.
        Returns:
            [T, heads * head_dim] in q's dtype; for "mla" [T, heads * value].
        """
        q, k, v, rope = inputs.q, inputs.k, inputs.v, inputs.rope
        split, total, latent = batch.num_decode_tokens, q.shape[0], layer.spec.variant == "mla"
        if total == 0:
            value_dim = layer.weights.up_v.shape[2] if latent else layer.spec.v_head_dim
            return q.new_empty(0, layer.spec.num_heads * value_dim)
        if latent:
            q = self.save_latent(q, k if inputs.save else None, layer, batch, rope)
        elif inputs.save and k is not None and v is not None:
            if rope is None:
                self.save_kv(k, v, layer, batch)
            else:
                q = self.rotate_and_save(q, k, v, layer, batch, rope)
        elif rope is not None:
            q, _ = self._rotate(q, q[:, :0] if k is None else k, layer, batch, rope)
        if split == total:
            return self.decode(q, layer, batch, out)
        if split == 0:
            return self.extend(q, layer, batch, out)
        decoding, prompts = q[:split], q[split:]
        return self.branch.segments(
            split,
            out,
            lambda place: self.decode(decoding, layer, batch, place),
            lambda place: self.extend(prompts, layer, batch, place),
        )

    def save_latent(self, q: Tensor, k: Tensor | None, layer: Layer, batch: ForwardBatch, rope: Rope | None) -> Tensor:
        """Writes latent vectors (variant "mla") into the pool. Returns q, rotated."""
        raise BackendError(f'{type(self).__name__} serves no layers of latent attention; use "triton" or "torch"')

    def rotate_and_save(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> Tensor:
        """Rotates q and k, writes k and v into the pool, returns q. Override to fuse the three."""
        q, k = self._rotate(q, k, layer, batch, rope)
        self.save_kv(k, v, layer, batch)
        return q

    @staticmethod
    def _rotate(q: Tensor, k: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> tuple[Tensor, Tensor]:
        dim = layer.spec.head_dim
        heads, kv_heads = (t.view(t.shape[0], t.shape[1] // dim, dim) for t in (q, k))
        heads, kv_heads = qk_norm_rotary(heads, kv_heads, batch.rope_positions, rope)
        return heads.flatten(1), kv_heads.flatten(1)

    @abstractmethod
    def save_kv(self, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch) -> None:
        """Writes keys and values, [T, kv_heads * head_dim], at batch.out_cache_loc."""

    @abstractmethod
    def decode(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Rows [0, num_decode_rows), tokens_per_row tokens each."""

    @abstractmethod
    def extend(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Rows [num_decode_rows, B), any number of tokens each."""


class PagedKVBackend(SegmentedAttnBackend):
    """Writes keys and values into KVPool, and keeps each step's rows and lengths.

    Attributes:
        provider: library of the kernels (hybridrt.kernels.core.providers).
        serves_latent: has kernels for variant "mla".
        head_dims, architectures: for a library that needs a 16-bit KV cache: its head widths and
            the major numbers of compute capability. Empty: any dtype, width and GPU.

    Raises:
        ProviderNotInstalledError, BackendError: the provider is missing, or cannot serve this
            device and these layers.
    """

    provider: ClassVar[str]
    captures_prompts = True
    serves_latent: ClassVar[bool] = False
    head_dims: ClassVar[tuple[int, ...]] = ()
    architectures: ClassVar[tuple[int, ...]] = ()

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        self.kv_pool = kv_pool
        self.req_to_token_pool = req_to_token_pool
        self._tables = req_to_token_pool.tables.unbind(1)  # of each page group
        self.branch = Branch(kv_pool.device)
        device, specs = kv_pool.device, set(kv_pool.specs.values())
        require(self.provider, type(self).__name__)
        if reason := self.objection(device, specs):
            raise BackendError(f"provider {self.provider!r} cannot serve attention on {device.type!r}: {reason}")
        self._write_kv = select("write_kv", device.type)
        self._rotary_write_kv = select("rotary_write_kv", device.type)
        self._write_latent = select("write_latent", device.type)

    @classmethod
    def objection(cls, device: torch.device, specs: Collection[AttentionSpec]) -> str | None:
        for spec in specs:
            latent = spec.variant == "mla"
            if latent and not cls.serves_latent:
                return f'{cls.__name__} has no kernels for latent attention (variant "mla"); use "triton" or "torch"'
            if not latent and spec.v_head_dim != spec.head_dim:
                return f"head_dim is {spec.head_dim} and v_head_dim {spec.v_head_dim}; {cls.__name__} takes equal ones"
            if reason := provider_objection(cls.provider, device.type):
                return reason
            if cls.head_dims and (taken := spec.query_dtype or spec.dtype).itemsize != 2:
                what = "the KV cache is" if spec.query_dtype is None else "queries are"
                return f"{what} {taken}, it takes bfloat16 and float16"
            if cls.head_dims and spec.head_dim not in cls.head_dims:
                return f"head_dim is {spec.head_dim}, it takes {', '.join(map(str, cls.head_dims))}"
        if reason := super().objection(device, specs):
            return reason
        if specs and cls.architectures and device.type == "cuda":
            major, minor = capability(device)
            if major not in cls.architectures:
                supported = ", ".join(f"sm_{each}x" for each in cls.architectures)
                return f"the GPU is sm_{major}{minor}, it supports {supported}"
        return None

    def _check_places(self, batch: ForwardBatch) -> None:
        """Checks rows and KV slots. Waits for the device."""
        table, rows, size = self.req_to_token_pool, batch.req_pool_indices, self.kv_pool.page_size
        check_range("req_pool_indices", rows, table.num_rows + 1, BackendError)
        check_own("req_pool_indices", rows[: batch.num_real])
        starts, lens = torch.arange(table.max_context // size, device=rows.device) * size, batch.seq_lens.clone()
        spec, split = batch.spec_info, batch.num_decode_rows
        if spec is not None and spec.num_drafts is not None:  # padding drafts have no page
            lens[:split] -= spec.tokens_per_row - 1 - spec.num_drafts[:split]
        for group, num_pages in enumerate(self.kv_pool.num_pages):
            num_slots, pages = (num_pages + 1) * size, self._tables[group][:, ::size][rows]  # by first slots
            check_range("out_cache_loc", self._places(group, batch), num_slots, BackendError)
            check_range("req_to_token", torch.where(starts < lens[:, None], pages, 0), num_slots, BackendError)

    @staticmethod
    def _places(group: int, batch: ForwardBatch) -> Tensor:
        """[N] token slots of the new tokens in a page group."""
        places = batch.out_cache_loc
        return places if places.dim() == 1 else places[group]

    def layer_table(self, layer: Layer) -> Tensor:
        """[R + 1, max_context] int32 token slots in a layer's page group."""
        return self._tables[self.kv_pool.group_of(layer.layer_id)]

    def layer_places(self, layer: Layer, batch: ForwardBatch) -> Tensor:
        """[N] token slots of the new tokens in a layer's page group."""
        return self._places(self.kv_pool.group_of(layer.layer_id), batch)

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        if graph is not None:
            check_graph_batch(batch, graph)
        else:
            check_eager_batch(batch, self._check_places)
            for group, table in enumerate(self._tables[: len(self.kv_pool.windows)]):
                check_written_places(batch, self._places(group, batch), table)
        decode = self._decode_segment(batch) if batch.num_decode_rows else None
        extend = self._extend_segment(batch) if batch.num_extend_rows and graph is None else None
        copies = graph.buffers.get(self) if graph is not None and graph.prompts else None
        batch.metadata[self] = PagedMetadata(decode, extend, copies=copies)

    def prepare_in_graph(self, batch: ForwardBatch) -> None:
        if batch.num_extend_rows:
            step: PagedMetadata = self.metadata_of(batch)
            step.extend = self._extend_segment(batch)._replace(copies=step.copies)

    @staticmethod
    def _decode_segment(batch: ForwardBatch) -> AttentionRows:
        """Lengths of a captured step are not bounded."""
        split, spec, lens = batch.num_decode_rows, batch.spec_info, batch.seq_lens_cpu
        mask, drafts = (None, None) if spec is None else (spec.mask, spec.num_drafts)
        return AttentionRows(
            batch.req_pool_indices[:split],
            batch.seq_lens[:split],
            mask=None if mask is None else mask[:split],
            num_drafts=None if drafts is None else drafts[:split],
            max_len=None if lens is None else max(lens[:split]),
        )

    @staticmethod
    def _extend_segment(batch: ForwardBatch) -> AttentionPrompts:
        split, totals = batch.num_decode_rows, batch.seq_lens_cpu
        starts, lens = batch.query_start_loc[split:] - batch.num_decode_tokens, batch.seq_lens[split:]
        host = list(batch.extend_seq_lens_cpu), () if totals is None else list(totals[split:])
        return AttentionPrompts(batch.req_pool_indices[split:], starts, lens, *host)

    def save_latent(self, q: Tensor, k: Tensor | None, layer: Layer, batch: ForwardBatch, rope: Rope | None) -> Tensor:
        """Norms and rotates k [T, rank + rope], writes it; returns q [T, heads * (nope + rope)],
        rotated."""
        if k is None:
            raise BackendError("a layer of latent attention always writes its tokens: pass k, and save_kv_cache=True")
        cache, cos_sin = self.kv_pool.layer(layer.layer_id)[0], None if rope is None else rope.cos_sin
        heads, scale = q.view(q.shape[0], layer.spec.num_heads, -1), self.kv_pool.scales[layer.layer_id].keys
        written: Tensor = self._write_latent(
            heads, k, layer.weights, batch.positions, cos_sin, cache, self.layer_places(layer, batch), scale
        )
        return written.flatten(1)

    def rotate_and_save(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> Tensor:
        spec: AttentionSpec = layer.spec
        heads, kv_heads = (-1, spec.num_heads, spec.head_dim), (-1, spec.num_kv_heads, spec.head_dim)
        rotated: Tensor = self._rotary_write_kv(
            q.view(heads), k.view(kv_heads), v.view(kv_heads), batch.rope_positions, rope,
            KVPlaces(
                *self.kv_pool.layer(layer.layer_id), self.layer_places(layer, batch),
                *self.kv_pool.scales[layer.layer_id],
            ),
        )  # fmt: skip
        return rotated.view(q.shape[0], -1)

    def save_kv(self, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch) -> None:
        k_cache, v_cache = self.kv_pool.layer(layer.layer_id)
        shape = (k.shape[0], layer.spec.num_kv_heads, layer.spec.head_dim)
        places, scales = self.layer_places(layer, batch), self.kv_pool.scales[layer.layer_id]
        self._write_kv(k.view(shape), v.view(shape), k_cache, v_cache, places, *scales)

    def commit(self, batch: ForwardBatch, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        """Moves the KV of accepted inputs together: `path` says where it is."""
        if accepted is None or path is None or not self.kv_pool.tensors:
            return
        n, tokens = path.shape
        first = (batch.seq_lens[:n] - tokens).unsqueeze(1)
        order = torch.arange(tokens, device=path.device)
        rows, kept = batch.req_pool_indices[:n].unsqueeze(1), order < accepted.unsqueeze(1)
        moves = [
            [table[rows, first + at].masked_fill(~kept, 0).flatten() for at in (path, order)] for table in self._tables
        ]
        for cache, group in zip(self.kv_pool.tensors, self.kv_pool.tensor_groups):
            move_kv(cache, *moves[group])


class PagedAttnBackend(PagedKVBackend):
    """Attention with lengths on the device. The host plans nothing, so graphs replay unchanged."""

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        device = kv_pool.device.type
        self._extend = select("attention_extend", device, self.provider)
        self._decode = select("attention_decode", device, self.provider)
        views = {
            i: PagedKV(
                *kv_pool.layer(i), self._tables[kv_pool.group_of(i)], spec.scale, spec.sliding_window, None,
                *kv_pool.scales[i],
            )
            for i, spec in kv_pool.specs.items()
        }  # fmt: skip
        self.layer_kv: Callable[[int], PagedKV] = views.__getitem__  # by layer id, without sinks
        if self.serves_latent:
            self._latent_extend = select("latent_extend", device, self.provider)

    def decode(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        heads = q.view(batch.num_decode_rows, batch.tokens_per_row, layer.spec.num_heads, -1)
        kv, rows = self.layer_kv(layer.layer_id), (batch.metadata.get(self) or self.metadata_of(batch)).decode
        if layer.spec.sinks:
            kv = kv._replace(sinks=layer.sinks)
        if layer.spec.variant == "mla":
            sums = self._decode(into_latent(heads, layer.weights), kv, rows)
            return from_latent(sums, layer.weights).view(q.shape[0], -1)
        if out is None:
            return self._decode(heads, kv, rows, None).reshape(q.shape[0], -1)
        self._decode(heads, kv, rows, out.view(heads.shape))
        return out

    def extend(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        heads = by_head(q, layer.spec.num_heads, q.shape[1] // layer.spec.num_heads)
        kv, rows = self.layer_kv(layer.layer_id), (batch.metadata.get(self) or self.metadata_of(batch)).extend
        if layer.spec.sinks:
            kv = kv._replace(sinks=layer.sinks)
        if layer.spec.variant == "mla":
            return self._latent_extend(heads, kv, layer.weights, rows).flatten(1)
        place = None if out is None else by_head(out, *heads.shape[1:])
        return self._extend(heads, kv, rows, place).reshape(q.shape[0], -1)


@dataclass
class TorchPlan:
    """What the layers of a CPU step share, computed by the first layer that needs it.

    Attributes:
        rotations: cosines and sines, by the address of their table.
        places: where keys and values are written, by page group.
    """

    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    places: dict[int, CellPlaces] = field(default_factory=dict)


class TorchNativeAttnBackend(PagedAttnBackend):
    """Gathers a request's pages and calls scaled_dot_product_attention. On a CPU, what layers share
    is computed once a step."""

    provider = "torch"
    serves_latent = serves_sinks = serves_codes = True
    auto_decode = auto_prefill = ("cpu",)

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        self._windows = dict(zip(self._tables, kv_pool.windows))
        self._shares = kv_pool.device.type == "cpu"  # a graph would keep values
        if self._shares:
            self._decode = attend

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        super().prepare(batch, graph=graph)
        if self._shares:
            step: PagedMetadata = batch.metadata[self]
            step.plans[0] = TorchPlan()  # of all page groups
            if step.decode is not None:
                step.decode = RowContexts(self._windows, step.decode, batch.tokens_per_row)

    def rotate_and_save(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> Tensor:
        step: PagedMetadata = batch.metadata.get(self) or self.metadata_of(batch)
        plan, spec, table = step.plans.get(0) or TorchPlan(), layer.spec, rope.cos_sin.data_ptr()
        if table not in plan.rotations:
            plan.rotations[table] = rotations(rope, batch.rope_positions)
        group = self.kv_pool.group_of(layer.layer_id)
        if group not in plan.places:
            plan.places[group] = cell_places(self._places(group, batch), self.kv_pool.page_size)
        heads, kv_heads = (-1, spec.num_heads, spec.head_dim), (-1, spec.num_kv_heads, spec.head_dim)
        rotated, key = rotate(q.view(heads), k.view(kv_heads), rope, plan.rotations[table])
        k_cache, v_cache = self.kv_pool.layer(layer.layer_id)
        k_scale, v_scale = self.kv_pool.scales[layer.layer_id]
        store_at(((k_cache, key, k_scale), (v_cache, v.view(kv_heads), v_scale)), plan.places[group])
        return rotated.flatten(1)
