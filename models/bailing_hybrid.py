"""Ling 3: blocks of Kimi Delta Attention or gated latent attention, then experts or an MLP.

    x ─ norm ─ KDA or MLA ─ + ─ norm ─ MoE or MLP ─ +

Ant Group 2026. KDA's decay is bounded, a sigmoid multiplies each head of latent attention, and the
last layers of Ling-3.0-flash clamp their experts' SwiGLU, as in Ant Group's branch of vLLM
(transformers 5.23 omits the clamps).
"""

from dataclasses import replace
from typing import Any, ClassVar

from hybridrt.base.config_fields import OFF, PERIOD, SIZE, TAPS, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, OBJECT, TRUE, either, integer, list_of, number, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import LayerSpec
from hybridrt.kinds.kda import KDAConfig
from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import MTPHead
from hybridrt.models.config.family import Family, FamilyFields, derive_ffns, ffns, interleaved, latent_attention
from hybridrt.models.kimi_linear import FIELDS as KIMI
from hybridrt.models.kimi_linear import OLDER, KimiLinearForCausalLM

LEFT_OUT = ("mla_use_nope", "num_nextn_predict_layers")
FIELDS: FieldTypes = {
    **{name: values for name, values in KIMI.items() if name not in LEFT_OUT},
    "rope_parameters": OBJECT,
    "num_mtp_layers": integer(0, 64),
    "layer_group_size": PERIOD,
    "head_dim": SIZE,
    "short_conv_kernel_size": TAPS,
    "kda_safe_gate": FLAG,
    "kda_lower_bound": number(-1e6, 0.0),
    # Other values would mean a different model.
    "gated_attention_proj_granularity_type": either(NULL, one_of("head_wise")),
    "linear_attention": either(NULL, one_of("kda")),
    **dict.fromkeys(("moe_router_enable_expert_bias", "no_kda_lora"), either(NULL, TRUE)),
    **dict.fromkeys(("mtp_use_kda", "use_mla_nope", "use_qkv_bias", "use_bias"), OFF),
    **dict.fromkeys(("score_function", "scoring_func"), either(NULL, one_of("sigmoid"))),
    # SwiGLU limits of each layer; 0: none.
    **dict.fromkeys(
        ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"),
        either(NULL, list_of(either(NULL, number(0.0, 1e6)))),
    ),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 157184, "hidden_size": 2560, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 42, "num_attention_heads": 32, "num_key_value_heads": 32, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 2,
    "norm_topk_prob": True, "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
    "rope_parameters": None, "rope_theta": 6000000.0, "attention_bias": False, "num_mtp_layers": 1,
    "num_local_experts": 512, "head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6,
    "kda_safe_gate": True, "kda_lower_bound": -5.0, "layer_types": None, "mlp_layer_types": None,
    "linear_head_dim": None, "linear_num_heads": None, "linear_conv_kernel_dim": None,
}  # fmt: skip
LINEAR = {
    "linear_head_dim": "head_dim", "linear_num_heads": "num_attention_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    fields |= {name: fields[other] for name, other in LINEAR.items() if fields[name] is None}
    if fields["layer_types"] is None:
        group, count = fields["layer_group_size"], fields["num_hidden_layers"]
        fields["layer_types"] = ["linear_attention" if (i + 1) % group else "full_attention" for i in range(count)]
    derive_ffns(fields)


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
    layers = interleaved(hf, kda, latent_attention(hf, rotary=True), ffns(hf))
    return layers | {"mtp_layers": head}


FAMILY = Family(
    model="hybridrt.models.bailing_hybrid:BailingHybridForCausalLM",
    model_type="bailing_hybrid",
    fields=FIELDS,
    defaults=DEFAULTS,
    older=OLDER | {"num_nextn_predict_layers": "num_mtp_layers"},
    derive=_derive,
    describe=_describe,
    mtp_head="hybridrt.models.bailing_hybrid:BailingHybridMTP",
)
PUBLISHED = replace(FAMILY, model="hybridrt.models.bailing_hybrid:BailingMoeV3ForCausalLM")


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Ling 3 by transformers' name. Its prediction head is one more layer in the checkpoint."""

    gated: ClassVar[bool] = True
    spellings: ClassVar[dict[str, str]] = {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.": ".self_attn.",
        ".dense.": ".o_proj.",
        ".expert_bias": ".e_score_correction_bias",
        ".forget_gate.": ".",
    }

    def limits(self, layer_id: int) -> tuple[float | None, float | None]:
        """Layers with 0 or null, or past the end of the lists, have no limit."""
        lists = (getattr(self.config.hf, f"{part}_swiglu_limit_list", None) for part in ("expert", "share_expert"))
        routed, shared = ((each or [])[layer_id : layer_id + 1] for each in lists)
        return (float(routed[0]) if any(routed) else None), (float(shared[0]) if any(shared) else None)

    def rename_key(self, key: str) -> str:
        first = f"{self.layers_key}.{len(self.config.layers)}."
        return super().rename_key(f"mtp.{key.removeprefix(first)}" if key.startswith(first) else key)


class BailingMoeV3ForCausalLM(BailingHybridForCausalLM):
    """Ling 3 by its published name."""


class BailingHybridMTP(MTPHead):
    """One more block of gated latent attention and experts."""

    def checkpoint_map(self) -> CheckpointMap:
        return {
            **self.embedding_norm.targets("mtp.enorm"),
            **self.hidden_norm.targets("mtp.hnorm"),
            **self.fuse.targets("mtp.eh_proj", "both"),
            **{key.replace("mtp.0.", "mtp."): target for key, target in self.stack.targets("mtp").items()},
            **self.norm.targets("mtp.final_layernorm"),
        }
