"""Kimi-Linear: three Kimi Delta Attention blocks to one of latent attention, then experts or an MLP.

    x ─ norm ─ KDA or MLA ─ + ─ norm ─ MoE or MLP ─ +

Nothing is rotated: recurrent layers give positions (Moonshot AI 2025, arXiv:2510.26692).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hybridrt.base.config_fields import (
    EPSILON,
    LATENT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MULTIPLIER,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
)
from hybridrt.base.config_json import FALSE, FLAG, NULL, TRUE, FieldType, check_fields, either, integer, list_of, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.kinds.kda import KDAConfig
from hybridrt.layers.linear import MLP
from hybridrt.layers.mla import LatentAttention
from hybridrt.layers.moe import Experts, MoE, SigmoidGroupRouter
from hybridrt.layers.norm import LayerPart, ResidualPart
from hybridrt.models.base import SWIGLU, CausalLM
from hybridrt.models.config.family import Family, FamilyFields, derive_ffns, ffns, interleaved, latent_attention
from hybridrt.recurrent.kda import KDAMixer

GATES = ("gate_lower_bound", "use_full_rank_gate")
UNGATED = FieldType(
    f"an object without {' and '.join(GATES)}", lambda v: isinstance(v, Mapping) and not any(map(v.get, GATES))
)
FIELDS: FieldTypes = {
    **LATENT,
    **dict.fromkeys(("num_local_experts", "n_group", "topk_group", "num_experts_per_tok"), integer(1, MAX_EXPERTS)),
    "n_shared_experts": integer(1, 64),
    **dict.fromkeys(("moe_intermediate_size", "linear_num_heads"), SIZE),
    "routed_scaling_factor": MULTIPLIER,
    "layer_types": list_of(one_of("linear_attention", "full_attention")),
    "mlp_layer_types": list_of(one_of("dense", "sparse")),
    "linear_head_dim": STATE,
    "linear_conv_kernel_dim": TAPS,
    "rms_norm_eps": EPSILON,
    **dict.fromkeys(("attention_bias", "norm_topk_prob"), FLAG),
    # Others would mean a different model.
    **dict.fromkeys(("mla_use_nope", "use_grouped_topk"), either(NULL, TRUE)),
    "moe_router_activation_func": either(NULL, one_of("sigmoid")),
    "moe_layer_freq": either(NULL, integer(1, 1)),
    "num_nextn_predict_layers": either(NULL, integer(0, 0)),
    # Parts of Kimi-K3.
    **dict.fromkeys(("attn_res_block_size", "routed_expert_hidden_size"), either(NULL, integer(0, 0))),
    **dict.fromkeys(("mla_use_output_gate", "latent_moe_use_norm"), either(NULL, FALSE)),
    "first_k_dense_replace": integer(0, MAX_LAYERS),
    "linear_attn_config": either(NULL, UNGATED),
}

DEFAULTS: dict[str, Any] = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "n_shared_experts": 1,
    "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "attention_bias": False, "num_local_experts": 256, "first_k_dense_replace": 1, "mlp_layer_types": None,
    "layer_types": None, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
OLDER = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}  # fmt: skip
# linear_attn_config -> fields. Its layers count from 1.
LINEAR = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip
PLACES = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
EXPERTS = (
    "num_experts", "num_local_experts", "num_experts_per_token", "num_experts_per_tok", "num_shared_experts",
    "n_shared_experts", "num_expert_group", "n_group", "topk_group", "moe_intermediate_size", "mlp_layer_types",
)  # fmt: skip


def _rewrite(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Gives each layer an MLP without experts (null or 0), as in the published code."""
    counts = ("num_experts", "num_local_experts")
    check_fields(raw, dict.fromkeys(counts, either(NULL, integer(0, MAX_EXPERTS))), file)
    name = next((count for count in counts if count in raw), None)
    if name is None or raw[name]:
        return dict(raw)
    if "sparse" in (raw.get("mlp_layer_types") or ()):
        raise ConfigError(f"{file}: {name} is {raw[name]}, but mlp_layer_types has sparse layers, which have experts")
    return {k: v for k, v in raw.items() if k not in EXPERTS} | {"first_k_dense_replace": MAX_LAYERS}


def _derive(fields: dict[str, Any]) -> None:
    linear, count = fields.get("linear_attn_config") or {}, fields["num_hidden_layers"]
    fields |= {name: linear[theirs] for theirs, name in LINEAR.items() if theirs in linear}
    if fields["layer_types"] is None:
        check_fields(linear, dict.fromkeys(PLACES, list_of(integer(1, count))), "linear_attn_config")
        given = [name for name in PLACES if name in linear]
        if len(given) == 1:
            raise ConfigError(f"linear_attn_config has {given[0]} alone; it must have both of {' and '.join(PLACES)}")
        if given:
            kinds = {layer: kind for name, kind in PLACES.items() for layer in linear[name]}
        else:
            kinds = {i + 1: "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)}
        fields["layer_types"] = [kinds.get(i + 1) for i in range(count)]
    derive_ffns(fields)


def _describe(hf: Any) -> FamilyFields:
    kda = KDAConfig(hf.linear_num_heads, hf.linear_head_dim, hf.linear_conv_kernel_dim, gate_rank=hf.linear_head_dim)
    return interleaved(hf, kda, latent_attention(hf, rotary=False), ffns(hf))


FAMILY = Family(
    model="hybridrt.models.kimi_linear:KimiLinearForCausalLM",
    model_type="kimi_linear",
    fields=FIELDS,
    defaults=DEFAULTS,
    older=OLDER,
    derive=_derive,
    describe=_describe,
    rewrite=_rewrite,
)


MOE_KEYS = {"router": "gate", "experts": "experts", "shared": "shared_experts"}


class KimiLinearForCausalLM(CausalLM):
    gated: ClassVar[bool] = False  # outputs of latent attention
    spellings: ClassVar[dict[str, str]] = {**SWIGLU, ".block_sparse_moe.": ".mlp.", ".forget_gate.": "."}
    joined_convs = True

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        mixer: LayerPart
        if spec.attention:
            own = config.attention_of(layer_id)
            mixer = LatentAttention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias,
                gated=self.gated, build=build,
            )  # fmt: skip
        else:
            mixer = self.recurrent(layer_id, name)
        ffn: LayerPart = self._moe(f"{name}.moe", layer_id) if spec.ffn == "moe" else self._mlp(f"{name}.mlp")
        return [
            ResidualPart("input_layernorm", "self_attn", mixer),
            ResidualPart("post_attention_layernorm", "mlp", ffn),
        ]

    def recurrent(self, layer_id: int, name: str) -> LayerPart:
        config, eps = self.config, self.config.hf.rms_norm_eps
        return KDAMixer(f"{name}.kda", config.linear_of(KDAConfig), layer_id, config.hidden_size, eps, build=self.build)

    def _mlp(self, name: str) -> MLP:
        return MLP(name, self.config.hidden_size, self.config.hf.intermediate_size, build=self.build)

    def limits(self, layer_id: int) -> tuple[float | None, float | None]:
        """SwiGLU limits of a layer's routed and shared experts."""
        return None, None

    def _moe(self, name: str, layer_id: int) -> MoE:
        """Adds the shared expert as one more, or separately if its limit differs."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build_of(layer_id)
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
