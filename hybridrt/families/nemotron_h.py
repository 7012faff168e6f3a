"""Nemotron-H: blocks of one kind each, Mamba-2, attention, MLP or experts."""

import math
from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_fields import (
    ATTENTION,
    CHUNK,
    COMMON,
    COUNT,
    EPSILON,
    MAX_EXPERTS,
    MULTIPLIER,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
)
from hybridrt.config_json import FLAG, NULL, TEXT, either, integer, list_of
from hybridrt.errors import ConfigError
from hybridrt.families.base import Family, FamilyFields, attention_config
from hybridrt.kinds.mamba2 import Mamba2Config

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "n_groups"), SIZE),
    "ssm_state_size": STATE,
    "conv_kernel": TAPS,
    "chunk_size": CHUNK,
    **dict.fromkeys(("layers_block_type", "mtp_layers_block_type"), list_of(TEXT)),
    "num_nextn_predict_layers": COUNT,
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("n_group", "topk_group"), integer(1, MAX_EXPERTS)),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), SIZE),
    "moe_latent_size": either(NULL, SIZE),
    "routed_scaling_factor": MULTIPLIER,
    "layer_norm_epsilon": EPSILON,
    **dict.fromkeys(("use_bias", "use_conv_bias", "mlp_bias", "norm_topk_prob"), FLAG),
}


def _describe(hf: Any) -> FamilyFields:
    kinds = {
        "linear_attention": LayerSpec(False, "mamba2", None),
        "full_attention": LayerSpec(True, None, None),
        "mlp": LayerSpec(False, None, "mlp"),
        "moe": LayerSpec(False, None, "moe"),
    }
    # Older spellings of the pattern that transformers versions keep in layers_block_type.
    kinds |= {"mamba": kinds["linear_attention"], "attention": kinds["full_attention"]}
    unknown = sorted(set(hf.layers_block_type) - set(kinds))
    if unknown:
        raise ConfigError(f"layers_block_type holds {unknown}; known kinds are {sorted(kinds)}")
    mamba = Mamba2Config(
        num_heads=hf.mamba_num_heads,
        head_dim=hf.mamba_head_dim,
        state_size=hf.ssm_state_size,
        n_groups=hf.n_groups,
        conv_kernel=hf.conv_kernel,
        chunk_size=hf.chunk_size,
        # transformers raises time steps to time_step_min in prefill, and not in decode. The fused path of the published
        # code raises them in neither, nor does vLLM.
        dt_limit=(0.0, math.inf),
    )
    layers = tuple(kinds[k] for k in hf.layers_block_type)
    head = tuple(kinds[k] for k in hf.mtp_layers_block_type) if hf.num_nextn_predict_layers == 1 else ()
    # Nemotron-H rotates nothing: its attention layers take positions from the recurrent layers around them.
    attention = attention_config(hf, rotary=False)
    return {"layers": layers, "linear": {"mamba2": mamba}, "attention": attention, "mtp_layers": head}


FAMILY = Family(
    model="hybridrt.models.nemotron_h:NemotronHForCausalLM",
    config_class="NemotronHConfig",
    fields=FIELDS,
    describe=_describe,
    mtp_head="hybridrt.models.nemotron_h:NemotronHMTP",
)
