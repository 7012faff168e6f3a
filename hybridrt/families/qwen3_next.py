"""Qwen3-Next: three Gated Delta Net blocks to one of gated attention, each followed by an MLP or experts."""

from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_fields import (
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
from hybridrt.config_json import FLAG, NULL, OBJECT, either, integer, list_of
from hybridrt.families.base import GDN, Family, FamilyFields, attention_config, gdn_config, interleaved

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **OUTPUT_GATES,
    **GDN,
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), COUNT),
    "decoder_sparse_step": PERIOD,
    "mlp_only_layers": list_of(integer(0, MAX_LAYERS)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
    "num_nextn_predict_layers": either(NULL, COUNT),
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "norm_topk_prob"), FLAG),
}


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
    config_class="Qwen3NextConfig",
    fields=FIELDS,
    describe=_describe,
    mtp_head="hybridrt.models.qwen3_next:Qwen3NextMTP",
)
