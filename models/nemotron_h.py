"""Nemotron-H: a stack of pre-norm residual blocks, each of one kind: Mamba-2 (M), attention (*), MLP (-) or MoE (E).

    x ─ norm ─ mixer ─ +

Positions come from the recurrent layers: attention rotates nothing (NVIDIA 2025, arXiv:2504.03624).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import Attention
from hybridrt.layers.mlp import MLP
from hybridrt.layers.moe import Experts, Latent, MoE, SigmoidGroupRouter
from hybridrt.layers.stack import ResidualPart
from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import CausalLM, MTPHead
from hybridrt.recurrent.mamba2 import Mamba2Block

MOE_KEYS = {
    "router": "gate",
    "experts": "experts",
    "shared": "shared_experts",
    "into": "fc1_latent_proj",
    "back": "fc2_latent_proj",
}


class NemotronHForCausalLM(CausalLM):
    """Nemotron-H and Nemotron 3 (NVIDIA)."""

    embed_key, norm_key, layers_key = "backbone.embeddings", "backbone.norm_f", "backbone.layers"
    spellings: ClassVar[dict[str, str]] = {"model.": "backbone."}
    eps_field = "layer_norm_epsilon"

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        return [ResidualPart("norm", "mixer", self._part(layer_id, f"{name}.mixer"))]

    def _part(self, layer_id: int, name: str) -> Any:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            return Attention(name, config.attention_of(layer_id), layer_id, hidden, build=build)
        if spec.linear:
            return Mamba2Block(
                name, config.linear_of(Mamba2Config), layer_id, hidden, bias=hf.use_bias, conv_bias=hf.use_conv_bias,
                gated_norm=(hf.layer_norm_epsilon, False), build=build,
            )  # fmt: skip
        if spec.ffn == "moe":
            return self._moe(name, layer_id)
        return self._mlp(name, self.size_of("intermediate_size", layer_id))

    def size_of(self, field: str, layer_id: int) -> int:
        """A number of config.json as a layer has it."""
        return getattr(self.config.hf, field)

    def _mlp(self, name: str, size: int) -> MLP:
        hidden, bias = self.config.hidden_size, self.config.hf.mlp_bias
        return MLP(name, hidden, size, activation="relu2", bias=bias, build=self.build)

    def _moe(self, name: str, layer_id: int) -> MoE:
        """Routed squared-ReLU experts, in a smaller latent space where the config has one, beside a shared expert."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        count, top_k = self.size_of("n_routed_experts", layer_id), self.size_of("num_experts_per_tok", layer_id)
        router = SigmoidGroupRouter(
            f"{name}.router", hidden, count, top_k=top_k, n_group=hf.n_group,
            topk_group=hf.topk_group, renormalize=hf.norm_topk_prob, scaling=float(hf.routed_scaling_factor),
            build=build,
        )  # fmt: skip
        size, inner = hf.moe_latent_size or hidden, self.size_of("moe_intermediate_size", layer_id)
        experts = Experts(f"{name}.experts", count, size, inner, activation="relu2", build=build)
        shared = self._mlp(f"{name}.shared", self.size_of("moe_shared_expert_intermediate_size", layer_id))
        latent = Latent(name, hidden, size, bias=hf.mlp_bias, build=build) if hf.moe_latent_size else None
        return MoE(router, experts, shared=shared, latent=latent, keys=MOE_KEYS)


class NemotronHMTP(MTPHead):
    """The prediction head of Nemotron 3: a few of the model's own blocks. In the checkpoint the fusion stands with the
    first of them, the final norm with the last."""

    def checkpoint_map(self) -> CheckpointMap:
        return {
            **self.embedding_norm.targets("mtp.layers.0.enorm"),
            **self.hidden_norm.targets("mtp.layers.0.hnorm"),
            **self.fuse.targets("mtp.layers.0.eh_proj", "both"),
            **self.norm.targets(f"mtp.layers.{len(self.stack.parts) - 1}.final_layernorm"),
            **self.stack.targets("mtp.layers"),
        }
