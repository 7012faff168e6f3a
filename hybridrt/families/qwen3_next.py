"""Qwen3-Next: three Gated Delta Net blocks to one of gated attention, each followed by an MLP or experts."""

from typing import Any

from hybridrt.base.config import LayerSpec
from hybridrt.base.config_fields import (
    ATTENTION,
    COMMON,
    COUNT,
    EPSILON,
    MAX_LAYERS,
    OUTPUT_GATES,
    PERIOD,
    SIZE,
    FieldTypes,
)
from hybridrt.base.config_json import FLAG, NULL, OBJECT, either, integer, list_of
from hybridrt.families.base import (
    GDN,
    GDN_DEFAULTS,
    Family,
    FamilyFields,
    attention_config,
    derive_gdn,
    gdn_config,
    interleaved,
)

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **OUTPUT_GATES,
    **GDN,
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("decoder_sparse_step", "full_attention_interval"), PERIOD),
    "mlp_only_layers": list_of(integer(0, MAX_LAYERS)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
    "num_nextn_predict_layers": either(NULL, COUNT),
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "norm_topk_prob"), FLAG),
}
DEFAULTS: dict[str, Any] = {
    **GDN_DEFAULTS,
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "rope_parameters": None, "partial_rotary_factor": 0.25,
    "attention_bias": False, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
    "mlp_only_layers": None,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    derive_gdn(fields)
    if fields["mlp_only_layers"] is None:
        fields["mlp_only_layers"] = []


def _describe(hf: Any) -> FamilyFields:
    def sparse(i: int) -> bool:
        return hf.num_experts > 0 and i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0

    ffns = ["moe" if sparse(i) else "mlp" for i in range(len(hf.layer_types))]
    # Published configs leave the number out, and one head is in their checkpoints.
    one_head = getattr(hf, "num_nextn_predict_layers", 1) == 1
    head = (LayerSpec(True, None, "moe" if hf.num_experts > 0 else "mlp"),) if one_head else ()
    return interleaved(hf, gdn_config(hf), attention_config(hf), ffns) | {"mtp_layers": head}


FAMILY = Family(
    model="hybridrt.models.qwen3_next:Qwen3NextForCausalLM",
    model_type="qwen3_next",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
    mtp_head="hybridrt.models.qwen3_next:Qwen3NextMTP",
)
