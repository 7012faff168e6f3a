"""Zamba2: Mamba-2 blocks, some of them behind a transformer block whose weights several places share."""

import math
from typing import Any

from hybridrt.base.config import AttentionConfig, LayerSpec
from hybridrt.base.config_fields import (
    CHUNK,
    COMMON,
    EPSILON,
    MAX_LAYERS,
    POSITIONS,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
    integer,
)
from hybridrt.base.config_json import FLAG, NULL, FieldType, either, list_of, number, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.families.base import FULL_ROPE, Family, FamilyFields, check_heads
from hybridrt.kinds.mamba2 import Mamba2Config

FIELDS: FieldTypes = {
    **COMMON,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "attention_head_dim", "intermediate_size"), SIZE),
    **dict.fromkeys(("mamba_expand", "mamba_ngroups", "n_mamba_heads", "adapter_rank"), SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    "chunk_size": CHUNK,
    "layers_block_type": list_of(one_of("linear_attention", "hybrid")),
    "num_mem_blocks": integer(1, MAX_LAYERS),
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": EPSILON,
    "time_step_min": number(0.0, 1e6),
    "rope_parameters": either(NULL, FULL_ROPE),
    **dict.fromkeys(("add_bias_linear", "use_mem_rope", "use_shared_attention_adapter"), FLAG),
    "use_long_context": FieldType("false: rescaled rotary embeddings are not supported", lambda v: v is False),
}
# Which layers hold a shared block besides, in the published model of 2.7 billion weights.
HYBRID = (6, 12, 18, 24, 30, 36, 42, 47, 51)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_size": 2560, "num_hidden_layers": 54,
    "layers_block_type": None, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1,
    "time_step_min": 0.001, "n_mamba_heads": 8, "chunk_size": 256, "add_bias_linear": False, "intermediate_size": None,
    "num_attention_heads": 32, "num_key_value_heads": None, "attention_head_dim": None, "num_mem_blocks": 1,
    "use_shared_attention_adapter": False, "adapter_rank": 128, "use_mem_rope": False, "rope_parameters": None,
    "rms_norm_eps": 1e-05, "use_long_context": False, "tie_word_embeddings": True,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * fields["hidden_size"]
    if fields["attention_head_dim"] is None:
        fields["attention_head_dim"] = 2 * fields["hidden_size"] // fields["num_attention_heads"]
    if fields["layers_block_type"] is None:
        fields["layers_block_type"] = ["hybrid" if i in HYBRID else "linear_attention" for i in range(54)]


def _describe(hf: Any) -> FamilyFields:
    inner = hf.mamba_expand * hf.hidden_size
    if inner % hf.n_mamba_heads or hf.hidden_size * 2 % hf.num_attention_heads:
        raise ConfigError(
            f"n_mamba_heads {hf.n_mamba_heads} must divide mamba_expand x hidden_size, {inner}, and "
            f"num_attention_heads {hf.num_attention_heads} must divide 2 x hidden_size, {2 * hf.hidden_size}"
        )
    check_heads(hf)
    if hf.use_shared_attention_adapter and hf.num_attention_heads != hf.num_key_value_heads:
        raise ConfigError(
            f"use_shared_attention_adapter: the adapters of keys and values are made for {hf.num_attention_heads} "
            f"heads, and num_key_value_heads is {hf.num_key_value_heads}"
        )
    mamba = Mamba2Config(
        num_heads=hf.n_mamba_heads,
        head_dim=inner // hf.n_mamba_heads,
        state_size=hf.mamba_d_state,
        n_groups=hf.mamba_ngroups,
        conv_kernel=hf.mamba_d_conv,
        chunk_size=hf.chunk_size,
        # transformers clamps so in prefill and not in decode; one rule for both lets steps agree with whole prompts.
        dt_limit=(float(hf.time_step_min), math.inf),
    )
    head_dim, rope = 2 * hf.hidden_size // hf.num_attention_heads, None
    if hf.use_mem_rope:
        rope = dict(hf.rope_parameters or {})
    heads = hf.num_attention_heads, hf.num_key_value_heads, head_dim
    attention = AttentionConfig(*heads, rope, scale=(head_dim / 2) ** -0.5)
    # Mamba-2 follows each use of a shared block. Each use has a KV cache of its own, under its layer's id.
    plain, hybrid = LayerSpec(False, "mamba2", None), LayerSpec(True, "mamba2", "mlp")
    layers = tuple(hybrid if kind == "hybrid" else plain for kind in hf.layers_block_type)
    return {"layers": layers, "linear": {"mamba2": mamba}, "attention": attention}


FAMILY = Family(
    model="hybridrt.models.zamba2:Zamba2ForCausalLM",
    model_type="zamba2",
    fields=FIELDS,
    defaults=DEFAULTS,
    older={"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
    derive=_derive,
    describe=_describe,
    activation="gelu",
)
