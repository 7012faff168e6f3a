"""LFM2: gated short convolutions and a few layers of attention, then an MLP or experts.

    x ─ norm ─ short conv or attention ─ + ─ norm ─ MLP or MoE ─ +

Heads of q and k are normed before rotation (Liquid AI 2025, arXiv:2511.23404). Checkpoints of
LFM2-VL hold the text part under `model.language_model`, and a tower next to it.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hybridrt.base.config_fields import (
    ATTENTION,
    COMMON,
    COUNT,
    EPSILON,
    MAX_EXPERTS,
    MAX_LAYERS,
    MULTIPLIER,
    SIZE,
    TAPS,
    FieldTypes,
)
from hybridrt.base.config_json import FLAG, NULL, either, integer, list_of, number, one_of
from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.moe import Experts, MoE, SigmoidGroupRouter
from hybridrt.layers.norm import LayerPart, ResidualPart
from hybridrt.models.base import MTP_KEYS, SWIGLU, CausalLM
from hybridrt.models.config.family import FULL_ROPE, Family, FamilyFields, attention_config, interleaved
from hybridrt.models.vision.siglip2 import Siglip2Tower, read
from hybridrt.recurrent.short_conv import ShortConvMixer

SHARED: FieldTypes = {
    **COMMON,
    **ATTENTION,
    "conv_L_cache": TAPS,
    "conv_bias": FLAG,
    "full_attn_idxs": either(NULL, list_of(integer(0, MAX_LAYERS))),
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
COMMON_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 128000, "norm_eps": 1e-05, "tie_word_embeddings": True, "rope_parameters": None,
    "rope_theta": 1000000.0, "conv_bias": False, "conv_L_cache": 3, "layer_types": None,
}  # fmt: skip
DENSE_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "hidden_size": 2560, "intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "full_attn_idxs": None,
}  # fmt: skip
MOE_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}  # fmt: skip
OLDER = {"tie_embedding": "tie_word_embeddings"}


def _derive(fields: dict[str, Any]) -> None:
    if fields["layer_types"] is None:
        count, full = fields["num_hidden_layers"], fields["full_attn_idxs"]
        fields["layer_types"] = ["full_attention" if full is None or i in full else "conv" for i in range(count)]


def _describe(hf: Any) -> FamilyFields:
    dense = getattr(hf, "num_dense_layers", len(hf.layer_types))  # later layers have experts
    ffns = ["mlp" if i < dense else "moe" for i in range(len(hf.layer_types))]
    conv = ShortConvConfig(hf.hidden_size, hf.conv_L_cache)
    return interleaved(hf, conv, attention_config(hf), ffns)


FAMILY = Family(
    model="hybridrt.models.lfm2:Lfm2ForCausalLM",
    model_type="lfm2",
    fields=DENSE,
    defaults=DENSE_DEFAULTS,
    older={**OLDER, "block_ff_dim": "intermediate_size"},
    derive=_derive,
    describe=_describe,
)
SEEING = replace(
    FAMILY,
    model="hybridrt.models.lfm2:Lfm2VlForConditionalGeneration",
    defaults={**DENSE_DEFAULTS, "image_token_id": 396},
    section="text_config",
    outer_older=OLDER,
    image_tokens=("image_token_id",),
    vision=read,
)
MOE_FAMILY = Family(
    model="hybridrt.models.lfm2:Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    fields=MOE,
    defaults=MOE_DEFAULTS,
    older=OLDER,
    describe=_describe,
)


class Lfm2ForCausalLM(CausalLM):
    norm_key, eps_field = "model.embedding_norm", "norm_eps"
    spellings: ClassVar[dict[str, str]] = {
        **SWIGLU,
        ".q_layernorm.": ".q_norm.",
        ".k_layernorm.": ".k_norm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".expert_bias": ".gate.e_score_correction_bias",
    }

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            heads = config.attention_of(layer_id)
            attention = Attention(
                f"{name}.attn", heads, layer_id, hidden, cos_sin=self.cos_sin(heads), qk_norm=(hf.norm_eps, False),
                build=build,
            )  # fmt: skip
            mixer = ResidualPart("operator_norm", "self_attn", attention)
        else:
            conv = config.linear_of(ShortConvConfig)
            short = ShortConvMixer(f"{name}.short", conv, layer_id, hidden, bias=hf.conv_bias, build=build)
            mixer = ResidualPart("operator_norm", "conv", short)
        ffn: LayerPart = self._moe(f"{name}.moe") if spec.ffn == "moe" else self._mlp(f"{name}.mlp")
        return [mixer, ResidualPart("ffn_norm", "feed_forward", ffn)]

    def _mlp(self, name: str) -> MLP:
        hf, size = self.config.hf, self.config.hf.intermediate_size
        if getattr(hf, "block_auto_adjust_ff_dim", False):  # config.json gives 3/2 of the width
            step = hf.block_multiple_of
            size = step * -(-int(hf.block_ffn_dim_multiplier * int(2 * size / 3)) // step)
        return MLP(name, self.config.hidden_size, size, build=self.build)

    def _moe(self, name: str) -> MoE:
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        router = SigmoidGroupRouter(
            f"{name}.router", hidden, hf.num_experts, top_k=hf.num_experts_per_tok, n_group=1, topk_group=1,
            renormalize=hf.norm_topk_prob, scaling=float(hf.routed_scaling_factor), corrected=hf.use_expert_bias,
            build=build,
        )  # fmt: skip
        size = hf.moe_intermediate_size
        experts = Experts(f"{name}.experts", hf.num_experts, hidden, size, activation="silu", build=build)
        return MoE(router, experts, keys={"router": "gate", "experts": "experts"})


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts (Liquid AI 2025)."""


# Keys of the text part and of the others, in checkpoints with images.
SEEING_KEYS = {"model.language_model.": "model."}
NOT_TEXT = r"model\.(vision_tower|multi_modal_projector)\..*"
POOLING_HEAD = r"model\.vision_tower\.head\..*"  # of SigLIP2, for one vector of a picture


class Lfm2VlForConditionalGeneration(Lfm2ForCausalLM):
    """LFM2 with images."""

    spellings: ClassVar[dict[str, str]] = {**SEEING_KEYS, **Lfm2ForCausalLM.spellings}
    skipped_keys = (MTP_KEYS, NOT_TEXT, POOLING_HEAD)
    tower_class, tower_keys = Siglip2Tower, NOT_TEXT

    def rename_key(self, key: str) -> str:
        if re.fullmatch(NOT_TEXT, key):  # older files have one more name
            return key.replace(".vision_tower.vision_model.", ".vision_tower.")
        return super().rename_key(key)
