"""Rules of NVIDIA ModelOpt: one algorithm for all modules, or a table with one for each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridrt.base.config_fields import FieldTypes
from hybridrt.base.config_json import NULL, OBJECT, TEXT, check_fields, either
from hybridrt.base.errors import ConfigError, UnsupportedModelError, shown
from hybridrt.base.quantization import QuantRules, Scheme
from hybridrt.models.config.quant_names import by_wildcard
from hybridrt.models.config.quant_simple import NAMES

NVFP4 = Scheme("fp4", "modelopt-nvfp4", (1, 16), scale_dtype=torch.float8_e4m3fn)
MXFP4 = Scheme("fp4", "modelopt", (1, 32), scale_dtype=torch.float8_e8m0fnu)
ALGORITHMS = {
    "FP8": Scheme("fp8", "modelopt", (0, 0), "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", "modelopt", (1, 0), "token"),
    "FP8_PB_WO": Scheme("fp8", "modelopt", (128, 128)),
    "NVFP4": replace(NVFP4, activations="group"),
    "W4A16_NVFP4": NVFP4,
    "W4A16_NVFP4_4O6": NVFP4,
    "MXFP8": Scheme("fp8", "modelopt", (1, 32), "group", scale_dtype=torch.float8_e8m0fnu),
    "MXFP4": MXFP4,
    "W4A16_MXFP4": MXFP4,
}
MIXED = "MIXED_PRECISION"
LISTS = ("exclude_modules", "ignore")  # names of one field in hf_quant_config.json and in config.json
FIELDS: FieldTypes = {
    **dict.fromkeys(("quant_algo", "kv_cache_quant_algo"), either(NULL, TEXT)),
    **dict.fromkeys(LISTS, NAMES),
    **dict.fromkeys(("quantized_layers", "config_groups"), either(NULL, OBJECT)),
}


@dataclass(frozen=True)
class ModelOptRules(QuantRules):
    """Attributes: common: None for a table, and for a checkpoint with plain weights."""

    common: Scheme | None
    table: Mapping[str, Scheme]
    exclude: tuple[str, ...]
    name: str = "modelopt"

    def scheme(self, module: str) -> Scheme | None:
        return self.table.get(module, self.common)

    def leaves_plain(self, module: str) -> bool:
        return by_wildcard(self.exclude, module)


def modelopt_fields(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What config.json or hf_quant_config.json says, in either form, by the names of the latter. Nulls say nothing."""
    nested = said.get("quantization")
    said = nested if isinstance(nested, Mapping) else said
    check_fields(said, FIELDS, where)
    lists = [said[name] for name in LISTS if said.get(name) is not None]
    exclude = {"exclude_modules": sorted({each for names in lists for each in names})} if lists else {}
    others = (*(name for name in FIELDS if name not in LISTS), "group_size")
    return exclude | {name: said[name] for name in others if said.get(name) is not None}


def modelopt_rules(said: Mapping[str, Any], where: str) -> QuantRules:
    """`said`: of config.json or hf_quant_config.json, in either form, or `modelopt_fields` of both."""
    said = modelopt_fields(said, where)
    exclude = tuple(said.get("exclude_modules", ()))
    algorithm = said.get("quant_algo")
    if algorithm is None:
        return ModelOptRules(None, {}, exclude)
    if algorithm == MIXED:
        layers = said.get("quantized_layers") or {}
        if not layers:
            raise ConfigError(f"{where}: quantized_layers is empty; {MIXED} needs an entry for each module")
        table = {name: _scheme(entry, f"{where}: quantized_layers: {name}") for name, entry in layers.items()}
        return ModelOptRules(None, table, exclude)
    for group in (said.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("group_size") is not None:
            _scheme({"quant_algo": algorithm, "group_size": weights["group_size"]}, where)
    return ModelOptRules(_scheme(said, where), {}, exclude)


def _scheme(entry: Any, where: str) -> Scheme:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {shown(entry)}; it must be an object with quant_algo")
    algorithm = entry.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise UnsupportedModelError(
            f"{where}: quant_algo is {shown(algorithm)}; hybridrt reads {', '.join(ALGORITHMS)} and {MIXED}"
        )
    scheme, group = ALGORITHMS[algorithm], entry.get("group_size")
    if group is not None and scheme.block[0] == 1 and scheme.block[1] and group != scheme.block[1]:
        raise ConfigError(f"{where}: group_size is {shown(group)}; {algorithm} has groups of {scheme.block[1]}")
    return scheme
