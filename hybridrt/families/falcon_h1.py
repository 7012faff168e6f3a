"""Falcon-H1: every block runs softmax attention and Mamba-2 side by side, then an MLP."""

from typing import Any

from hybridrt.base.config import LayerSpec
from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MULTIPLIER, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, TRUE, either, list_of
from hybridrt.families.base import (
    FULL_ROPE,
    MAMBA2,
    MAMBA2_DEFAULTS,
    Family,
    FamilyFields,
    attention_config,
    derive_mamba2,
    mamba2_config,
)

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **MAMBA2,
    "mamba_d_ssm": either(NULL, SIZE),
    "rms_norm_eps": EPSILON,
    "rope_parameters": FULL_ROPE,
    **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate"), FLAG),
    **dict.fromkeys(("attention_bias", "projectors_bias", "mlp_bias"), FLAG),
    **dict.fromkeys(("lm_head_multiplier", "embedding_multiplier", "key_multiplier"), MULTIPLIER),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), MULTIPLIER),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), MULTIPLIER),
    "ssm_multipliers": list_of(MULTIPLIER, 5),
    "mlp_multipliers": list_of(MULTIPLIER, 2),
    # Blocks without one of the branches or without an MLP: hub files name them, and none uses them.
    "attn_layer_indices": NULL,
    "mamba_use_mlp": either(NULL, TRUE),
    **dict.fromkeys(("layer_types", "layers_block_type"), NULL),
}
DEFAULTS: dict[str, Any] = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
    "projectors_bias": False, "attention_bias": False, "mlp_bias": False, "rope_parameters": None,
    "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "mlp_multipliers": None,
    "ssm_multipliers": None,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    derive_mamba2(fields, fields["mamba_d_ssm"])
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if fields[name] is None:
            fields[name] = [1.0] * count


def _describe(hf: Any) -> FamilyFields:
    mamba = mamba2_config(hf, hf.mamba_d_ssm)
    layer = LayerSpec(attention=True, linear="mamba2", ffn="mlp")
    return {"layers": (layer,) * hf.num_hidden_layers, "linear": {"mamba2": mamba}, "attention": attention_config(hf)}


FAMILY = Family(
    model="hybridrt.models.falcon_h1:FalconH1ForCausalLM",
    model_type="falcon_h1",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
)
