"""Mamba-2: Mamba-2 blocks and nothing else."""

from typing import Any

from hybridrt.config import LayerSpec
from hybridrt.config_kinds import CHUNK, DT_LIMIT, SIZE
from hybridrt.families.base import Family, FamilyFields
from hybridrt.families.mamba import NO_ATTENTION, PURE
from hybridrt.kinds.mamba2 import Mamba2Config


def _describe(hf: Any) -> FamilyFields:
    mamba = Mamba2Config(
        num_heads=hf.num_heads,
        head_dim=hf.head_dim,
        state_size=hf.state_size,
        n_groups=hf.n_groups,
        conv_kernel=hf.conv_kernel,
        chunk_size=hf.chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )
    layers = (LayerSpec(attention=False, linear="mamba2", ffn=None),) * hf.num_hidden_layers
    return {"layers": layers, "linear": {"mamba2": mamba}, "attention": NO_ATTENTION}


FAMILY = Family(
    model="hybridrt.models.mamba:Mamba2ForCausalLM",
    config_class="Mamba2Config",
    fields={
        **PURE,
        **dict.fromkeys(("num_heads", "head_dim", "n_groups"), SIZE),
        "chunk_size": CHUNK,
        "time_step_limit": DT_LIMIT,
    },
    describe=_describe,
)
