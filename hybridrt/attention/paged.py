"""Attention over KVPool: the metadata and the writing that all backends share, and those whose kernels plan nothing."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hybridrt.attention.base import Rope, SegmentedAttnBackend, check_graph_tokens
from hybridrt.attention.checks import (
    check_batch,
    check_device_lengths,
    check_graph_step,
    check_own,
    check_range,
    may_look,
)
from hybridrt.config import AttentionSpec
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.providers import objection, require, select
from hybridrt.kernels.state_commit import move_kv
from hybridrt.mem_cache.kv_pool import KVPool
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool


@dataclass
class PagedMetadata:
    """Views of one step. `decode_max_len` is a host upper bound of the decode rows' lengths, None in a graph."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    decode_max_len: int | None
    tree_mask: torch.Tensor | None
    num_drafts: torch.Tensor | None
    query_lens: list[int]
    seq_lens_host: list[int]


def kernel_facts(device: torch.device, spec: AttentionSpec) -> dict[str, Any]:
    """What providers are told of an attention layer when they are asked whether they can serve it."""
    facts: dict[str, Any] = {"dtype": spec.dtype, "head_dim": spec.head_dim}
    return facts | {"capability": torch.cuda.get_device_capability(device)} if device.type == "cuda" else facts


class PagedKVBackend(SegmentedAttnBackend):
    """Writes keys and values into KVPool, and knows each step's rows and lengths.

    Args:
        kv_pool, req_to_token_pool: where keys, values and their slots live.

    Attributes:
        provider: whose kernels attend (hybridrt.kernels.providers).
        operations: those that it runs.

    Raises:
        ProviderNotInstalledError, BackendError: the provider is missing, or cannot serve this device and these layers.
    """

    provider: ClassVar[str]
    operations: ClassVar[tuple[str, ...]] = ("attention_extend", "attention_decode")

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        self.kv_pool = kv_pool
        self.req_to_token_pool = req_to_token_pool
        self.metadata: PagedMetadata | None = None
        device, specs = kv_pool.device, set(kv_pool.specs.values())
        require(self.provider, type(self).__name__)
        if reason := self.objection(device, specs):
            raise BackendError(f"provider {self.provider!r} cannot serve attention on {device.type!r}: {reason}")
        self._write_kv = select("write_kv", device.type)
        self._rotary_write_kv = select("rotary_write_kv", device.type)

    @classmethod
    def objection(cls, device: torch.device, specs: Collection[AttentionSpec]) -> str | None:
        for spec in specs:
            if spec.variant != "gqa":
                return f'{cls.__name__} has no kernels for variant "{spec.variant}"'
            if spec.v_head_dim != spec.head_dim:
                return f"head_dim is {spec.head_dim} and v_head_dim {spec.v_head_dim}; {cls.__name__} takes equal ones"
        facts = [kernel_facts(device, spec) for spec in specs]
        asked = (objection(op, device.type, cls.provider, **each) for op in cls.operations for each in facts)
        return next((reason for reason in asked if reason is not None), None)

    def _check_places(self, batch: ForwardBatch) -> None:
        """Rows, and the KV slots that the step writes and reads. Waits for the device."""
        table, rows, size = self.req_to_token_pool, batch.req_pool_indices, self.kv_pool.page_size
        num_slots = (self.kv_pool.num_pages + 1) * size
        check_range("req_pool_indices", rows, table.num_rows + 1)
        check_own("req_pool_indices", rows[: batch.num_real])
        check_range("out_cache_loc", batch.out_cache_loc, num_slots)
        pages = table.req_to_token[:, ::size][rows]  # by their first slots
        starts, lens = torch.arange(pages.shape[1], device=pages.device) * size, batch.seq_lens.clone()
        spec, split = batch.spec_info, batch.num_decode_rows
        if spec is not None and spec.num_drafts is not None:  # padding drafts, the last tokens of a row, have no page
            lens[:split] -= spec.tokens_per_row - 1 - spec.num_drafts[:split]
        check_range("req_to_token", torch.where(starts < lens[:, None], pages, 0), num_slots)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        check_batch(batch)
        if may_look(batch.seq_lens.device):
            self._check_places(batch)
        check_device_lengths(batch)
        split = batch.num_decode_rows
        num_drafts = batch.spec_info.num_drafts if batch.spec_info else None
        lens = list(batch.seq_lens_cpu) if batch.seq_lens_cpu is not None else None
        extend_lens = lens[split:] if lens is not None else []
        self.metadata = PagedMetadata(
            rows=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            decode_max_len=max(lens[:split], default=0) if lens is not None else None,
            tree_mask=batch.spec_info.tree_mask if batch.spec_info else None,
            num_drafts=None if num_drafts is None else num_drafts[:split],  # a graph's batch says it of all its rows
            query_lens=list(batch.extend_seq_lens_cpu) if batch.num_extend_rows else [],
            seq_lens_host=extend_lens,
        )

    def rotate_and_save(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: ForwardBatch, rope: Rope
    ) -> torch.Tensor:
        spec: AttentionSpec = layer.spec
        heads, kv_heads = (-1, spec.num_heads, spec.head_dim), (-1, spec.num_kv_heads, spec.head_dim)
        rotated: torch.Tensor = self._rotary_write_kv(
            q.view(heads), k.view(kv_heads), v.view(kv_heads), batch.positions, rope.cos_sin, rope.q_weight,
            rope.k_weight, rope.eps, *self.kv_pool.layer(layer.layer_id), batch.out_cache_loc,
        )  # fmt: skip
        return rotated.view(q.shape[0], -1)

    def save_kv(self, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: ForwardBatch) -> None:
        k_cache, v_cache = self.kv_pool.layer(layer.layer_id)
        shape = (k.shape[0], layer.spec.num_kv_heads, layer.spec.head_dim)
        self._write_kv(k.view(shape), v.view(shape), k_cache, v_cache, batch.out_cache_loc)

    def commit_decode(self, accepted: torch.Tensor | None = None, path: torch.Tensor | None = None) -> None:
        """A tree's accepted nodes stand wherever they were proposed: their KV moves up to where their depth says."""
        if accepted is None or path is None:
            return
        meta, (n, tokens) = self._metadata(), path.shape
        first = (meta.seq_lens[:n] - tokens).unsqueeze(1)
        depth = torch.arange(tokens, device=path.device)
        table, rows = self.req_to_token_pool.req_to_token, meta.rows[:n].unsqueeze(1)
        kept = depth < accepted.unsqueeze(1)
        source, destination = (table[rows, first + at].masked_fill(~kept, 0) for at in (path, depth))
        for cache in self.kv_pool.tensors:
            move_kv(cache, source.flatten(), destination.flatten())

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        check_graph_tokens(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
    ) -> None:
        check_graph_step(bs, 0, check_graph_tokens(bs, num_tokens), forward_mode, spec_info)
        self._bind(bs, req_pool_indices, seq_lens, spec_info)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        num_real: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
        seq_lens_cpu: list[int] | None,
    ) -> None:
        check_graph_step(bs, num_real, spec_info.tokens_per_row if spec_info else 1, forward_mode, spec_info)
        self._bind(bs, req_pool_indices, seq_lens, spec_info)

    def _bind(self, bs: int, rows: torch.Tensor, seq_lens: torch.Tensor, spec_info: SpecInfo | None) -> None:
        # The runner's static buffers are all that the kernels read: lengths and rows stay on the device.
        tree_mask = spec_info.tree_mask[:bs] if spec_info and spec_info.tree_mask is not None else None
        num_drafts = spec_info.num_drafts[:bs] if spec_info and spec_info.num_drafts is not None else None
        self.metadata = PagedMetadata(rows[:bs], seq_lens[:bs], None, None, tree_mask, num_drafts, [], [])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _metadata(self) -> PagedMetadata:
        assert self.metadata is not None, "init_forward_metadata comes before forward"
        return self.metadata


