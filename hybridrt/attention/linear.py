"""What every recurrent backend shares: per-step metadata, graph buffers, and the commit at the end of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend, check_graph_tokens
from hybridrt.attention.checks import check_batch, check_device_lengths, check_graph_step, check_range, may_look
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.chunk_plan import ChunkPlan, plan_chunks
from hybridrt.kernels.decode_metadata import DecodeBuffers, fill_decode_metadata
from hybridrt.kernels.state_commit import commit_conv_window, commit_intermediate
from hybridrt.kernels.state_ring import RingFolds, advance_ring, fold_ring
from hybridrt.mem_cache.mamba_pool import LayerCache, MambaPool
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool


@dataclass(frozen=True)
class DecodeSegment:
    """Decode or verify rows: n rows of `tokens_per_row` tokens. `rows` are request rows, [n] int32."""

    rows: torch.Tensor
    buffers: DecodeBuffers
    tokens_per_row: int
    parents: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] * self.tokens_per_row


@dataclass(frozen=True)
class ExtendSegment:
    """Prompt chunks of n rows, packed. query_start_loc counts from the segment's first token."""

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    start_positions: torch.Tensor
    has_initial_states: torch.Tensor
    plan: ChunkPlan


@dataclass(frozen=True)
class ForwardMetadata:
    """One step as the recurrent layers see it; either segment may be absent.

    Attributes:
        query_start_loc: [B + 1] int32 over all rows.
        mamba_cache_indices: [B] int32 state slots, -1 for padding rows.
    """

    query_start_loc: torch.Tensor
    mamba_cache_indices: torch.Tensor
    decode: DecodeSegment | None
    extend: ExtendSegment | None

    @property
    def num_tokens(self) -> int:
        decode = self.decode.num_tokens if self.decode else 0
        return decode + (self.extend.plan.num_tokens if self.extend else 0)


