"""SGLang's names for the hooks of a backend: shims over `prepare`, `run` and `commit`.

hybridrt itself does not call them. They remember the batch that they planned last.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, GraphView, RoutedLayer, SpecInfo


class ContractHooks:
    """The hooks, over methods of AttentionBackend, which has these:"""

    prepare: Callable[..., None]
    prepare_in_graph: Callable[[ForwardBatch], None]
    commit: Callable[..., None]
    route: Callable[[RoutedLayer], Any]
    seq_len_fill: int

    _last_batch: ForwardBatch | None = None
    _views: dict[int, GraphView] | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """`prepare` of an eager step."""
        self.prepare(batch)
        self._last_batch = batch

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """`prepare` of a step that is captured or replayed."""
        planned = replace(batch, num_real=0) if in_capture else batch
        self.prepare(planned, graph=self._view(batch.tokens_per_row))
        batch.metadata, self._last_batch = planned.metadata, batch

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.prepare_in_graph(batch)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
    ) -> None:
        """`prepare` of a capture, over the runner's static tensors."""
        tokens = check_graph_tokens(bs, num_tokens)
        if tokens != (spec_info.tokens_per_row if spec_info else 1):
            raise BackendError(
                f"num_tokens says {tokens} tokens a row, and spec_info is {spec_info}: pass bs * "
                "spec_info.tokens_per_row, or bs without spec_info"
            )
        self.init_forward_metadata_replay_cuda_graph(bs, 0, req_pool_indices, seq_lens, forward_mode, spec_info, None)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        num_real: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
        seq_lens_cpu: list[int] | None,
    ) -> None:
        """`prepare` of a replay of `num_real` rows, padded to bs."""
        rows, none = req_pool_indices[:bs], req_pool_indices[:0]  # a plan reads no tokens
        batch = ForwardBatch(
            forward_mode, none, none, rows, seq_lens[:bs], none, none, num_real, bs, self,  # type: ignore[arg-type]
            seq_lens_cpu, spec_info=spec_info,
        )  # fmt: skip
        self.prepare(batch, graph=self._view(batch.tokens_per_row))
        self._last_batch = batch

    def _view(self, tokens_per_row: int) -> GraphView:
        view = (self._views or {}).get(tokens_per_row)
        if view is None:
            raise BackendError(
                f"no buffers for graphs of {tokens_per_row} tokens a row: call init_cuda_graph_state first"
            )
        return view

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.seq_len_fill

    def forward(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        layer: RoutedLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        out: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`run`: one layer for all rows of a prepared batch. Returns [T, width], decode rows first.

        Args:
            q, k, v: as in `AttentionInputs`. All None for recurrent layers, whose inputs are
                keywords; k and v None for layers that only read the pool.
            save_kv_cache: write k and v into the pool first.
            out: as in `AttentionBackend.run`.
        """
        backend = self.route(layer)
        result: Tensor = backend.run(layer, batch, backend.inputs_from(q, k, v, save_kv_cache, **kwargs), out)
        return result

    def forward_decode(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        layer: RoutedLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """`forward` of a batch without extend rows."""
        if batch.num_extend_rows:
            raise BackendError(f"forward_decode of a batch with {batch.num_extend_rows} extend rows; call forward")
        return self.forward(q, k, v, layer, batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        layer: RoutedLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """`forward` of a batch without decode rows."""
        if batch.num_decode_rows:
            raise BackendError(f"forward_extend of a batch with {batch.num_decode_rows} decode rows; call forward")
        return self.forward(q, k, v, layer, batch, save_kv_cache, **kwargs)

    def commit_decode(self, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        """`commit` of the step that these hooks planned last."""
        if self._last_batch is None:
            raise BackendError(
                "commit_decode belongs to init_forward_metadata; after prepare(batch) call commit(batch)"
            )
        self.commit(self._last_batch, accepted, path)

    def update_mamba_state_after_mtp_verify(self, accepted: Tensor, path: Tensor | None = None) -> None:
        """`commit` of a verify step that these hooks planned."""
        self.commit_decode(accepted, path)

    def metadata_by_older_hooks(self, batch: ForwardBatch) -> Any:
        """What was prepared for a batch that was made after that: capture and replay hooks get only
        tensors.

        Raises:
            BackendError: the batch was not prepared.
        """
        for owner in (batch.attn_backend, self):
            last = getattr(owner, "_last_batch", None)
            if last is not None and last.req_pool_indices.data_ptr() == batch.req_pool_indices.data_ptr():
                found = last.metadata.get(self)
                if found is not None:
                    return found
        raise BackendError("no planned step: call prepare(batch) once before the layers of a step run")


def check_graph_tokens(max_bs: int, max_num_tokens: int) -> int:
    """Tokens a row. BackendError unless max_num_tokens is a positive multiple of max_bs."""
    if max_bs < 1 or max_num_tokens < max_bs or max_num_tokens % max_bs:
        raise BackendError(
            f"max_num_tokens is {max_num_tokens}; it must be a multiple of max_bs {max_bs}: every row of a graph "
            "has the same number of tokens"
        )
    return max_num_tokens // max_bs
