"""Rules of compressed-tensors (llm-compressor): groups of modules by class, name or expression."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybridrt.base.config_fields import FieldTypes
from hybridrt.base.config_json import (
    FLAG,
    NULL,
    OBJECT,
    TEXT,
    FieldType,
    check_fields,
    either,
    list_of,
    one_of,
)
from hybridrt.base.errors import ConfigError, UnsupportedModelError, shown
from hybridrt.base.quantization import QuantRules, Scheme
from hybridrt.layers.quant.layouts import LAYOUTS
from hybridrt.models.config.quant_names import by_expression, expression
from hybridrt.models.config.quant_simple import BLOCK_SIDE, GROUP, NAMES

CONFIG: FieldTypes = {
    "config_groups": OBJECT,
    "format": either(NULL, TEXT),
    "ignore": NAMES,
    "sparsity_config": either(NULL, OBJECT),
    "transform_config": either(NULL, OBJECT),
}
GROUP_FIELDS: FieldTypes = {
    "targets": list_of(TEXT),
    "weights": either(NULL, OBJECT),
    "input_activations": either(NULL, OBJECT),
    "format": either(NULL, TEXT),
}
TWO_SIDES = list_of(BLOCK_SIDE, 2)
WEIGHTS: FieldTypes = {
    "num_bits": FieldType("4 or 8", lambda v: type(v) is int and v in (4, 8)),
    "type": one_of("int", "float"),
    "strategy": either(NULL, one_of("tensor", "channel", "group", "block", "tensor_group")),
    "group_size": either(NULL, GROUP),
    "block_structure": either(NULL, either(TEXT, TWO_SIDES)),
    "symmetric": FLAG,
}
# Format -> layout, and the only type and bits of its weights, if it has some.
FORMATS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "pack-quantized": ("compressed-packed", "int", (4, 8)),
    "int-quantized": ("compressed", "int", (8,)),
    "float-quantized": ("compressed", "float", (8,)),
    "naive-quantized": ("compressed", "", (8,)),
    "nvfp4-pack-quantized": ("compressed-nvfp4", "float", (4,)),
    "mxfp4-pack-quantized": ("compressed-mxfp4", "float", (4,)),
    "mxfp8-quantized": ("compressed", "float", (8,)),
}
# Of formats with one size of groups: that size, and the dtype of their scales.
GROUPS = {
    "nvfp4-pack-quantized": (16, torch.float8_e4m3fn),
    "mxfp4-pack-quantized": (32, torch.float8_e8m0fnu),
    "mxfp8-quantized": (32, torch.float8_e8m0fnu),
}


@dataclass(frozen=True)
class CompressedRules(QuantRules):
    """Attributes: groups: targets and schemes, in order."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...]
    name: str = "compressed-tensors"

    def scheme(self, module: str) -> Scheme | None:
        """An exact name comes before an expression, and that before a class of modules. "Linear" also has modules of
        other classes for which no group is named."""
        ways = (
            lambda target: target == module,
            lambda target: by_expression(target, module),
            lambda target: target == _class_of(module),
            lambda target: target == "Linear",
        )
        found = (scheme for way in ways for targets, scheme in self.groups if any(map(way, targets)))
        return next(found, None)

    def leaves_plain(self, module: str) -> bool:
        return any(each == module or by_expression(each, module) for each in self.ignore)


def _class_of(module: str) -> str:
    """The class of torch that a module has, as far as names tell."""
    last = module.rpartition(".")[2]
    return "Conv1d" if last.endswith("conv1d") else "Embedding" if "embed" in last else "Linear"


