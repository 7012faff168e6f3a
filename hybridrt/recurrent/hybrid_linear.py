"""The composite: routes layers by id and kind, and passes every hook to all backends."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, GraphView
from hybridrt.base.plugins import load_object
from hybridrt.kinds.registry import linear_kind
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.backend import MambaAttnBackendBase


def linear_backends(
    mixers: Mapping[int, Any], req_to_token_pool: HybridReqToTokenPool
) -> list[MambaAttnBackendBase[Any, Any]]:
    """One backend for each recurrent kind of `mixers` (by layer id)."""
    by_kind: dict[str, dict[int, Any]] = {}
    for layer_id, mixer in mixers.items():
        by_kind.setdefault(mixer.kind, {})[layer_id] = mixer
    found = []
    for name, layers in by_kind.items():
        cls = load_object(linear_kind(name).backend)
        chunk_size = next(iter(layers.values())).config.chunk_size
        found.append(cls(layers=layers, req_to_token_pool=req_to_token_pool, chunk_size=chunk_size))
    return found


class HybridLinearAttnBackend(AttentionBackend):
    """Routes by `layer.layer_id` and `layer.kind` (None for softmax attention). Two parallel
    branches of a block may share an id.

    Args:
        full_attn_backend: serves `full_attn_layers`.
        linear_attn_backend: one recurrent backend, one for each kind, or None.
        full_attn_layers: ids of the softmax-attention layers.

    Raises:
        BackendError: two backends of one kind.
    """

    def __init__(
        self,
        full_attn_backend: AttentionBackend,
        linear_attn_backend: MambaAttnBackendBase[Any, Any] | Sequence[MambaAttnBackendBase[Any, Any]] | None,
        full_attn_layers: Collection[int],
    ) -> None:
        given = linear_attn_backend or ()
        self.linear_attn_backends = tuple(given) if isinstance(given, Sequence) else (given,)
        self.full_attn_backend = full_attn_backend
        # Recurrent layers take padding from num_real.
        self.seq_len_fill = full_attn_backend.seq_len_fill
        self.needs_host_lens = bool(full_attn_layers) and full_attn_backend.needs_host_lens
        kinds = [backend.kind for backend in self.linear_attn_backends]
        if len(set(kinds)) < len(kinds):
            raise BackendError(f"the recurrent backends are of the kinds {kinds}; give one for each kind")
        self.routes: dict[tuple[int, str | None], AttentionBackend] = {}
        self.routes |= {(i, None): full_attn_backend for i in full_attn_layers}
        self.routes |= {(i, backend.kind): backend for backend in self.linear_attn_backends for i in backend.layers}
        # A model may have no attention layers (Falcon-Mamba).
        self.backends: list[AttentionBackend] = [full_attn_backend] * bool(full_attn_layers)
        if self.linear_attn_backends:
            self.backends.append(MambaAttnBackendBase.join(self.linear_attn_backends))

    @classmethod
    def over(
        cls,
        full_attn_backend: AttentionBackend,
        mixers: Mapping[int, Any],
        full_attn_layers: Collection[int],
        req_to_token_pool: HybridReqToTokenPool,
    ) -> "HybridLinearAttnBackend":
        """The composite of a model, with one backend for each kind of `mixers` (by layer id)."""
        return cls(full_attn_backend, linear_backends(mixers, req_to_token_pool), full_attn_layers)

    @property
    def linear_attn_backend(self) -> MambaAttnBackendBase[Any, Any]:
        if len(self.linear_attn_backends) != 1:
            kinds = ", ".join(backend.kind for backend in self.linear_attn_backends) or "no"
            raise BackendError(
                f"the model has {kinds} recurrent layers; this is for models with one kind, else use route"
            )
        return self.linear_attn_backends[0]

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(size for backend in self.backends for size in backend.chunk_sizes)

    def route(self, layer: Any) -> AttentionBackend:
        """The backend that serves a layer. BackendError if none does."""
        role = layer.layer_id, getattr(layer, "kind", None)
        backend = self.routes.get(role)
        if backend is None:
            what = f"{role[1]} layer" if role[1] else "attention layer"
            served = sorted({i for i, kind in self.routes if kind == role[1]})
            raise BackendError(f"no backend serves {what} {layer.layer_id}; layers of that kind are {served}")
        return backend

    def run(self, layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        backend = self.routes.get((layer.layer_id, getattr(layer, "kind", None))) or self.route(layer)
        return backend.run(layer, batch, inputs, out)

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        for backend in self.backends:
            backend.prepare(batch, graph=graph)

    @property
    def saves_at_chunks(self) -> bool:  # type: ignore[override]
        return all(backend.saves_at_chunks for backend in self.linear_attn_backends)

    @property
    def captures_prompts(self) -> bool:  # type: ignore[override]
        return all(backend.captures_prompts for backend in self.backends)

    def prepare_in_graph(self, batch: ForwardBatch) -> None:
        for backend in self.backends:
            backend.prepare_in_graph(batch)

    def commit(self, batch: ForwardBatch, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        for backend in self.backends:
            backend.commit(batch, accepted, path)

    def drop_step(self) -> None:
        for backend in self.backends:
            backend.drop_step()

    def allocate_graph(self, view: GraphView) -> None:
        for backend in self.backends:
            backend.allocate_graph(view)
