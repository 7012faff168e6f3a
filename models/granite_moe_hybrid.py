"""Granite 4-H: Mamba-2 blocks and a few of attention, then experts or an MLP.

    x ─ norm ─ Mamba-2 or attention ─ x m ─ + ─ norm ─ experts or MLP ─ x m ─ +

Most models rotate nothing. Multipliers of embedding, scores, blocks and logits scale weights and
norms at loading (IBM 2025).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from hybridrt.base.config_fields import ATTENTION, COMMON, COUNT, EPSILON, MULTIPLIER, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, either, list_of, number, one_of
from hybridrt.base.model_config import ModelConfig
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.moe import SHARED_WEIGHT, Experts, MoE, SoftmaxRouter, stacked_experts
from hybridrt.layers.norm import ResidualPart
from hybridrt.layers.weights import Build, TensorPart, Transform
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import (
    FULL_ROPE,
    MAMBA2,
    MAMBA2_DEFAULTS,
    Family,
    FamilyFields,
    attention_config,
    derive_mamba2,
    interleaved,
    mamba2_config,
)
from hybridrt.recurrent.mamba2 import Mamba2Block

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **MAMBA2,
    "shared_intermediate_size": SIZE,
    "layer_types": list_of(one_of("linear_attention", "full_attention", "mamba", "attention")),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), COUNT),
    "position_embedding_type": either(NULL, one_of("rope", "nope")),
    "rope_parameters": either(NULL, FULL_ROPE),
    "rms_norm_eps": EPSILON,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), MULTIPLIER),
    "logits_scaling": number(1e-6, 1e6),
    "attention_bias": FLAG,
}
DEFAULTS: dict[str, Any] = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "rope_parameters": None, "attention_bias": False, "embedding_multiplier": 1.0,
    "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8,
    "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    derive_mamba2(fields)
    if fields["layer_types"] is None:
        fields["layer_types"] = ["linear_attention"] * fields["num_hidden_layers"]


def _describe(hf: Any) -> FamilyFields:
    mamba = mamba2_config(hf)
    rotary = hf.position_embedding_type == "rope"
    attention = attention_config(hf, rotary=rotary, scale=float(hf.attention_multiplier))
    return interleaved(hf, mamba, attention, "moe" if hf.num_local_experts > 0 else "mlp")


FAMILY = Family(
    model="hybridrt.models.granite_moe_hybrid:GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    fields=FIELDS,
    defaults=DEFAULTS,
    older={"layers_block_type": "layer_types"},
    derive=_derive,
    describe=_describe,
)


MOE_KEYS = {"router": "block_sparse_moe.router.layer", "experts": "block_sparse_moe.experts", "shared": "shared_mlp"}
INTO, OUT = ".input_linear.weight", ".output_linear.weight"


class GraniteMoeHybridForCausalLM(CausalLM):
    spellings: ClassVar[dict[str, str]] = {".router.weight": ".router.layer.weight"}

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        hf = config.hf
        scales = {"embed_scale": float(hf.embedding_multiplier), "norm_scale": 1.0 / hf.logits_scaling}
        super().__init__(config, build, max_len, **scales)

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build, scale = config.hidden_size, self.build, float(hf.residual_multiplier)
        if spec.attention:
            own = config.attention_of(layer_id)
            attention = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias,
                out_scale=scale, build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            mamba = Mamba2Block(
                f"{name}.mamba", config.linear_of(Mamba2Config), layer_id, hidden, bias=hf.mamba_proj_bias,
                conv_bias=hf.mamba_conv_bias, gated_norm=(hf.rms_norm_eps, False), out_scale=scale, build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "mamba", mamba)
        if spec.ffn == "moe":
            return [mixer, ResidualPart("post_attention_layernorm", "", self._moe(f"{name}.moe", scale))]
        mlp = MLP(f"{name}.mlp", hidden, hf.shared_intermediate_size, scales=(1.0, scale), build=build)
        return [mixer, ResidualPart("post_attention_layernorm", "shared_mlp", mlp)]

    def _moe(self, name: str, scale: float) -> MoE:
        """Stores the shared expert, which has no gate, as more experts."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        experts = Experts(
            f"{name}.experts", hf.num_local_experts, hidden, hf.intermediate_size, activation="silu",
            shared_size=hf.shared_intermediate_size, scales=(scale, scale / SHARED_WEIGHT), build=build,
        )  # fmt: skip
        # A softmax over the chosen experts equals a renormalised one over all.
        router = SoftmaxRouter(
            f"{name}.router", hidden, hf.num_local_experts, top_k=hf.num_experts_per_tok, renormalize=True,
            shared_experts=experts.num_shared, build=build,
        )  # fmt: skip
        return MoE(router, experts, keys=MOE_KEYS)

    def parts_of(self, key: str) -> list[TensorPart]:
        """A tensor may hold all experts; gate and up share one."""
        stem = key.removesuffix(INTO).removesuffix(OUT)
        if stem == key:
            return super().parts_of(key)
        matrices = ("gate", "up") if key.endswith(INTO) else ("down",)
        if stem.endswith("block_sparse_moe"):
            return stacked_experts(f"{stem}.experts", matrices, self.config.hf.num_local_experts)
        return [(f"{stem}.{name}_proj.weight", _matrix(i, len(matrices))) for i, name in enumerate(matrices)]


def _matrix(i: int, count: int) -> Transform:
    return lambda t: t.unflatten(0, (count, -1))[i]
