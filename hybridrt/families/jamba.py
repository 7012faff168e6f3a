"""Jamba: Mamba-1 blocks with one of attention every few layers, each followed by an MLP or experts."""

from typing import Any

from hybridrt.config_fields import ATTENTION, COMMON, COUNT, EPSILON, PERIOD, SIZE, STATE, TAPS, FieldTypes
from hybridrt.config_json import FLAG, NULL, TRUE, either
from hybridrt.families.base import Family, FamilyFields, attention_config, interleaved
from hybridrt.kinds.mamba1 import Mamba1Config

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_expand", "mamba_dt_rank"), SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "attn_layer_offset", "expert_layer_offset"), COUNT),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), PERIOD),
    "rms_norm_eps": EPSILON,
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), FLAG),
    # Norms of dt, B and C; the first Jamba could be configured without.
    "mamba_inner_layernorms": either(NULL, TRUE),
}


def _describe(hf: Any) -> FamilyFields:
    mamba = Mamba1Config(
        intermediate_size=hf.mamba_expand * hf.hidden_size,
        state_size=hf.mamba_d_state,
        conv_kernel=hf.mamba_d_conv,
        dt_rank=int(hf.mamba_dt_rank),
    )

    full = [kind == "attention" for kind in hf.layers_block_type]
    ffns = ["moe" if experts > 1 else "mlp" for experts in hf.layers_num_experts]
    # Jamba rotates nothing: its attention layers take positions from the recurrent layers around them.
    return interleaved(hf, mamba, attention_config(hf, rotary=False), ffns, full)


FAMILY = Family(
    model="hybridrt.models.jamba:JambaForCausalLM",
    config_class="JambaConfig",
    fields=FIELDS,
    describe=_describe,
)
