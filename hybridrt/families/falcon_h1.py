"""Falcon-H1: every block runs softmax attention and Mamba-2 side by side, then an MLP."""

from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_fields import (
    ATTENTION,
    CHUNK,
    COMMON,
    DT_LIMIT,
    EPSILON,
    MULTIPLIER,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
)
from hybridrt.config_json import FLAG, NULL, OBJECT, TRUE, either, list_of
from hybridrt.families.base import Family, FamilyFields, attention_config
from hybridrt.kinds.mamba2 import Mamba2Config

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_expand", "mamba_n_heads", "mamba_n_groups"), SIZE),
    "mamba_d_ssm": either(NULL, SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    "mamba_chunk_size": CHUNK,
    "time_step_limit": DT_LIMIT,
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate"), FLAG),
    **dict.fromkeys(("attention_bias", "projectors_bias", "mlp_bias"), FLAG),
    **dict.fromkeys(("lm_head_multiplier", "embedding_multiplier", "key_multiplier"), MULTIPLIER),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), MULTIPLIER),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), MULTIPLIER),
    "ssm_multipliers": list_of(MULTIPLIER, 5),
    "mlp_multipliers": list_of(MULTIPLIER, 2),
    # Blocks without one of the branches or without an MLP: hub files name them, and none asks for them.
    "attn_layer_indices": NULL,
    "mamba_use_mlp": either(NULL, TRUE),
}


def _describe(hf: Any) -> FamilyFields:
    d_ssm = hf.mamba_d_ssm if hf.mamba_d_ssm is not None else int(hf.mamba_expand * hf.hidden_size)
    mamba = Mamba2Config(
        num_heads=hf.mamba_n_heads,
        head_dim=d_ssm // hf.mamba_n_heads,
        state_size=hf.mamba_d_state,
        n_groups=hf.mamba_n_groups,
        conv_kernel=hf.mamba_d_conv,
        chunk_size=hf.mamba_chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )
    layer = LayerSpec(attention=True, linear="mamba2", ffn="mlp")
    return {"layers": (layer,) * hf.num_hidden_layers, "linear": {"mamba2": mamba}, "attention": attention_config(hf)}


FAMILY = Family(
    model="hybridrt.models.falcon_h1:FalconH1ForCausalLM",
    config_class="FalconH1Config",
    fields=FIELDS,
    describe=_describe,
)
