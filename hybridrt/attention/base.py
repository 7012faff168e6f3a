"""The interface of all attention and recurrent backends, and the side stream of graphs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybridrt.attention.contract import ContractHooks, check_graph_tokens
from hybridrt.base.device import SideStream, is_capturing
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, GraphView, RoutedLayer
from hybridrt.base.model_config import AttentionSpec, LinearConfig
from hybridrt.kernels.core.records import LatentWeights, Rope

_IN_LINE = nullcontext()


class Branch:
    """A second stream for one of two independent parts of a step.

    Kernels of a small batch leave most of the device idle, so two parallel chains take only as long
    as the longer one. Only captured steps are split: there the allocator keeps the memory that
    streams share, and the host costs nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._side, self._on_gpu = SideStream(device), device.type == "cuda"

    def side_stream(self) -> AbstractContextManager[object]:
        """Kernels launched in this context run in parallel with later ones, until `join`."""
        return self._side.after_current() if self._on_gpu and is_capturing() else _IN_LINE

    def join(self) -> None:
        """Later kernels wait for both streams."""
        if self._on_gpu and is_capturing():
            self._side.join()

    def segments(
        self,
        split: int,
        out: torch.Tensor | None,
        decode: Callable[[torch.Tensor | None], torch.Tensor],
        extend: Callable[[torch.Tensor | None], torch.Tensor],
    ) -> torch.Tensor:
        """[T, ...]: the first `split` tokens by `decode`, in parallel with the others by `extend`.
        Each gets its part of `out` [T, ...] and may write its result there."""
        first, second = (None, None) if out is None else (out[:split], out[split:])
        with self.side_stream():
            decoded = decode(first)
        chunks = extend(second)
        self.join()
        if out is None or decoded.data_ptr() != out.data_ptr() or chunks.data_ptr() != out[split:].data_ptr():
            return torch.cat((decoded, chunks))
        return out


class AttentionInputs(NamedTuple):
    """The inputs of a softmax-attention layer.

    Attributes:
        q: [T, heads * head_dim]; k, v: [T, kv_heads * head_dim] each. Variant "mla": q [T, heads * (nope + rope)] and k
            [T, rank + rope] before its norm, and no v.
        save: write k and v into the pool first. If False, or without k and v, the pool has them.
        rope: rotates q and k first; None if they are rotated, or the model rotates nothing.
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
    weights: LatentWeights  # variant "mla" only
    sinks: Tensor  # [heads] float32, if the spec has sinks


class RecurrentLayer(Protocol):
    """What a backend reads of any mixer. `width`: channels of the backend's result."""

    kind: str
    layer_id: int
    width: int

    @property
    def config(self) -> LinearConfig: ...


