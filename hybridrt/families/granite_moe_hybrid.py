"""Granite 4-H: Mamba-2 blocks and a few of attention, each followed by shared and routed experts, or by an MLP."""

from typing import Any

from hybridrt.base.config_fields import ATTENTION, COMMON, COUNT, EPSILON, MULTIPLIER, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, either, list_of, number, one_of
from hybridrt.families.base import (
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
