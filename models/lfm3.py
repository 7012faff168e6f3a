"""LFM3: gated short convolutions, attention with a sliding window, a few layers of full attention,
each followed by an MLP.

    x ─ norm ─ short conv or attention ─ norm ─ + ─ norm ─ MLP ─ norm ─ +

Layers with a window and without rotate in ways of their own, and a sigmoid multiplies each head's
output (Liquid AI 2026). Published files name the type of a rotary embedding that turns a part of a
head "default". transformers 5.23 turns whole heads then; the publisher's code and this one read it
as "proportional". Checkpoints of LFM3-VL hold the text part under `model.language_model`, and a tower
next to it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, POSITIONS, TAPS, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, FieldType, either, integer, list_of, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import AttentionConfig, LayerSpec
from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.norm import LayerPart, ResidualPart
from hybridrt.models.base import MTP_KEYS, SWIGLU, CausalLM
from hybridrt.models.config.family import Family, FamilyFields, attention_config
from hybridrt.models.lfm2 import NOT_TEXT, SEEING_KEYS
from hybridrt.models.vision.lfm3 import Lfm3Tower, read
from hybridrt.recurrent.short_conv import ShortConvMixer

FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"


def _turns_whole_heads(rope: Mapping[str, Any]) -> bool:
    return rope.get("partial_rotary_factor") in (None, 1)


def _known(rope: Any) -> bool:
    """Only two types turn a part of a head."""
    if not isinstance(rope, Mapping) or _turns_whole_heads(rope):
        return True
    return rope.get("rope_type", rope.get("type", "default")) in ("default", "proportional")


ROPES = FieldType(
    f"null, or an object with an object for each of {FULL} and {SLIDING}, whose partial_rotary_factor is 1 or null "
    "unless its rope_type is default or proportional",
    lambda v: v is None or (isinstance(v, Mapping) and all(map(_known, v.values()))),
)
FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    "conv_L_cache": TAPS,
    "layer_types": list_of(one_of(CONV, FULL, SLIDING)),
    "sliding_window": either(NULL, POSITIONS),
    "norm_eps": EPSILON,
    "rope_parameters": ROPES,
    **dict.fromkeys(("conv_bias", "attention_bias", "use_attention_gate", "use_sandwich_norm"), FLAG),
    # Not read by transformers. Other values would mean a different model.
    "num_experts": either(NULL, integer(0, 0)),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 128000,
    "norm_eps": 1e-05, "tie_word_embeddings": True, "rope_parameters": None, "rope_theta": 1000000.0,
    "conv_bias": False, "conv_L_cache": 7, "layer_types": None, "sliding_window": 256, "attention_bias": False,
    "use_attention_gate": True, "use_sandwich_norm": True,
}  # fmt: skip
ROPE_DEFAULTS: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


def _derive(fields: dict[str, Any]) -> None:
    if fields["layer_types"] is None:
        four, count = (SLIDING, CONV, FULL, CONV), fields["num_hidden_layers"]
        fields["layer_types"] = [CONV, *(four[i % 4] for i in range(1, count))]
    if fields["rope_parameters"] is None:
        fields["rope_parameters"] = ROPE_DEFAULTS


def _attention(hf: Any, kind: str) -> AttentionConfig:
    """The attention of all layers of type `kind`."""
    rope, window = hf.rope_parameters.get(kind), hf.sliding_window if kind == SLIDING else None
    if rope is None:
        raise ConfigError(f"rope_parameters has no object {kind!r}; layers of that type rotate by it")
    if kind == SLIDING and window is None:
        raise ConfigError(f"sliding_window is null; with {SLIDING} in layer_types it must be an integer from 1")
    if rope["rope_type"] == "default" and not _turns_whole_heads(rope):
        rope = {**rope, "rope_type": "proportional"}
    return replace(attention_config(hf, rotary=False), rope=rope, sliding_window=window)


def _describe(hf: Any) -> FamilyFields:
    own = {kind: _attention(hf, kind) for kind in (FULL, SLIDING) if kind in hf.layer_types}
    conv = ShortConvConfig(hf.hidden_size, hf.conv_L_cache)
    specs = {CONV: LayerSpec(False, conv.kind, "mlp")} | {kind: LayerSpec(a, None, "mlp") for kind, a in own.items()}
    return {
        "layers": tuple(specs[kind] for kind in hf.layer_types),
        "linear": {conv.kind: conv} if CONV in hf.layer_types else {},
        "attention": next(iter(own.values()), attention_config(hf, rotary=False)),
    }


FAMILY = Family(
    model="hybridrt.models.lfm3:Lfm3ForCausalLM",
    model_type="lfm3",
    fields=FIELDS,
    defaults=DEFAULTS,
    older={"rms_norm_eps": "norm_eps"},
    derive=_derive,
    describe=_describe,
    rope_kinds=(FULL, SLIDING),
)
SEEING = replace(
    FAMILY,
    model="hybridrt.models.lfm3:Lfm3VlForConditionalGeneration",
    defaults={**DEFAULTS, "image_token_id": 125030, "video_token_id": 125029},
    section="text_config",
    image_tokens=("image_token_id", "video_token_id"),
    vision=read,
)


class Lfm3ForCausalLM(CausalLM):
    norm_key, eps_field = "model.embedding_norm", "norm_eps"
    # Published checkpoints name the gate differently.
    spellings: ClassVar[dict[str, str]] = {**SWIGLU, ".self_attn.gate_proj.": ".self_attn.g_proj."}

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, build = self.config, self.config.hf, self.build
        hidden = config.hidden_size
        after_mixer, after_mlp = ("post_operator_norm", "post_ffn_norm") if hf.use_sandwich_norm else ("", "")
        mixer: LayerPart
        if config.layer(layer_id).attention:
            own = config.attention_of(layer_id)
            mixer = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias,
                qk_norm=(hf.norm_eps, False), head_gated=hf.use_attention_gate, build=build,
            )  # fmt: skip
            first = ResidualPart("operator_norm", "self_attn", mixer, after_mixer)
        else:
            conv = config.linear_of(ShortConvConfig)
            mixer = ShortConvMixer(f"{name}.short", conv, layer_id, hidden, bias=hf.conv_bias, build=build)
            first = ResidualPart("operator_norm", "conv", mixer, after_mixer)
        mlp = MLP(f"{name}.mlp", hidden, hf.intermediate_size, build=build)
        return [first, ResidualPart("ffn_norm", "feed_forward", mlp, after_mlp)]


class Lfm3VlForConditionalGeneration(Lfm3ForCausalLM):
    """LFM3 with images."""

    spellings: ClassVar[dict[str, str]] = {**SEEING_KEYS, **Lfm3ForCausalLM.spellings}
    skipped_keys = (MTP_KEYS, NOT_TEXT)
    tower_class, tower_keys = Lfm3Tower, NOT_TEXT

    def rename_key(self, key: str) -> str:
        if not re.fullmatch(NOT_TEXT, key):
            return super().rename_key(key)
        return key.replace("_layernorm.", "_norm.").replace(".patchifier.", ".patch_embed.")
