"""Bamba: Mamba-2 blocks and a few of attention, each followed by an MLP."""

from typing import Any

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MAX_LAYERS, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, OBJECT, either, integer, list_of
from hybridrt.families.base import (
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
    "attn_layer_indices": either(NULL, list_of(integer(0, MAX_LAYERS))),
    **dict.fromkeys(("layer_types", "layers_block_type"), NULL),  # which attn_layer_indices say
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "mlp_bias"), FLAG),
}
DEFAULTS: dict[str, Any] = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 262144, "attn_layer_indices": None, "rope_parameters": None, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    derive_mamba2(fields)
    fields["partial_rotary_factor"] = 0.5  # unless rope_parameters says another


def _describe(hf: Any) -> FamilyFields:
    mamba = mamba2_config(hf)
    full = [i in (hf.attn_layer_indices or ()) for i in range(hf.num_hidden_layers)]
    return interleaved(hf, mamba, attention_config(hf), "mlp", full)


FAMILY = Family(
    model="hybridrt.models.bamba:BambaForCausalLM",
    model_type="bamba",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
)
