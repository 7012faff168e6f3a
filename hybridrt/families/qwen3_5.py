"""Qwen3.5 and its successors 3.6 and 3.8: as Qwen3-Next, dense or with experts; the text part of those that see."""

from dataclasses import replace
from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_fields import ATTENTION, COMMON, COUNT, EPSILON, OUTPUT_GATES, SIZE, FieldTypes
from hybridrt.config_json import FLAG, NULL, OBJECT, either
from hybridrt.families.base import GDN, Family, FamilyFields, attention_config, gdn_config, interleaved

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **OUTPUT_GATES,
    **GDN,
    "mtp_num_hidden_layers": either(NULL, COUNT),
    "mtp_use_dedicated_embeddings": either(NULL, FLAG),
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    "attention_bias": FLAG,
}
MOE_FIELDS: FieldTypes = {
    **{name: kind for name, kind in FIELDS.items() if name != "intermediate_size"},
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
}


def _describe(hf: Any, ffn: str) -> FamilyFields:
    # Only a head that shares the model's embedding is implemented.
    one_head = getattr(hf, "mtp_num_hidden_layers", 0) == 1 and not getattr(hf, "mtp_use_dedicated_embeddings", False)
    # In text all three positions of its rotary embedding (mrope_section) are the token's own: it is the plain one.
    head = (LayerSpec(True, None, ffn),) if one_head else ()
    return interleaved(hf, gdn_config(hf), attention_config(hf), ffn) | {"mtp_layers": head}


DENSE = Family(
    model="hybridrt.models.qwen3_5:Qwen3_5ForCausalLM",
    config_class="Qwen3_5TextConfig",
    fields=FIELDS,
    describe=lambda hf: _describe(hf, "mlp"),
    mtp_head="hybridrt.models.qwen3_next:Qwen3NextMTP",
)
MOE = replace(
    DENSE,
    model="hybridrt.models.qwen3_5:Qwen3_5MoeForCausalLM",
    config_class="Qwen3_5MoeTextConfig",
    fields=MOE_FIELDS,
    describe=lambda hf: _describe(hf, "moe"),
)
IMAGES = ("image_token_id", "video_token_id")
SEEING = replace(
    DENSE,
    model="hybridrt.models.qwen3_5:Qwen3_5ForConditionalGeneration",
    section="text_config",
    image_tokens=IMAGES,
)
SEEING_MOE = replace(
    MOE,
    model="hybridrt.models.qwen3_5:Qwen3_5MoeForConditionalGeneration",
    section="text_config",
    image_tokens=IMAGES,
)
