"""What every recurrent backend shares: the split of a step by segment, its metadata, graph buffers and its commit."""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend, check_graph_tokens
from hybridrt.attention.checks import (
    check_batch,
    check_device_lengths,
    check_graph_step,
    check_own,
    check_range,
    may_look,
)
from hybridrt.attention.segments import DecodeSegment, ExtendSegment, ForwardMetadata
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.chunk_plan import plan_chunks
from hybridrt.kernels.decode_metadata import DecodeBuffers, fill_decode_metadata
from hybridrt.kernels.records import ConvWeights
from hybridrt.mem_cache.mamba_pool import LayerCache, MambaPool
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool

# What a mixer hands its backend, by name: [T, ...] each, decode rows first.
Inputs = Mapping[str, torch.Tensor]


def conv_weights(layer: Any) -> ConvWeights:
    """A mixer's conv, as the operations take it."""
    return ConvWeights(layer.conv_weight, layer.conv_bias)


class MambaAttnBackendBase(AttentionBackend):
    """The backend of one kind of recurrent layer over MambaPool. A kind writes `decode` and `extend`, which call its
    kernels; the class docstring says which inputs they take.

    Args:
        layers: the model's mixers of this kind by layer id.
        chunk_size: tokens of a prefill chunk.
    """

    kind: str

    def __init__(self, *, layers: Mapping[int, Any], req_to_token_pool: HybridReqToTokenPool, chunk_size: int) -> None:
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
        self.members = [self]  # the backends that this one plans and commits for
        self._uncommitted = False  # a planned step waits for commit_decode
        # By tokens of a row: captured graphs of decode and of verify steps each go on reading their own.
        self._graph_buffers: dict[int, tuple[DecodeBuffers, torch.Tensor]] = {}
        self.mamba_pool.set_decays({i: partial(self.ring_decay, layer) for i, layer in layers.items()})

    @staticmethod
    def join(backends: Sequence["MambaAttnBackendBase"]) -> "MambaAttnBackendBase":
        """The first of a model's backends, which from now on plans and commits for all of them: their layers share
        slots and ring cursors, and a step moves the cursors once."""
        first = backends[0]
        first.members = [member for backend in backends for member in backend.members]
        return first

    def layer_cache(self, layer_id: int) -> LayerCache:
        return self.mamba_pool.layer_cache(layer_id)

    # -- one layer ----------------------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        out: torch.Tensor | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """One mixer over all rows.

        Args:
            layer: the mixer.
            out: [T, width], where the result of a step with one segment may be left; what is returned counts.
            inputs: the kind's own, [T, ...] each.
        Returns:
            [T, width], decode rows first.
        """
        step = self._metadata()
        if step.decode and step.extend:
            split = step.decode.num_tokens
            decoded = self.decode(layer, {name: t[:split] for name, t in inputs.items()}, step.decode)
            chunks = self.extend(layer, {name: t[split:] for name, t in inputs.items()}, step.extend)
            return torch.cat((decoded, chunks))
        if out is not None:
            inputs["out"] = out
        if step.decode:
            return self.decode(layer, inputs, step.decode)
        if step.extend:
            return self.extend(layer, inputs, step.extend)
        return next(iter(inputs.values())).new_empty(0, layer.width)

    @abstractmethod
    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        """A mixer's decode or verify rows: [n * tokens_per_row, width], maybe in inputs["out"]."""

    @abstractmethod
    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        """A mixer's prompt chunks: [tokens, width], maybe in inputs["out"]."""

    def conv_rows(self, layer: Any, segment: DecodeSegment) -> dict[str, Any]:
        """`causal_conv1d_update` of a mixer's decode rows: all that it takes but the inputs."""
        cache = self.layer_cache(layer.layer_id)
        return {
            "weights": conv_weights(layer),
            "state": segment.conv_state(cache),
            "intermediate": segment.conv_windows(cache),
        }

    def conv_chunks(self, layer: Any, segment: ExtendSegment) -> dict[str, Any]:
        """`causal_conv1d_varlen` of a mixer's prompt chunks: all that it takes but the inputs."""
        state = segment.conv_state(self.layer_cache(layer.layer_id))
        return {"weights": conv_weights(layer), "state": state, "query_start_loc": segment.query_start_loc}

    @staticmethod
    def ring_decay(layer: Any) -> torch.Tensor | None:
        """[heads] float32, times which a mixer's ring gates are logs of decays; None where they are that already."""
        return None

    def segment(self, *, decode: bool) -> "MambaAttnBackendBase":
        """This backend as it stands in a step that has its decode rows alone, or its extend rows alone."""
        view, metadata = copy.copy(self), self._metadata()
        view.metadata = replace(metadata, extend=None) if decode else replace(metadata, decode=None)
        return view

    # -- planning -----------------------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._require_commit()
        check_batch(batch)
        if may_look(batch.seq_lens.device):
            check_range("req_pool_indices", batch.req_pool_indices, self.pools.num_rows + 1)
            slots = self.pools.get_mamba_indices(batch.req_pool_indices[: batch.num_real])
            check_range("req_to_mamba_slot", slots, self.mamba_pool.num_slots + 1)
            check_own("req_to_mamba_slot", slots)
            if batch.read_state_slots is not None:
                check_range("read_state_slots", batch.read_state_slots, self.mamba_pool.num_slots + 1)
        check_device_lengths(batch)
        split = batch.num_decode_rows
        decode, extends = None, dict[int, ExtendSegment]()
        slots = torch.empty(0, dtype=torch.int32, device=batch.seq_lens.device)
        if split:
            self._check_width(batch.tokens_per_row)
            decode = self._decode_segment(batch)
            slots = decode.buffers.state_slots
        if batch.num_extend_rows:
            extends = self._extend_segments(batch)
            extend_slots = extends[self.chunk_size].write_state_slots
            slots = torch.cat((slots, extend_slots)) if split else extend_slots
        for member in self.members:
            extend = extends.get(member.chunk_size)
            member.metadata = ForwardMetadata(batch.query_start_loc, slots, decode, extend)
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

    def _decode_segment(self, batch: ForwardBatch) -> DecodeSegment:
        split, tokens = batch.num_decode_rows, batch.tokens_per_row
        buffers, rows = DecodeBuffers.allocate(split, batch.seq_lens.device), batch.req_pool_indices[:split]
        self._fill_buffers(buffers, rows, batch.seq_lens[:split], min(batch.num_real, split), tokens)
        return DecodeSegment(rows, buffers, tokens, batch.spec_info.parents if batch.spec_info else None)

    def _fill_buffers(
        self, buffers: DecodeBuffers, rows: torch.Tensor, seq_lens: torch.Tensor, num_real: int, tokens: int
    ) -> None:
        pool = self.mamba_pool
        slot_map = self.pools.req_to_mamba_slot
        fill_decode_metadata(buffers, rows, seq_lens, num_real, tokens, slot_map, pool.ring_start, pool.ring_length)

    def _extend_segments(self, batch: ForwardBatch) -> dict[int, ExtendSegment]:
        """By chunk size, which alone differs from kind to kind."""
        split = batch.num_decode_rows
        slots = self.pools.get_mamba_indices(batch.req_pool_indices[split:])
        if batch.num_real < batch.batch_size:
            slots[max(batch.num_real - split, 0) :] = -1
        starts = batch.query_start_loc[split:]
        positions = batch.seq_lens[split:] - (starts[1:] - starts[:-1])
        reads = slots
        if batch.read_state_slots is not None:
            reads = torch.where(batch.read_state_slots > 0, batch.read_state_slots, slots)
        shared = reads, slots, starts - batch.num_decode_tokens, positions, positions > 0
        plans = batch.chunk_plans
        if plans is None:
            lens = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
            plans = {size: plan_chunks(*lens, size, slots.device) for size in self.chunk_sizes}
        return {size: ExtendSegment(*shared, plans[size]) for size in self.chunk_sizes}

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(member.chunk_size for member in self.members))

    # -- graphs -------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        tokens = check_graph_tokens(max_bs, max_num_tokens)
        device = self.pools.req_to_mamba_slot.device
        query_start_loc = torch.arange(max_bs + 1, dtype=torch.int32, device=device) * tokens
        self._graph_buffers[tokens] = DecodeBuffers.allocate(max_bs, device), query_start_loc
        if self.mamba_pool.spec.mode == "replay":
            self.mamba_pool.stack_decays()  # must not be made within a capture

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
        for member in self.members:
            member.metadata = ForwardMetadata(query_start_loc[: bs + 1], buffers.state_slots, decode, None)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # -- the end of a step --------------------------------------------------------------------------------------

    def commit_decode(self, accepted: torch.Tensor | None = None, path: torch.Tensor | None = None) -> None:
        decode, self._uncommitted = self._metadata().decode, False
        if decode is None or not self._needs_commit(decode.tokens_per_row):
            return
        buf = decode.buffers
        accepted = buf.accepted if accepted is None else accepted
        n = len(accepted)
        self.mamba_pool.commit(decode.rows[:n], buf.state_slots[:n], accepted, buf.start_positions[:n], path)

    def _metadata(self) -> ForwardMetadata:
        assert self.metadata is not None, "init_forward_metadata comes before forward"
        return self.metadata
