"""swa_ssm: sliding-window attention over recent tokens, a Mamba-1 history branch over all, an MLP.

    x ─ norm ─┬─ attention(window) ─ out ─┬─ + ─ norm ─ MLP ─ +
              └─ Mamba-1(history) ────────┘

A small family of our own for hybridrt.layers.hybrid_attention: what a layer's window forgets, its history branch may
remember (docs/hybrid-layer.md).
"""

import re
from typing import Any, cast

import torch
from torch import nn

from hybridrt.attention.window_history import WindowHistoryBackend
from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.records import Rope
from hybridrt.layers.hybrid_attention import HybridAttentionLayer, HybridSSMAdapter
from hybridrt.layers.linear import Summands
from hybridrt.layers.mlp import GatedMLP
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.rotary import rotary_table
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM


class SwaSsmBlock(nn.Module):
    """One decoder block."""

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        hf, hidden, name = config.hf, config.hidden_size, f"layers.{layer_id}"
        history = HybridSSMAdapter(
            hidden, hf.ssm_state_size, hf.ssm_conv_kernel, hf.ssm_intermediate_size,
            time_step_rank=hf.ssm_time_step_rank, mode=hf.history_modes[layer_id], layer_id=layer_id,
            name=f"{name}.history", build=build,
        )  # fmt: skip
        self.mixer = HybridAttentionLayer(config, layer_id, f"{name}.attn", history, build)
        self.mlp = GatedMLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        self.input_norm = RMSNorm(f"{name}.input_norm", hidden, hf.rms_norm_eps, device=build.device)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", hidden, hf.rms_norm_eps, device=build.device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, batch: ForwardBatch) -> Summands:
        h, residual = self.input_norm(x, residual)
        return self.mlp.after_norm(self.mlp_norm, self.mixer(h, rope, batch), residual, batch)

    def checkpoint_map(self, key: str) -> CheckpointMap:
        return {
            **self.mixer.targets(f"{key}.self_attn"),
            **self.mixer.ssm_adapter.targets(f"{key}.history"),
            **self.mlp.targets(f"{key}.mlp"),
            **self.input_norm.targets(f"{key}.input_layernorm"),
            **self.mlp_norm.targets(f"{key}.post_attention_layernorm"),
        }


class SwaSsmForCausalLM(CausalLM):
    """The decoder. A checkpoint may hold history branches that a layer's mode has no use for."""

    composite = WindowHistoryBackend

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__(config, tp=tp, dtype=dtype, device=device, max_len=max_len)
        build, hidden = Build(tp, dtype, device), config.hidden_size
        self.make_tables(build)
        blocks = nn.ModuleList(SwaSsmBlock(config, i, build) for i in range(len(config.layers)))
        self.layers = cast(list[SwaSsmBlock], blocks)
        self.norm = RMSNorm("norm", hidden, config.hf.rms_norm_eps, device=device)
        self.rope = Rope(rotary_table(config, max_len, device))
        unused = [i for i, block in enumerate(self.layers) if not block.mixer.ssm_adapter.targets("")]
        self.skipped_keys = tuple(re.escape(f"model.layers.{i}.history.") + ".*" for i in unused)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, self.rope, batch)
        return self.norm(x, residual)[0]

    def mixers(self) -> dict[int, Any]:
        return {i: layer.mixer.ssm_adapter for i, layer in enumerate(self.layers)}

    def checkpoint_map(self) -> CheckpointMap:
        found = {**self.embed.targets("model.embed_tokens"), **self.norm.targets("model.norm")}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        for i, layer in enumerate(self.layers):
            found |= layer.checkpoint_map(f"model.layers.{i}")
        return found
