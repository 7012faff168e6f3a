"""Writes a quantised copy of a plain checkpoint, tensor by tensor."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hybridrt.base.config_json import read_object
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, reason
from hybridrt.collectives.groups import TPGroup
from hybridrt.models.config.quant_online import OnlineRules
from hybridrt.models.config.quant_written import quantization_config
from hybridrt.models.loading.loader import check_tensors
from hybridrt.models.loading.quantised_copy import CopyPlan, plan_copy
from hybridrt.models.loading.shards import shards_of
from hybridrt.models.loading.tensor_writer import TensorWriter
from hybridrt.models.loading.weight_files import Shards, opened
from hybridrt.models.loading.weight_reader import read_tensors
from hybridrt.runtime.load.build_model import plain_model
from hybridrt.runtime.load.load_target import load_target

INDEX = "model.safetensors.index.json"
# Next to config.json and weights: tokenizer, chat template, licence.
COPIED = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*", "NOTICE*")
WRITTEN = ("config.json", "*.safetensors.index.json")


@dataclass(frozen=True)
class QuantisedCopy:
    """Attributes: modules: quantised ones. plain: modules with a matrix that stayed plain. source_bytes, bytes: of
    all tensors, before and after."""

    path: Path
    modules: int
    plain: int
    source_bytes: int
    bytes: int


def write_quantised(model: str, out: Path, scheme: str, ignore: Sequence[str], progress: bool = False) -> QuantisedCopy:
    """Quantises a plain checkpoint into the new directory `out`. Its files appear there at once, or not at all. Peak
    memory: one tensor and what it becomes.

    Raises:
        ConfigError: an option cannot be used, `out` exists, or it cannot be written.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        if out.exists() or out.is_symlink():
            raise ConfigError(f"{out} exists; choose another name, or remove it")
    except OSError as e:  # such as a name that is too long
        raise ConfigError(f"{out} cannot be written: {reason(e)}") from e
    rules = OnlineRules(scheme, tuple(ignore))
    config = EngineConfig(model)
    path, target = load_target(config, TPGroup())
    quant = target.model_config.quant
    if quant is not None:
        raise ConfigError(
            f"{path} is quantised already (by {quant.rules.name}); pass the checkpoint that it was made from"
        )
    if out.resolve().is_relative_to(path.resolve()):
        raise ConfigError(f"{out} would be within the checkpoint {path}; choose another place")
    shards = _sorted(shards_of(path))
    plain, linear = plain_model(config, target)
    check_tensors(plain, path, shards)
    plan = plan_copy(plain, linear, rules, shards)
    temporary: Path | None = None
    made = [parent for parent in out.parents if not parent.exists()]  # innermost first
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        sizes = _write_shards(plan, shards, temporary, target.device, progress)
        _write_config(plan, path, temporary)
        _copy_others(path, temporary)
        temporary.chmod(0o777 & ~_umask())
        os.rename(temporary, out)
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {reason(e)}") from e
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # it holds the copy, or was never made
                parent.rmdir()
    return QuantisedCopy(out, sum(map(len, plan.modules.values())), len(plan.plain), *sizes)


def _sorted(shards: Shards) -> Shards:
    """Tensors in the order in which `read_tensors` gives them on any device."""
    found = {}
    for file in shards:
        with opened(file) as f:
            found[file] = [entry.key for entry in sorted(f.entries.values(), key=lambda entry: entry.start)]
    return found


def _write_shards(
    plan: CopyPlan, shards: Shards, out: Path, device: torch.device, progress: bool
) -> tuple[int, int]:  # fmt: skip
    """Returns bytes before and after."""
    files: dict[str, str] = {}
    before = after = 0
    with tqdm(
        total=sum(map(len, shards.values())), desc="quantising", unit="tensor", disable=None if progress else True
    ) as bar:
        for file, keys in shards.items():
            with opened(file) as f:
                entries = [f.entry(key) for key in keys]
            contents = plan.contents(entries)
            files |= dict.fromkeys(contents, file.name)
            with TensorWriter(out / file.name, contents) as writer:
                for key, tensor in read_tensors({file: keys}, device):
                    plan.write(writer, key, tensor)
                    bar.update()
            before, after = before + sum(entry.size for entry in entries), after + writer.size
    if len(shards) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(files.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return before, after


def _write_config(plan: CopyPlan, path: Path, out: Path) -> None:
    fields: dict[str, Any] = read_object(path / "config.json")
    schemes = {module.name: module.scheme for modules in plan.modules.values() for module in modules}
    fields["quantization_config"] = quantization_config(schemes, plan.plain)
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _copy_others(path: Path, out: Path) -> None:
    for file in sorted(path.iterdir()):
        wanted = any(fnmatch(file.name, each) for each in COPIED) and not any(fnmatch(file.name, w) for w in WRITTEN)
        if wanted and file.is_file():
            shutil.copyfile(file, out / file.name)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found
