"""The base of all recurrent backends, and the composite that routes each layer to its backend."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from hybridrt.attention.base import AttentionBackend, Branch, RecurrentLayer
from hybridrt.attention.checks import check_eager_batch, check_graph_batch, check_states
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, GraphView, RoutedLayer
from hybridrt.base.plugins import load_object
from hybridrt.kernels.core.chunk_plan import ChunkPlan, plan_chunks
from hybridrt.kernels.core.launch import end_launches
from hybridrt.kernels.core.providers import needs_host
from hybridrt.kernels.core.slots import take_tokens
from hybridrt.kernels.mamba.mamba2_decode_cpu import pool_rows
from hybridrt.kernels.state.row_tables import DecodeBuffers, fill_decode_metadata
from hybridrt.kinds.registry import linear_kind
from hybridrt.mem_cache.pools.mamba_pool import LayerCache, MambaPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment, ForwardMetadata, extend_segments

LayerT = TypeVar("LayerT", bound=RecurrentLayer)
# Tensors [T, ...], decode rows first. Only the last may be None.
InputsT = TypeVar("InputsT", bound=tuple[Any, ...])

UNCOMMITTED = (
    "a decode step before this one was not committed, so its tokens are not part of the state: call commit after its "
    "last layer, or drop_step if it will not be committed"
)


def _part(inputs: InputsT, tokens: slice) -> InputsT:
    parts = (None if t is None else t[tokens] for t in inputs)
    return type(inputs)(*parts)  # type: ignore[arg-type]


class MambaAttnBackendBase(AttentionBackend, Generic[LayerT, InputsT]):
    """The backend of one recurrent kind, over MambaPool. A subclass names its input record and
    implements `decode` and `extend` with the kind's kernels.

    Args:
        layers: the model's mixers of this kind by layer id.
        chunk_size: tokens of a prefill chunk.
    """

    kind: str
    inputs: ClassVar[type[tuple[Any, ...]]]
    scan: ClassVar[str | None] = None  # operation of its chunks, if libraries have it
    extend_in_graphs: ClassVar[bool] = False  # True if `extend` reads no tensor on the host: graphs may hold it

    def __init__(
        self, *, layers: Mapping[int, LayerT], req_to_token_pool: HybridReqToTokenPool, chunk_size: int
    ) -> None:
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
        self.layer_cache: Callable[[int], LayerCache] = self.mamba_pool.layer_cache
        if self.mamba_pool.spec.rounds:
            self.saves_at_chunks = False  # a request continues from its saves as they are stored: in passes
        self.chunk_size = chunk_size
        self.device = req_to_token_pool.req_to_state_slot.device
        self.branch = Branch(self.device)
        self.fill_decode_metadata = fill_decode_metadata.for_device(self.device)
        self._others: list[RecurrentBackend] = []  # planned and committed by this one
        self._lead: ReferenceType[RecurrentBackend] | None = None  # None: plans for itself
        self._last: ForwardMetadata | None = None  # the last step with a commit to come
        self.mamba_pool.set_decays({i: partial(self.ring_decay, layer) for i, layer in layers.items()})

    @staticmethod
    def join(backends: "Sequence[RecurrentBackend]") -> "RecurrentBackend":
        """Makes the first backend plan and commit for all, and returns it. Their layers share slots
        and ring cursors, which a step must move once."""
        first = backends[0]
        first.members = [member for backend in backends for member in backend.members]
        for member in first.members:
            member.lead = first
        return first

    # A reference to itself would keep the pools until garbage is collected.
    @property
    def members(self) -> "list[RecurrentBackend]":
        """The backends that this one plans and commits for, itself first."""
        return [self, *self._others]

    @members.setter
    def members(self, members: "list[RecurrentBackend]") -> None:
        self._others = members[1:]

    @property
    def lead(self) -> "RecurrentBackend":
        """The backend that plans and commits for this one."""
        lead = self if self._lead is None else self._lead()
        assert lead is not None, "the composite holds it"
        return lead

    @lead.setter
    def lead(self, lead: "RecurrentBackend") -> None:
        self._lead = ref(lead)

    # -- one layer ----------------------------------------------------------------------------------------------

    def inputs_from(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, save_kv_cache: bool, **kwargs: Any
    ) -> Any:
        return self.inputs(**kwargs)

    def run(self, layer: LayerT, batch: ForwardBatch, inputs: InputsT, out: Tensor | None = None) -> Tensor:
        """Runs one mixer for all rows: [T, width], decode rows first."""
        step: ForwardMetadata | None = batch.metadata.get(self)
        if step is None or not step.begun:
            step = self.begin_step(batch)
        decode, extend = step.decode, step.extends.get(self.chunk_size)
        compute = self._extend_in_passes if extend and extend.later else self.extend
        if decode and extend:
            split = decode.num_tokens
            return self.branch.segments(
                split,
                out,
                lambda place: self.decode(layer, _part(inputs, slice(split)), decode, place),
                lambda place: compute(layer, _part(inputs, slice(split, None)), extend, place),
            )
        if decode:
            return self.decode(layer, inputs, decode, out)
        if extend:
            return compute(layer, inputs, extend, out)
        return inputs[0].new_empty(0, layer.width)

    @abstractmethod
    def decode(self, layer: LayerT, inputs: InputsT, segment: DecodeSegment, out: Tensor | None = None) -> Tensor:
        """Decode or verify rows: [n * tokens_per_row, width]. The result may be written to `out` and
        returned, or `out` is ignored. Graphs hold this method: it must not wait for the device."""

    @abstractmethod
    def extend(self, layer: LayerT, inputs: InputsT, segment: ExtendSegment, out: Tensor | None = None) -> Tensor:
        """Prompt chunks: [tokens, width]. The result may be written to `out` and returned, or `out`
        is ignored."""

    def _extend_in_passes(
        self, layer: LayerT, inputs: InputsT, segment: ExtendSegment, out: Tensor | None = None
    ) -> Tensor:
        """Outputs of later passes replace those of the whole segment."""
        taken = (take_tokens(inputs, tokens) for tokens, _ in segment.later)
        chosen = [type(inputs)(*parts) for parts in taken]  # type: ignore[arg-type]
        outputs = self.extend(layer, inputs, segment, out)
        for (tokens, later), part in zip(segment.later, chosen, strict=True):
            replaced = self.extend(layer, part, later)
            if later.real is not None:
                # Padding is token 0, which keeps its output.
                replaced = torch.where(later.real.view(-1, *[1] * (replaced.ndim - 1)), replaced, outputs[:1])
            outputs.index_copy_(0, tokens, replaced)
        return outputs

    @staticmethod
    def ring_decay(layer: LayerT) -> Tensor | None:
        """[heads] float32: a ring gate times this factor is a log decay. None: gates are log
        decays."""
        return None

    def restrict_to_segment(self, batch: ForwardBatch, *, decode: bool) -> ForwardBatch:
        """A copy of a prepared batch whose recurrent metadata has only its decode rows, or only its
        extend rows. Other fields are unchanged."""
        step = self.begin_step(batch)
        part = replace(batch)
        alone = replace(step, extends={}) if decode else replace(step, decode=None)
        for member in self.lead.members:
            part.metadata[member] = alone
        return part

    # -- planning -----------------------------------------------------------------------------------------------

    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        tokens = batch.tokens_per_row
        if tokens > (max_tokens := self.mamba_pool.spec.tokens_per_step):
            raise BackendError(
                f"a step of {tokens} tokens a row on a state pool made for {max_tokens}: verify at most {max_tokens}, "
                f"or build the pool with tokens_per_step={tokens}"
            )
        step = self._plan(batch) if graph is None else self._plan_graph(batch, graph)
        step.previous = self._last and self._uncommitted()
        # A plain decode graph commits itself; a capture has no rows.
        commits = batch.num_decode_rows > 0 if graph is None else batch.num_real > 0 and tokens > 1
        step.open = commits and self._leaves_state(tokens)
        if step.open:
            self._last = step
        batch.metadata[self] = step
        for other in self._others:
            batch.metadata[other] = step

    def _uncommitted(self) -> ForwardMetadata | None:
        """The last step with a commit to come. Forgets closed ones."""
        while self._last is not None and not self._last.open:
            self._last = self._last.previous
        return self._last

    def _plan(self, batch: ForwardBatch) -> ForwardMetadata:
        check_eager_batch(batch, partial(check_states, pools=self.pools, num_slots=self.mamba_pool.num_slots))
        if not batch.num_extend_rows:
            return ForwardMetadata({})
        plans = self._given_plans(batch)
        if not plans:
            lens = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
            plans = {size: plan_chunks(*lens, size, batch.seq_lens.device) for size in self.chunk_sizes}
        return ForwardMetadata(plans)

    @staticmethod
    def _given_plans(batch: ForwardBatch) -> Mapping[int, ChunkPlan]:
        return batch.extend_passes[0].chunk_plans if batch.extend_passes else batch.chunk_plans or {}

    def _plan_graph(self, batch: ForwardBatch, view: GraphView) -> ForwardMetadata:
        """Fills the view's buffers, which the graph reads."""
        check_graph_batch(batch, view)
        if self._last is not None and self._uncommitted() is not None:
            raise BackendError(UNCOMMITTED)
        by_size: dict[int, DecodeBuffers] = view.buffers[self]
        bs, decode = batch.num_decode_rows, None
        if bs:
            if bs not in by_size:
                by_size[bs] = by_size[view.max_bs].prefix(bs)
            decode = self._decode_segment(batch, by_size[bs])
        plans = self._given_plans(batch) if batch.num_extend_rows else {}
        return ForwardMetadata(plans, decode, begun=True)

    @property
    def captures_prompts(self) -> bool:  # type: ignore[override]
        device = self.device.type
        return all(m.extend_in_graphs and not (m.scan and needs_host(m.scan, device)) for m in self.members)

    def prepare_in_graph(self, batch: ForwardBatch) -> None:
        if batch.num_extend_rows:
            step: ForwardMetadata = self.metadata_of(batch)
            step.extends = extend_segments(batch, step.plans, self.pools)

    def begin_step(self, batch: ForwardBatch) -> ForwardMetadata:
        """Returns the step metadata. The first call builds the segments, because slots and ring
        cursors are final only after earlier steps were queued.

        Raises:
            BackendError: an earlier step was not committed. This step is dropped: commit, then
                prepare it again.
        """
        step: ForwardMetadata = batch.metadata.get(self) or self.lead.metadata_of(batch)
        if step.begun:
            return step
        if step.previous is not None and step.previous.open:
            step.open = False
            for member in self.lead.members:
                del batch.metadata[member]
            raise BackendError(UNCOMMITTED)
        if split := batch.num_decode_rows:
            step.decode = self._decode_segment(batch, DecodeBuffers.allocate(split, batch.seq_lens.device))
            end_launches(batch.seq_lens.device)  # the layer's first kernel may read these early
        if batch.num_extend_rows:
            step.extends = extend_segments(batch, step.plans, self.pools)
        step.begun, step.previous = True, None
        return step

    def _leaves_state(self, tokens: int) -> bool:
        """Whether `commit` writes the state of a step."""
        mode = self.mamba_pool.spec.mode
        return mode == "replay" or (mode == "intermediate" and tokens > 1)

    def drop_step(self) -> None:
        while step := self._uncommitted():
            step.open = False

    def _decode_segment(self, batch: ForwardBatch, buffers: DecodeBuffers) -> DecodeSegment:
        split, tokens, spec = batch.num_decode_rows, batch.tokens_per_row, batch.spec_info
        rows, num_real = batch.req_pool_indices[:split], min(batch.num_real, split)
        self.fill_decode_metadata(buffers, rows, batch.seq_lens[:split], num_real, tokens, self.mamba_pool.tables)
        predecessors = spec.relations(split)[0] if spec else None
        neighbours = None if tokens > 1 else pool_rows(buffers.state_slots, buffers.start_positions)
        return DecodeSegment(rows, buffers, tokens, predecessors, neighbours)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(member.chunk_size for member in self.members))

    # -- graphs -------------------------------------------------------------------------------------------------

    def allocate_graph(self, view: GraphView) -> None:
        view.buffers[self] = {view.max_bs: DecodeBuffers.allocate(view.max_bs, self.device)}
        if self.mamba_pool.spec.mode == "replay":
            self.mamba_pool.stack_decays()  # a capture must not build them

    # -- the end of a step --------------------------------------------------------------------------------------

    def commit(self, batch: ForwardBatch, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        step: ForwardMetadata = batch.metadata.get(self) or self.metadata_of(batch)
        if not step.begun and batch.num_decode_rows:
            raise BackendError("commit of a step that has not run: call it after the step's last layer")
        step.open = False
        decode = step.decode
        if decode is None or not self._leaves_state(decode.tokens_per_row):
            return
        buf = decode.buffers
        accepted = buf.accepted if accepted is None else accepted
        n = len(accepted)
        self.mamba_pool.commit(decode.rows[:n], buf.state_slots[:n], accepted, buf.start_positions[:n], path)


RecurrentBackend: TypeAlias = MambaAttnBackendBase[Any, Any]  # of any kind


def linear_backends(
    mixers: Mapping[int, RecurrentLayer], req_to_token_pool: HybridReqToTokenPool
) -> list[RecurrentBackend]:
    """One backend for each recurrent kind of `mixers` (by layer id)."""
    by_kind: dict[str, dict[int, RecurrentLayer]] = {}
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
        linear_attn_backend: RecurrentBackend | Sequence[RecurrentBackend] | None,
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
    def linear_attn_backend(self) -> RecurrentBackend:
        if len(self.linear_attn_backends) != 1:
            kinds = ", ".join(backend.kind for backend in self.linear_attn_backends) or "no"
            raise BackendError(
                f"the model has {kinds} recurrent layers; this is for models with one kind, else use route"
            )
        return self.linear_attn_backends[0]

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(size for backend in self.backends for size in backend.chunk_sizes)

    def route(self, layer: RoutedLayer) -> AttentionBackend:
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
