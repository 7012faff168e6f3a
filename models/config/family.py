"""What a family is: fields of its config.json, how to read them, and its model class."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrt.base.config_fields import CHUNK, DT_LIMIT, MULTIPLIER, SIZE, STATE, TAPS, FieldTypes
from hybridrt.base.config_json import FLAG, FieldType, list_of, one_of
from hybridrt.base.errors import ConfigError, shown
from hybridrt.base.model_config import AttentionConfig, LatentConfig, LayerSpec, LinearConfig
from hybridrt.base.vision import VisionSpec
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.mamba2 import Mamba2Config

FamilyFields = dict[str, Any]

# Older names of layer types in config.json, and the present ones.
OLDER_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
MAMBA2: FieldTypes = {
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_expand"), SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    "mamba_chunk_size": CHUNK,
    "time_step_limit": DT_LIMIT,
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), FLAG),
}
MAMBA2_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_d_state": 256,
    "mamba_d_conv": 4, "mamba_chunk_size": 256, "time_step_limit": (0.0, math.inf), "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}  # fmt: skip
# Fields of models with Gated Delta Net and attention layers.
GDN: FieldTypes = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), SIZE),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), STATE),
    "linear_conv_kernel_dim": TAPS,
    "layer_types": list_of(one_of("linear_attention", "full_attention")),
}
GDN_DEFAULTS: dict[str, Any] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "layer_types": None, "full_attention_interval": 4,
}  # fmt: skip
# transformers rotates whole heads, whatever the factor is.
FULL_ROPE = FieldType(
    "an object whose partial_rotary_factor is 1 or null: this architecture rotates whole heads",
    lambda v: isinstance(v, Mapping) and v.get("partial_rotary_factor") in (None, 1),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
        model: "module:class" of its CausalLM. The class has the architecture's name.
        fields: allowed values of every config.json field that the model or its plan reads.
        describe: from an object with these fields to the family's part of a ModelConfig: `layers`,
            `linear`, `attention` and, with a prediction head, `mtp_layers`. Raises ConfigError.
        model_type: what config.json must say, if it says any.
        defaults: for omitted fields, as in transformers. None and "auto" are left to `derive`.
        older: older field names. They win, unless null where the field may be null.
        derive: fills fields that follow from others, whose types are checked. Raises ConfigError.
        read: (config.json's object, its path) to the object for `describe`, for a family with its
            own reader. model_type, defaults, older and derive are then ignored.
        rewrite: (config.json's object, its path) to the object to read, for other spellings of
            fields. Raises ConfigError.
        activation: hidden_act that the model implements.
        mtp_head: "module:class" of its multi-token-prediction head.
        section: config.json's object of the text part of a model with images.
        outer_older: older names of the fields next to `section`, its own included. They win, unless
            null.
        image_tokens: config.json fields with the tokens that stand for images. `defaults` may have
            them.
        vision: (config.json's object with its image_token_id, the text part's hidden_size) to the
            tower. Raises ConfigError. None: only the text part runs.
        rope_kinds: layer types with rotary embeddings of their own: `rope_parameters` has an object
            for each. (): one object is for all layers.
    """

    model: str
    fields: FieldTypes
    describe: Callable[[Any], FamilyFields]
    model_type: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], None] | None = None
    read: Callable[[Mapping[str, Any], Path], Any] | None = None
    rewrite: Callable[[Mapping[str, Any], Path], dict[str, Any]] | None = None
    activation: str = "silu"
    mtp_head: str | None = None
    section: str | None = None
    outer_older: Mapping[str, str] = field(default_factory=dict)
    image_tokens: tuple[str, ...] = ()
    vision: Callable[[Mapping[str, Any], int], VisionSpec] | None = None
    rope_kinds: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        return self.model.partition(":")[2]


def attention_config(hf: Any, rotary: bool = True, scale: float | None = None) -> AttentionConfig:
    """Grouped-query attention from transformers' fields. Without `rotary`, no positions."""
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    check_heads(hf)
    rope = dict(hf.rope_parameters) if rotary else None
    return AttentionConfig(hf.num_attention_heads, hf.num_key_value_heads, head_dim, rope, scale=scale)


def latent_attention(hf: Any, rotary: bool) -> AttentionConfig:
    """Latent attention from the fields of `LATENT`. Its cache has one head, whose values are a part
    of its keys. num_key_value_heads is ignored, because keys are made for all heads."""
    rope, rank = dict(hf.rope_parameters) if rotary else None, hf.kv_lora_rank
    if rope:
        # qk_rope_head_dim is the rotated part already.
        rope.pop("partial_rotary_factor", None)
    query_rank = getattr(hf, "q_lora_rank", None)
    latent = LatentConfig(rank, hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim, query_rank)
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5 * _yarn_scale(rope or {})
    return AttentionConfig(
        hf.num_attention_heads, 1, rank + latent.rope_dim, rope, v_head_dim=rank, scale=scale, latent=latent
    )


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """Multiplies scores of stretched positions (DeepSeek-V2, section 3.1.4)."""
    weight, factor = rope.get("mscale_all_dim") or 0, rope.get("factor", 1)
    if not weight or rope.get("rope_type", "default") == "default":
        return 1.0
    if not (MULTIPLIER.holds(weight) and MULTIPLIER.holds(factor)):
        raise ConfigError(f"mscale_all_dim is {shown(weight)} and factor {shown(factor)}; both must be numbers")
    return float(0.1 * weight * math.log(max(factor, 1)) + 1) ** 2


