"""The interface of every attention and recurrent backend, as an embedding runtime programs against it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from hybridrt.attention.branch import Branch
from hybridrt.attention.contract import ContractHooks, check_graph_tokens
from hybridrt.base.config import AttentionSpec
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, GraphView
from hybridrt.kernels.attention.rotary import qk_norm_rotary
from hybridrt.kernels.core.records import LatentWeights, Rope


class AttentionInputs(NamedTuple):
    """The inputs of a softmax-attention layer, [T, heads * head_dim] each.

    Attributes:
        save: k and v are written into the pool first. Without k and v, or with save False, the pool holds them already.
        rope: how to rotate q and k first; None if they are rotated, or the model rotates nothing.
    """

    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    save: bool = True
    rope: Rope | None = None


class Layer(Protocol):
    """What a backend reads of a softmax-attention layer."""

    layer_id: int
    spec: AttentionSpec
    weights: LatentWeights  # of variant "mla" alone


class AttentionBackend(ContractHooks, ABC):
    """Plans a step once, then runs every layer of it.

    The plan is stored on the batch, so that a step may be prepared while earlier ones have not run yet. A backend
    implements `prepare` and `run`; one with state also `commit`, and one whose graphs need buffers `allocate_graph`.
    """

    needs_host_lens = False  # True if a replay plans on the host (flashinfer) and so waits for exact lengths
    saves_at_chunks = False  # True if recurrent layers leave a state behind any chunk of a prompt
    captures_prompts = False  # True if a graph may hold extend rows: their kernels need no lengths on the host
    seq_len_fill = 1  # the seq_len that a padding row of a graph gets, for one token a row

    @property
    def linear_attn_backend(self) -> Any:
        """The recurrent side, for blocks that run both in parallel; a composite has one."""
        raise BackendError(f"{type(self).__name__} has no recurrent side; the model needs HybridLinearAttnBackend")

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Which chunk plans a batch with extend rows may bring along; () where nothing is recurrent."""
        return ()

    def route(self, layer: Any) -> "AttentionBackend":
        """The backend that serves a layer: this one, but for a composite."""
        return self

    # -- a step -------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        """Plans a step, once before its first layer. The plan is stored on the batch.

        Without `graph` this is host work and copies: nothing is read on the device that an earlier step changes, so
        the step may be prepared before the steps in front of it have run. Steps run in the order of their preparation.

        Args:
            graph: the step is captured as a graph, or replays one, whose metadata is in the view. A capture runs no
                request: its `num_real` is 0. The batch's tensors are those that the graph was captured with;
                `seq_lens_cpu`, where it is given, holds the lengths of the real rows. Such a step is prepared after
                the steps in front of it were launched and committed. If it has extend rows, the recorded step begins
                with `prepare_in_graph`.

        Raises:
            BackendError: the batch contradicts itself or the pools.
        """

    def recording_key(self, batch: ForwardBatch) -> Hashable:
        """Of a prepared plain decode step on a CPU whose tensors are kept: steps of equal keys are the same operations
        on the same tensors, so one can be recorded for all (hybridrt.kernels.core.recording). None: it cannot be."""
        return None

    def prepare_in_graph(self, batch: ForwardBatch) -> None:  # decode rows need none of it
        """What a graph itself plans of its extend rows, in each replay: everything that is computed from the batch's
        tensors on the device. `prepare` has been called for the capture or the replay."""

    @abstractmethod
    def run(self, layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        """One layer over all rows of a batch that was prepared.

        On a GPU its kernels may read the batch's tensors and the page table before the kernel in front of them has
        ended. A model launches something of PyTorch, its embedding or a product, behind what writes them
        (hybridrt.kernels.core.pdl_triton).

        Args:
            layer: the layer that calls: `layer_id`, and what its backend reads of it.
            inputs: the record of the layer's kind: AttentionInputs of softmax attention, and one for each kind of
                recurrent layer (`MambaAttnBackendBase.inputs`). A composite passes it on.
            out: [T, width], where the result may be left; what is returned counts.
        Returns:
            [T, width], decode rows first.

        Raises:
            BackendError: the batch was not prepared, or a step in front of it was not committed.
        """

    def inputs_from(self, q: Any, k: Any, v: Any, save_kv_cache: bool, **kwargs: Any) -> Any:
        """The record of `run` from the arguments of `forward`."""
        return AttentionInputs(q, k, v, save_kv_cache, **kwargs)

    def commit(self, batch: ForwardBatch, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        """After the last layer of a step with a decode segment: what stays becomes part of the state.

        Args:
            batch: the step.
            accepted: [n] int32 committed inputs of the first n verified rows, the root included: >= 1 for real rows,
                0 for padding rows, of which any number may be left out; None for plain decode, which keeps its one
                token.
            path: [n, T] int64 accepted nodes of a draft tree, the root first; None for a chain, which keeps its first
                `accepted` inputs. A chain's KV has nothing to commit.

        Raises:
            BackendError: a tree, and this backend supports chains alone.
        """
        if path is not None:
            raise BackendError(f"{type(self).__name__} verifies chains alone; use topk=1")

    def drop_step(self) -> None:  # most backends keep nothing of a step
        """Gives up all steps that were prepared and not committed."""

    def planned(self, batch: ForwardBatch) -> Any:
        """What this backend's `prepare` left on a batch.

        Raises:
            BackendError: the batch was not prepared.
        """
        found = batch.metadata.get(self)
        return self.planned_by_older_hooks(batch) if found is None else found

    # -- graphs -------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> GraphView:
        """The static buffers of graphs of up to max_bs rows of max_num_tokens / max_bs tokens each.

        Raises:
            BackendError: max_num_tokens is not a positive multiple of max_bs.
        """
        view = GraphView(max_bs, check_graph_tokens(max_bs, max_num_tokens))
        self.allocate_graph(view)
        self._views = (self._views or {}) | {view.tokens_per_row: view}
        return view

    def prompt_graph_state(self, max_bs: int) -> GraphView:
        """The static buffers of graphs with extend rows, behind up to max_bs decode rows of one token.

        Raises:
            BackendError: this backend's extend rows cannot be captured (`captures_prompts`).
        """
        if not self.captures_prompts:
            raise BackendError(f"{type(self).__name__} needs the lengths of prompts on the host: run them eagerly")
        view = GraphView(max_bs, 1, prompts=True)
        self.allocate_graph(view)
        return view

    def allocate_graph(self, view: GraphView) -> None:  # most backends need no buffers
        """Puts this backend's buffers, if it needs some, into a new view."""


