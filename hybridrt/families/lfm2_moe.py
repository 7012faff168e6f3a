"""LFM2 with experts behind its first layers."""

from typing import Any

from hybridrt.config_json import FLAG, integer
from hybridrt.config_kinds import COUNT, MAX_EXPERTS, MULTIPLIER, SIZE
from hybridrt.families.base import Family, FamilyFields
from hybridrt.families.lfm2 import SHARED, describe


def _describe(hf: Any) -> FamilyFields:
    return describe(hf, hf.num_dense_layers)


FAMILY = Family(
    model="hybridrt.models.lfm2:Lfm2MoeForCausalLM",
    config_class="Lfm2MoeConfig",
    fields={
        **SHARED,
        "num_dense_layers": COUNT,
        "num_experts": integer(2, MAX_EXPERTS),
        "num_experts_per_tok": COUNT,
        "moe_intermediate_size": SIZE,
        "routed_scaling_factor": MULTIPLIER,
        **dict.fromkeys(("norm_topk_prob", "use_expert_bias"), FLAG),
    },
    describe=_describe,
)
