"""Ling 3: Kimi Delta Attention with gated latent attention every few layers, each followed by an MLP or experts.

Published checkpoints name their architecture otherwise than those that transformers writes.
"""

from dataclasses import replace
from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_fields import OFF, FieldTypes
from hybridrt.config_json import FLAG, NULL, OBJECT, TRUE, either, integer, list_of, number, one_of
from hybridrt.errors import ConfigError
from hybridrt.families.base import Family, FamilyFields, interleaved, latent_attention
from hybridrt.families.kimi_linear import FIELDS as KIMI
from hybridrt.families.kimi_linear import feed_forward_parts
from hybridrt.kinds.kda import KDAConfig

FIELDS: FieldTypes = {
    **{name: values for name, values in KIMI.items() if name != "mla_use_nope"},
    "rope_parameters": OBJECT,
    "num_mtp_layers": integer(0, 64),
    "num_nextn_predict_layers": integer(0, 64),
    "kda_safe_gate": FLAG,
    "kda_lower_bound": number(-1e6, 0.0),
    # Of published checkpoints, which transformers does not read: only these values have a meaning here.
    "gated_attention_proj_granularity_type": either(NULL, one_of("head_wise")),
    "linear_attention": either(NULL, one_of("kda")),
    **dict.fromkeys(("moe_router_enable_expert_bias", "no_kda_lora"), either(NULL, TRUE)),
    **dict.fromkeys(("mtp_use_kda", "use_mla_nope", "use_qkv_bias", "use_bias"), OFF),
    **dict.fromkeys(("score_function", "scoring_func"), either(NULL, one_of("sigmoid"))),
    # Limits of SwiGLU in the routed and in the shared experts, layer by layer: 0 is none.
    **dict.fromkeys(
        ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"),
        either(NULL, list_of(either(NULL, number(0.0, 1e6)))),
    ),
}


def check_shared_experts(hf: Any) -> None:
    """ConfigError unless shared experts are as wide as the others."""
    shared = getattr(hf, "moe_shared_expert_intermediate_size", None)
    if shared not in (None, hf.moe_intermediate_size):
        raise ConfigError(
            f"moe_shared_expert_intermediate_size is {shared}; hybridrt runs shared experts of "
            f"moe_intermediate_size {hf.moe_intermediate_size}"
        )


def _describe(hf: Any) -> FamilyFields:
    check_shared_experts(hf)
    bound = float(hf.kda_lower_bound) if hf.kda_safe_gate else None
    kda = KDAConfig(hf.linear_num_heads, hf.linear_head_dim, hf.linear_conv_kernel_dim, lower_bound=bound)
    head = (LayerSpec(True, None, "moe"),) if hf.num_mtp_layers == 1 else ()
    layers = interleaved(hf, kda, latent_attention(hf, rotary=True), feed_forward_parts(hf))
    return layers | {"mtp_layers": head}


FAMILY = Family(
    model="hybridrt.models.bailing_hybrid:BailingHybridForCausalLM",
    config_class="BailingHybridConfig",
    fields=FIELDS,
    describe=_describe,
    mtp_head="hybridrt.models.bailing_hybrid:BailingHybridMTP",
)
PUBLISHED = replace(FAMILY, model="hybridrt.models.bailing_hybrid:BailingMoeV3ForCausalLM")
