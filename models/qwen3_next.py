"""Qwen3-Next: three Gated Delta Net blocks to one of gated attention, each followed by a mixture of experts.

    x ─ norm ─ GDN or gated attention ─ + ─ norm ─ MoE or MLP ─ +

Norms are zero-centred (1 + w), rotary turns a quarter of each head, attention's output is gated by a sigmoid
(Qwen team 2025).
"""

from typing import Any, cast

import torch
from torch import nn

from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.activation import sigmoid_mul
from hybridrt.kernels.records import Rope
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.layers.attention import AttentionLayer, qkv_segments
from hybridrt.layers.gdn import GDNMixer
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.mlp import GatedMLP
from hybridrt.layers.moe import Experts, SoftmaxMoE, SoftmaxRouter
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.rotary import rotary_table
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM


class GatedAttention(nn.Module):
    """Grouped-query attention with per-head norms of q and k, and a sigmoid gate on the output."""

    def __init__(self, config: ModelConfig, layer_id: int, name: str, build: Build) -> None:
        super().__init__()
        attention, hidden = config.attention, config.hidden_size
        self.config, self.has_bias = attention, config.hf.attention_bias
        self.attn = AttentionLayer(attention, layer_id, build.tp)
        width = attention.num_heads * attention.head_dim
        parts = [*qkv_segments(attention, build.tp), Segment("gate", width)]
        names = [s.name for s in parts] if self.has_bias else []
        self.qkvg = ColumnLinear(f"{name}.qkvg", hidden, parts, bias=names, build=build)
        self.o_proj = RowLinear(f"{name}.o_proj", [Segment("x", width)], hidden, bias=self.has_bias, build=build)
        norm = {"eps": config.hf.rms_norm_eps, "device": build.device, "zero_centered": True}
        self.q_norm = RMSNorm(f"{name}.q_norm", attention.head_dim, **norm)
        self.k_norm = RMSNorm(f"{name}.k_norm", attention.head_dim, **norm)

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor, batch: ForwardBatch
    ) -> Summands:
        attn = self.attn
        projected, residual = norm_linear(norm, self.qkvg, x, residual)
        q, k, v, gate = projected.split((attn.q_size, attn.kv_size, attn.kv_size, attn.q_size), dim=-1)
        rope = Rope(cos_sin, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        out = batch.attn_backend.forward(q, k, v, attn, batch, rope=rope)
        return self.o_proj.onto(residual, sigmoid_mul(out, gate))

    def checkpoint_map(self, key: str) -> CheckpointMap:
        heads, dim = self.config.num_heads, self.config.head_dim

        def by_part(t: torch.Tensor) -> torch.Tensor:
            """q_proj holds, head by head, the query and then its gate."""
            return t.unflatten(0, (heads, 2, dim)).transpose(0, 1).flatten(0, 2)

        found = {
            **self.qkvg.targets(f"{key}.q_proj", ["q", "gate"], bias=self.has_bias, rearrange=by_part),
            **self.o_proj.targets(f"{key}.o_proj", "x", bias=self.has_bias),
            **self.q_norm.targets(f"{key}.q_norm"),
            **self.k_norm.targets(f"{key}.k_norm"),
        }
        for name in ("k", "v"):
            found |= self.qkvg.targets(f"{key}.{name}_proj", [name], bias=self.has_bias)
        return found


class SparseMoE(SoftmaxMoE):
    """Routed SwiGLU experts plus a shared one behind a sigmoid gate: one more expert, which every token passes."""

    def __init__(self, config: ModelConfig, name: str, build: Build) -> None:
        hf, hidden = config.hf, config.hidden_size
        experts = Experts(
            f"{name}.experts", hf.num_experts, hidden, hf.moe_intermediate_size, activation="silu", gated=True,
            shared_size=hf.shared_expert_intermediate_size, build=build,
        )  # fmt: skip
        router = SoftmaxRouter(
            f"{name}.router", hidden, hf.num_experts, top_k=hf.num_experts_per_tok, renormalize=hf.norm_topk_prob,
            shared_experts=experts.num_shared, build=build,
        )  # fmt: skip
        super().__init__(router, experts)

    def targets(self, key: str) -> CheckpointMap:
        return {
            **self.router.targets(f"{key}.gate"),
            **self.router.shared_gate_targets(f"{key}.shared_expert_gate"),
            **self.experts.targets(f"{key}.experts"),
            **self.experts.shared_targets(f"{key}.shared_expert"),
        }


class Qwen3NextBlock(nn.Module):
    """One decoder block: a token mixer, then a feed-forward part."""

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        hf, hidden, spec, name = config.hf, config.hidden_size, config.layers[layer_id], f"layers.{layer_id}"
        norm = {"eps": hf.rms_norm_eps, "device": build.device, "zero_centered": True}
        self.attn: GatedAttention | None = None
        self.gdn: GDNMixer | None = None
        if spec.attention:
            self.attn = GatedAttention(config, layer_id, f"{name}.attn", build)
        else:
            gdn = config.linear_of(GDNConfig)
            self.gdn = GDNMixer(f"{name}.gdn", gdn, layer_id, hidden, hf.rms_norm_eps, build=build)
        self.ffn: SparseMoE | GatedMLP
        if spec.ffn == "moe":
            self.ffn = SparseMoE(config, f"{name}.moe", build)
        else:
            self.ffn = GatedMLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        self.input_norm = RMSNorm(f"{name}.input_norm", hidden, **norm)
        self.ffn_norm = RMSNorm(f"{name}.ffn_norm", hidden, **norm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: torch.Tensor, batch: ForwardBatch
    ) -> Summands:
        if self.gdn is not None:
            mixed, residual = self.gdn(self.input_norm, x, residual, batch)
        else:
            assert self.attn is not None
            mixed, residual = self.attn(self.input_norm, x, residual, cos_sin, batch)
        return self.ffn.after_norm(self.ffn_norm, mixed, residual, batch)

    def checkpoint_map(self, key: str) -> CheckpointMap:
        if self.gdn is not None:
            mixer = self.gdn.targets(f"{key}.linear_attn")
        else:
            assert self.attn is not None
            mixer = self.attn.checkpoint_map(f"{key}.self_attn")
        return {
            **mixer,
            **self.ffn.targets(f"{key}.mlp"),
            **self.input_norm.targets(f"{key}.input_layernorm"),
            **self.ffn_norm.targets(f"{key}.post_attention_layernorm"),
        }


class Qwen3NextForCausalLM(CausalLM):
    """Qwen3-Next (80B-A3B and its kin)."""

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__(config, tp=tp, dtype=dtype, device=device, max_len=max_len)
        build, hidden, eps = Build(tp, dtype, device), config.hidden_size, config.hf.rms_norm_eps
        self.make_tables(build)
        blocks = nn.ModuleList(Qwen3NextBlock(config, i, build) for i in range(len(config.layers)))
        self.layers = cast(list[Qwen3NextBlock], blocks)
        self.norm = RMSNorm("norm", hidden, eps, device=device, zero_centered=True)
        self.cos_sin = rotary_table(config, max_len, device)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, self.cos_sin, batch)
        return self.norm(x, residual)[0]

    def mixers(self) -> dict[int, Any]:
        return {layer.gdn.layer_id: layer.gdn for layer in self.layers if layer.gdn is not None}

    def checkpoint_map(self) -> CheckpointMap:
        found = {**self.embed.targets("model.embed_tokens"), **self.norm.targets("model.norm")}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        for i, layer in enumerate(self.layers):
            found |= layer.checkpoint_map(f"model.layers.{i}")
        return found