class SegmentedAttnBackend(AttentionBackend):
    """A softmax-attention backend that runs the decode and the extend segment of a batch each with its own method.

    Attributes:
        provider: whose kernels it runs, a name of hybridrt.kernels.core.providers; None for its own.
        auto_decode, auto_prefill: types of device on which "auto" may choose it for this. Of several the first in
            hybridrt.recurrent.backends is chosen.
        branch: runs the decode segment of a captured step beside the other one. Without a device of its own it does
            not.
    """

    provider: ClassVar[str | None] = None
    auto_decode: ClassVar[tuple[str, ...]] = ()
    auto_prefill: ClassVar[tuple[str, ...]] = ()
    branch = Branch(torch.device("cpu"))

    @classmethod
    def objection(cls, device: torch.device, specs: Collection[AttentionSpec]) -> str | None:
        """Why it cannot serve attention layers of these specs on a device; None if it can."""
        return None

    def run(self, layer: Layer, batch: ForwardBatch, inputs: AttentionInputs, out: Tensor | None = None) -> Tensor:
        """Attention of one layer over all rows of the batch.

        Args:
            layer: the layer that calls: its `layer_id` and `spec` (AttentionSpec). A layer of variant "mla" has
                `weights` (LatentWeights) too, and brings q [T, heads * (nope + rope)], k [T, rank + rope] before its
                norm, and no v.
            out: [T, heads * head_dim], where the result may be left; what is returned counts.
        Returns:
            [T, heads * head_dim] in q's dtype; of variant "mla" [T, heads * value].
        """
        q, k, v, save, rope = inputs
        split, total, latent = batch.num_decode_tokens, q.shape[0], layer.spec.variant == "mla"
        if total == 0:
            value_dim = layer.weights.up_v.shape[2] if latent else layer.spec.v_head_dim
            return q.new_empty(0, layer.spec.num_heads * value_dim)
        if latent:
            q = self.save_latent(q, k if save else None, layer, batch, rope)
        elif save and k is not None and v is not None:
            if rope is None:
                self.save_kv(k, v, layer, batch)
            else:
                q = self.rotate_and_save(q, k, v, layer, batch, rope)
        elif rope is not None:
            q, _ = self._rotate(q, q[:, :0] if k is None else k, layer, batch, rope)
        if split == total:
            return self.decode(q, layer, batch, out)
        if split == 0:
            return self.extend(q, layer, batch, out)
        decoding, prompts = q[:split], q[split:]
        return self.branch.segments(
            split,
            out,
            lambda place: self.decode(decoding, layer, batch, place),
            lambda place: self.extend(prompts, layer, batch, place),
        )

    def save_latent(self, q: Tensor, k: Tensor | None, layer: Layer, batch: ForwardBatch, rope: Rope | None) -> Tensor:
        """Writes the vectors of a layer of variant "mla" into the pool and returns q, rotated. A backend that serves
        such layers overrides it."""
        raise BackendError(f"{type(self).__name__} serves no layers of latent attention")

    def rotate_and_save(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> Tensor:
        """Rotates q and k, writes k and v into the pool, returns q. A backend that fuses the three overrides it."""
        q, k = self._rotate(q, k, layer, batch, rope)
        self.save_kv(k, v, layer, batch)
        return q

    @staticmethod
    def _rotate(q: Tensor, k: Tensor, layer: Layer, batch: ForwardBatch, rope: Rope) -> tuple[Tensor, Tensor]:
        dim = layer.spec.head_dim
        heads, kv_heads = (t.view(t.shape[0], t.shape[1] // dim, dim) for t in (q, k))
        heads, kv_heads = qk_norm_rotary(heads, kv_heads, batch.positions, rope)
        return heads.flatten(1), kv_heads.flatten(1)

    @abstractmethod
    def save_kv(self, k: Tensor, v: Tensor, layer: Layer, batch: ForwardBatch) -> None:
        """Writes the new tokens' keys and values ([T, kv_heads * head_dim]) at batch.out_cache_loc."""

    @abstractmethod
    def decode(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """The decode segment: rows [0, num_decode_rows) with tokens_per_row tokens each."""

    @abstractmethod
    def extend(self, q: Tensor, layer: Layer, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """The extend segment: rows [num_decode_rows, B), any number of tokens each."""
