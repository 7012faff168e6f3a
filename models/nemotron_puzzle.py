"""Nemotron-H Puzzle: Nemotron-H with block sizes found by a search (NVIDIA 2026)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrt.base.config_fields import MAX_EXPERTS, SIZE, FieldTypes
from hybridrt.base.config_json import NULL, OBJECT, check_fields, either, integer, list_of
from hybridrt.base.errors import ConfigError
from hybridrt.models.config.family import FamilyFields, check_experts
from hybridrt.models.nemotron_h import FAMILY as NEMOTRON_H
from hybridrt.models.nemotron_h import NemotronHForCausalLM

SIZES = ("moe_intermediate_size", "moe_shared_expert_intermediate_size", "intermediate_size")
EXPERTS = ("n_routed_experts", "num_experts_per_tok")
FIELDS: FieldTypes = {
    **dict.fromkeys(SIZES, either(NULL, SIZE)),
    **dict.fromkeys(EXPERTS, either(NULL, integer(1, MAX_EXPERTS))),
}


def _rewrite(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Applies each block's overrides, `block_configs`."""
    check_fields(raw, {**FIELDS, "block_configs": list_of(OBJECT)}, file)
    blocks = [_own(i, block, raw, file) for i, block in enumerate(raw.get("block_configs", ()))]
    if not blocks:
        raise ConfigError(f"{file}: block_configs is missing or empty; it must say what each block is")
    kinds = [block.get("block_type") for block in raw["block_configs"]]
    # The prediction head's layout is unknown: it is ignored.
    changes = {"model_type": "nemotron_h", "layers_block_type": kinds, "num_nextn_predict_layers": 0}
    found = {k: v for k, v in raw.items() if k not in ("hybrid_override_pattern", "layer_types", "num_hidden_layers")}
    return found | changes | {"block_configs": blocks}


def _own(i: int, block: Mapping[str, Any], raw: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    own = {k: v for k, v in block.items() if k != "block_type" and v is not None and v != raw.get(k)}
    check_fields(own, FIELDS, file)
    if unknown := sorted(own.keys() - FIELDS.keys()):
        where = f"{file}: block {i} of block_configs"
        raise ConfigError(f"{where} has its own {', '.join(unknown)}; it may have {', '.join(FIELDS)}")
    return own


def _describe(hf: Any) -> FamilyFields:
    fields = NEMOTRON_H.describe(hf)
    for i, (layer, block) in enumerate(zip(fields["layers"], hf.block_configs)):
        if layer.ffn == "moe":
            experts, chosen = (block.get(name, getattr(hf, name)) for name in EXPERTS)
            check_experts(hf, experts, chosen, f"block {i} of block_configs")
    return fields


FAMILY = replace(
    NEMOTRON_H,
    model="hybridrt.models.nemotron_puzzle:NemotronHPuzzleForCausalLM",
    rewrite=_rewrite,
    describe=_describe,
    mtp_head=None,
)


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    """Nemotron 3 Puzzle (NVIDIA): expert width and experts a token vary by block."""

    def size_of(self, field: str, layer_id: int) -> int:
        size: int | None = self.config.hf.block_configs[layer_id].get(field)
        return super().size_of(field, layer_id) if size is None else size
