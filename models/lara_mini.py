"""Lara 4 Mini: Gated Delta Net, attention within a window and full attention, each followed by experts.

    x ─ norm ─ GDN or attention ─ + ─ norm ─ experts ─ +

Only layers with a window rotate. Every token has a shared expert without a gate (Translated 2026).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MAX_EXPERTS, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, OBJECT, FieldType, either, integer, list_of, one_of
from hybridrt.base.model_config import LayerSpec
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.moe import SHARED_WEIGHT, Experts, MoE, SoftmaxRouter
from hybridrt.layers.norm import ResidualPart
from hybridrt.layers.rotary import unturned_table
from hybridrt.layers.weights import TensorPart
from hybridrt.models.base import CausalLM, part_of_rows
from hybridrt.models.config.family import GDN, Family, FamilyFields, attention_config, gdn_config
from hybridrt.recurrent.gdn import GDNKeys, GDNMixer

KINDS = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
FIELDS: FieldTypes = {
    **COMMON,
    **{name: kind for name, kind in ATTENTION.items() if name != "intermediate_size"},
    **GDN,
    "layer_types": list_of(one_of(*dict.fromkeys(KINDS))),
    "sliding_window": SIZE,
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), integer(1, MAX_EXPERTS)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "norm_topk_prob"), FLAG),
    # Fields of Qwen3-Next. Here all layers have experts.
    "mlp_only_layers": FieldType("absent, or an empty list", lambda v: v in (None, [])),
    "decoder_sparse_step": either(NULL, integer(1, 1)),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 34, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True, "rope_parameters": None, "attention_bias": False, "sliding_window": 512,
    "layer_types": None, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 128, "num_experts_per_tok": 4, "norm_topk_prob": True,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    if fields["layer_types"] is None:
        fields["layer_types"] = [KINDS[i % len(KINDS)] for i in range(fields["num_hidden_layers"])]


def _describe(hf: Any) -> FamilyFields:
    gdn, full = gdn_config(hf), attention_config(hf, rotary=False)
    windowed = replace(attention_config(hf), sliding_window=hf.sliding_window)
    parts: dict[str, LayerSpec] = {
        "linear_attention": LayerSpec(False, gdn.kind, "moe"),
        "sliding_attention": LayerSpec(windowed, None, "moe"),
        "full_attention": LayerSpec(full, None, "moe"),
    }
    layers = tuple(parts[kind] for kind in hf.layer_types)
    return {"layers": layers, "linear": {gdn.kind: gdn}, "attention": full}


FAMILY = Family(
    model="hybridrt.models.lara_mini:LaraMiniForCausalLM",
    model_type="lara_mini",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
)


# transformers splits the published tensor, `in_proj`, into these.
PROJECTIONS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}
JOINED = ".in_proj.weight"


class LaraMiniForCausalLM(CausalLM):
    spellings = {".out_norm.": ".norm."}  # noqa: RUF012

    @cached_property
    def unturned(self) -> torch.Tensor:
        return unturned_table(self.max_len, self.device)

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            own = config.attention_of(layer_id)
            cos_sin = self.unturned if own.rope is None else self.cos_sin(own)
            attention = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=cos_sin, bias=hf.attention_bias,
                qk_norm=(hf.rms_norm_eps, False), build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            gdn = GDNMixer(
                f"{name}.gdn", config.linear_of(GDNConfig), layer_id, hidden, hf.rms_norm_eps,
                keys=GDNKeys(PROJECTIONS), build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "linear_attn", gdn)
        return [mixer, ResidualPart("post_attention_layernorm", "mlp", self._moe(f"{name}.moe"))]

    def _moe(self, name: str) -> MoE:
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        experts = Experts(
            f"{name}.experts", hf.num_experts, hidden, hf.moe_intermediate_size, activation="silu",
            shared_size=hf.shared_expert_intermediate_size, scales=(1.0, 1.0 / SHARED_WEIGHT), build=build,
        )  # fmt: skip
        router = SoftmaxRouter(
            f"{name}.router", hidden, hf.num_experts, top_k=hf.num_experts_per_tok, renormalize=hf.norm_topk_prob,
            shared_experts=experts.num_shared, exact=True, build=build,
        )  # fmt: skip
        return MoE(router, experts, keys={"router": "gate", "experts": "experts", "shared": "shared_expert"})

    def parts_of(self, key: str) -> list[TensorPart]:
        """Published projections are one tensor, rows q, k, v, z, b, a."""
        stem = key.removesuffix(JOINED)
        if stem == key:
            return super().parts_of(key)
        gdn = self.config.linear_of(GDNConfig)
        values, heads = gdn.num_v_heads * gdn.head_v_dim, gdn.num_v_heads
        sizes = [2 * gdn.num_k_heads * gdn.head_k_dim + values, values, heads, heads]
        return [(f"{stem}.{part}.weight", part_of_rows(sizes, i)) for i, part in enumerate(PROJECTIONS)]
