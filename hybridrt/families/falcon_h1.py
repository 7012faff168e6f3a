"""Falcon-H1: every block runs softmax attention and Mamba-2 side by side, then an MLP."""

from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_fields import ATTENTION, COMMON, EPSILON, MULTIPLIER, SIZE, FieldTypes
from hybridrt.config_json import FLAG, NULL, TRUE, either, list_of
from hybridrt.families.base import FULL_ROPE, MAMBA2, Family, FamilyFields, attention_config, mamba2_config

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **MAMBA2,
    "mamba_expand": SIZE,
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
}


def _describe(hf: Any) -> FamilyFields:
    d_ssm = hf.mamba_d_ssm if hf.mamba_d_ssm is not None else int(hf.mamba_expand * hf.hidden_size)
    mamba = mamba2_config(hf, d_ssm // hf.mamba_n_heads)
    layer = LayerSpec(attention=True, linear="mamba2", ffn="mlp")
    return {"layers": (layer,) * hf.num_hidden_layers, "linear": {"mamba2": mamba}, "attention": attention_config(hf)}


FAMILY = Family(
    model="hybridrt.models.falcon_h1:FalconH1ForCausalLM",
    config_class="FalconH1Config",
    fields=FIELDS,
    describe=_describe,
)
