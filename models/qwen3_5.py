"""Qwen3.5 and successors: Qwen3-Next's blocks, with one checkpoint tensor for each projection.

    x ─ norm ─ GDN or gated attention ─ + ─ norm ─ MLP or MoE ─ +

Checkpoints with images hold the text part under `model.language_model`, and a tower under
`model.visual` (Qwen team 2026).
"""

from dataclasses import replace
from typing import Any, ClassVar

from hybridrt.base.config_fields import ATTENTION, COMMON, COUNT, EPSILON, OUTPUT_GATES, PERIOD, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, OBJECT, either
from hybridrt.base.model_config import LayerSpec
from hybridrt.models.base import MTP_KEYS
from hybridrt.models.config.family import (
    GDN,
    GDN_DEFAULTS,
    Family,
    FamilyFields,
    attention_config,
    derive_gdn,
    gdn_config,
    interleaved,
)
from hybridrt.models.qwen3_next import Qwen3NextForCausalLM
from hybridrt.models.vision.qwen3_5 import Qwen3_5Tower, read
from hybridrt.recurrent.gdn import GDNKeys

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **OUTPUT_GATES,
    **GDN,
    "mtp_num_hidden_layers": either(NULL, COUNT),
    "mtp_use_dedicated_embeddings": either(NULL, FLAG),
    "full_attention_interval": PERIOD,
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    "attention_bias": FLAG,
}
MOE_FIELDS: FieldTypes = {
    **{name: kind for name, kind in FIELDS.items() if name != "intermediate_size"},
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
}
DEFAULTS: dict[str, Any] = {
    **GDN_DEFAULTS,
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "rope_parameters": None, "partial_rotary_factor": 0.25,
    "attention_bias": False,
}  # fmt: skip
MROPE_SECTION = (11, 11, 10)
MOE_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip


def _describe(hf: Any, ffn: str) -> FamilyFields:
    one_head = getattr(hf, "mtp_num_hidden_layers", 0) == 1 and not getattr(hf, "mtp_use_dedicated_embeddings", False)
    head = (LayerSpec(True, None, ffn),) if one_head else ()
    sections = hf.rope_parameters.get("mrope_section") or MROPE_SECTION
    attention = attention_config(hf)
    attention = replace(attention, rope={**(attention.rope or {}), "mrope_section": sections})
    return interleaved(hf, gdn_config(hf), attention, ffn) | {"mtp_layers": head}


DENSE = Family(
    model="hybridrt.models.qwen3_5:Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=derive_gdn,
    describe=lambda hf: _describe(hf, "mlp"),
    mtp_head="hybridrt.models.qwen3_next:Qwen3NextMTP",
)
MOE = replace(
    DENSE,
    model="hybridrt.models.qwen3_5:Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    fields=MOE_FIELDS,
    defaults=MOE_DEFAULTS,
    describe=lambda hf: _describe(hf, "moe"),
)
IMAGES = ("image_token_id", "video_token_id")
IMAGE_DEFAULTS = {"image_token_id": 248056, "video_token_id": 248057}
SEEING = replace(
    DENSE,
    model="hybridrt.models.qwen3_5:Qwen3_5ForConditionalGeneration",
    defaults={**DEFAULTS, **IMAGE_DEFAULTS},
    section="text_config",
    image_tokens=IMAGES,
    vision=read,
)
SEEING_MOE = replace(
    MOE,
    model="hybridrt.models.qwen3_5:Qwen3_5MoeForConditionalGeneration",
    defaults={**MOE_DEFAULTS, **IMAGE_DEFAULTS},
    section="text_config",
    image_tokens=IMAGES,
    vision=read,
)


TOWER_KEYS = r"model\.visual\..*"


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    gdn_keys: ClassVar[GDNKeys] = GDNKeys({"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"})
    skipped_keys = (MTP_KEYS, TOWER_KEYS)
    tower_class, tower_keys = Qwen3_5Tower, TOWER_KEYS
    spellings: ClassVar[dict[str, str]] = {"model.language_model.": "model."}

    def renormalizes(self) -> bool:
        return True


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts."""


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Qwen3.5 with images."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """Qwen3.5 with experts and images."""
