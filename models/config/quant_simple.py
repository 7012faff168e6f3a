"""Rules of checkpoints with one scheme for all modules: fp8 by blocks, AWQ, GPTQ."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    integer,
    list_of,
    one_of,
)
from hybridrt.base.errors import ConfigError
from hybridrt.base.quantization import QuantRules, Scheme
from hybridrt.models.config.quant_names import by_wildcard, expression, listed

NAMES = either(NULL, list_of(TEXT))
BLOCK_SIDE = integer(1, 1 << 20)
GROUP = either(integer(-1, -1), integer(1, 1 << 20))
FP8: FieldTypes = {
    "fmt": either(NULL, one_of("e4m3", "float8_e4m3fn")),
    "weight_block_size": either(NULL, list_of(BLOCK_SIDE, 2)),
    "activation_scheme": either(NULL, one_of("dynamic", "static")),
    "scale_fmt": either(NULL, one_of("ue8m0", "float")),
    **dict.fromkeys(("modules_to_not_convert", "ignored_layers"), NAMES),
}
GEMM = FieldType("gemm: other layouts are not read", lambda v: isinstance(v, str) and v.lower() == "gemm")
AWQ: FieldTypes = {
    **dict.fromkeys(("bits", "w_bit"), integer(4, 4)),
    **dict.fromkeys(("group_size", "q_group_size"), GROUP),
    # Names that AutoAWQ, transformers and GPTQModel have for it.
    **dict.fromkeys(("version", "format", "checkpoint_format"), either(NULL, GEMM)),
    "zero_point": FLAG,
    "modules_to_not_convert": NAMES,
}
GPTQ_BITS = FieldType("4 or 8", lambda v: type(v) is int and v in (4, 8))
GPTQ_RULE: FieldTypes = {"bits": GPTQ_BITS, "group_size": GROUP, "sym": FLAG, "desc_act": FLAG}
GPTQ_FORMATS = ("checkpoint_format", "format")  # of older and of newer writers
GPTQ: FieldTypes = {
    **GPTQ_RULE,
    **dict.fromkeys(GPTQ_FORMATS, either(NULL, one_of("gptq", "gptq_v2"))),
    "pack_dtype": either(NULL, one_of("int32")),
    "dynamic": either(NULL, OBJECT),
}


@dataclass(frozen=True)
class OneScheme(QuantRules):
    """Attributes: plain: names of modules that are left alone."""

    name: str
    found: Scheme
    plain: tuple[str, ...]

    def scheme(self, module: str) -> Scheme | None:
        return self.found

    def leaves_plain(self, module: str) -> bool:
        return listed(self.plain, module)


@dataclass(frozen=True)
class ContainedNames(OneScheme):
    """Names are parts of modules' names."""

    def leaves_plain(self, module: str) -> bool:
        return any(each in module for each in self.plain)


@dataclass(frozen=True)
class GptqRules(QuantRules):
    """Attributes: dynamic: expressions in order, each with the fields of GPTQ_RULE that it changes; None:
    modules that are left alone."""

    name: str
    fields: Mapping[str, Any]
    dynamic: tuple[tuple[str, Mapping[str, Any] | None], ...]

    def scheme(self, module: str) -> Scheme | None:
        changes = [found for text, found in self.dynamic if found is not None and expression(text).match(module)]
        return gptq_scheme({**self.fields, **(changes[0] if changes else {})})

    def leaves_plain(self, module: str) -> bool:
        for text, changes in self.dynamic:
            if expression(text).match(module):
                return changes is None
        return module == "lm_head" and not self.fields.get("lm_head")


@dataclass(frozen=True)
class StackedExperts(OneScheme):
    """Only stacks of experts are quantised. Names may have wildcards."""

    def scheme(self, module: str) -> Scheme | None:
        return self.found if ".experts." in module else None

    def leaves_plain(self, module: str) -> bool:
        return by_wildcard(self.plain, module) or listed(self.plain, module)


def fp8_rules(said: Mapping[str, Any], where: str) -> QuantRules:
    check_fields(said, FP8, where)
    block = said.get("weight_block_size")
    static = said.get("activation_scheme") == "static"
    scheme = Scheme(
        "fp8", "fp8", (0, 0) if block is None else (block[0], block[1]),
        activations="tensor" if static else "token" if block is None else "group",
    )  # fmt: skip
    return OneScheme("fp8", scheme, _plain(said, "modules_to_not_convert", "ignored_layers"))


def mxfp4_rules(said: Mapping[str, Any], where: str) -> QuantRules:
    """gpt-oss."""
    check_fields(said, {"modules_to_not_convert": NAMES}, where)
    scheme = Scheme("fp4", "mxfp4", (1, 32), scale_dtype=torch.float8_e8m0fnu)
    return StackedExperts("mxfp4", scheme, _plain(said, "modules_to_not_convert"))


def awq_rules(said: Mapping[str, Any], where: str) -> QuantRules:
    check_fields(said, AWQ, where)
    group = said.get("group_size", said.get("q_group_size", 128))
    return ContainedNames(
        "awq", Scheme("int4", "awq", (1, max(group, 0))), (*_plain(said, "modules_to_not_convert"), "lm_head")
    )


def gptq_rules(said: Mapping[str, Any], where: str) -> QuantRules:
    check_fields(said, GPTQ, where)
    if "bits" not in said:
        raise ConfigError(f"{where}: bits is missing; GPTQ needs it")
    formats = {name: said[name] for name in GPTQ_FORMATS if said.get(name)}
    if len(set(formats.values())) > 1:
        raise ConfigError(
            f"{where}: {' and '.join(f'{name} is {value}' for name, value in formats.items())}; remove the wrong one"
        )
    dynamic = []
    for text, changes in (said.get("dynamic") or {}).items():
        plain = text.startswith("-:")
        pattern = text[2:] if text.startswith(("-:", "+:")) else text
        expression(pattern)
        if not plain:
            check_fields({"dynamic": changes}, {"dynamic": OBJECT}, where)
            check_fields(changes, GPTQ_RULE, f"{where}: dynamic {text}")
        # The tensors of all modules have one layout. GPTQModel, too, reads no format here.
        own = None if plain else {name: changes[name] for name in GPTQ_RULE if name in changes}
        dynamic.append((pattern, own))
    return GptqRules("gptq", dict(said), tuple(dynamic))


def gptq_scheme(fields: Mapping[str, Any]) -> Scheme:
    layout = next((fields[name] for name in GPTQ_FORMATS if fields.get(name)), "gptq")
    group = fields.get("group_size", 128)
    scheme = Scheme(f"int{fields['bits']}", layout, (1, max(group, 0)))
    return replace(scheme, indexed=bool(fields.get("desc_act")) and group > 0)


def _plain(said: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    return tuple(name for field in fields for name in said.get(field) or ())
