"""Kimi-Linear: three blocks of Kimi Delta Attention to one of latent attention, each followed by experts or an MLP.

    x ─ norm ─ KDA or MLA ─ + ─ norm ─ MoE or MLP ─ +

Nothing is rotated: latent attention takes positions from the recurrent layers around it (Moonshot AI 2025,
arXiv:2510.26692).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from hybridrt.kinds.kda import KDAConfig
from hybridrt.layers.mla import LatentAttention
from hybridrt.layers.mlp import MLP
from hybridrt.layers.moe import Experts, MoE, SigmoidGroupRouter
from hybridrt.layers.stack import ResidualPart
from hybridrt.models.base import SWIGLU, CausalLM
from hybridrt.recurrent.kda import KDAMixer

MOE_KEYS = {"router": "gate", "experts": "experts", "shared": "shared_experts"}


class KimiLinearForCausalLM(CausalLM):
    """Kimi-Linear (48B-A3B)."""

    gated: ClassVar[bool] = False  # the outputs of latent attention
    spellings: ClassVar[dict[str, str]] = {**SWIGLU, ".block_sparse_moe.": ".mlp.", ".forget_gate.": "."}
    joined_convs = True

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        mixer: Any
        if spec.attention:
            own = config.attention_of(layer_id)
            mixer = LatentAttention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias,
                gated=self.gated, build=build,
            )  # fmt: skip
        else:
            mixer = self.recurrent(layer_id, name)
        ffn: Any = self._moe(f"{name}.moe", layer_id) if spec.ffn == "moe" else self._mlp(f"{name}.mlp")
        return [
            ResidualPart("input_layernorm", "self_attn", mixer),
            ResidualPart("post_attention_layernorm", "mlp", ffn),
        ]

    def recurrent(self, layer_id: int, name: str) -> Any:
        """The mixer of a layer without attention."""
        config, eps = self.config, self.config.hf.rms_norm_eps
        return KDAMixer(f"{name}.kda", config.linear_of(KDAConfig), layer_id, config.hidden_size, eps, build=self.build)

    def _mlp(self, name: str) -> MLP:
        return MLP(name, self.config.hidden_size, self.config.hf.intermediate_size, build=self.build)

    def limits(self, layer_id: int) -> tuple[float | None, float | None]:
        """Of SwiGLU in a layer's routed experts and in its shared one."""
        return None, None

    def _moe(self, name: str, layer_id: int) -> MoE:
        """Routed SwiGLU experts, chosen within the best groups by corrected sigmoid scores, and a shared one: one more
        expert, or beside them where its limit differs."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        size, (limit, shared_limit) = hf.moe_intermediate_size, self.limits(layer_id)
        shared_size = size * hf.n_shared_experts
        alike = limit == shared_limit
        experts = Experts(
            f"{name}.experts", hf.num_local_experts, hidden, size, activation="silu", limit=limit,
            shared_size=shared_size if alike else 0, build=build,
        )  # fmt: skip
        router = SigmoidGroupRouter(
            f"{name}.router", hidden, hf.num_local_experts, top_k=hf.num_experts_per_tok, n_group=hf.n_group,
            topk_group=hf.topk_group, renormalize=hf.norm_topk_prob, scaling=float(hf.routed_scaling_factor),
            shared_experts=experts.num_shared, build=build,
        )  # fmt: skip
        shared = None if alike else MLP(f"{name}.shared", hidden, shared_size, limit=shared_limit, build=build)
        return MoE(router, experts, shared=shared, keys=MOE_KEYS)
