"""Jamba: Mamba-1 blocks and a few of attention, each followed by an MLP or experts.

    x ─ norm ─ Mamba-1 or attention ─ + ─ norm ─ MLP or MoE ─ +

Attention rotates nothing: recurrent layers give positions (AI21 2024, arXiv:2403.19887).
"""

from collections.abc import Sequence
from typing import Any

from hybridrt.base.config_fields import ATTENTION, COMMON, COUNT, EPSILON, PERIOD, SIZE, STATE, TAPS, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, TRUE, either
from hybridrt.base.errors import ConfigError
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.moe import Experts, MoE, SoftmaxRouter
from hybridrt.layers.norm import ResidualPart
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import Family, FamilyFields, attention_config, interleaved
from hybridrt.models.mamba import dt_rank
from hybridrt.recurrent.mamba1 import Mamba1Mixer

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_expand", "mamba_dt_rank"), SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "attn_layer_offset", "expert_layer_offset"), COUNT),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), PERIOD),
    "rms_norm_eps": EPSILON,
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), FLAG),
    # Norms of dt, B and C are optional in the first Jamba.
    "mamba_inner_layernorms": either(NULL, TRUE),
    **dict.fromkeys(("layer_types", "layers_block_type", "layers_num_experts"), NULL),  # periods and offsets decide
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144, "num_experts_per_tok": 2, "num_experts": 16, "expert_layer_period": 2,
    "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    if fields["mamba_dt_rank"] == "auto":
        fields["mamba_dt_rank"] = dt_rank(fields["hidden_size"])


def _places(hf: Any, what: str) -> list[bool]:
    """One layer in each period, at the offset."""
    period, offset = getattr(hf, f"{what}_layer_period"), getattr(hf, f"{what}_layer_offset")
    if offset >= period:
        raise ConfigError(f"{what}_layer_offset is {offset}; it must be smaller than {what}_layer_period, {period}")
    return [i % period == offset for i in range(hf.num_hidden_layers)]


def _describe(hf: Any) -> FamilyFields:
    mamba = Mamba1Config(
        intermediate_size=hf.mamba_expand * hf.hidden_size,
        state_size=hf.mamba_d_state,
        conv_kernel=hf.mamba_d_conv,
        dt_rank=int(hf.mamba_dt_rank),
    )
    ffns = ["moe" if sparse and hf.num_experts > 1 else "mlp" for sparse in _places(hf, "expert")]
    return interleaved(hf, mamba, attention_config(hf, rotary=False), ffns, _places(hf, "attn"))


FAMILY = Family(
    model="hybridrt.models.jamba:JambaForCausalLM",
    model_type="jamba",
    fields=FIELDS,
    defaults=DEFAULTS,
    older={"num_local_experts": "num_experts"},
    derive=_derive,
    describe=_describe,
)


class JambaForCausalLM(CausalLM):
    norm_key = "model.final_layernorm"

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            attention = Attention(f"{name}.attn", config.attention_of(layer_id), layer_id, hidden, build=build)
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            mamba = Mamba1Mixer(
                f"{name}.mamba", config.linear_of(Mamba1Config), layer_id, hidden, conv_bias=hf.mamba_conv_bias,
                proj_bias=hf.mamba_proj_bias, norm_eps=hf.rms_norm_eps, build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "mamba", mamba)
        experts = spec.ffn == "moe"
        ffn = self._moe(f"{name}.moe") if experts else MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        return [mixer, ResidualPart("pre_ff_layernorm", "feed_forward", ffn)]

    def _moe(self, name: str) -> MoE:
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        count, size, top_k = hf.num_experts, hf.intermediate_size, hf.num_experts_per_tok
        router = SoftmaxRouter(f"{name}.router", hidden, count, top_k=top_k, renormalize=False, build=build)
        experts = Experts(f"{name}.experts", count, hidden, size, activation="silu", build=build)
        return MoE(router, experts, keys={"router": "router", "experts": "experts"})