class MambaAttnBackendBase(AttentionBackend):
    """A recurrent backend over MambaPool.

    Args:
        layers: the model's recurrent mixers by layer id; their kind must be the backend's own.
        chunk_size: tokens of a prefill chunk.
    """

    kind: str

    def __init__(self, *, layers: dict[int, Any], req_to_token_pool: HybridReqToTokenPool, chunk_size: int) -> None:
        wrong = {layer_id: m.kind for layer_id, m in layers.items() if m.kind != self.kind}
        if wrong:
            layer_id, kind = next(iter(wrong.items()))
            raise BackendError(
                f"layer {layer_id} is a {kind!r} layer, but the linear backend {self.kind!r} was chosen; "
                f'use linear_attn_backend="auto" or {kind!r}'
            )
        if req_to_token_pool.mamba_pool is None:
            raise BackendError(f"the {self.kind!r} backend needs a MambaPool; the pools were built without one")
        self.layers = layers
        self.pools = req_to_token_pool
        self.mamba_pool: MambaPool = req_to_token_pool.mamba_pool
        self.chunk_size = chunk_size
        self.metadata: ForwardMetadata | None = None
        self._uncommitted = False  # a planned step waits for commit_decode
        # By tokens of a row: captured graphs of decode and of verify steps each go on reading their own.
        self._graph_buffers: dict[int, tuple[DecodeBuffers, torch.Tensor]] = {}

    def layer_cache(self, layer_id: int) -> LayerCache:
        return self.mamba_pool.layer_cache(layer_id)

    # -- planning -----------------------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._require_commit()
        check_batch(batch)
        if may_look(batch.seq_lens.device):
            check_range("req_pool_indices", batch.req_pool_indices, self.pools.num_rows + 1)
            slots = self.pools.get_mamba_indices(batch.req_pool_indices[: batch.num_real])
            check_range("req_to_mamba_slot", slots, self.mamba_pool.num_slots + 1)
        check_device_lengths(batch)
        split, real = batch.num_decode_rows, batch.num_real
        decode = extend = None
        slots = torch.empty(0, dtype=torch.int32, device=batch.seq_lens.device)
        if split:
            self._check_width(batch.tokens_per_row)
            buffers = DecodeBuffers.allocate(split, batch.seq_lens.device)
            decode = self._fill(
                buffers, batch.req_pool_indices[:split], batch.seq_lens[:split], min(real, split), batch
            )
            slots = buffers.slots
        if batch.num_extend_rows:
            extend = self._extend_segment(batch)
            slots = torch.cat((slots, extend.slots)) if split else extend.slots
        self.metadata = ForwardMetadata(batch.query_start_loc, slots, decode, extend)
        self._uncommitted = bool(split) and self._needs_commit(batch.tokens_per_row)

    def _needs_commit(self, tokens: int) -> bool:
        """Whether a step of so many tokens a row leaves the state behind it to `commit_decode`."""
        mode = self.mamba_pool.spec.mode
        return mode == "replay" or (mode == "intermediate" and tokens > 1)

    def _require_commit(self) -> None:
        if self._uncommitted:
            raise BackendError(
                "the last decode step was not committed, so its tokens are not part of the state: call commit_decode "
                "after its last layer, or drop_step if it is given up"
            )

    def drop_step(self) -> None:
        self._uncommitted = False

    def _check_width(self, tokens: int) -> None:
        most = self.mamba_pool.spec.tokens_per_step
        if tokens > most:
            raise BackendError(
                f"a step of {tokens} tokens a row on a state pool made for {most}: verify at most {most}, or build the "
                f"pool with tokens_per_step={tokens}"
            )

    def _fill(
        self, buffers: DecodeBuffers, rows: torch.Tensor, seq_lens: torch.Tensor, num_real: int, batch: ForwardBatch
    ) -> DecodeSegment:
        self._fill_buffers(buffers, rows, seq_lens, num_real, batch.tokens_per_row)
        parents = batch.spec_info.parents if batch.spec_info else None
        return DecodeSegment(rows, buffers, batch.tokens_per_row, parents)

    def _fill_buffers(
        self, buffers: DecodeBuffers, rows: torch.Tensor, seq_lens: torch.Tensor, num_real: int, tokens: int
    ) -> None:
        pool = self.mamba_pool
        slot_map = self.pools.req_to_mamba_slot
        fill_decode_metadata(buffers, rows, seq_lens, num_real, tokens, slot_map, pool.ring_start, pool.ring_length)

    def _extend_segment(self, batch: ForwardBatch) -> ExtendSegment:
        split = batch.num_decode_rows
        slots = self.pools.get_mamba_indices(batch.req_pool_indices[split:])
        if batch.num_real < batch.batch_size:
            slots[max(batch.num_real - split, 0) :] = -1
        starts = batch.query_start_loc[split:]
        lens = starts[1:] - starts[:-1]
        start_positions = batch.seq_lens[split:] - lens
        plan = plan_chunks(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, self.chunk_size, slots.device)
        return ExtendSegment(slots, starts - batch.num_decode_tokens, start_positions, start_positions > 0, plan)

    # -- graphs -------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        tokens = check_graph_tokens(max_bs, max_num_tokens)
        device = self.pools.req_to_mamba_slot.device
        query_start_loc = torch.arange(max_bs + 1, dtype=torch.int32, device=device) * tokens
        self._graph_buffers[tokens] = DecodeBuffers.allocate(max_bs, device), query_start_loc
        for layer_ids, _ in self._own_stacks():
            self._ring_decay(layer_ids)  # what it caches must not be made within a capture

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
    ) -> None:
        tokens = check_graph_tokens(bs, num_tokens)
        check_graph_step(bs, 0, tokens, forward_mode, spec_info)
        # Capture runs no request: every row is padding, so the captured kernels leave the pools alone.
        self._bind(bs, 0, req_pool_indices, seq_lens, tokens, spec_info)

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
        self._require_commit()
        tokens = spec_info.tokens_per_row if spec_info else 1
        check_graph_step(bs, num_real, tokens, forward_mode, spec_info)
        self._check_width(tokens)
        self._bind(bs, num_real, req_pool_indices, seq_lens, tokens, spec_info)
        self._uncommitted = tokens > 1 and self._needs_commit(tokens)  # a plain step's graph commits within it

    def _bind(
        self,
        bs: int,
        num_real: int,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: int,
        spec_info: SpecInfo | None,
    ) -> None:
        """Fills the first bs entries of the graph buffers and points the metadata at them."""
        assert tokens in self._graph_buffers, "init_cuda_graph_state first"
        whole, query_start_loc = self._graph_buffers[tokens]
        buffers = whole.prefix(bs)
        self._fill_buffers(buffers, rows[:bs], seq_lens[:bs], num_real, tokens)
        parents = spec_info.parents[:bs] if spec_info and spec_info.parents is not None else None
        decode = DecodeSegment(rows[:bs], buffers, tokens, parents)
        self.metadata = ForwardMetadata(query_start_loc[: bs + 1], buffers.slots, decode, None)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # -- the end of a step --------------------------------------------------------------------------------------

    def commit_decode(self, accepted: torch.Tensor | None = None, path: torch.Tensor | None = None) -> None:
        decode = self._metadata().decode
        pool, self._uncommitted = self.mamba_pool, False
        if decode is None or pool.spec.mode == "classic":
            return
        accepted = decode.buffers.accepted if accepted is None else accepted
        rows, slots = decode.rows[: len(accepted)], decode.buffers.slots[: len(accepted)]
        if pool.spec.mode == "replay":
            cursors = pool.ring_start, pool.ring_length
            self._fold(
                advance_ring(*cursors, rows, accepted, slots, width=pool.width, widest=pool.spec.tokens_per_step)
            )
        elif decode.tokens_per_row > 1:
            ends = None
            if path is not None:
                ends = decode.buffers.start_positions[: len(accepted)] + accepted - 1
                last = path.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1).long()).squeeze(1).int() + 1
                accepted = last.masked_fill(accepted == 0, 0)
            for layer_id in self.layers:
                self._commit_layer(self.layer_cache(layer_id), slots, rows, accepted, ends)

    @staticmethod
    def _commit_layer(
        cache: LayerCache, slots: torch.Tensor, rows: torch.Tensor, nodes: torch.Tensor, ends: torch.Tensor | None
    ) -> None:
        """Back to the state after node `nodes` - 1 of each row, which stands at position `ends` of a tree. A chain's
        conv inputs are in the ring already."""
        assert cache.intermediate_ssm is not None
        commit_intermediate(cache.temporal, cache.intermediate_ssm, slots, rows, nodes)
        if ends is not None:
            assert cache.intermediate_conv_window is not None
            commit_conv_window(cache.conv, cache.intermediate_conv_window, slots, rows, nodes, ends)

    def _fold(self, folds: RingFolds, write_slots: torch.Tensor | None = None) -> None:
        """Makes the named ring entries part of the state, in all layers."""
        for layer_ids, cache in self._own_stacks():
            fold_ring(cache.temporal, *cache.ring, self._ring_decay(layer_ids), folds, write_slots=write_slots)

    def _own_stacks(self) -> list[tuple[Sequence[int], LayerCache]]:
        return [(layer_ids, cache) for layer_ids, cache in self.mamba_pool.stacks if layer_ids[0] in self.layers]

    def _ring_decay(self, layer_ids: Sequence[int]) -> torch.Tensor | None:
        """[L, heads] float32, times which a ring's gates are logs of decays; None where they are that already."""
        return None

    def materialize(self, rows: torch.Tensor, lengths: torch.Tensor, write_slots: torch.Tensor) -> None:
        """The recurrent state of `rows` after their first `lengths` ring entries, written to `write_slots` in every
        layer, without consuming the ring. [n] int32 each. Only in replay mode: elsewhere `temporal` is the state."""
        if self.mamba_pool.spec.mode != "replay":
            raise BackendError("materialize reads a state ring; this pool has none (its state mode is not replay)")
        slots, start = self.pools.get_mamba_indices(rows), self.mamba_pool.ring_start[rows]
        self._fold(RingFolds(slots, rows, start, lengths, torch.full_like(rows[:1], len(rows))), write_slots)

    def _metadata(self) -> ForwardMetadata:
        assert self.metadata is not None, "init_forward_metadata comes before forward"
        return self.metadata
