"""Bamba: Mamba-2 blocks and a few of attention, each followed by an MLP."""

from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_fields import (
    ATTENTION,
    CHUNK,
    COMMON,
    DT_LIMIT,
    EPSILON,
    LAYERS,
    MAX_LAYERS,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
)
from hybridrt.config_json import FLAG, NULL, OBJECT, either, integer, list_of
from hybridrt.families.base import Family, FamilyFields, attention_config
from hybridrt.kinds.mamba2 import Mamba2Config

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    "num_hidden_layers": LAYERS,
    "attn_layer_indices": either(NULL, list_of(integer(0, MAX_LAYERS))),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_n_groups"), SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    "mamba_chunk_size": CHUNK,
    "time_step_limit": DT_LIMIT,
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"), FLAG),
}


def _describe(hf: Any) -> FamilyFields:
    mamba = Mamba2Config(
        num_heads=hf.mamba_n_heads,
        head_dim=hf.mamba_d_head,
        state_size=hf.mamba_d_state,
        n_groups=hf.mamba_n_groups,
        conv_kernel=hf.mamba_d_conv,
        chunk_size=hf.mamba_chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )
    full = set(hf.attn_layer_indices or ())
    kinds = LayerSpec(False, "mamba2", "mlp"), LayerSpec(True, None, "mlp")
    layers = tuple(kinds[i in full] for i in range(hf.num_hidden_layers))
    return {"layers": layers, "linear": {"mamba2": mamba}, "attention": attention_config(hf)}


FAMILY = Family(
    model="hybridrt.models.bamba:BambaForCausalLM",
    config_class="BambaConfig",
    fields=FIELDS,
    describe=_describe,
)
