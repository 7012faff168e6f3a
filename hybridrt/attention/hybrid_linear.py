"""The composite: each layer goes to the backend of its kind, every hook goes to all of them."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.attention.linear import MambaAttnBackendBase
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo


class HybridLinearAttnBackend(AttentionBackend):
    """Routes by `layer.layer_id` between a full-attention and a recurrent backend.

    Args:
        full_attn_backend: serves `full_attn_layers`.
        linear_attn_backend: serves the other layers of `routes`, and is what a block that runs both in parallel
            (Falcon-H1) asks for its recurrent half. None where no layer keeps a state.
        full_attn_layers: ids of the softmax-attention layers.
        extra_routes: further backends by layer id, for a third and fourth kind of layer.
    """

    def __init__(
        self,
        full_attn_backend: AttentionBackend,
        linear_attn_backend: MambaAttnBackendBase | None,
        full_attn_layers: Collection[int],
        extra_routes: Mapping[int, AttentionBackend] | None = None,
    ) -> None:
        self.full_attn_backend = full_attn_backend
        self._linear_attn_backend = linear_attn_backend
        self.needs_host_lens = bool(full_attn_layers) and full_attn_backend.needs_host_lens
        recurrent = [linear_attn_backend] if linear_attn_backend else []
        self.routes: dict[int, AttentionBackend] = {i: backend for backend in recurrent for i in backend.layers}
        self.routes |= {i: full_attn_backend for i in full_attn_layers}
        self.routes |= extra_routes or {}
        # A full-attention backend without layers (Falcon-Mamba) has nothing to plan.
        serving = (*[full_attn_backend] * bool(full_attn_layers), *recurrent, *self.routes.values())
        self.backends = list({id(b): b for b in serving}.values())

    @property
    def linear_attn_backend(self) -> MambaAttnBackendBase:
        if self._linear_attn_backend is None:
            raise BackendError("no layer of this model keeps a recurrent state")
        return self._linear_attn_backend

    def forward(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        backend = self.routes.get(layer.layer_id)
        if backend is None:
            raise BackendError(f"no backend serves layer {layer.layer_id}; routed layers are {sorted(self.routes)}")
        return backend.forward(q, k, v, layer, batch, save_kv_cache, **kwargs)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for backend in self.backends:
            backend.init_forward_metadata(batch)

    def commit_decode(self, accepted: torch.Tensor | None = None, path: torch.Tensor | None = None) -> None:
        for backend in self.backends:
            backend.commit_decode(accepted, path)

    def drop_step(self) -> None:
        for backend in self.backends:
            backend.drop_step()

    def update_mamba_state_after_mtp_verify(self, accepted: torch.Tensor, path: torch.Tensor | None = None) -> None:
        """`commit_decode` under the name that serving runtimes know."""
        self.commit_decode(accepted, path)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.backends:
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
        for backend in self.backends:
            backend.init_forward_metadata_capture_cuda_graph(
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
        for backend in self.backends:
            backend.init_forward_metadata_replay_cuda_graph(
                bs, num_real, req_pool_indices, seq_lens, forward_mode, spec_info, seq_lens_cpu
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The full-attention backend's own: recurrent layers take padding from num_real, not from lengths."""
        return self.full_attn_backend.get_cuda_graph_seq_len_fill_value()
