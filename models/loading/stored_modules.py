"""Which modules of a checkpoint's files are quantised, and which parts of a model they fill."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.errors import CheckpointError
from hybridrt.base.files_safetensors import DTYPES
from hybridrt.base.quantization import PLAIN, QuantConfig, QuantRules, Scheme, StoredModule, split_key
from hybridrt.layers.quant.layouts import EXPONENTS, LAYOUTS, scale_dtypes, whole_rows
from hybridrt.layers.weights import WEIGHT_DTYPES
from hybridrt.models.base import CausalLM
from hybridrt.models.config.quant_online import OnlineRules
from hybridrt.models.loading.online_modules import online_table
from hybridrt.models.loading.shards import shards_of
from hybridrt.models.loading.weight_files import opened

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)")
# Last names that only quantised modules have, of any layout.
_SIGNS = ("weight_packed", "qweight", "blocks")
_SCALES = frozenset(
    name for each in LAYOUTS.values() for name in (each.scale, each.zeros, each.index, each.shape, each.factor) if name
)
# Of models with a vision tower: tables may name modules as the text model alone does.
_WRAPPER = "language_model."
# Scales of the KV cache, of activations of plain modules, and of attention: advice.
ADVICE = r".*(\.|_)(k|v|q|kv|prob|prob_output|softmax|input|output)_(scale|zero_point)"


def with_stored_modules(config: QuantConfig, path: Path) -> QuantConfig:
    """The configuration with the quantised modules of a checkpoint's files. Reads their headers.

    Raises:
        CheckpointError: a module lacks a tensor, has one too many or one of a wrong dtype, or the
            configuration has no scheme for it.
    """
    modules = _modules_of(path)
    found = {
        name: _stored(name, tensors, config.rules) for name, tensors in modules.items() if _quantised(name, tensors)
    }
    return replace(config, modules=found, plain=_plain_dtypes(modules))


def with_plain_dtypes(config: QuantConfig, path: Path) -> QuantConfig:
    """The configuration with the dtypes of a plain checkpoint's files. Reads their headers."""
    return replace(config, plain=_plain_dtypes(_modules_of(path)))


def _modules_of(path: Path) -> dict[str, Tensors]:
    modules: dict[str, Tensors] = {}
    for file, keys in shards_of(path).items():
        with opened(file) as f:
            for key in keys:
                name, last = split_key(key)
                entry = f.entry(key)
                modules.setdefault(name, {})[last] = DTYPES[entry.dtype], entry.shape
    return modules


def _plain_dtypes(modules: Mapping[str, Tensors]) -> dict[str, torch.dtype]:
    weights = {name: tensors["weight"][0] for name, tensors in modules.items() if "weight" in tensors}
    return {name: dtype for name, dtype in weights.items() if dtype in WEIGHT_DTYPES}


def _quantised(name: str, tensors: Tensors) -> bool:
    """Whether a module is quantised. CheckpointError: it is not, but has scales."""
    weight = tensors.get("weight")
    if any(sign in tensors for sign in _SIGNS) or (weight is not None and weight[0] not in WEIGHT_DTYPES):
        return True
    scales = sorted(_SCALES & tensors.keys())
    if scales:
        stands = "there is no weight" if weight is None else f"{name}.weight is {weight[0]}"
        raise CheckpointError(f"{name}.{scales[0]} belongs to a quantised matrix, but {stands}; the file is not whole")
    return False


def _stored(name: str, tensors: Tensors, rules: QuantRules) -> StoredModule:
    scheme = rules.scheme(name) or rules.scheme(name.replace(_WRAPPER, "", 1))
    if scheme is None:
        kinds = ", ".join(f"{last} {dtype}".replace("torch.", "") for last, (dtype, _) in sorted(tensors.items()))
        raise CheckpointError(f"{name} is quantised ({kinds}), but quantization_config ({rules.name}) has none for it")
    if not scheme.layout:
        return StoredModule(name, scheme, tensors)
    if scheme.layout == "fp8" and "weight_scale_inv" not in tensors and "weight_scale" in tensors:
        scheme = replace(scheme, layout="modelopt")  # vLLM's names
    layout = LAYOUTS[scheme.layout]
    for last in (layout.codes, layout.scale, layout.factor, *layout.needs, *(layout.zeros,) * scheme.zeros):
        if last and last not in tensors:
            there = ", ".join(sorted(tensors))
            raise CheckpointError(
                f"{name}.{last} is missing: quantization_config ({rules.name}) says {scheme}, which needs it; the file "
                f"holds {name}.({there})"
            )
    if scheme.indexed and layout.index not in tensors:
        raise CheckpointError(
            f"{name}.{layout.index} is missing: with desc_act or actorder it gives the group of each input"
        )
    strange = sorted(_SCALES & tensors.keys() - set(layout.names))
    if strange:
        raise CheckpointError(f"{name}.{strange[0]} is no tensor of {scheme} ({rules.name}), which nothing else reads")
    _check_dtypes(name, scheme, tensors)
    dtype = tensors[layout.scale][0]
    scheme = replace(
        scheme, scale_dtype=torch.float8_e8m0fnu if dtype in EXPONENTS else dtype, zeros=layout.zeros in tensors,
        indexed=layout.index in tensors,
    )  # fmt: skip
    own = {last: tensors[last] for last in layout.names if last in tensors}
    own[layout.codes] = tensors[layout.codes][0], whole_rows(scheme, tensors[layout.codes][1])
    return StoredModule(name, scheme, own)


