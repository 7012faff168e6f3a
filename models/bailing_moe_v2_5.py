"""Ling 2.5 and Ring 2.5: blocks of simple gated linear attention or latent attention.

    x ─ norm ─ simple GLA or MLA ─ + ─ norm ─ MoE or MLP ─ +

Ant Group 2026. Decays slow down from layer to layer, counted as in the vendor's training code,
SGLang and vLLM (modeling_bailing_moe_v2_5.py counts from one layer earlier).

transformers has no class. Fields are those of Ling 3 and of configuration_bailing_moe_v2_5.py
(inclusionAI/Ring-V2.5).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hybridrt.base.config_fields import COUNT, OFF, ROPE, SIZE, FieldTypes
from hybridrt.base.config_json import NULL, TRUE, check_fields, either, one_of
from hybridrt.base.errors import ConfigError, shown
from hybridrt.base.model_config import AttentionConfig, LayerSpec
from hybridrt.kinds.simple_gla import SimpleGLAConfig
from hybridrt.layers.norm import LayerPart
from hybridrt.models.bailing_hybrid import FAMILY as HYBRID
from hybridrt.models.bailing_hybrid import BailingHybridForCausalLM, check_shared_experts
from hybridrt.models.config.family import FamilyFields, ffns, interleaved, latent_attention
from hybridrt.recurrent.lightning import alibi_rates
from hybridrt.recurrent.simple_gla import SimpleGLAMixer

FIELDS: FieldTypes = {
    **HYBRID.fields,
    "group_norm_size": SIZE,
    "rotary_dim": either(NULL, SIZE),
    "num_kv_heads_for_linear_attn": either(NULL, COUNT),
    **dict.fromkeys(("use_qk_norm", "norm_topk_prob"), TRUE),
    **dict.fromkeys(("linear_rope", "rope_interleave"), either(NULL, TRUE)),
    **dict.fromkeys(("attention_bias", "linear_silu", "use_linear_silu"), OFF),
    **dict.fromkeys(
        (
            "linear_attention", "gated_attention_proj_granularity_type", "expert_swiglu_limit_list",
            "share_expert_swiglu_limit_list",
        ),
        NULL,
    ),
}  # fmt: skip
# Defaults of the published class that differ from Ling 3's.
DEFAULTS: dict[str, Any] = {
    "layer_group_size": 5, "group_norm_size": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 600000.0, "routed_scaling_factor": 1.0,
    "max_position_embeddings": 32768,
}  # fmt: skip


def _rewrite(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    check_fields(raw, {"model_type": one_of("bailing_hybrid", "bailing_moe_v2_5", "bailing_moe_linear")}, file)
    return {**DEFAULTS, **raw, "model_type": "bailing_hybrid"}


def _linear(hf: Any) -> SimpleGLAConfig:
    linear = SimpleGLAConfig(hf.linear_num_heads, hf.linear_head_dim)
    heads, part = getattr(hf, "num_kv_heads_for_linear_attn", None), getattr(hf, "rotary_dim", None)
    if heads not in (None, 0, linear.num_heads):
        raise ConfigError(f"num_kv_heads_for_linear_attn is {heads}; hybridrt runs {linear.num_heads}, one a head")
    factor = hf.rope_parameters.get("partial_rotary_factor")
    rotated = int(linear.head_dim * (factor or 1)) if ROPE["partial_rotary_factor"].holds(factor) else 0
    if rotated < 2 or rotated % 2:
        raise ConfigError(
            f"partial_rotary_factor is {shown(factor)}; of the {linear.head_dim} numbers of a head it must turn pairs"
        )
    if part not in (None, rotated):
        raise ConfigError(f"rotary_dim is {part}; by head_dim and partial_rotary_factor it must be {rotated}")
    return linear


def _describe(hf: Any) -> FamilyFields:
    check_shared_experts(hf)
    count, group = hf.num_hidden_layers, hf.layer_group_size
    full = [(i + 1) % group == 0 or i >= count // group * group for i in range(count)]
    layers = interleaved(hf, _linear(hf), latent_attention(hf, rotary=True), ffns(hf), full)
    return layers | {"mtp_layers": (LayerSpec(True, None, "moe"),) if hf.num_mtp_layers == 1 else ()}


FAMILY = replace(
    HYBRID,
    model="hybridrt.models.bailing_moe_v2_5:BailingMoeV2_5ForCausalLM",
    fields=FIELDS,
    describe=_describe,
    rewrite=_rewrite,
)


class BailingMoeV2_5ForCausalLM(BailingHybridForCausalLM):
    gated: ClassVar[bool] = False

    def recurrent(self, layer_id: int, name: str) -> LayerPart:
        config, hf = self.config, self.config.hf
        linear = config.linear_of(SimpleGLAConfig)
        heads = AttentionConfig(linear.num_heads, linear.num_heads, linear.head_dim, dict(hf.rope_parameters))
        table = self.cos_sin(heads)
        assert table is not None, "heads are rotated"
        rates = alibi_rates(linear.num_heads) * (1.0 - layer_id / (len(config.layers) - 1) + 1e-5)
        return SimpleGLAMixer(
            f"{name}.gla", linear, layer_id, config.hidden_size, rates=rates, cos_sin=table, eps=hf.rms_norm_eps,
            groups=hf.group_norm_size, build=self.build,
        )  # fmt: skip
