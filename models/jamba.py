"""Jamba: Mamba-1 blocks with one of attention every few layers, each followed by an MLP or a mixture of experts.

    x ─ norm ─ Mamba-1 or attention ─ + ─ norm ─ MLP or MoE ─ +

Positions come from the recurrent layers: attention rotates nothing (AI21 2024, arXiv:2403.19887).
"""

from collections.abc import Sequence

from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.layers.attention import Attention
from hybridrt.layers.mlp import MLP
from hybridrt.layers.moe import Experts, MoE, SoftmaxRouter
from hybridrt.layers.stack import ResidualPart
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.mamba1 import Mamba1Mixer


class JambaForCausalLM(CausalLM):
    """Jamba (AI21 2024), any size."""

    norm_key = "model.final_layernorm"

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            attention = Attention(f"{name}.attn", config.attention_of(layer_id), layer_id, hidden, build=build)
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            mamba = Mamba1Mixer(
                f"{name}.mamba", config.linear_of(Mamba1Config), layer_id, hidden, conv_bias=hf.mamba_conv_bias,
                proj_bias=hf.mamba_proj_bias, norm_eps=hf.rms_norm_eps, build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "mamba", mamba)
        experts = spec.ffn == "moe"
        ffn = self._moe(f"{name}.moe") if experts else MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        return [mixer, ResidualPart("pre_ff_layernorm", "feed_forward", ffn)]

    def _moe(self, name: str) -> MoE:
        """Routed SwiGLU experts; the weights of the chosen ones are their shares of the softmax over all."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        count, size, top_k = hf.num_experts, hf.intermediate_size, hf.num_experts_per_tok
        router = SoftmaxRouter(f"{name}.router", hidden, count, top_k=top_k, renormalize=False, build=build)
        experts = Experts(f"{name}.experts", count, hidden, size, activation="silu", build=build)
        return MoE(router, experts, keys={"router": "router", "experts": "experts"})
