"""Mamba: Mamba-1 blocks and nothing else."""

from typing import Any

from hybridrt.config import AttentionConfig, LayerSpec
from hybridrt.config_json import FLAG, NULL, either
from hybridrt.config_kinds import COMMON, EPSILON, POSITIONS, SIZE, STATE, TAPS, Kinds
from hybridrt.families.base import Family, FamilyFields
from hybridrt.kinds.mamba1 import Mamba1Config

# What every stack of Mamba blocks and nothing else has.
PURE: Kinds = {
    **COMMON,
    "state_size": STATE,
    "conv_kernel": TAPS,
    "max_position_embeddings": either(NULL, POSITIONS),
    "layer_norm_epsilon": EPSILON,
    **dict.fromkeys(("use_conv_bias", "use_bias", "residual_in_fp32"), FLAG),
}
FIELDS: Kinds = {**PURE, **dict.fromkeys(("intermediate_size", "time_step_rank"), SIZE)}
NO_ATTENTION = AttentionConfig(0, 0, 0, rope=None)


def describe(hf: Any) -> FamilyFields:
    mamba = Mamba1Config(hf.intermediate_size, hf.state_size, hf.conv_kernel, int(hf.time_step_rank))
    layers = (LayerSpec(attention=False, linear="mamba1", ffn=None),) * hf.num_hidden_layers
    return {"layers": layers, "linear": {"mamba1": mamba}, "attention": NO_ATTENTION}


FAMILY = Family(
    model="hybridrt.models.mamba:MambaForCausalLM",
    config_class="MambaConfig",
    fields=FIELDS,
    describe=describe,
)
