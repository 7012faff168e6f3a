"""Two softmax-attention backends: one for prefill, one for decode."""

from torch import Tensor

from hybridrt.attention.base import Layer
from hybridrt.attention.paged import SegmentedAttnBackend
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, GraphView
from hybridrt.kernels.core.records import Rope

_SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class PrefillDecodeAttnBackend(SegmentedAttnBackend):
    """Decode and idle steps go to the decode backend, extend to the prefill backend, mixed ones by
    segment. Verify and draft-extend steps go to the one that `speculative_attention_mode` names.
    Both share one KV pool.

    A recurrent layer is not split: it has one backend with one set of buffers.
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
        self.branch = decode_backend.branch
        self.seq_len_fill = decode_backend.seq_len_fill
        self.needs_host_lens = decode_backend.needs_host_lens or self.verify_backend.needs_host_lens
        self.captures_prompts = decode_backend.captures_prompts

    def _decode_segment_backend(self, batch: ForwardBatch) -> SegmentedAttnBackend:
        verifying = batch.forward_mode in _SPECULATIVE or batch.spec_info is not None
        return self.verify_backend if verifying else self.decode_backend

    def _extend_segment_backend(self, batch: ForwardBatch) -> SegmentedAttnBackend:
        """The backend of prompts. In a graph that is the decode backend, if the prefill backend cannot be
        captured."""
        if batch.forward_mode in _SPECULATIVE:
            return self.verify_backend
        in_graph = batch.metadata.get(self)
        return self.decode_backend if in_graph and not self.prefill_backend.captures_prompts else self.prefill_backend

    def _saving_backend(self, batch: ForwardBatch) -> SegmentedAttnBackend:
        """The one that writes new keys and values of both segments: that of decode rows, if there are any."""
        return self._decode_segment_backend(batch) if batch.num_decode_rows else self._extend_segment_backend(batch)

    def _planning(self, batch: ForwardBatch) -> dict[SegmentedAttnBackend, None]:
        """The backends of the segments, each once. An empty step has the decode backend."""
        extend = [self._extend_segment_backend(batch)] if batch.num_extend_rows else []
        decode = [self._decode_segment_backend(batch)] if batch.num_decode_rows or not extend else []
        return dict.fromkeys(decode + extend)

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        if graph is not None and graph.prompts:
            batch.metadata[self] = True  # a graph of prompts
        for backend in self._planning(batch):
            backend.prepare(batch, graph=graph)

    def prepare_in_graph(self, batch: ForwardBatch) -> None:
        for backend in self._planning(batch):
            backend.prepare_in_graph(batch)

    def rotate_and_save(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> Tensor:
        return self._saving_backend(batch).rotate_and_save(q, k, v, layer, batch, rope)

    def save_latent(self, q: Tensor, k: Tensor | None, layer: Layer, batch: ForwardBatch, rope: Rope | None) -> Tensor:
        return self._saving_backend(batch).save_latent(q, k, layer, batch, rope)

    def save_kv(self, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch) -> None:
        self._saving_backend(batch).save_kv(k, v, layer, batch)

    def decode(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        return self._decode_segment_backend(batch).decode(q, layer, batch, out)

    def extend(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        return self._extend_segment_backend(batch).extend(q, layer, batch, out)

    def commit(self, batch: ForwardBatch, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        if accepted is not None:
            self.verify_backend.commit(batch, accepted, path)

    def allocate_graph(self, view: GraphView) -> None:
        prompts = [self.prefill_backend] if view.prompts and self.prefill_backend.captures_prompts else []
        for backend in dict.fromkeys((self.decode_backend, self.verify_backend, *prompts)):
            backend.allocate_graph(view)


# SGLang's name.
HybridAttnBackend = PrefillDecodeAttnBackend