def compressed_rules(said: Mapping[str, Any], where: str) -> QuantRules:
    check_fields(said, CONFIG, where)
    sparsity = (said.get("sparsity_config") or {}).get("format")
    if sparsity not in (None, "dense"):
        raise UnsupportedModelError(f"{where}: sparsity_config has format {shown(sparsity)}; hybridrt reads dense ones")
    if (said.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModelError(
            f"{where}: transform_config asks for transforms of weights and inputs, which hybridrt does not apply; "
            "use a checkpoint without them"
        )
    groups = []
    for name, group in (said.get("config_groups") or {}).items():
        at = f"{where}: {name}"
        check_fields({name: group}, {name: OBJECT}, where)
        check_fields(group, GROUP_FIELDS, at)
        for target in group.get("targets", ()):
            if target.startswith("re:"):
                expression(target)
        if group.get("weights"):
            groups.append((tuple(group.get("targets", ())), _scheme(group, said.get("format"), at)))
    ignore = tuple(said.get("ignore") or ())
    for each in ignore:
        if each.startswith("re:"):
            expression(each)
    return CompressedRules(tuple(groups), ignore)


def _scheme(group: Mapping[str, Any], common: str | None, at: str) -> Scheme:
    weights = group["weights"]
    check_fields(weights, WEIGHTS, f"{at}: weights")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    form = group.get("format") or common
    if form in (None, "mixed-precision"):
        form = _usual_format(bits, kind, weights)
    if form not in FORMATS:
        raise UnsupportedModelError(f"{at}: format is {shown(form)}; hybridrt reads {', '.join(FORMATS)}")
    layout, own_kind, own_bits = FORMATS[form]
    if bits not in own_bits or own_kind not in ("", kind):
        raise ConfigError(f"{at}: format {form} does not go with num_bits {bits} of type {kind}")
    method = f"int{bits}" if kind == "int" else f"fp{bits}"
    dynamic = (group.get("input_activations") or {}).get("strategy") or ""
    activations = {"tensor_group": "group"}.get(dynamic, dynamic)
    zeros = kind == "int" and not weights.get("symmetric", True)
    order = weights.get("actorder")
    indexed = order in ("group", "dynamic", True)  # the first two are one thing
    if indexed and not LAYOUTS[layout].index:
        raise UnsupportedModelError(
            f"{at}: actorder is {shown(order)}, and format {form} stores no group of each input; use a checkpoint with "
            "actorder weight or null, or one that is pack-quantized"
        )
    scales = GROUPS[form][1] if form in GROUPS else torch.float32  # or as the files have them
    return Scheme(
        method, layout, _block(weights, form, at), str(activations), scale_dtype=scales, zeros=zeros, indexed=indexed
    )


def _usual_format(bits: int, kind: str, weights: Mapping[str, Any]) -> str:
    if kind == "int":
        return "pack-quantized" if bits == 4 else "int-quantized"
    if bits == 8:
        return "float-quantized"
    return "mxfp4-pack-quantized" if weights.get("group_size") == 32 else "nvfp4-pack-quantized"


def _block(weights: Mapping[str, Any], form: str, at: str) -> tuple[int, int]:
    group = weights.get("group_size") or 0
    if form in GROUPS:
        only, _ = GROUPS[form]
        if group not in (0, only):
            raise ConfigError(f"{at}: group_size is {group}; {form} has groups of {only}")
        return 1, only
    strategy = weights.get("strategy") or ("group" if group > 0 else "channel" if group else "tensor")
    if strategy == "block":
        return _two_sides(weights.get("block_structure"), at)
    if strategy in ("group", "tensor_group"):
        if group == 0:
            raise ConfigError(f"{at}: group_size is missing; strategy {strategy} needs it")
        return 1, max(group, 0)
    return (0, 0) if strategy == "tensor" else (1, 0)


def _two_sides(block: Any, at: str) -> tuple[int, int]:
    sides = block
    if isinstance(block, str):
        # Longer numbers are too large, and Python converts no more than 4,300 digits.
        sides = list(map(int, block.split("x"))) if re.fullmatch(r"\d{1,7}x\d{1,7}", block) else None
    if not TWO_SIDES.holds(sides):
        raise ConfigError(f"{at}: block_structure is {shown(block)}; it must be two numbers, as [128, 128]")
    return sides[0], sides[1]