class AttentionBackend(ContractHooks, ABC):
    """Prepares a step once, then runs every layer of it.

    What it prepares is stored on the batch (`metadata`), so a step can be prepared before earlier ones have run.
    Implement `prepare` and `run`; with state also `commit`; with graph buffers `allocate_graph`.
    """

    needs_host_lens = False  # True if a replay plans on the host (flashinfer)
    saves_at_chunks = False  # True if recurrent layers can leave a state after any chunk
    captures_prompts = False  # True if a graph may hold extend rows: kernels read nothing on the host
    seq_len_fill = 1  # seq_len of a graph's padding row

    @property
    def linear_attn_backend(self) -> Any:
        """The recurrent backend of a composite, for blocks that run both branches."""
        raise BackendError(f"{type(self).__name__} has no recurrent side; the model needs HybridLinearAttnBackend")

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Sizes for which a batch with extend rows needs chunk plans; () without recurrent layers."""
        return ()

    def route(self, layer: RoutedLayer) -> "AttentionBackend":
        return self

    # -- a step -------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, batch: ForwardBatch, *, graph: GraphView | None = None) -> None:
        """Plans a step before its first layer.

        Without `graph` this is host work and copies. It reads nothing on the device that an earlier
        step changes, so earlier steps need not have run. Steps run in the order of their
        preparation.

        Args:
            graph: buffers of a graph, which the step captures or replays. In a capture `num_real`
                is 0. The batch has the tensors of the capture; `seq_lens_cpu`, if given, has the
                lengths of real rows. Earlier steps must be launched and committed. With extend
                rows, the recorded step begins with `prepare_in_graph`.

        Raises:
            BackendError: the batch contradicts itself or the pools.
        """

    def prepare_in_graph(self, batch: ForwardBatch) -> None:  # decode rows need nothing
        """Plans extend rows inside a graph, from device tensors, in each replay. Call `prepare`
        first."""

    @abstractmethod
    def run(self, layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        """Runs one layer for all rows of a prepared batch.

        On a GPU, kernels may read the batch's tensors and the page table before the previous kernel
        has ended. So a model must launch a PyTorch kernel after the one that writes them
        (hybridrt.kernels.core.pdl_triton).

        Args:
            inputs: AttentionInputs, or the record of a recurrent kind
                (`MambaAttnBackendBase.inputs`).
            out: [T, width], where the result may be written. Use the returned tensor.
        Returns:
            [T, width], decode rows first.

        Raises:
            BackendError: the batch was not prepared, or an earlier step was not committed.
        """

    def inputs_from(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, save_kv_cache: bool, **kwargs: Any
    ) -> Any:
        """The record for `run` from the arguments of `forward`."""
        if q is None:
            raise BackendError("q is None; a layer of softmax attention needs q [T, heads * head_dim]")
        return AttentionInputs(q, k, v, save_kv_cache, **kwargs)

    def commit(self, batch: ForwardBatch, accepted: Tensor | None = None, path: Tensor | None = None) -> None:
        """Makes accepted tokens part of the state, after the last layer of a step with decode rows.

        Args:
            accepted: [n] int32 accepted inputs of the first n rows, root included: >= 1 for real
                rows, 0 for padding rows, which may be left out. None: plain decode, one token each.
            path: [n, T] int64 places of the accepted inputs in their row, in order. None: the first
                ones, whose KV needs no commit.

        Raises:
            BackendError: a path, and this backend supports none.
        """
        if path is not None:
            raise BackendError(f"{type(self).__name__} verifies no drafts that fork; use topk=1")

    def drop_step(self) -> None:  # most backends keep no steps
        """Drops all prepared steps that were not committed."""

    def metadata_of(self, batch: ForwardBatch) -> Any:
        """What `prepare` stored on a batch. Ways that are taken for each layer look into `metadata` themselves first,
        without a call.

        Raises:
            BackendError: the batch was not prepared.
        """
        found = batch.metadata.get(self)
        return self.metadata_by_older_hooks(batch) if found is None else found

    # -- graphs -------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> GraphView:
        """Static buffers of decode graphs of up to max_bs rows, max_num_tokens / max_bs tokens
        each.

        Raises:
            BackendError: max_num_tokens is not a positive multiple of max_bs.
        """
        view = GraphView(max_bs, check_graph_tokens(max_bs, max_num_tokens))
        self.allocate_graph(view)
        self._views = (self._views or {}) | {view.tokens_per_row: view}
        return view

    def prompt_graph_state(self, max_bs: int) -> GraphView:
        """Static buffers of graphs with up to max_bs one-token decode rows, then extend rows.

        Raises:
            BackendError: extend rows cannot be captured (`captures_prompts`).
        """
        if not self.captures_prompts:
            raise BackendError(
                f"{type(self).__name__} reads lengths or slots of prompts on the host (captures_prompts is False): run "
                "prompts eagerly"
            )
        view = GraphView(max_bs, 1, prompts=True)
        self.allocate_graph(view)
        return view

    def allocate_graph(self, view: GraphView) -> None:  # most backends need no buffers
        """Adds this backend's buffers to a new view."""