class PagedAttnBackend(PagedKVBackend):
    """Attention with lengths on the device: nothing is planned on the host, so graphs replay as they are."""

    def __init__(self, *, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool) -> None:
        super().__init__(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        self._extend, self._decode = (select(op, kv_pool.device.type, self.provider) for op in self.operations)

    def forward_decode(
        self, q: torch.Tensor, layer: Any, batch: ForwardBatch, *, out: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        meta, split, spec = self._metadata(), batch.num_decode_rows, layer.spec
        heads = q.view(split, -1, spec.num_heads, spec.head_dim)
        result: torch.Tensor = self._decode(
            heads,
            *self.kv_pool.layer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            meta.rows[:split],
            meta.seq_lens[:split],
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            tree_mask=meta.tree_mask,
            num_drafts=meta.num_drafts,
            max_len=meta.decode_max_len,
            out=None if out is None else out.view(heads.shape),
        )
        return result.reshape(q.shape[0], -1)

    def forward_extend(
        self, q: torch.Tensor, layer: Any, batch: ForwardBatch, *, out: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        meta, split, spec = self._metadata(), batch.num_decode_rows, layer.spec
        assert meta.query_start_loc is not None
        heads = q.view(-1, spec.num_heads, spec.head_dim)
        result: torch.Tensor = self._extend(
            heads,
            *self.kv_pool.layer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            meta.rows[split:],
            meta.query_start_loc[split:] - batch.num_decode_tokens,
            meta.seq_lens[split:],
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            query_lens=meta.query_lens,
            seq_lens_host=meta.seq_lens_host,
            out=None if out is None else out.view(heads.shape),
        )
        return result.reshape(q.shape[0], -1)