def derive_mamba2(fields: dict[str, Any], own: int | None = None) -> None:
    """Derives the head size that `MAMBA2_DEFAULTS` leaves open. `own`: the width of all heads, if a
    family has a field for it."""
    if fields["mamba_d_head"] == "auto":
        width = fields["mamba_expand"] * fields["hidden_size"] if own is None else own
        fields["mamba_d_head"] = width // fields["mamba_n_heads"]


def mamba2_config(hf: Any, own: int | None = None) -> Mamba2Config:
    """Mamba-2 from the fields of `MAMBA2`. `own` as in `derive_mamba2`."""
    width = hf.mamba_expand * hf.hidden_size if own is None else own
    if hf.mamba_n_heads * hf.mamba_d_head != width:
        raise ConfigError(
            f"mamba_n_heads is {hf.mamba_n_heads} and mamba_d_head {hf.mamba_d_head}; their product must be {width}, "
            "mamba_d_ssm or mamba_expand x hidden_size"
        )
    return Mamba2Config(
        num_heads=hf.mamba_n_heads,
        head_dim=hf.mamba_d_head,
        state_size=hf.mamba_d_state,
        n_groups=hf.mamba_n_groups,
        conv_kernel=hf.mamba_d_conv,
        chunk_size=hf.mamba_chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )


def derive_gdn(fields: dict[str, Any]) -> None:
    """Without a list of kinds: attention in every fourth layer, or at the file's interval."""
    if fields["layer_types"] is None:
        every, count = fields["full_attention_interval"], fields["num_hidden_layers"]
        fields["layer_types"] = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def derive_ffns(fields: dict[str, Any]) -> None:
    """Without a list: an MLP in the first layers, experts in the others."""
    if fields["mlp_layer_types"] is None:
        dense = fields["first_k_dense_replace"]
        fields["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(fields["num_hidden_layers"])]


def ffns(hf: Any) -> list[str]:
    """ "moe" or "mlp" of each layer."""
    return ["moe" if kind == "sparse" else "mlp" for kind in hf.mlp_layer_types]


def gdn_config(hf: Any, beta_scale: float = 1.0) -> GDNConfig:
    """Gated Delta Net from transformers' fields."""
    return GDNConfig(
        num_k_heads=hf.linear_num_key_heads,
        num_v_heads=hf.linear_num_value_heads,
        head_k_dim=hf.linear_key_head_dim,
        head_v_dim=hf.linear_value_head_dim,
        conv_kernel=hf.linear_conv_kernel_dim,
        beta_scale=beta_scale,
    )


def interleaved(
    hf: Any, mixer: LinearConfig, attention: AttentionConfig, ffn: str | Sequence[str], full: Sequence[bool] = ()
) -> FamilyFields:
    """Result of `Family.describe`: attention in layers where `full`, `mixer` in the others.

    Args:
        ffn: "mlp" or "moe", of all layers or of each.
        full: () reads `layer_types`.
    """
    full = full or [kind in ("full_attention", "attention") for kind in hf.layer_types]
    ffns = [ffn] * len(full) if isinstance(ffn, str) else ffn
    layers = tuple(LayerSpec(f, None if f else mixer.kind, part) for f, part in zip(full, ffns, strict=True))
    return {"layers": layers, "linear": {mixer.kind: mixer}, "attention": attention}


def current_kind(kind: Any) -> Any:
    return OLDER_LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind


def check_heads(hf: Any) -> None:
    """ConfigError unless each KV head serves equally many query heads."""
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {hf.num_attention_heads} is no multiple of num_key_value_heads "
            f"{hf.num_key_value_heads}"
        )


def check_experts(hf: Any, experts: int, chosen: int, where: object) -> None:
    """ConfigError, with `where`, unless a router can choose that many experts of a layer."""
    if not 1 <= chosen <= experts:
        raise ConfigError(f"{where}: num_experts_per_tok is {chosen}, but there are {experts} experts")
    groups, best = getattr(hf, "n_group", None), getattr(hf, "topk_group", None)
    if groups is None or best is None:
        return
    if experts % groups or best > groups:
        raise ConfigError(f"{where}: n_group is {groups} and topk_group {best}; n_group divides the {experts} experts")
    if experts < 2 * groups:  # a group's score is the sum of its two best
        raise ConfigError(f"{where}: n_group is {groups}, and there are {experts} experts; a group has two or more")


def routed_experts(hf: Any) -> int:
    """Experts that a layer's router chooses from; 0: none."""
    # n_routed_experts is last: files of other families may hold it too.
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(hf, name, 0))), 0)
