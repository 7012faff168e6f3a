"""Nemotron-H: a stack of pre-norm residual blocks, each of one kind: Mamba-2 (M), attention (*), MLP (-) or MoE (E).

    x ─ norm ─ mixer ─ +

Positions come from the recurrent layers: attention rotates nothing (NVIDIA 2025, arXiv:2504.03624).
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import PlainAttention
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.mamba2 import Mamba2Mixer, mamba2_segments
from hybridrt.layers.mlp import Relu2MLP
from hybridrt.layers.moe import Experts, SigmoidGroupRouter
from hybridrt.layers.norm import GatedRMSNorm, RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM


class MambaPart(nn.Module):
    """Mamba-2 with its two projections; the gated norm works in groups as wide as a group of B and C serves."""

    def __init__(self, config: ModelConfig, layer_id: int, name: str, build: Build) -> None:
        super().__init__()
        hf, mamba = config.hf, config.linear_of(Mamba2Config)
        self.has_bias = hf.use_bias
        parts = mamba2_segments(mamba, build.tp)
        bias = [s.name for s in parts] if hf.use_bias else []
        self.in_proj = ColumnLinear(f"{name}.in_proj", config.hidden_size, parts, bias=bias, build=build)
        norm = GatedRMSNorm(
            f"{name}.norm", mamba.intermediate_size // build.tp.size, hf.layer_norm_epsilon,
            group_size=mamba.intermediate_size // mamba.n_groups, norm_before_gate=False, build=build,
        )  # fmt: skip
        self.mixer = Mamba2Mixer(name, mamba, layer_id, conv_bias=hf.use_conv_bias, norm=norm, build=build)
        output = [Segment("x", mamba.intermediate_size)]
        self.out_proj = RowLinear(f"{name}.out_proj", output, config.hidden_size, bias=hf.use_bias, build=build)

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = norm_linear(norm, self.in_proj, x, residual)
        return self.out_proj.onto(residual, self.mixer(projected, batch))

    def checkpoint_map(self, key: str) -> CheckpointMap:
        return {
            **self.in_proj.targets(f"{key}.in_proj", ["z", "x", "B", "C", "dt"], bias=self.has_bias),
            **self.out_proj.targets(f"{key}.out_proj", "x", bias=self.has_bias),
            **self.mixer.targets(key),
        }


class AttentionPart(PlainAttention):
    """Grouped-query attention without rotary."""

    def checkpoint_map(self, key: str) -> CheckpointMap:
        return self.targets(key)


class MLPPart(Relu2MLP):
    """Squared-ReLU MLP."""

    def __init__(self, config: ModelConfig, layer_id: int, name: str, build: Build) -> None:
        super().__init__(name, config.hidden_size, config.hf.intermediate_size, bias=config.hf.mlp_bias, build=build)

    def forward(  # type: ignore[override]  # as the other parts
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> Summands:
        return self.after_norm(norm, x, residual, batch)

    checkpoint_map = Relu2MLP.targets


class MoEPart(nn.Module):
    """Routed squared-ReLU experts, in a smaller latent space where the config has one, beside a shared expert."""

    def __init__(self, config: ModelConfig, layer_id: int, name: str, build: Build) -> None:
        super().__init__()
        hf, hidden, bias = config.hf, config.hidden_size, config.hf.mlp_bias
        self.tp, self.has_bias = build.tp, bias
        self.router = SigmoidGroupRouter(
            f"{name}.router", hidden, hf.n_routed_experts, top_k=hf.num_experts_per_tok, n_group=hf.n_group,
            topk_group=hf.topk_group, renormalize=hf.norm_topk_prob, scaling=float(hf.routed_scaling_factor),
            build=build,
        )  # fmt: skip
        latent = hf.moe_latent_size
        self.experts = Experts(
            f"{name}.experts", hf.n_routed_experts, latent or hidden, hf.moe_intermediate_size,
            activation="relu2", gated=False, build=build,
        )  # fmt: skip
        self.shared = Relu2MLP(f"{name}.shared", hidden, hf.moe_shared_expert_intermediate_size, bias=bias, build=build)
        self.to_latent = self.from_latent = None
        if latent:
            # Every rank needs the whole latent vector, so its two projections are not cut.
            names, uncut = ("latent",) if bias else (), replace(build, tp=TPGroup())
            self.to_latent = ColumnLinear(
                f"{name}.to_latent", hidden, [Segment("latent", latent)], bias=names, build=uncut
            )
            self.from_latent = ColumnLinear(
                f"{name}.from_latent", latent, [Segment("latent", hidden)], bias=names, build=uncut
            )

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> Summands:
        x, residual = norm(x, residual)
        weights, ids = self.router(x, batch)
        if self.to_latent is None or self.from_latent is None:
            return self.tp.all_reduce(self.experts(x, weights, ids) + self.shared(x, reduce=False)), residual
        routed = self.from_latent(self.tp.all_reduce(self.experts(self.to_latent(x), weights, ids)))
        return routed + self.shared(x), residual

    def checkpoint_map(self, key: str) -> CheckpointMap:
        found = {**self.router.targets(f"{key}.gate"), **self.experts.targets(f"{key}.experts")}
        found |= self.shared.targets(f"{key}.shared_experts")
        if self.to_latent is not None and self.from_latent is not None:
            found |= self.to_latent.targets(f"{key}.fc1_latent_proj", ["latent"], bias=self.has_bias)
            found |= self.from_latent.targets(f"{key}.fc2_latent_proj", ["latent"], bias=self.has_bias)
        return found


Part = MambaPart | AttentionPart | MLPPart | MoEPart


def make_part(config: ModelConfig, layer_id: int, name: str, build: Build) -> Part:
    """The part that config.layers[layer_id] describes."""
    spec = config.layers[layer_id]
    kinds: dict[str | None, Any] = {
        "mlp": MLPPart,
        "moe": MoEPart,
        None: AttentionPart if spec.attention else MambaPart,
    }
    part: Part = kinds[spec.ffn](config, layer_id, name, build)
    return part


class NemotronHForCausalLM(CausalLM):
    """Nemotron-H and Nemotron 3 (NVIDIA)."""

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__(config, tp=tp, dtype=dtype, device=device, max_len=max_len)
        build, hidden, eps = Build(tp, dtype, device), config.hidden_size, config.hf.layer_norm_epsilon
        self.make_tables(build)
        ids = range(len(config.layers))
        norms = nn.ModuleList(RMSNorm(f"layers.{i}.norm", hidden, eps, device=device) for i in ids)
        parts = nn.ModuleList(make_part(config, i, f"layers.{i}.mixer", build) for i in ids)
        self.norms, self.parts = cast(list[RMSNorm], norms), cast(list[Part], parts)
        self.norm = RMSNorm("norm", hidden, eps, device=device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x, residual = self.embed(batch.input_ids), None
        for norm, part in zip(self.norms, self.parts):
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]

    def mixers(self) -> dict[int, Any]:
        return {part.mixer.layer_id: part.mixer for part in self.parts if isinstance(part, MambaPart)}

    def rename_key(self, key: str) -> str:
        return f"backbone.{key.removeprefix('model.')}" if key.startswith("model.") else key

    def checkpoint_map(self) -> CheckpointMap:
        found = {**self.embed.targets("backbone.embeddings"), **self.norm.targets("backbone.norm_f")}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        for i, (norm, part) in enumerate(zip(self.norms, self.parts)):
            found |= {**norm.targets(f"backbone.layers.{i}.norm"), **part.checkpoint_map(f"backbone.layers.{i}.mixer")}
        return found
