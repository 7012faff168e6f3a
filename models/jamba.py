"""Jamba: Mamba-1 blocks with one of attention every few layers, each followed by an MLP or a mixture of experts.

    x ─ norm ─ Mamba-1 or attention ─ + ─ norm ─ MLP or MoE ─ +

Positions come from the recurrent layers: attention rotates nothing (AI21 2024, arXiv:2403.19887).
"""

from typing import Any, cast

import torch
from torch import nn

from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.layers.attention import PlainAttention
from hybridrt.layers.linear import Summands
from hybridrt.layers.mamba1 import Mamba1Mixer
from hybridrt.layers.mlp import GatedMLP
from hybridrt.layers.moe import Experts, SoftmaxMoE, SoftmaxRouter
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM


class JambaMoE(SoftmaxMoE):
    """Routed SwiGLU experts; the weights of the chosen ones are their shares of the softmax over all."""

    def __init__(self, config: ModelConfig, name: str, build: Build) -> None:
        hf, hidden = config.hf, config.hidden_size
        router = SoftmaxRouter(
            f"{name}.router", hidden, hf.num_experts, top_k=hf.num_experts_per_tok, renormalize=False, build=build
        )
        experts = Experts(
            f"{name}.experts", hf.num_experts, hidden, hf.intermediate_size, activation="silu", gated=True, build=build
        )
        super().__init__(router, experts)

    def targets(self, key: str) -> CheckpointMap:
        return {**self.router.targets(f"{key}.router"), **self.experts.targets(f"{key}.experts")}


class JambaBlock(nn.Module):
    """One decoder block: a token mixer, then a feed-forward part."""

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        hf, hidden, spec, name = config.hf, config.hidden_size, config.layers[layer_id], f"layers.{layer_id}"
        self.mixer: PlainAttention | Mamba1Mixer
        if spec.attention:
            self.mixer = PlainAttention(config, layer_id, f"{name}.attn", build)
        else:
            self.mixer = Mamba1Mixer(
                f"{name}.mamba", config.linear_of(Mamba1Config), layer_id, hidden, conv_bias=hf.mamba_conv_bias,
                proj_bias=hf.mamba_proj_bias, norm_eps=hf.rms_norm_eps, build=build,
            )  # fmt: skip
        self.ffn: JambaMoE | GatedMLP
        if spec.ffn == "moe":
            self.ffn = JambaMoE(config, f"{name}.moe", build)
        else:
            self.ffn = GatedMLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        self.input_norm = RMSNorm(f"{name}.input_norm", hidden, hf.rms_norm_eps, device=build.device)
        self.ffn_norm = RMSNorm(f"{name}.ffn_norm", hidden, hf.rms_norm_eps, device=build.device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        mixed, residual = self.mixer(self.input_norm, x, residual, batch)
        return self.ffn.after_norm(self.ffn_norm, mixed, residual, batch)

    def checkpoint_map(self, key: str) -> CheckpointMap:
        part = "mamba" if isinstance(self.mixer, Mamba1Mixer) else "self_attn"
        return {
            **self.mixer.targets(f"{key}.{part}"),
            **self.ffn.targets(f"{key}.feed_forward"),
            **self.input_norm.targets(f"{key}.input_layernorm"),
            **self.ffn_norm.targets(f"{key}.pre_ff_layernorm"),
        }


class JambaForCausalLM(CausalLM):
    """Jamba (AI21 2024), any size."""

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__(config, tp=tp, dtype=dtype, device=device, max_len=max_len)
        build, hidden = Build(tp, dtype, device), config.hidden_size
        self.make_tables(build)
        blocks = nn.ModuleList(JambaBlock(config, i, build) for i in range(len(config.layers)))
        self.layers = cast(list[JambaBlock], blocks)
        self.norm = RMSNorm("norm", hidden, config.hf.rms_norm_eps, device=device)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm(x, residual)[0]

    def mixers(self) -> dict[int, Any]:
        return {layer.mixer.layer_id: layer.mixer for layer in self.layers if isinstance(layer.mixer, Mamba1Mixer)}

    def checkpoint_map(self) -> CheckpointMap:
        found = {**self.embed.targets("model.embed_tokens"), **self.norm.targets("model.final_layernorm")}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        for i, layer in enumerate(self.layers):
            found |= layer.checkpoint_map(f"model.layers.{i}")
        return found
