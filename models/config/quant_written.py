"""The quantization_config of checkpoints that we write, in the form of compressed-tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrt.base.quantization import Scheme

_COMMON = {"symmetric": True, "dynamic": False}
_FP8_INPUTS = {
    "num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": True
}  # fmt: skip
FORMATS = {"fp8": "float-quantized", "int4": "pack-quantized", "fp4": "nvfp4-pack-quantized"}


def quantization_config(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, Any]:
    """`schemes`: of quantised modules. They are the target "Linear"; those with another scheme than
    most are named. `plain`: other modules with a matrix."""
    (usual, _), *others = Counter(schemes.values()).most_common()
    groups = {"group_0": _group(usual, ["Linear"])}
    for i, (scheme, _) in enumerate(others, 1):
        groups[f"group_{i}"] = _group(scheme, sorted(name for name, each in schemes.items() if each == scheme))
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[usual.method],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted({"lm_head", *plain}),
        "kv_cache_scheme": None,
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    high, wide = scheme.block
    if scheme.method == "fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, wide]}
    elif scheme.method == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": wide}
    else:
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": wide}
    return {
        "targets": targets,
        "weights": {**weights, **_COMMON},
        "input_activations": dict(_FP8_INPUTS) if scheme.method == "fp8" else None,
        "output_activations": None,
        "format": FORMATS[scheme.method],
    }
