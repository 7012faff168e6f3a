"""Mamba and Mamba-2: blocks of one kind and nothing else."""

from typing import Any

from hybridrt.config import AttentionConfig, LayerSpec, LinearConfig
from hybridrt.config_fields import CHUNK, COMMON, DT_LIMIT, EPSILON, POSITIONS, SIZE, STATE, TAPS, FieldTypes
from hybridrt.config_json import FLAG, NULL, either
from hybridrt.families.base import Family, FamilyFields
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config

PURE: FieldTypes = {
    **COMMON,
    "state_size": STATE,
    "conv_kernel": TAPS,
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
NO_ATTENTION = AttentionConfig(0, 0, 0, rope=None)


def describe(hf: Any) -> FamilyFields:
    return _stack(hf, Mamba1Config(hf.intermediate_size, hf.state_size, hf.conv_kernel, int(hf.time_step_rank)))


def _describe2(hf: Any) -> FamilyFields:
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
    model="hybridrt.models.mamba:MambaForCausalLM", config_class="MambaConfig", fields=FIELDS, describe=describe
)
FAMILY2 = Family(
    model="hybridrt.models.mamba:Mamba2ForCausalLM", config_class="Mamba2Config", fields=FIELDS2, describe=_describe2
)
