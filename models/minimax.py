"""MiniMax: lightning attention and a few layers of softmax attention, each followed by experts.

    x ─ norm ─ h ─ attention ─ x beta ─ + alpha h ─ norm ─ h ─ experts ─ x beta ─ + alpha h

A part adds to its normed input. Decays slow down from layer to layer (MiniMax 2025,
arXiv:2501.08313). Published checkpoints (MiniMax-Text-01, MiniMax-M1-80k) and transformers spell
fields differently.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MAX_EXPERTS, MULTIPLIER, SIZE, FieldTypes
from hybridrt.base.config_json import NULL, TRUE, check_fields, either, integer, list_of, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig
from hybridrt.kinds.lightning import LightningConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.moe import Experts, MoE, SoftmaxRouter
from hybridrt.layers.norm import ResidualPart, RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import MTP_KEYS, SWIGLU, CausalLM
from hybridrt.models.config.family import FULL_ROPE, Family, FamilyFields, attention_config, interleaved
from hybridrt.recurrent.lightning import LightningMixer, alibi_rates, decay_rates

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
    "sliding_window": either(NULL, SIZE),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "num_experts_per_tok": 2, "num_local_experts": 8,
    "rope_parameters": None, "rope_theta": 1000000.0, "layer_types": None, "full_attn_alpha_factor": 1,
    "full_attn_beta_factor": 1, "linear_attn_alpha_factor": 1, "linear_attn_beta_factor": 1, "mlp_alpha_factor": 1,
    "mlp_beta_factor": 1, "sliding_window": None,
}  # fmt: skip
# published name -> transformers' name
FACTORS = {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for theirs, ours in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
PUBLISHED: FieldTypes = {
    "model_type": one_of("minimax_text_01", "MiniMaxText01", "minimax_m1", "MiniMaxM1"),
    **dict.fromkeys(FACTORS, MULTIPLIER),
    # False would apply factors to the norms' inputs.
    "postnorm": TRUE,
    # Published code has no windows.
    "sliding_window": NULL,
    # No published checkpoint has a shared MLP.
    "shared_intermediate_size": either(integer(0, 0), list_of(integer(0, 0))),
}
KINDS = ("linear_attention", "full_attention")


def _rewrite(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """A published config.json with transformers' names of fields. postnorm is False by default, as in the
    published code."""
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
    """Rotates `rotary_dim` of each head, as in training; transformers 5.23 rotates whole heads."""
    rotated, head_dim = getattr(hf, "rotary_dim", None), attention_config(hf).head_dim
    if rotated is not None:
        if rotated > head_dim:
            raise ConfigError(f"rotary_dim is {rotated}; it must be at most head_dim, {head_dim}")
        hf.rope_parameters = {**hf.rope_parameters, "partial_rotary_factor": rotated / head_dim}
    return replace(attention_config(hf), sliding_window=hf.sliding_window)


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


LIGHTNING_EPS = 1e-6  # epsilon of lightning attention's norm; rms_norm_eps is for other norms


class OntoNormed(nn.Module):
    """A part that adds to `alpha` times its normed input."""

    def __init__(self, part: Attention | LightningMixer | MoE, alpha: float) -> None:
        super().__init__()
        self.part, self.alpha = part, alpha

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        h = norm(x, residual)[0]
        return self.part.output(h, batch), h if self.alpha == 1.0 else h * self.alpha

    def targets(self, key: str) -> CheckpointMap:
        return self.part.targets(key)


class MiniMaxForCausalLM(CausalLM):
    """MiniMax-Text-01 and MiniMax-M1 (MiniMax 2025), with the checkpoint names and the decays of
    transformers."""

    spellings: ClassVar[dict[str, str]] = {**SWIGLU, ".block_sparse_moe.": ".mlp."}
    skipped_keys = (MTP_KEYS, r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)")

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, hidden, build = self.config, self.config.hf, self.config.hidden_size, self.build
        mixer: Attention | LightningMixer
        if config.layer(layer_id).attention:
            own, alpha, beta = config.attention_of(layer_id), hf.full_attn_alpha_factor, hf.full_attn_beta_factor
            mixer = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), out_scale=float(beta), build=build
            )
        else:
            alpha, beta = hf.linear_attn_alpha_factor, hf.linear_attn_beta_factor
            lightning = config.linear_of(LightningConfig)
            mixer = LightningMixer(
                f"{name}.lightning", lightning, layer_id, hidden, rates=self.rates(lightning.num_heads, layer_id),
                eps=LIGHTNING_EPS, out_scale=float(beta), build=build,
            )  # fmt: skip
        experts = OntoNormed(self._moe(f"{name}.moe"), hf.mlp_alpha_factor)
        return [
            ResidualPart("input_layernorm", "self_attn", OntoNormed(mixer, alpha)),
            ResidualPart("post_attention_layernorm", "mlp", experts),
        ]

    def rates(self, num_heads: int, layer_id: int) -> torch.Tensor:
        """[num_heads] float32 decay rates of a layer."""
        return decay_rates(num_heads) * (1.0 - layer_id / (len(self.config.layers) - 1 + 1e-5) + 1e-5)

    def _moe(self, name: str) -> MoE:
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        count, scales = hf.num_local_experts, (float(hf.mlp_beta_factor), 1.0)
        router = SoftmaxRouter(
            f"{name}.router", hidden, count, top_k=hf.num_experts_per_tok, renormalize=True, build=build
        )
        experts = Experts(
            f"{name}.experts", count, hidden, hf.intermediate_size, activation="silu", scales=scales, build=build
        )
        return MoE(router, experts, keys={"router": "gate", "experts": "experts"})


class MiniMaxText01ForCausalLM(MiniMaxForCausalLM):
    """MiniMax-Text-01 as published: other decays if heads are no power of two."""

    def rates(self, num_heads: int, layer_id: int) -> torch.Tensor:
        return alibi_rates(num_heads) * (1.0 - layer_id / max(len(self.config.layers) - 1, 1) + 1e-5)


class MiniMaxM1ForCausalLM(MiniMaxText01ForCausalLM):
    """MiniMax-M1 as published."""
