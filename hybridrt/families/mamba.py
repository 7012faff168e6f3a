"""Mamba and Mamba-2: blocks of one kind and nothing else."""

import math
from typing import Any

from hybridrt.base.config import AttentionConfig, LayerSpec, LinearConfig
from hybridrt.base.config_fields import CHUNK, COMMON, DT_LIMIT, EPSILON, POSITIONS, SIZE, STATE, TAPS, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, either
from hybridrt.base.errors import ConfigError
from hybridrt.families.base import Family, FamilyFields
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config

PURE: FieldTypes = {
    **COMMON,
    "state_size": STATE,
    "conv_kernel": TAPS,
    "expand": SIZE,
    "max_position_embeddings": either(NULL, POSITIONS),
    "layer_norm_epsilon": EPSILON,
    **dict.fromkeys(("use_conv_bias", "use_bias", "residual_in_fp32"), FLAG),
}
FIELDS: FieldTypes = {**PURE, **dict.fromkeys(("intermediate_size", "time_step_rank"), SIZE)}
FIELDS2: FieldTypes = {
    **PURE,
    **dict.fromkeys(("num_heads", "head_dim", "n_groups"), SIZE),
    "chunk_size": CHUNK,
    "time_step_limit": DT_LIMIT,
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-05,
    "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True,
    "intermediate_size": None, "time_step_rank": "auto", "tie_word_embeddings": True,
}  # fmt: skip
DEFAULTS2: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-05,
    "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True,
    "num_heads": 128, "head_dim": 64, "n_groups": 8, "chunk_size": 256, "time_step_limit": (0.0, math.inf),
    "tie_word_embeddings": False,
}  # fmt: skip
NO_ATTENTION = AttentionConfig(0, 0, 0, rope=None)


def derive(fields: dict[str, Any]) -> None:
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = fields["expand"] * fields["hidden_size"]
    if fields["time_step_rank"] == "auto":
        fields["time_step_rank"] = dt_rank(fields["hidden_size"])


def dt_rank(hidden_size: int) -> int:
    """Of Mamba-1 where "auto" leaves it open."""
    return math.ceil(hidden_size / 16)


def describe(hf: Any) -> FamilyFields:
    return _stack(hf, Mamba1Config(hf.intermediate_size, hf.state_size, hf.conv_kernel, int(hf.time_step_rank)))


def _describe2(hf: Any) -> FamilyFields:
    if hf.num_heads * hf.head_dim != hf.expand * hf.hidden_size:
        raise ConfigError(
            f"num_heads is {hf.num_heads} and head_dim {hf.head_dim}; their product must be expand x hidden_size, "
            f"{hf.expand * hf.hidden_size}"
        )
    mamba = Mamba2Config(
        num_heads=hf.num_heads,
        head_dim=hf.head_dim,
        state_size=hf.state_size,
        n_groups=hf.n_groups,
        conv_kernel=hf.conv_kernel,
        chunk_size=hf.chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )
    return _stack(hf, mamba)


def _stack(hf: Any, mamba: LinearConfig) -> FamilyFields:
    layers = (LayerSpec(attention=False, linear=mamba.kind, ffn=None),) * hf.num_hidden_layers
    return {"layers": layers, "linear": {mamba.kind: mamba}, "attention": NO_ATTENTION}


FAMILY = Family(
    model="hybridrt.models.mamba:MambaForCausalLM",
    model_type="mamba",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=derive,
    describe=describe,
)
FAMILY2 = Family(
    model="hybridrt.models.mamba:Mamba2ForCausalLM",
    model_type="mamba2",
    fields=FIELDS2,
    defaults=DEFAULTS2,
    describe=_describe2,
)
