"""Qwen3-Next: three Gated Delta Net blocks to one of gated attention, each followed by a mixture of experts.

    x ─ norm ─ GDN or gated attention ─ + ─ norm ─ MoE or MLP ─ +

Norms are zero-centred (1 + w), rotary turns a quarter of each head, attention's output is gated by a sigmoid
(Qwen team 2025).
"""

from collections.abc import Sequence
from typing import ClassVar

from hybridrt.kinds.gdn import GDNConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.mlp import MLP
from hybridrt.layers.moe import Experts, MoE, SoftmaxRouter
from hybridrt.layers.stack import ResidualPart
from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import CausalLM, MTPHead
from hybridrt.recurrent.gdn import GDNKeys, GDNMixer

MOE_KEYS = {
    "router": "gate",
    "experts": "experts",
    "shared": "shared_expert",
    "shared_gate": "shared_expert_gate",
}
GDN_KEYS = GDNKeys({"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}, by_key_head=True)


class Qwen3NextForCausalLM(CausalLM):
    """Qwen3-Next (80B-A3B and its kin)."""

    gdn_keys: ClassVar[GDNKeys] = GDN_KEYS
    zero_centered = True

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            own = config.attention_of(layer_id)
            attention = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias,
                qk_norm=(hf.rms_norm_eps, True), gated=True, build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            gdn = GDNMixer(
                f"{name}.gdn", config.linear_of(GDNConfig), layer_id, hidden, hf.rms_norm_eps, keys=self.gdn_keys,
                build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "linear_attn", gdn)
        experts = spec.ffn == "moe"
        ffn = self._moe(f"{name}.moe") if experts else MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        return [mixer, ResidualPart("post_attention_layernorm", "mlp", ffn)]

    def renormalizes(self) -> bool:
        """Whether the weights of a token's experts are made to add up to 1."""
        return bool(self.config.hf.norm_topk_prob)

    def _moe(self, name: str) -> MoE:
        """Routed SwiGLU experts plus a shared one behind a sigmoid gate: one more expert, which every token passes."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        experts = Experts(
            f"{name}.experts", hf.num_experts, hidden, hf.moe_intermediate_size, activation="silu",
            shared_size=hf.shared_expert_intermediate_size, build=build,
        )  # fmt: skip
        router = SoftmaxRouter(
            f"{name}.router", hidden, hf.num_experts, top_k=hf.num_experts_per_tok, renormalize=self.renormalizes(),
            shared_experts=experts.num_shared, build=build,
        )  # fmt: skip
        return MoE(router, experts, keys=MOE_KEYS)


class Qwen3NextMTP(MTPHead):
    """The prediction head: one more block of gated attention and experts."""

    def checkpoint_map(self) -> CheckpointMap:
        return {
            **self.embedding_norm.targets("mtp.pre_fc_norm_embedding"),
            **self.hidden_norm.targets("mtp.pre_fc_norm_hidden"),
            **self.fuse.targets("mtp.fc", "both"),
            **self.stack.targets("mtp.layers"),
            **self.norm.targets("mtp.norm"),
        }
