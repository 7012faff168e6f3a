"""OLMo-Hybrid: three Gated Delta Net blocks to one of attention, each followed by an MLP."""

from typing import Any

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, either
from hybridrt.families.base import FULL_ROPE, GDN, Family, FamilyFields, attention_config, gdn_config, interleaved

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **GDN,
    "rms_norm_eps": EPSILON,
    "rope_parameters": either(NULL, FULL_ROPE),
    **dict.fromkeys(("linear_allow_neg_eigval", "attention_bias"), FLAG),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 30, "num_key_value_heads": None, "max_position_embeddings": 65536, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "rope_parameters": None, "attention_bias": False, "layer_types": None,
    "linear_num_key_heads": None, "linear_num_value_heads": None, "linear_key_head_dim": None,
    "linear_value_head_dim": None, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    if fields["layer_types"] is None:
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(fields["num_hidden_layers"])]
        fields["layer_types"] = kinds if len(kinds) > 3 else [*kinds[:-1], "full_attention"]
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if fields[name] is None:
            fields[name] = fields["num_attention_heads"]
    if fields["linear_key_head_dim"] is None:
        fields["linear_key_head_dim"] = int(0.75 * fields["hidden_size"] / fields["linear_num_key_heads"])
    if fields["linear_value_head_dim"] is None:
        fields["linear_value_head_dim"] = 2 * fields["linear_key_head_dim"]


def _describe(hf: Any) -> FamilyFields:
    gdn = gdn_config(hf, beta_scale=2.0 if hf.linear_allow_neg_eigval else 1.0)
    # Released models rotate nothing: their rope_parameters are null, or have no theta.
    rotary = (hf.rope_parameters or {}).get("rope_theta") is not None
    return interleaved(hf, gdn, attention_config(hf, rotary=rotary), "mlp")


FAMILY = Family(
    model="hybridrt.models.olmo_hybrid:OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
)
