"""The backend of layers with window attention plus a history branch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hybridrt.attention.base import AttentionBackend, AttentionInputs
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, RoutedLayer
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.backend import HybridLinearAttnBackend, linear_backends


class WindowHistoryInputs(NamedTuple):
    """Inputs of a layer of both branches. hidden_states [T, hidden]: the input of the block's
    projections."""

    attention: AttentionInputs
    hidden_states: Tensor


class WindowHistoryBackend(HybridLinearAttnBackend):
    """Adds a layer's history branch to its window attention, after the output projection and before
    the sum over ranks.

    Errors of either branch are raised: attention alone never passes for both.

    Args:
        window_backend: any attention backend. It reads a layer's `sliding_window`.
        adapters: the history branches (hybridrt.models.hybrid_attention.HybridSSMAdapter) of all
            layers, including disabled ones.

    Raises:
        BackendError: two branches of one name, or of one layer id.
    """

    def __init__(
        self, window_backend: AttentionBackend, adapters: Sequence[Any], req_to_token_pool: HybridReqToTokenPool
    ) -> None:
        for attribute in ("name", "layer_id"):
            seen = [getattr(adapter, attribute) for adapter in adapters]
            twice = sorted({value for value in seen if seen.count(value) > 1})
            if twice:
                raise BackendError(f"{attribute} {twice[0]!r} belongs to two history branches; give each its own")
        mixers = {adapter.layer_id: adapter.mixer for adapter in adapters if adapter.mixer is not None}
        super().__init__(window_backend, linear_backends(mixers, req_to_token_pool), [a.layer_id for a in adapters])

    @classmethod
    def over(
        cls,
        full_attn_backend: AttentionBackend,
        mixers: Mapping[int, Any],
        full_attn_layers: Collection[int],
        req_to_token_pool: HybridReqToTokenPool,
    ) -> "WindowHistoryBackend":
        """The composite of a model. `mixers` are history branches."""
        return cls(full_attn_backend, list(mixers.values()), req_to_token_pool)

    def route(self, layer: RoutedLayer) -> AttentionBackend:
        """This backend serves layers of both branches, and routes others as any composite."""
        return self if hasattr(layer, "ssm_adapter") else super().route(layer)

    def inputs_from(
        self, q: Tensor | None, k: Tensor | None, v: Tensor | None, save_kv_cache: bool, **kwargs: Any
    ) -> WindowHistoryInputs:
        hidden_states = kwargs.pop("hidden_states")
        return WindowHistoryInputs(super().inputs_from(q, k, v, save_kv_cache, **kwargs), hidden_states)

    def run(self, layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        """Runs one layer for all rows. A layer of both branches has WindowHistoryInputs.

        Args:
            layer: has `attn` (the window backend's layer), `project` (output projection, [T, heads
                * head_dim] to [T, hidden], without the sum over ranks) and `ssm_adapter`.
        Returns:
            [T, hidden], this rank's summand. The branch is zero on padding rows.
        """
        if not isinstance(inputs, WindowHistoryInputs):
            return super().run(layer, batch, inputs, out)
        attended: Tensor = layer.project(super().run(layer.attn, batch, inputs.attention))
        if layer.ssm_adapter.mode == "disabled":
            return attended
        return attended + layer.ssm_adapter.forward_history_branch(inputs.hidden_states, batch)
