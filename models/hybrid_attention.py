"""Layers of sliding-window attention with a history branch, a recurrent layer that sees all tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hybridrt.attention.base import AttentionInputs
from hybridrt.base.errors import BackendError, ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig
from hybridrt.base.plugins import load_object
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.prefix_sum import PrefixSumConfig
from hybridrt.kinds.registry import linear_kind
from hybridrt.layers.attention import Attention
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget
from hybridrt.models.window_history import WindowHistoryInputs

# mode -> recurrent kind
HISTORY_MODES: Mapping[str, str | None] = {
    "disabled": None,
    "prefix_sum": "prefix_sum",
    "enabled": "mamba1",
    "benchmark": "mamba1",
}


class HybridSSMAdapter(nn.Module):
    """The history branch: a recurrent layer with projections, on the hidden states that attention
    reads.

    Its state has its own slot in MambaPool, under `layer_id`. It returns this rank's summand of [T,
    hidden], to be added to attention's before the sum over ranks.

    Args:
        time_step_rank: rank of dt's projection; None: ceil(hidden_size / 16).
        mode: "enabled"; "disabled": zeros, no state; "prefix_sum": running sums of hidden states
            within each request, to test the wiring; "benchmark": computes and writes all, returns
            zeros.
        name: unique in the model.

    Raises:
        ConfigError: the mode is unknown.

    Attributes:
        mixer: the recurrent layer; None for "disabled".
    """

    def __init__(
        self,
        hidden_size: int,
        ssm_state_size: int,
        conv_kernel_size: int,
        intermediate_size: int,
        *,
        time_step_rank: int | None = None,
        mode: str = "enabled",
        layer_id: int = 0,
        name: str = "history",
        build: Build | None = None,
    ) -> None:
        super().__init__()
        if mode not in HISTORY_MODES:
            raise ConfigError(f"the history branch's mode is {mode!r}; it must be one of {', '.join(HISTORY_MODES)}")
        build = build or Build(TPGroup(), torch.get_default_dtype(), torch.device("cpu"))
        self.name, self.mode, self.layer_id, self.tp = name, mode, layer_id, build.tp
        rank = time_step_rank or -(-hidden_size // 16)
        mamba = Mamba1Config(intermediate_size, ssm_state_size, conv_kernel_size, rank)
        configs = {"mamba1": mamba, "prefix_sum": PrefixSumConfig(hidden_size)}
        self.mixer: Any = None
        if kind := HISTORY_MODES[mode]:
            mixer_class = load_object(linear_kind(kind).mixer)
            self.mixer = mixer_class(name, configs[kind], layer_id, hidden_size, build=build)

    def forward_history_branch(
        self, hidden_states: torch.Tensor, batch: ForwardBatch | None = None, *, decode: bool | None = None
    ) -> torch.Tensor:
        """All rows of a step, decode rows first: [T, hidden] to [T, hidden]. "prefix_sum": any [T,
        *dims].

        Args:
            batch: planned by a WindowHistoryBackend. Mode "disabled" needs no plan.
            decode: True: decode (or verify) rows only. False: extend rows only.

        Raises:
            BackendError: the step is not planned, or hidden_states does not have its number of
                tokens.
        """
        if self.mode == "disabled":
            return torch.zeros_like(hidden_states)
        if batch is None:
            raise BackendError(
                f"history branch {self.name!r} has no planned step: pass the batch that its backend has prepared"
            )
        if decode is not None:
            batch = batch.attn_backend.route(self.mixer).restrict_to_segment(batch, decode=decode)
        count, planned = len(hidden_states), batch.attn_backend.route(self.mixer).begin_step(batch).num_tokens
        if count != planned:
            raise BackendError(f"history branch {self.name!r} was given {count} tokens of a step of {planned}")
        out: torch.Tensor = self.mixer.summand(hidden_states, batch)
        return torch.zeros_like(out) if self.mode == "benchmark" else out

    def forward_history_branch_decode(
        self, hidden_states: torch.Tensor, batch: ForwardBatch | None = None
    ) -> torch.Tensor:
        """`forward_history_branch` of decode (or verify) rows only."""
        return self.forward_history_branch(hidden_states, batch, decode=True)

    def forward_history_branch_prefill(
        self, hidden_states: torch.Tensor, batch: ForwardBatch | None = None
    ) -> torch.Tensor:
        """`forward_history_branch` of extend rows only."""
        return self.forward_history_branch(hidden_states, batch, decode=False)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return {} if self.mixer is None else self.mixer.targets(key)


class HybridAttentionLayer(Attention):
    """Rotary attention over a sliding window, plus `ssm_adapter`, with one sum over ranks for both."""

    def __init__(
        self, name: str, config: AttentionConfig, layer_id: int, hidden_size: int, ssm_adapter: HybridSSMAdapter, *,
        cos_sin: torch.Tensor | None, build: Build,
    ) -> None:  # fmt: skip
        super().__init__(name, config, layer_id, hidden_size, cos_sin=cos_sin, build=build)
        self.ssm_adapter, self.tp = ssm_adapter, build.tp

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        h, residual = norm(x, residual)
        q, k, v = self.qkv(h).split(self.sizes, dim=-1)
        out = batch.attn_backend.run(self, batch, WindowHistoryInputs(AttentionInputs(q, k, v, rope=self.rope), h))
        return self.tp.all_reduce(out), residual

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """This rank's summand of attention: [T, heads * head_dim] to [T, hidden]."""
        return self.o_proj(attended, reduce=False)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return {**super().targets(f"{key}.self_attn"), **self.ssm_adapter.targets(f"{key}.history")}
