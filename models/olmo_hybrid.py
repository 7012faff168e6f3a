"""OLMo-Hybrid: three Gated Delta Net blocks to one of attention, each followed by an MLP.

    x ─ norm ─ GDN ─ + ─ norm ─ MLP ─ +         x ─ attention ─ norm ─ + ─ MLP ─ norm ─ +

The delta rule's beta is doubled, so that a step may invert a part of the state (Grazzi et al.
2024). Attention blocks norm outputs, and norm q and k over all heads (Ai2 2026).
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hybridrt.attention.base import AttentionInputs
from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, either
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.norm import ResidualPart, RMSNorm, SharedRMSNorm
from hybridrt.layers.summands import Hidden, Summands, summed
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import (
    FULL_ROPE,
    GDN,
    Family,
    FamilyFields,
    attention_config,
    gdn_config,
    interleaved,
)
from hybridrt.recurrent.gdn import GDNKeys, GDNMixer

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **GDN,
    "rms_norm_eps": EPSILON,
    "rope_parameters": either(NULL, FULL_ROPE),
    **dict.fromkeys(("linear_allow_neg_eigval", "attention_bias"), FLAG),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 30, "num_key_value_heads": None, "max_position_embeddings": 65536, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "rope_parameters": None, "attention_bias": False, "layer_types": None,
    "linear_num_key_heads": None, "linear_num_value_heads": None, "linear_key_head_dim": None,
    "linear_value_head_dim": None, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    if fields["layer_types"] is None:
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(fields["num_hidden_layers"])]
        fields["layer_types"] = kinds if len(kinds) > 3 else [*kinds[:-1], "full_attention"]
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if fields[name] is None:
            fields[name] = fields["num_attention_heads"]
    if fields["linear_key_head_dim"] is None:
        fields["linear_key_head_dim"] = int(0.75 * fields["hidden_size"] / fields["linear_num_key_heads"])
    if fields["linear_value_head_dim"] is None:
        fields["linear_value_head_dim"] = 2 * fields["linear_key_head_dim"]


def _describe(hf: Any) -> FamilyFields:
    gdn = gdn_config(hf, beta_scale=2.0 if hf.linear_allow_neg_eigval else 1.0)
    # Released models rotate nothing.
    rotary = (hf.rope_parameters or {}).get("rope_theta") is not None
    return interleaved(hf, gdn, attention_config(hf, rotary=rotary), "mlp")


FAMILY = Family(
    model="hybridrt.models.olmo_hybrid:OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
)


PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"}
CONVS = {"q_conv1d": "q", "k_conv1d": "k", "v_conv1d": "v"}
GDN_KEYS = GDNKeys(PROJECTIONS, convs=CONVS, norm="o_norm", out="o_proj")
GDN_EPS = 1e-5  # epsilon of the gated norm; config.json's is for other norms


class WholeNormAttention(Attention):
    """Attention without an input norm, with norms over all heads of q and of k."""

    def __init__(
        self, name: str, config: AttentionConfig, layer_id: int, hidden_size: int, *, eps: float, build: Build,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(name, config, layer_id, hidden_size, build=build, **more)
        segments = self.qkv.segments
        self.q_whole, self.k_whole = (
            SharedRMSNorm(
                f"{name}.{part}_norm", segments[part].size, eps, shards=segments[part].shards or build.tp.size,
                build=build,
            )
            for part in ("q", "k")
        )  # fmt: skip

    def output(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Of tokens without a norm, summed over all ranks: [T, hidden] to [T, hidden]."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q, k = self.q_whole(q)[0], self.k_whole(k)[0]
        return self.o_proj(batch.attn_backend.run(self.attn, batch, AttentionInputs(q, k, v, rope=self.rope)))

    def targets(self, key: str) -> CheckpointMap:
        norms = {**self.q_whole.targets(f"{key}.q_norm"), **self.k_whole.targets(f"{key}.k_norm")}
        return super().targets(key) | norms


class PostNormed(nn.Module):
    """Adds norm(output(x + residual))."""

    def __init__(
        self, part: WholeNormAttention | MLP, output: Callable[[torch.Tensor, ForwardBatch], torch.Tensor]
    ) -> None:
        super().__init__()
        self.part, self.output = part, output

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        total = summed(x) if residual is None else summed(x) + residual
        return norm(self.output(total, batch))[0], total

    def targets(self, key: str) -> CheckpointMap:
        return self.part.targets(key)


class OlmoHybridForCausalLM(CausalLM):
    spellings: ClassVar[dict[str, str]] = {  # norms in newer checkpoints
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    }
    joined_convs = True

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, hidden, build = self.config, self.config.hf, self.config.hidden_size, self.build
        mlp = MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        if config.layer(layer_id).attention:
            own = config.attention_of(layer_id)
            attention = WholeNormAttention(
                f"{name}.attn", own, layer_id, hidden, eps=hf.rms_norm_eps, cos_sin=self.cos_sin(own),
                bias=hf.attention_bias, build=build,
            )  # fmt: skip
            return [
                ResidualPart("post_attention_layernorm", "self_attn", PostNormed(attention, attention.output)),
                ResidualPart("post_feedforward_layernorm", "mlp", PostNormed(mlp, lambda x, _: mlp.summand(x, True))),
            ]
        gdn = GDNMixer(
            f"{name}.gdn", config.linear_of(GDNConfig), layer_id, hidden, GDN_EPS, keys=GDN_KEYS, build=build
        )
        return [
            ResidualPart("input_layernorm", "linear_attn", gdn),
            ResidualPart("post_attention_layernorm", "mlp", mlp),
        ]
