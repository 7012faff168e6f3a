"""Scales for a KV cache of codes that a checkpoint brings: `k_scale` and `v_scale` of attention layers."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from hybridrt.base.errors import CheckpointError
from hybridrt.models.base import CausalLM
from hybridrt.models.loading.shards import shards_of
from hybridrt.models.loading.weight_files import opened

_NAME = re.compile(r"\.(\d{1,7})\.(?:.*\.)?(k|v|kv)_scale")
Scales = dict[tuple[int, str], float]  # by layer, and "k" or "v"


def stored_kv_scales(model: CausalLM, path: Path) -> Scales:
    """The scales of a checkpoint's files: a number is its code times the scale. Layers may lack
    some.

    Raises:
        CheckpointError: one is no positive number, or there are two for the same keys or values.
    """
    found: Scales = {}
    for file, key, layer_id, which in _tensors(model, path):
        with opened(file) as f:
            value = f.read(key)
        scale = float(value) if value.numel() == 1 else math.nan
        if not 0 < scale < math.inf:
            shown = value.flatten()[:4].tolist()
            raise CheckpointError(f"{key} is {shown} {list(value.shape)}; a scale of a KV cache is one positive number")
        for each in which:
            if (layer_id, each) in found:
                raise CheckpointError(f"{key} is the second scale for {each} of layer {layer_id}; there is one of each")
            found[layer_id, each] = scale
    return found


def has_kv_scales(model: CausalLM, path: Path) -> bool:
    return any(True for _ in _tensors(model, path))


def _tensors(model: CausalLM, path: Path) -> Iterator[tuple[Path, str, int, str]]:
    """File, name, layer id and letters of each scale of an attention layer."""
    config, first = model.config, len(model.config.layers)
    places = {model.layers_key: (0, config.full_attention_layer_ids)}
    if model.mtp is not None:
        places["mtp.layers"] = (first, config.mtp_attention_layer_ids)
    for file, keys in shards_of(path).items():
        for key in keys:
            name = model.rename_key(key)
            for prefix, (offset, layer_ids) in places.items():
                match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
                if match is not None and offset + int(match[1]) in layer_ids:
                    yield file, key, offset + int(match[1]), match[2]
