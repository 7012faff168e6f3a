"""Bamba: Mamba-2 blocks and a few of attention, each followed by an MLP."""

from typing import Any

from hybridrt.config_fields import ATTENTION, COMMON, EPSILON, LAYERS, MAX_LAYERS, SIZE, FieldTypes
from hybridrt.config_json import FLAG, NULL, OBJECT, either, integer, list_of
from hybridrt.families.base import MAMBA2, Family, FamilyFields, attention_config, interleaved, mamba2_config

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **MAMBA2,
    "num_hidden_layers": LAYERS,
    "attn_layer_indices": either(NULL, list_of(integer(0, MAX_LAYERS))),
    "mamba_d_head": SIZE,
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "mlp_bias"), FLAG),
}


def _describe(hf: Any) -> FamilyFields:
    mamba = mamba2_config(hf, hf.mamba_d_head)
    full = [i in (hf.attn_layer_indices or ()) for i in range(hf.num_hidden_layers)]
    return interleaved(hf, mamba, attention_config(hf), "mlp", full)


FAMILY = Family(
    model="hybridrt.models.bamba:BambaForCausalLM",
    config_class="BambaConfig",
    fields=FIELDS,
    describe=_describe,
)
