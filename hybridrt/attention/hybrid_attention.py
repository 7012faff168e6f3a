"""The backend of layers whose output is attention over a sliding window plus a history branch over everything."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.attention.hybrid_linear import HybridLinearAttnBackend
from hybridrt.attention.mamba1 import Mamba1AttnBackend
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.prefix_sum import prefix_sum_update, prefix_sum_varlen
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool


class HistoryAttnBackend(Mamba1AttnBackend):
    """The recurrent side: plans the step for all history branches, whose state is Mamba-1's or a running sum."""

    kind = "history"

    @property
    def linear_attn_backend(self) -> "HistoryAttnBackend":
        return self

    def prefix_sum(self, x: torch.Tensor, layer: Any) -> torch.Tensor:
        """Running sums of one branch, per request: x [T, *dims] to [T, *dims]."""
        metadata, cache = self._metadata(), self.layer_cache(layer.layer_id)
        split, parts = metadata.decode.num_tokens if metadata.decode else 0, []
        if seg := metadata.decode:
            # One token is final at once; only a verify step may have to go back.
            stored = cache.intermediate_ssm if seg.tokens_per_row > 1 else None
            sums = prefix_sum_update(
                x[:split].unflatten(0, (-1, seg.tokens_per_row)), cache.temporal, seg.buffers.slots, seg.buffers.slots,
                intermediate_states=stored, rows=seg.rows, parents=seg.parents,
            )  # fmt: skip
            parts.append(sums.flatten(0, 1))
        if chunks := metadata.extend:
            places = (chunks.slots, chunks.slots, chunks.query_start_loc)
            parts.append(prefix_sum_varlen(x[split:], cache.temporal, *places))
        return parts[0] if len(parts) == 1 else torch.cat([x[:0], *parts])

    def segment(self, *, decode: bool) -> "HistoryAttnBackend":
        """This backend as it stands in a step that has its decode rows alone, or its extend rows alone."""
        view, metadata = copy.copy(self), self._metadata()
        view.metadata = replace(metadata, extend=None) if decode else replace(metadata, decode=None)
        return view


class HybridAttentionBackend(HybridLinearAttnBackend):
    """Adds the history branch of a layer to its window's attention, on partial sums: after the attention's output
    projection and before the sum over tensor-parallel ranks.

    Whatever the window's backend or the branch raises is raised: attention alone is never passed off as both.

    Args:
        window_backend: any attention backend; it reads a layer's `sliding_window`.
        adapters: the history branches (hybridrt.layers.hybrid_attention.HybridSSMAdapter) of all layers, disabled ones
            included.

    Raises:
        BackendError: two branches of one name, or of one layer id.
    """

    def __init__(
        self, window_backend: AttentionBackend, adapters: Sequence[Any], req_to_token_pool: HybridReqToTokenPool
    ) -> None:
        for attribute in ("name", "layer_id"):
            seen = [getattr(adapter, attribute) for adapter in adapters]
            twice = sorted({value for value in seen if seen.count(value) > 1})
            if twice:
                raise BackendError(f"{attribute} {twice[0]!r} belongs to two history branches; give each its own")
        stateful = {a.layer_id: a for a in adapters if a.config is not None}
        history = None
        if stateful:
            chunk_size = max(a.config.chunk_size for a in stateful.values())
            history = HistoryAttnBackend(layers=stateful, req_to_token_pool=req_to_token_pool, chunk_size=chunk_size)
        super().__init__(window_backend, history, [a.layer_id for a in adapters])

    def forward(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer over all rows of the batch.

        Args:
            layer: has `attn` (what the window's backend takes as its layer), `project` (the attention's output
                projection, [T, heads * head_dim] to [T, hidden], without the sum over ranks) and `ssm_adapter`.
            hidden_states: [T, hidden], what the block's projections read.
        Returns:
            [T, hidden], this rank's summand. The branch is zero on padding rows.
        """
        assert hidden_states is not None
        out: torch.Tensor = layer.project(super().forward(q, k, v, layer.attn, batch, save_kv_cache, **kwargs))
        if layer.ssm_adapter.mode == "disabled":
            return out
        return out + layer.ssm_adapter.forward_history_branch(hidden_states, batch)
