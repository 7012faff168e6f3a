"""MiniMax: lightning attention with a layer of softmax attention every few, each followed by experts.

Published checkpoints (MiniMaxAI/MiniMax-Text-01 and MiniMax-M1-80k on the hub) spell their config.json otherwise than
those that transformers writes.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrt.base.config import AttentionConfig
from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MAX_EXPERTS, MULTIPLIER, SIZE, FieldTypes
from hybridrt.base.config_json import NULL, TRUE, check_fields, either, integer, list_of, one_of
from hybridrt.base.errors import ConfigError
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
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "num_experts_per_tok": 2, "num_local_experts": 8,
    "rope_parameters": None, "rope_theta": 1000000.0, "layer_types": None, "full_attn_alpha_factor": 1,
    "full_attn_beta_factor": 1, "linear_attn_alpha_factor": 1, "linear_attn_beta_factor": 1, "mlp_alpha_factor": 1,
    "mlp_beta_factor": 1,
}  # fmt: skip
# Factors in published files, and what transformers names them.
FACTORS = {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for theirs, ours in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
PUBLISHED: FieldTypes = {
    "model_type": one_of("minimax_text_01", "MiniMaxText01", "minimax_m1", "MiniMaxM1"),
    **dict.fromkeys(FACTORS, MULTIPLIER),
    # Without it, factors would multiply the inputs of the norms.
    "postnorm": TRUE,
    # An MLP that every token passes beside the experts, of the model or of each layer: no published checkpoint has one.
    "shared_intermediate_size": either(integer(0, 0), list_of(integer(0, 0))),
}
KINDS = ("linear_attention", "full_attention")


def _rewrite(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Fields by the names of transformers. Published code takes postnorm for false where it is left out."""
    kinds = list_of(integer(0, 1), raw.get("num_hidden_layers"))
    asked = {"attn_type_list": None, "postnorm": False, **raw}
    check_fields(asked, {**PUBLISHED, "attn_type_list": kinds}, file)
    factors = {FACTORS[name]: value for name, value in raw.items() if name in FACTORS}
    types = [KINDS[kind] for kind in asked["attn_type_list"]]
    return {**raw, **factors, "layer_types": types, "model_type": "minimax"}


def _derive(fields: dict[str, Any]) -> None:
    if fields["layer_types"] is None:
        fields["layer_types"] = [KINDS[(i + 1) % 2] for i in range(fields["num_hidden_layers"])]


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
    model_type="minimax",
    fields=FIELDS,
    defaults=DEFAULTS,
    older={"num_experts": "num_local_experts"},
    derive=_derive,
    describe=_describe,
)
TEXT_01 = replace(FAMILY, model="hybridrt.models.minimax:MiniMaxText01ForCausalLM", rewrite=_rewrite)
M1 = replace(TEXT_01, model="hybridrt.models.minimax:MiniMaxM1ForCausalLM")
