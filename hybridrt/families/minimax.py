"""MiniMax: lightning attention with a layer of softmax attention every few, each followed by experts."""

from typing import Any

from hybridrt.config import AttentionConfig
from hybridrt.config_fields import ATTENTION, COMMON, EPSILON, MAX_EXPERTS, MULTIPLIER, SIZE, FieldTypes
from hybridrt.config_json import NULL, either, integer, list_of, one_of
from hybridrt.errors import ConfigError
from hybridrt.families.base import FULL_ROPE, Family, FamilyFields, attention_config, interleaved
from hybridrt.kinds.lightning import LightningConfig

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    "layer_types": list_of(one_of("linear_attention", "full_attention")),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), integer(1, MAX_EXPERTS)),
    **dict.fromkeys(("full_attn_alpha_factor", "full_attn_beta_factor"), MULTIPLIER),
    **dict.fromkeys(("linear_attn_alpha_factor", "linear_attn_beta_factor"), MULTIPLIER),
    **dict.fromkeys(("mlp_alpha_factor", "mlp_beta_factor"), MULTIPLIER),
    "rms_norm_eps": EPSILON,
    "rope_parameters": FULL_ROPE,
    "rotary_dim": either(NULL, SIZE),
}


def _attention(hf: Any) -> AttentionConfig:
    """Released models were trained with a part of each head rotated, and name its size `rotary_dim`. transformers 5.23
    does not read that, nor `partial_rotary_factor`: it rotates whole heads."""
    rotated, head_dim = getattr(hf, "rotary_dim", None), attention_config(hf).head_dim
    if rotated is not None:
        if rotated > head_dim:
            raise ConfigError(f"rotary_dim is {rotated}; it must be at most head_dim, {head_dim}")
        hf.rope_parameters = {**hf.rope_parameters, "partial_rotary_factor": rotated / head_dim}
    return attention_config(hf)


def _describe(hf: Any) -> FamilyFields:
    attention = _attention(hf)
    return interleaved(hf, LightningConfig(attention.num_heads, attention.head_dim), attention, "moe")


FAMILY = Family(
    model="hybridrt.models.minimax:MiniMaxForCausalLM",
    config_class="MiniMaxConfig",
    fields=FIELDS,
    describe=_describe,
)
