"""Bamba: Mamba-2 blocks and a few of attention, each followed by an MLP.

    x ─ norm ─ Mamba-2 or attention ─ + ─ norm ─ MLP ─ +

Half of each head is rotated (IBM, Princeton, CMU and UIUC 2024).
"""

from collections.abc import Sequence
from typing import Any

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MAX_LAYERS, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, OBJECT, either, integer, list_of
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.norm import ResidualPart
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import (
    MAMBA2,
    MAMBA2_DEFAULTS,
    Family,
    FamilyFields,
    attention_config,
    derive_mamba2,
    interleaved,
    mamba2_config,
)
from hybridrt.recurrent.mamba2 import Mamba2Block

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **MAMBA2,
    "attn_layer_indices": either(NULL, list_of(integer(0, MAX_LAYERS))),
    **dict.fromkeys(("layer_types", "layers_block_type"), NULL),  # attn_layer_indices has them
    "rms_norm_eps": EPSILON,
    "rope_parameters": OBJECT,
    **dict.fromkeys(("attention_bias", "mlp_bias"), FLAG),
}
DEFAULTS: dict[str, Any] = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 262144, "attn_layer_indices": None, "rope_parameters": None, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    derive_mamba2(fields)
    fields["partial_rotary_factor"] = 0.5  # unless rope_parameters has another


def _describe(hf: Any) -> FamilyFields:
    mamba = mamba2_config(hf)
    full = [i in (hf.attn_layer_indices or ()) for i in range(hf.num_hidden_layers)]
    return interleaved(hf, mamba, attention_config(hf), "mlp", full)


FAMILY = Family(
    model="hybridrt.models.bamba:BambaForCausalLM",
    model_type="bamba",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
)


class BambaForCausalLM(CausalLM):
    norm_key = "model.final_layernorm"

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, hidden, build = self.config, self.config.hf, self.config.hidden_size, self.build
        if config.layer(layer_id).attention:
            own = config.attention_of(layer_id)
            attention = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias, build=build
            )
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            mamba = Mamba2Block(
                f"{name}.mamba", config.linear_of(Mamba2Config), layer_id, hidden, bias=hf.mamba_proj_bias,
                conv_bias=hf.mamba_conv_bias, gated_norm=(hf.rms_norm_eps, False), build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "mamba", mamba)
        mlp = MLP(f"{name}.mlp", hidden, hf.intermediate_size, bias=hf.mlp_bias, build=build)
        return [mixer, ResidualPart("pre_ff_layernorm", "feed_forward", mlp)]
