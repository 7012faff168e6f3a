"""One full-attention backend for prefill and another for decode."""

from typing import Any

import torch

from hybridrt.attention.base import SegmentedAttnBackend
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.records import Rope

_SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class PrefillDecodeAttnBackend(SegmentedAttnBackend):
    """Decode and idle steps go to the decode backend, extend to the prefill backend, mixed ones by segment; verify
    and draft-extend to the one that `speculative_attention_mode` names. Both share one KV pool.

    Only the full-attention side is split: a recurrent layer has one backend and one set of its buffers.
    """

    def __init__(
        self,
        prefill_backend: SegmentedAttnBackend,
        decode_backend: SegmentedAttnBackend,
        speculative_attention_mode: str = "decode",
    ) -> None:
        if speculative_attention_mode not in ("prefill", "decode"):
            raise BackendError(
                f'speculative_attention_mode is {speculative_attention_mode!r}; it must be "prefill" or "decode"'
            )
        self.prefill_backend = prefill_backend
        self.decode_backend = decode_backend
        self.verify_backend = decode_backend if speculative_attention_mode == "decode" else prefill_backend
        self.needs_host_lens = decode_backend.needs_host_lens or self.verify_backend.needs_host_lens

    def backend_of(self, forward_mode: ForwardMode) -> SegmentedAttnBackend:
        """Who runs a step that has one segment."""
        if forward_mode in _SPECULATIVE:
            return self.verify_backend
        return self.prefill_backend if forward_mode is ForwardMode.EXTEND else self.decode_backend

    def _decode_segment_backend(self, batch: ForwardBatch) -> SegmentedAttnBackend:
        verifying = batch.forward_mode in _SPECULATIVE or batch.spec_info is not None
        return self.verify_backend if verifying else self.decode_backend

    def _extend_segment_backend(self, batch: ForwardBatch) -> SegmentedAttnBackend:
        return self.verify_backend if batch.forward_mode in _SPECULATIVE else self.prefill_backend

    def _saving_backend(self, batch: ForwardBatch) -> SegmentedAttnBackend:
        """Writes the keys and values of both segments: one that has planned the step."""
        return self._decode_segment_backend(batch) if batch.num_decode_rows else self._extend_segment_backend(batch)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.forward_mode is not ForwardMode.MIXED:
            return self.backend_of(batch.forward_mode).init_forward_metadata(batch)
        # Either may be asked for a segment, and both may be the same object.
        for backend in {id(b): b for b in (self._decode_segment_backend(batch), self.prefill_backend)}.values():
            backend.init_forward_metadata(batch)
        return None

    def rotate_and_save(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: ForwardBatch, rope: Rope
    ) -> torch.Tensor:
        return self._saving_backend(batch).rotate_and_save(q, k, v, layer, batch, rope)

    def save_kv(self, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: ForwardBatch) -> None:
        self._saving_backend(batch).save_kv(k, v, layer, batch)

    def forward_decode(self, q: torch.Tensor, layer: Any, batch: ForwardBatch, **kwargs: Any) -> torch.Tensor:
        return self._decode_segment_backend(batch).forward_decode(q, layer, batch, **kwargs)

    def forward_extend(self, q: torch.Tensor, layer: Any, batch: ForwardBatch, **kwargs: Any) -> torch.Tensor:
        return self._extend_segment_backend(batch).forward_extend(q, layer, batch, **kwargs)

    def commit_decode(self, accepted: torch.Tensor | None = None, path: torch.Tensor | None = None) -> None:
        if accepted is not None:
            self.verify_backend.commit_decode(accepted, path)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in {id(b): b for b in (self.decode_backend, self.verify_backend)}.values():
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
    ) -> None:
        self.backend_of(forward_mode).init_forward_metadata_capture_cuda_graph(
            bs, num_tokens, req_pool_indices, seq_lens, forward_mode, spec_info
        )

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
        self.backend_of(forward_mode).init_forward_metadata_replay_cuda_graph(
            bs, num_real, req_pool_indices, seq_lens, forward_mode, spec_info, seq_lens_cpu
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.decode_backend.get_cuda_graph_seq_len_fill_value()


# The name that serving runtimes know.
HybridAttnBackend = PrefillDecodeAttnBackend
