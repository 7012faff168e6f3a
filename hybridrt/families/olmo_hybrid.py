"""OLMo-Hybrid: three Gated Delta Net blocks to one of attention, each followed by an MLP."""

from typing import Any

from hybridrt.config_fields import ATTENTION, COMMON, EPSILON, FieldTypes
from hybridrt.config_json import FLAG, NULL, either
from hybridrt.families.base import FULL_ROPE, GDN, Family, FamilyFields, attention_config, gdn_config, interleaved

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **GDN,
    "rms_norm_eps": EPSILON,
    "rope_parameters": either(NULL, FULL_ROPE),
    **dict.fromkeys(("linear_allow_neg_eigval", "attention_bias"), FLAG),
}


def _describe(hf: Any) -> FamilyFields:
    gdn = gdn_config(hf, beta_scale=2.0 if hf.linear_allow_neg_eigval else 1.0)
    # Released models rotate nothing: their rope_parameters are null, or have no theta.
    rotary = (hf.rope_parameters or {}).get("rope_theta") is not None
    return interleaved(hf, gdn, attention_config(hf, rotary=rotary), "mlp")


FAMILY = Family(
    model="hybridrt.models.olmo_hybrid:OlmoHybridForCausalLM",
    config_class="OlmoHybridConfig",
    fields=FIELDS,
    describe=_describe,
)
