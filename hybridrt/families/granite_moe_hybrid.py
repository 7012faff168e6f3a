"""Granite 4-H: Mamba-2 blocks and a few of attention, each followed by shared and routed experts, or by an MLP."""

from typing import Any

from hybridrt.config_fields import ATTENTION, COMMON, COUNT, EPSILON, MULTIPLIER, SIZE, FieldTypes
from hybridrt.config_json import FLAG, NULL, either, list_of, number, one_of
from hybridrt.families.base import FULL_ROPE, MAMBA2, Family, FamilyFields, attention_config, interleaved, mamba2_config

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **MAMBA2,
    **dict.fromkeys(("mamba_d_head", "shared_intermediate_size"), SIZE),
    "layer_types": list_of(one_of("linear_attention", "full_attention", "mamba", "attention")),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), COUNT),
    "position_embedding_type": either(NULL, one_of("rope", "nope")),
    "rope_parameters": either(NULL, FULL_ROPE),
    "rms_norm_eps": EPSILON,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), MULTIPLIER),
    "logits_scaling": number(1e-6, 1e6),
    "attention_bias": FLAG,
}


def _describe(hf: Any) -> FamilyFields:
    mamba = mamba2_config(hf, hf.mamba_d_head)
    rotary = hf.position_embedding_type == "rope"
    attention = attention_config(hf, rotary=rotary, scale=float(hf.attention_multiplier))
    return interleaved(hf, mamba, attention, "moe" if hf.num_local_experts > 0 else "mlp")


FAMILY = Family(
    model="hybridrt.models.granite_moe_hybrid:GraniteMoeHybridForCausalLM",
    config_class="GraniteMoeHybridConfig",
    fields=FIELDS,
    describe=_describe,
)
