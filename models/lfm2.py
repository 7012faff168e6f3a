"""LFM2: gated short convolutions with a layer of attention every few, each followed by an MLP or experts.

    x ─ norm ─ short conv or attention ─ + ─ norm ─ MLP or MoE ─ +

Queries and keys are normed head by head before they are rotated (Liquid AI 2025, arXiv:2511.23404).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.mlp import MLP
from hybridrt.layers.moe import Experts, MoE, SigmoidGroupRouter
from hybridrt.layers.stack import ResidualPart
from hybridrt.models.base import SWIGLU, CausalLM
from hybridrt.recurrent.short_conv import ShortConvMixer


class Lfm2ForCausalLM(CausalLM):
    """LFM2 (Liquid AI 2025), dense."""

    norm_key, eps_field = "model.embedding_norm", "norm_eps"
    spellings: ClassVar[dict[str, str]] = {
        **SWIGLU,
        ".q_layernorm.": ".q_norm.",
        ".k_layernorm.": ".k_norm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".expert_bias": ".gate.e_score_correction_bias",
    }

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            heads = config.attention_of(layer_id)
            attention = Attention(
                f"{name}.attn", heads, layer_id, hidden, cos_sin=self.cos_sin(heads), qk_norm=(hf.norm_eps, False),
                build=build,
            )  # fmt: skip
            mixer = ResidualPart("operator_norm", "self_attn", attention)
        else:
            conv = config.linear_of(ShortConvConfig)
            short = ShortConvMixer(f"{name}.short", conv, layer_id, hidden, bias=hf.conv_bias, build=build)
            mixer = ResidualPart("operator_norm", "conv", short)
        ffn: Any = self._moe(f"{name}.moe") if spec.ffn == "moe" else self._mlp(f"{name}.mlp")
        return [mixer, ResidualPart("ffn_norm", "feed_forward", ffn)]

    def _mlp(self, name: str) -> MLP:
        hf, size = self.config.hf, self.config.hf.intermediate_size
        if getattr(hf, "block_auto_adjust_ff_dim", False):  # what config.json gives is about 3/2 of the width
            step = hf.block_multiple_of
            size = step * -(-int(hf.block_ffn_dim_multiplier * int(2 * size / 3)) // step)
        return MLP(name, self.config.hidden_size, size, build=self.build)

    def _moe(self, name: str) -> MoE:
        """Routed SwiGLU experts, chosen by sigmoid scores with a correction."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        router = SigmoidGroupRouter(
            f"{name}.router", hidden, hf.num_experts, top_k=hf.num_experts_per_tok, n_group=1, topk_group=1,
            renormalize=hf.norm_topk_prob, scaling=float(hf.routed_scaling_factor), corrected=hf.use_expert_bias,
            build=build,
        )  # fmt: skip
        size = hf.moe_intermediate_size
        experts = Experts(f"{name}.experts", hf.num_experts, hidden, size, activation="silu", build=build)
        return MoE(router, experts, keys={"router": "gate", "experts": "experts"})


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts (Liquid AI 2025)."""
