"""swa_ssm: sliding-window attention over recent tokens, a Mamba-1 history branch over all, an MLP.

    x ─ norm ─┬─ attention(window) ─ out ─┬─ + ─ norm ─ MLP ─ +
              └─ Mamba-1(history) ────────┘

A small family of our own for hybridrt.models.hybrid_attention: what a layer's window forgets, its history branch may
remember (docs/hybrid-layer.md).
"""

import re
from collections.abc import Sequence
from typing import Any

from hybridrt.base.config import ModelConfig
from hybridrt.layers.mlp import MLP
from hybridrt.layers.stack import ResidualPart
from hybridrt.layers.weights import Build
from hybridrt.models.base import CausalLM
from hybridrt.models.hybrid_attention import HybridAttentionLayer, HybridSSMAdapter
from hybridrt.models.window_history import WindowHistoryBackend


class SwaSsmForCausalLM(CausalLM):
    """The decoder. A checkpoint may hold history branches that a layer's mode has no use for."""

    composite = WindowHistoryBackend

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        super().__init__(config, build, max_len)
        unused = [i for i, adapter in self.mixers().items() if not adapter.targets("")]
        self.skipped_keys = tuple(re.escape(f"model.layers.{i}.history.") + ".*" for i in unused)

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        hf, hidden, own = self.config.hf, self.config.hidden_size, self.config.attention_of(layer_id)
        history = HybridSSMAdapter(
            hidden, hf.ssm_state_size, hf.ssm_conv_kernel, hf.ssm_intermediate_size,
            time_step_rank=hf.ssm_time_step_rank, mode=hf.history_modes[layer_id], layer_id=layer_id,
            name=f"{name}.history", build=self.build,
        )  # fmt: skip
        mixer = HybridAttentionLayer(
            f"{name}.attn", own, layer_id, hidden, history, cos_sin=self.cos_sin(own), build=self.build
        )
        mlp = MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=self.build)
        return [ResidualPart("input_layernorm", "", mixer), ResidualPart("post_attention_layernorm", "mlp", mlp)]

    def mixers(self) -> dict[int, Any]:
        adapters = [m for m in self.stack.modules() if isinstance(m, HybridSSMAdapter)]
        return {adapter.layer_id: adapter for adapter in adapters}
