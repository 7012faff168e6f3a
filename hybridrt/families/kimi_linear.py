"""Kimi-Linear: Kimi Delta Attention with latent attention every few layers, each followed by an MLP or experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrt.config_fields import (
    COUNT,
    EPSILON,
    LATENT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MULTIPLIER,
    OFF,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
)
from hybridrt.config_json import FLAG, NULL, TRUE, FieldType, check_fields, either, integer, list_of, one_of
from hybridrt.errors import ConfigError
from hybridrt.families.base import Family, FamilyFields, interleaved, latent_attention
from hybridrt.kinds.kda import KDAConfig

GATES = ("gate_lower_bound", "use_full_rank_gate")
FIELDS: FieldTypes = {
    **LATENT,
    "num_local_experts": integer(1, MAX_EXPERTS),
    **dict.fromkeys(("n_group", "topk_group", "num_experts_per_tok"), integer(1, MAX_EXPERTS)),
    "n_shared_experts": integer(1, 64),
    "moe_intermediate_size": SIZE,
    "routed_scaling_factor": MULTIPLIER,
    "layer_types": list_of(one_of("linear_attention", "full_attention")),
    "mlp_layer_types": list_of(one_of("dense", "sparse")),
    "linear_head_dim": STATE,
    "linear_num_heads": SIZE,
    "linear_conv_kernel_dim": TAPS,
    "rms_norm_eps": EPSILON,
    **dict.fromkeys(("attention_bias", "norm_topk_prob"), FLAG),
    # Of published checkpoints, which transformers does not read: only these values have a meaning here.
    **dict.fromkeys(("mla_use_nope", "use_grouped_topk"), either(NULL, TRUE)),
    "moe_router_activation_func": either(NULL, one_of("sigmoid")),
    "moe_layer_freq": either(NULL, integer(1, 1)),
    "num_nextn_predict_layers": either(NULL, integer(0, 0)),
    # Of Kimi-K3: further residuals, experts over a latent vector, and gates.
    **dict.fromkeys(("attn_res_block_size", "routed_expert_hidden_size"), either(NULL, integer(0, 0))),
    **dict.fromkeys(("mla_use_output_gate", "latent_moe_use_norm"), OFF),
    "linear_attn_config": either(
        NULL, FieldType(f"an object without {' and '.join(GATES)}", lambda v: not any(map(v.get, GATES)))
    ),
}

# Of experts alone, by the names of published files and of those that transformers writes.
EXPERTS = (
    "num_experts", "num_local_experts", "num_experts_per_token", "num_experts_per_tok", "num_shared_experts",
    "n_shared_experts", "num_expert_group", "n_group", "topk_group", "moe_intermediate_size", "mlp_layer_types",
)  # fmt: skip


def _rewrite(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Without experts (null or 0) each layer has an MLP, as in the published code; the fields of experts are then null
    or 0 as well, which transformers reads only in part."""
    counts = ("num_experts", "num_local_experts")
    check_fields(raw, dict.fromkeys(counts, either(NULL, COUNT)), file)
    name = next((count for count in counts if count in raw), None)
    if name is None or raw[name]:
        return dict(raw)
    if "sparse" in (raw.get("mlp_layer_types") or ()):
        raise ConfigError(f"{file}: {name} is {raw[name]}, but mlp_layer_types has sparse layers, which have experts")
    return {k: v for k, v in raw.items() if k not in EXPERTS} | {"first_k_dense_replace": MAX_LAYERS}


def feed_forward_parts(hf: Any) -> list[str]:
    """ "moe" or "mlp" of each layer."""
    return ["moe" if kind == "sparse" else "mlp" for kind in hf.mlp_layer_types]


def _describe(hf: Any) -> FamilyFields:
    kda = KDAConfig(hf.linear_num_heads, hf.linear_head_dim, hf.linear_conv_kernel_dim, gate_rank=hf.linear_head_dim)
    return interleaved(hf, kda, latent_attention(hf, rotary=False), feed_forward_parts(hf))


FAMILY = Family(
    model="hybridrt.models.kimi_linear:KimiLinearForCausalLM",
    config_class="KimiLinearConfig",
    fields=FIELDS,
    describe=_describe,
    rewrite=_rewrite,
)
