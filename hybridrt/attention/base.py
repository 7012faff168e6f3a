"""The interface of every attention and linear backend, as an embedding runtime programs against it."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hybridrt.config import AttentionSpec
from hybridrt.errors import BackendError
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.rotary import qk_norm_rotary


class AttentionBackend(ABC):
    """Plans a step once, then runs every layer of it.

    Metadata of graph replays lives in buffers allocated once by `init_cuda_graph_state`; a capture for batch size bs
    takes their first bs entries, and a replay fills them.
    """

    needs_host_lens = False  # True if a replay plans on the host (flashinfer) and so waits for exact lengths

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

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Once per eager step, before the first layer."""

    @abstractmethod
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
        """One layer over all rows of the batch. Recurrent layers pass their own inputs as keywords."""

    def commit_decode(self, accepted: torch.Tensor | None = None, path: torch.Tensor | None = None) -> None:
        """After the last layer of a step with a decode segment: what stays becomes part of the state.

        Args:
            accepted: [n] int32 committed inputs of the first n verified rows, the root included: >= 1 for real rows,
                0 for padding rows, of which any number may be left out; None for plain decode, which keeps its one
                token.
            path: [n, T] int64 accepted nodes of a draft tree, the root first; None for a chain, which keeps its first
                `accepted` inputs. A chain's KV has nothing to commit.

        Raises:
            BackendError: a tree, and this backend knows chains alone.
        """
        if path is not None:
            raise BackendError(f"{type(self).__name__} verifies chains alone; use topk=1")

    def drop_step(self) -> None:  # noqa: B027  # most backends keep nothing of a step
        """Gives up a step that was planned, so that the next one may be planned without `commit_decode`."""

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the metadata buffers of all graphs. max_num_tokens / max_bs is the tokens of a row."""

    @abstractmethod
    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: SpecInfo | None,
    ) -> None:
        """Points the metadata at the first bs entries of the buffers. The tensors are the runner's static views."""

    @abstractmethod
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
        """Fills the buffers for a batch of `num_real` rows padded to bs."""

    @abstractmethod
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The seq_len that a padding row gets."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a layer's queries and keys, after an optional RMS norm of each head.

    Attributes:
        cos_sin: [max_len, rot] float32 table (hybridrt.layers.rotary).
        q_weight, k_weight: [head_dim] float32, None for no norm; eps belongs to it.
    """

    cos_sin: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 0.0


class SegmentedAttnBackend(AttentionBackend):
    """A softmax-attention backend that runs the decode and the extend segment of a batch each with its own method.

    Attributes:
        provider: whose kernels it runs, a name of hybridrt.kernels.providers; None for its own.
        auto_decode, auto_prefill: types of device on which "auto" may choose it for this. Of several the first in
            hybridrt.attention.registry is chosen.
    """

    provider: ClassVar[str | None] = None
    auto_decode: ClassVar[tuple[str, ...]] = ()
    auto_prefill: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def objection(cls, device: torch.device, specs: Collection[AttentionSpec]) -> str | None:
        """Why it cannot serve attention layers of these specs on a device; None if it can."""
        return None

    def forward(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        rope: Rope | None = None,
        out: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer over all rows of the batch.

        Args:
            q, k, v: [T, heads * head_dim] of the new tokens.
            rope: how to rotate q and k first; None if they are rotated, or the model rotates nothing.
            layer: the layer that calls: its `layer_id` and `spec` (AttentionSpec).
            save_kv_cache: write k and v into the pool first.
            out: [T, heads * head_dim], where the result may be left; what is returned counts.
        Returns:
            [T, heads * head_dim] in q's dtype.
        """
        assert q is not None
        split, total = batch.num_decode_tokens, q.shape[0]
        if total == 0:
            return q.new_empty(0, layer.spec.num_heads * layer.spec.v_head_dim)
        if save_kv_cache and k is not None and v is not None:
            if rope is None:
                self.save_kv(k, v, layer, batch)
            else:
                q = self.rotate_and_save(q, k, v, layer, batch, rope)
        elif rope is not None:
            q, _ = self._rotate(q, q[:, :0] if k is None else k, layer, batch, rope)
        if split == total:
            return self.forward_decode(q, layer, batch, out=out, **kwargs)
        if split == 0:
            return self.forward_extend(q, layer, batch, out=out, **kwargs)
        decoded = self.forward_decode(q[:split], layer, batch, **kwargs)
        return torch.cat((decoded, self.forward_extend(q[split:], layer, batch, **kwargs)))

    def rotate_and_save(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: ForwardBatch, rope: Rope
    ) -> torch.Tensor:
        """Rotates q and k, writes k and v into the pool, returns q. A backend that fuses the three overrides it."""
        q, k = self._rotate(q, k, layer, batch, rope)
        self.save_kv(k, v, layer, batch)
        return q

    @staticmethod
    def _rotate(
        q: torch.Tensor, k: torch.Tensor, layer: Any, batch: ForwardBatch, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim = layer.spec.head_dim
        heads, kv_heads = (t.view(t.shape[0], t.shape[1] // dim, dim) for t in (q, k))
        weights = (rope.q_weight, rope.k_weight, rope.eps)
        heads, kv_heads = qk_norm_rotary(heads, kv_heads, batch.positions, rope.cos_sin, *weights)
        return heads.flatten(1), kv_heads.flatten(1)

    @abstractmethod
    def save_kv(self, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: ForwardBatch) -> None:
        """Writes the new tokens' keys and values ([T, kv_heads * head_dim]) at batch.out_cache_loc."""

    @abstractmethod
    def forward_decode(self, q: torch.Tensor, layer: Any, batch: ForwardBatch, **kwargs: Any) -> torch.Tensor:
        """The decode segment: rows [0, num_decode_rows) with tokens_per_row tokens each."""

    @abstractmethod
    def forward_extend(self, q: torch.Tensor, layer: Any, batch: ForwardBatch, **kwargs: Any) -> torch.Tensor:
        """The extend segment: rows [num_decode_rows, B), any number of tokens each."""


def check_graph_tokens(max_bs: int, max_num_tokens: int) -> int:
    """Tokens of a row; BackendError unless max_num_tokens is a positive multiple of max_bs."""
    if max_bs < 1 or max_num_tokens < max_bs or max_num_tokens % max_bs:
        raise BackendError(
            f"max_num_tokens is {max_num_tokens}; it must be a multiple of max_bs {max_bs}: every row of a graph "
            "has the same number of tokens"
        )
    return max_num_tokens // max_bs
