"""Writes a quantised checkpoint as a float32 one, which transformers reads without other packages."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from hybridrt.base.config_fields import QUANTISATION
from hybridrt.base.config_json import read_object
from hybridrt.base.quantization import StoredModule
from hybridrt.layers.quant.pieces import decoded
from hybridrt.models.config.read_config import read_model_config
from hybridrt.models.loading.shards import shards_of
from hybridrt.models.loading.stored_modules import ADVICE, with_stored_modules
from hybridrt.models.loading.weight_files import tensors_of


def write_decoded(path: Path, out: Path) -> int:
    """Decodes every quantised matrix and returns their number. Needs memory for the float32 model.

    Raises:
        CheckpointError: a quantised module is not whole.
    """
    import re

    quant = read_model_config(path).quant
    assert quant is not None, "the checkpoint is quantised"
    quant = with_stored_modules(quant, path)
    plain, held, count = dict[str, Tensor](), dict[str, dict[str, Tensor]](), 0
    for key, tensor in tensors_of(shards_of(path)):
        found = quant.module_of(key)
        if found is None:
            if not re.fullmatch(ADVICE, key):
                plain[key] = tensor.float() if tensor.dtype.is_floating_point else tensor
            continue
        module, last = found
        mine = held.setdefault(module.name, {})
        mine[last] = tensor
        if mine.keys() == module.tensors.keys():
            name, weight = _plain_weight(module, held.pop(module.name))
            plain[name] = weight
            count += 1
    save_file({key: tensor.contiguous() for key, tensor in plain.items()}, out / "model.safetensors", {"format": "pt"})
    _write_config(path, out)
    return count


def _plain_weight(module: StoredModule, tensors: dict[str, Tensor]) -> tuple[str, Tensor]:
    """A module's weight, as transformers names it and has its sides."""
    weight = decoded(module, tensors)
    if module.scheme.layout == "mxfp4":  # gpt-oss: its plain stacks are [E, in, out]
        return module.name, weight.mT
    return f"{module.name}.weight", weight


def _write_config(path: Path, out: Path) -> None:
    raw = read_object(path / "config.json")
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for name in QUANTISATION:
            part.pop(name, None)
    (out / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
    generation = path / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, out / generation.name)
