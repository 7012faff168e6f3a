"""Qwen3-Next: three Gated Delta Net blocks to one of gated attention, each followed by experts.

    x ─ norm ─ GDN or gated attention ─ + ─ norm ─ MoE or MLP ─ +

Norms are zero-centred (1 + w), a quarter of each head is rotated, and a sigmoid gates attention's
output (Qwen team 2025).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from hybridrt.base.config_fields import (
    ATTENTION,
    COMMON,
    COUNT,
    EPSILON,
    MAX_LAYERS,
    OUTPUT_GATES,
    PERIOD,
    SIZE,
    FieldTypes,
)
from hybridrt.base.config_json import FLAG, NULL, OBJECT, either, integer, list_of
from hybridrt.base.model_config import LayerSpec
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.moe import Experts, MoE, SoftmaxRouter
from hybridrt.layers.norm import LayerPart, ResidualPart
from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import CausalLM, MTPHead
from hybridrt.models.config.family import (
    GDN,
    GDN_DEFAULTS,
    Family,
    FamilyFields,
    attention_config,
    derive_gdn,
    gdn_config,
    interleaved,
)
from hybridrt.recurrent.gdn import GDNKeys, GDNMixer

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **OUTPUT_GATES,
    **GDN,
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("decoder_sparse_step", "full_attention_interval"), PERIOD),
    "mlp_only_layers": list_of(integer(0, MAX_LAYERS)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), SIZE),
    "num_nextn_predict_layers": either(NULL, COUNT),
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "norm_topk_prob"), FLAG),
}
DEFAULTS: dict[str, Any] = {
    **GDN_DEFAULTS,
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "rope_parameters": None, "partial_rotary_factor": 0.25,
    "attention_bias": False, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
    "mlp_only_layers": None,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    derive_gdn(fields)
    if fields["mlp_only_layers"] is None:
        fields["mlp_only_layers"] = []


def _describe(hf: Any) -> FamilyFields:
    def sparse(i: int) -> bool:
        return hf.num_experts > 0 and i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0

    ffns = ["moe" if sparse(i) else "mlp" for i in range(len(hf.layer_types))]
    # Published configs omit the number.
    one_head = getattr(hf, "num_nextn_predict_layers", 1) == 1
    head = (LayerSpec(True, None, "moe" if hf.num_experts > 0 else "mlp"),) if one_head else ()
    return interleaved(hf, gdn_config(hf), attention_config(hf), ffns) | {"mtp_layers": head}


FAMILY = Family(
    model="hybridrt.models.qwen3_next:Qwen3NextForCausalLM",
    model_type="qwen3_next",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
    mtp_head="hybridrt.models.qwen3_next:Qwen3NextMTP",
)


MOE_KEYS = {
    "router": "gate",
    "experts": "experts",
    "shared": "shared_expert",
    "shared_gate": "shared_expert_gate",
}
GDN_KEYS = GDNKeys({"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}, by_key_head=True)


class Qwen3NextForCausalLM(CausalLM):
    gdn_keys: ClassVar[GDNKeys] = GDN_KEYS
    zero_centered = True

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            own = config.attention_of(layer_id)
            attention = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias,
                qk_norm=(hf.rms_norm_eps, True), gated=True, build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            gdn = GDNMixer(
                f"{name}.gdn", config.linear_of(GDNConfig), layer_id, hidden, hf.rms_norm_eps, keys=self.gdn_keys,
                build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "linear_attn", gdn)
        if spec.ffn == "moe":
            ffn: LayerPart = self._moe(f"{name}.moe", layer_id)
        else:
            ffn = MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        return [mixer, ResidualPart("post_attention_layernorm", "mlp", ffn)]

    def renormalizes(self) -> bool:
        """Whether a token's expert weights are scaled to sum to 1."""
        return bool(self.config.hf.norm_topk_prob)

    def _moe(self, name: str, layer_id: int) -> MoE:
        """The shared expert has a sigmoid gate. `Experts` stores it as one more where it can."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build_of(layer_id)
        experts = Experts(
            f"{name}.experts", hf.num_experts, hidden, hf.moe_intermediate_size, activation="silu",
            shared_size=hf.shared_expert_intermediate_size, build=build,
        )  # fmt: skip
        router = SoftmaxRouter(
            f"{name}.router", hidden, hf.num_experts, top_k=hf.num_experts_per_tok, renormalize=self.renormalizes(),
            shared_experts=experts.num_shared, build=build,
        )  # fmt: skip
        return MoE(router, experts, keys=MOE_KEYS)


class Qwen3NextMTP(MTPHead):
    """One more block of gated attention and experts."""

    def checkpoint_map(self) -> CheckpointMap:
        return {
            **self.embedding_norm.targets("mtp.pre_fc_norm_embedding"),
            **self.hidden_norm.targets("mtp.pre_fc_norm_hidden"),
            **self.fuse.targets("mtp.fc", "both"),
            **self.stack.targets("mtp.layers"),
            **self.norm.targets("mtp.norm"),
        }
