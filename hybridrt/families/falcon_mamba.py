"""Falcon-Mamba: Mamba-1 blocks and nothing else."""

from typing import Any

from hybridrt.config import AttentionConfig, LayerSpec
from hybridrt.config_json import FLAG, NULL, either
from hybridrt.config_kinds import COMMON, EPSILON, POSITIONS, SIZE, STATE, TAPS, Kinds
from hybridrt.families.base import Family, FamilyFields
from hybridrt.kinds.mamba1 import Mamba1Config

FIELDS: Kinds = {
    **COMMON,
    **dict.fromkeys(("intermediate_size", "time_step_rank"), SIZE),
    "state_size": STATE,
    "conv_kernel": TAPS,
    "max_position_embeddings": either(NULL, POSITIONS),
    **dict.fromkeys(("layer_norm_epsilon", "mixer_rms_eps"), EPSILON),
    **dict.fromkeys(("use_conv_bias", "use_bias", "residual_in_fp32"), FLAG),
}


def _describe(hf: Any) -> FamilyFields:
    mamba = Mamba1Config(hf.intermediate_size, hf.state_size, hf.conv_kernel, int(hf.time_step_rank))
    layers = (LayerSpec(attention=False, linear="mamba1", ffn=None),) * hf.num_hidden_layers
    return {"layers": layers, "linear": {"mamba1": mamba}, "attention": AttentionConfig(0, 0, 0, rope=None)}


FAMILY = Family(
    model="hybridrt.models.falcon_mamba:FalconMambaForCausalLM",
    config_class="FalconMambaConfig",
    fields=FIELDS,
    describe=_describe,
)