def _check_dtypes(name: str, scheme: Scheme, tensors: Tensors) -> None:
    layout = LAYOUTS[scheme.layout]
    shape = whole_rows(scheme, tensors[layout.codes][1])
    wanted: Mapping[str, Iterable[torch.dtype]] = {
        layout.codes: (layout.dtypes[scheme.method],),
        layout.scale: scale_dtypes(scheme),
        layout.factor: (torch.float32, torch.float16, torch.bfloat16),
        layout.zeros: (torch.int8,) if scheme.layout == "compressed" else (torch.int32,),
        layout.index: (torch.int32, torch.int64),
        layout.shape: (torch.int64, torch.int32),
    }
    for last, dtypes in wanted.items():
        if last in tensors and tensors[last][0] not in dtypes:
            allowed = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise CheckpointError(
                f"{name}.{last} holds {str(tensors[last][0]).removeprefix('torch.')}; as {scheme} it holds {allowed}"
            )
    if len(shape) not in (2, 3):
        shape = tensors[layout.codes][1]
        raise CheckpointError(f"{name}.{layout.codes} has shape {list(shape)}; a matrix has two sides")


def scheme_table(model: CausalLM, linear: Container[str], config: QuantConfig) -> dict[str, Scheme]:
    """Schemes of a model's parts, "layer.segment", by the map that loads it. `model` may be on the
    "meta" device. It is built as a plain one, on one rank.

    Args:
        linear: the parts of linear layers, and of a layer's first expert.

    Raises:
        CheckpointError: experts of a layer are stored in different ways.
        ConfigError: the checkpoint is to be quantised, and has no matrix for that.
    """
    targets = model.all_targets()
    if config.online:
        assert isinstance(config.rules, OnlineRules)
        return online_table(model, targets, config.rules, linear)
    if config.modules is None:
        found = _table_by_rules(model, targets, config.rules)
    else:
        found = _table_by_files(model, targets, config.modules)
    _check_experts(targets, found)
    return found


def _table_by_files(
    model: CausalLM, targets: Mapping[str, Any], modules: Mapping[str, StoredModule]
) -> dict[str, Scheme]:
    found: dict[str, Scheme] = {}
    for name, module in modules.items():
        for key, _ in model.parts_of(f"{name}.weight"):
            for piece in targets.get(key, ()):
                found[piece.name.removesuffix(".weight")] = module.scheme
    return found


def narrow_table(model: CausalLM, linear: Container[str], config: QuantConfig, dtype: torch.dtype) -> dict[str, Scheme]:
    """Schemes of plain matrices of linear layers and tables whose numbers have fewer bytes in the files
    than in `dtype`, the model's: they stay so. Not those that loading multiplies, which would be rounded
    again, nor experts. `model` and `linear` as in `scheme_table`."""
    targets, found = model.all_targets(), dict[str, Scheme]()
    for name, stored in config.plain.items():
        if stored.itemsize >= dtype.itemsize:
            continue
        for key, _ in model.parts_of(f"{name}.weight"):
            for piece in targets.get(key, ()):
                part = piece.name.removesuffix(".weight")
                if part in linear and piece.scale == 1.0 and not _EXPERT.fullmatch(part):
                    found[part] = Scheme(dtype=stored)
    return found


def _check_experts(targets: Mapping[str, Any], found: Mapping[str, Scheme]) -> None:
    first: dict[str, tuple[str, Scheme]] = {}
    for key, pieces in targets.items():
        part = pieces[0].name.removesuffix(".weight")
        expert = _EXPERT.fullmatch(part)
        if expert is None:
            continue
        name, scheme = key.removesuffix(".weight"), found.get(part, PLAIN)
        stack = f"{expert[1]} {expert[2] == 'down'}"
        other, known = first.setdefault(stack, (name, scheme))
        if scheme != known:
            raise CheckpointError(
                f"{name} is stored as {scheme} and {other} as {known}; hybridrt reads experts of a layer that are "
                "stored alike, gate and up too"
            )


def _table_by_rules(model: CausalLM, targets: Mapping[str, Any], rules: QuantRules) -> dict[str, Scheme]:
    """Without files: a rule that calls a module plain may use any spelling of its name."""
    found: dict[str, Scheme] = {}
    tables = {f"{model.embed_key}.weight", "lm_head.weight"}
    for key, pieces in targets.items():
        if not key.endswith(".weight") or key in tables:
            continue
        names = [name.removesuffix(".weight") for name in _spelled(model, key)]
        scheme = next((each for each in map(rules.scheme, names) if each is not None), PLAIN)
        if scheme != PLAIN and not any(map(rules.leaves_plain, names)):
            found |= {piece.name.removesuffix(".weight"): scheme for piece in pieces}
    return found


def _spelled(model: CausalLM, key: str) -> list[str]:
    """A key of the map, and the checkpoint's possible spellings of it."""
    names = [key]
    for theirs, ours in model.spellings.items():
        names += [name.replace(ours, theirs) for name in names if ours in name]
    return [name for name in names if name == key or model.rename_key(name) == key]
