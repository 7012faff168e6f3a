"""LFM2: gated short convolutions with a layer of attention every few, each followed by an MLP or experts."""

from typing import Any

from hybridrt.config_fields import ATTENTION, COMMON, COUNT, EPSILON, MAX_EXPERTS, MULTIPLIER, SIZE, TAPS, FieldTypes
from hybridrt.config_json import FLAG, integer, list_of, number, one_of
from hybridrt.families.base import FULL_ROPE, Family, FamilyFields, attention_config, interleaved
from hybridrt.kinds.short_conv import ShortConvConfig

SHARED: FieldTypes = {
    **COMMON,
    **ATTENTION,
    "conv_L_cache": TAPS,
    "conv_bias": FLAG,
    "layer_types": list_of(one_of("conv", "full_attention")),
    "norm_eps": EPSILON,
    "rope_parameters": FULL_ROPE,
}
DENSE: FieldTypes = {
    **SHARED,
    "block_auto_adjust_ff_dim": FLAG,
    "block_ffn_dim_multiplier": number(1e-3, 1e3),
    "block_multiple_of": SIZE,
}
MOE: FieldTypes = {
    **SHARED,
    "num_dense_layers": COUNT,
    "num_experts": integer(2, MAX_EXPERTS),
    "num_experts_per_tok": COUNT,
    "moe_intermediate_size": SIZE,
    "routed_scaling_factor": MULTIPLIER,
    **dict.fromkeys(("norm_topk_prob", "use_expert_bias"), FLAG),
}


def _describe(hf: Any) -> FamilyFields:
    dense = getattr(hf, "num_dense_layers", len(hf.layer_types))  # experts are in the layers behind them
    ffns = ["mlp" if i < dense else "moe" for i in range(len(hf.layer_types))]
    conv = ShortConvConfig(hf.hidden_size, hf.conv_L_cache)
    return interleaved(hf, conv, attention_config(hf), ffns)


FAMILY = Family(
    model="hybridrt.models.lfm2:Lfm2ForCausalLM", config_class="Lfm2Config", fields=DENSE, describe=_describe
)
MOE_FAMILY = Family(
    model="hybridrt.models.lfm2:Lfm2MoeForCausalLM", config_class="Lfm2MoeConfig", fields=MOE, describe=_describe
)
