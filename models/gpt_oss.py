"""gpt-oss: attention with sinks, in every second layer within a window, each followed by experts.

    x ─ norm ─ attention ─ + ─ norm ─ experts ─ +

All projections, routers and experts have biases, and experts clamp their SwiGLU (OpenAI 2025,
arXiv:2508.10925). The published experts are in MXFP4 (`quant_method` "mxfp4"); their bfloat16 form
is read too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MAX_EXPERTS, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, integer, list_of, number, one_of
from hybridrt.base.model_config import LayerSpec
from hybridrt.layers.attention import Attention
from hybridrt.layers.moe import Experts, MoE, SoftmaxRouter
from hybridrt.layers.norm import ResidualPart
from hybridrt.layers.weights import TensorPart, Transform
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import FULL_ROPE, Family, FamilyFields, attention_config

WINDOWED, FULL = "sliding_attention", "full_attention"
FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), integer(1, MAX_EXPERTS)),
    "layer_types": list_of(one_of(WINDOWED, FULL)),
    "sliding_window": SIZE,
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), number(1e-6, 1e6)),
    "rms_norm_eps": EPSILON,
    "rope_parameters": FULL_ROPE,
    "attention_bias": FLAG,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "rope_parameters": None, "rope_theta": 150000.0,
    "attention_bias": True, "sliding_window": 128, "layer_types": None, "num_local_experts": 128,
    "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    if fields["layer_types"] is None:
        fields["layer_types"] = [(WINDOWED, FULL)[i % 2] for i in range(fields["num_hidden_layers"])]
    if fields["rope_parameters"] is None and fields.get("rope_scaling") is None:
        fields["rope_parameters"] = dict(YARN)


def _describe(hf: Any) -> FamilyFields:
    full = replace(attention_config(hf), sinks=True)
    windowed = replace(full, sliding_window=hf.sliding_window)
    layers = tuple(LayerSpec(windowed if kind == WINDOWED else full, None, "moe") for kind in hf.layer_types)
    return {"layers": layers, "linear": {}, "attention": full}


FAMILY = Family(
    model="hybridrt.models.gpt_oss:GptOssForCausalLM",
    model_type="gpt_oss",
    fields=FIELDS,
    defaults=DEFAULTS,
    older={"num_experts": "num_local_experts"},
    derive=_derive,
    describe=_describe,
)


class GptOssForCausalLM(CausalLM):
    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, build = self.config, self.config.hf, self.build
        own = config.attention_of(layer_id)
        attention = Attention(
            f"{name}.attn", own, layer_id, config.hidden_size, cos_sin=self.cos_sin(own), bias=hf.attention_bias,
            build=build,
        )  # fmt: skip
        return [
            ResidualPart("input_layernorm", "self_attn", attention),
            ResidualPart("post_attention_layernorm", "mlp", self._moe(f"{name}.moe")),
        ]

    def _moe(self, name: str) -> MoE:
        """Weights are a softmax over the chosen experts, which is that of all experts,
        renormalised."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        count = hf.num_local_experts
        router = SoftmaxRouter(
            f"{name}.router", hidden, count, top_k=hf.num_experts_per_tok, renormalize=True, bias=True, build=build
        )
        experts = Experts(
            f"{name}.experts", count, hidden, hf.intermediate_size, activation="silu", limit=hf.swiglu_limit,
            alpha=hf.swiglu_alpha, bias=True, build=build,
        )  # fmt: skip
        return MoE(router, experts, keys={"router": "router", "experts": "experts"})

    def parts_of(self, key: str) -> list[TensorPart]:
        """A tensor of all experts is [E, in, out], in MXFP4 [E, out, in] (".weight" is added to its
        name then), or [E, out] of biases. Outputs of gate and up alternate."""
        stem, _, end = key.rpartition(".experts.")
        whole = end.endswith(".weight")
        named = end.removesuffix("_bias").removesuffix(".weight")
        matrices = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(named)
        if not stem or matrices is None:
            return super().parts_of(key)
        leaf, count = "bias" if end.endswith("_bias") else "weight", self.config.hf.num_local_experts
        return [
            (f"{stem}.experts.{e}.{matrix}_proj.{leaf}", _matrix_of(e, i, len(matrices), count, whole))
            for i, matrix in enumerate(matrices)
            for e in range(count)
        ]


def _matrix_of(expert: int, first: int, step: int, count: int, by_outputs: bool) -> Transform:
    """Every `step`-th output of one expert, from `first` on: [out, in], or [out]. by_outputs: a
    matrix is stored so."""

    def select(t: torch.Tensor) -> torch.Tensor:
        if t.shape[0] != count:
            raise RuntimeError(f"it holds {t.shape[0]} experts, config.json says {count}")
        own = t[expert]
        return (own.t() if own.dim() == 2 and not by_outputs else own)[first::step]

    return select
