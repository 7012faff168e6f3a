"""What each tensor of a plain checkpoint becomes in a quantised copy."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hybridrt.base.errors import ConfigError
from hybridrt.base.files_safetensors import DTYPES, TensorEntry
from hybridrt.base.quantization import Scheme
from hybridrt.layers.quant.encoders import encode, stored_tensors
from hybridrt.layers.weights import Transform, unchanged
from hybridrt.models.base import CausalLM
from hybridrt.models.config.quant_online import OnlineRules
from hybridrt.models.loading.online_modules import matrix_of, online_table
from hybridrt.models.loading.tensor_writer import Contents, TensorWriter
from hybridrt.models.loading.weight_files import Shards, opened

_EXPERTS = ".experts."


@dataclass(frozen=True)
class Module:
    """A quantised module of the copy: the part of a tensor that it is made of."""

    name: str
    scheme: Scheme
    part: Transform = unchanged


@dataclass
class CopyPlan:
    """Attributes:
    modules: by keys of the source. Other tensors are copied as they are.
    plain: modules with a matrix that stays plain.
    """

    modules: dict[str, Sequence[Module]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)

    def contents(self, entries: Sequence[TensorEntry]) -> Contents:
        """The tensors of a file of the copy, of the tensors of a file of the source."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for entry in entries:
            if entry.key not in self.modules:
                found[entry.key] = DTYPES[entry.dtype], entry.shape
            for module in self.modules.get(entry.key, ()):
                shape = _shape_of(entry, module.part)
                told = stored_tensors(module.scheme, *shape)
                found |= {f"{module.name}.{last}": each for last, each in told.items()}
        return found

    def write(self, writer: TensorWriter, key: str, tensor: torch.Tensor) -> None:
        if key not in self.modules:
            writer.write(tensor)
        for module in self.modules.get(key, ()):
            made = encode(module.name, module.scheme, matrix_of(key, tensor, module.part))[1]
            for last in stored_tensors(module.scheme, *tensor.shape[-2:]):
                writer.write(made[last])


def plan_copy(model: CausalLM, linear: Container[str], rules: OnlineRules, shards: Shards) -> CopyPlan:
    """`model`, `linear`: as `online_table` takes them.

    Raises:
        ConfigError: nothing is quantised, a pattern to ignore matches nothing, or some experts of a
            layer only.
    """
    targets = model.all_targets()
    table = online_table(model, targets, rules, linear)
    by_key = {key: table.get(pieces[0].name.removesuffix(".weight")) for key, pieces in targets.items()}
    plan, seen = CopyPlan(), list[str]()
    for entry in _entries(shards):
        modules = _modules(model, entry, by_key)
        seen += [module.name for module in modules]
        kept = [module for module in modules if not rules.leaves_plain(module.name)]
        if len(kept) not in (0, len(modules)):
            raise ConfigError(f"{entry.key} holds several matrices, of which ignore names some; name all of them")
        if kept:
            plan.modules[entry.key] = kept
        elif len(entry.shape) > 1:
            plan.plain.append(entry.key.removesuffix(".weight"))
    _check_ignored(rules, seen)
    _check_experts([module for modules in plan.modules.values() for module in modules], seen)
    if not plan.modules:
        raise ConfigError(f"ignore leaves no matrix of {model.config.architecture} to quantise")
    return plan


def _entries(shards: Shards) -> list[TensorEntry]:
    found = []
    for file, keys in shards.items():
        with opened(file) as f:
            found += [f.entry(key) for key in keys]
    return found


def _modules(model: CausalLM, entry: TensorEntry, schemes: Mapping[str, Scheme | None]) -> list[Module]:
    """A stack of experts becomes a module for each matrix of each expert; a matrix stays one."""
    parts = model.parts_of(entry.key)
    found = [schemes.get(name) for name, _ in parts]
    if len(entry.shape) == 2 and entry.key.endswith(".weight"):
        first = found[0]
        return [] if first is None or any(each != first for each in found) else [_whole(entry, first)]
    modules = []
    for (name, part), scheme in zip(parts, found, strict=True):
        if scheme is None or len(entry.shape) != 3:
            return []
        stem, _, last = name.removesuffix(".weight").rpartition(_EXPERTS)
        own, _, _ = entry.key.rpartition(_EXPERTS)  # the file's spelling
        modules.append(Module(f"{own or stem}{_EXPERTS}{last}", scheme, part))
    return modules


def _whole(entry: TensorEntry, scheme: Scheme) -> Module:
    return Module(entry.key.removesuffix(".weight"), scheme)


def _shape_of(entry: TensorEntry, part: Transform) -> tuple[int, int]:
    empty = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
    outputs, inputs = matrix_of(entry.key, empty, part).shape
    return outputs, inputs


def _check_ignored(rules: OnlineRules, seen: Sequence[str]) -> None:
    for pattern in rules.ignore:
        if not any(OnlineRules(rules.name, (pattern,)).leaves_plain(name) for name in seen):
            raise ConfigError(
                f"ignore is {pattern!r}, which matches no matrix that would be quantised; use a module's name, as "
                f'{seen[0]!r}, or "re:" and an expression'
            )


def _check_experts(modules: Sequence[Module], seen: Sequence[str]) -> None:
    """hybridrt reads experts of a layer that are stored alike."""
    quantised = {module.name for module in modules}
    mixed = {re.sub(r"(\.experts)\.\d+\..*", r"\1", name) for name in seen if name not in quantised}
    for name in quantised:
        layer, _, last = name.partition(_EXPERTS)
        if last[:1].isdigit() and f"{layer}.experts" in mixed:
            raise ConfigError(f"ignore names some matrices of {layer}.experts only; name all of them")
