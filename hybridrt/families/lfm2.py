"""LFM2: gated short convolutions with a layer of attention every few, each followed by an MLP."""

from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_json import FLAG, OBJECT, list_of, number, one_of
from hybridrt.config_kinds import ATTENTION, COMMON, EPSILON, SIZE, TAPS, Kinds
from hybridrt.families.base import Family, FamilyFields, attention_config
from hybridrt.kinds.short_conv import ShortConvConfig

# What the dense models and those with experts share.
SHARED: Kinds = {
    **COMMON,
    **ATTENTION,
    "conv_L_cache": TAPS,
    "conv_bias": FLAG,
    "layer_types": list_of(one_of("conv", "full_attention")),
    "norm_eps": EPSILON,
    "rope_parameters": OBJECT,
}
FIELDS: Kinds = {
    **SHARED,
    "block_auto_adjust_ff_dim": FLAG,
    "block_ffn_dim_multiplier": number(1e-3, 1e3),
    "block_multiple_of": SIZE,
}


def describe(hf: Any, num_dense_layers: int | None = None) -> FamilyFields:
    """Layers from number `num_dense_layers` on have experts; None for none."""
    dense = len(hf.layer_types) if num_dense_layers is None else num_dense_layers

    def layer(i: int, kind: str) -> LayerSpec:
        full = kind == "full_attention"
        return LayerSpec(full, None if full else "short_conv", "mlp" if i < dense else "moe")

    layers = tuple(layer(i, kind) for i, kind in enumerate(hf.layer_types))
    conv = ShortConvConfig(hf.hidden_size, hf.conv_L_cache)
    return {"layers": layers, "linear": {"short_conv": conv}, "attention": attention_config(hf)}


FAMILY = Family(
    model="hybridrt.models.lfm2:Lfm2ForCausalLM",
    config_class="Lfm2Config",
    fields=FIELDS,
    describe=describe,
)
