"""A digest of a model's configuration and weights, from samples of every tensor.

Samples are read with file reads: mapping a file of 17 GB outside the page cache took 73 s.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.files import CONFIG_BYTES, read_bytes
from hybridrt.base.files_safetensors import TensorFile
from hybridrt.models.config.read_quant import OLDER_GPTQ, SIDE_FILE
from hybridrt.models.loading.weight_files import opened

SAMPLE = 1 << 16
PIECES = 16
_PIECE = SAMPLE // PIECES


def model_digest(path: Path, config: EngineConfig) -> str:
    """32 hex digits over config.json, files of a quantisation next to it, and the weights (random
    weights: their seed).

    Of every tensor: name, dtype, shape, and all of its bytes or, above 64 KiB, 16 pieces of 4 KiB
    at equal distances, the first and the last bytes among them. Any change of a small tensor
    changes the digest. In a large one of n bytes, any change of n / 15 bytes or more in a row does;
    a shorter one may not. The digest does not depend on how tensors are spread over files.

    Raises:
        CheckpointError: a weight file is not a safetensors file.
    """
    digest = hashlib.sha256(read_bytes(path / "config.json", CONFIG_BYTES))
    for name in (SIDE_FILE, OLDER_GPTQ):
        if (path / name).exists():
            digest.update(name.encode() + read_bytes(path / name, CONFIG_BYTES))
    if config.quantization is not None:
        digest.update(f"quantization {config.quantization}".encode())
    if config.load_format == "dummy":
        digest.update(f"dummy {config.seed}".encode())
    else:
        parts = [part for file in sorted(path.glob("*.safetensors")) for part in _tensors(file)]
        for name, description, sampled in sorted(parts, key=lambda part: part[0]):
            digest.update(json.dumps([name, description]).encode() + sampled)
    return digest.hexdigest()[:32]


def _tensors(file: Path) -> Iterator[tuple[str, list[Any], bytes]]:
    with opened(file) as f:
        for entry in f.entries.values():
            yield entry.key, [entry.dtype, entry.shape], _sampled(f, entry.start, entry.size)


def _sampled(file: TensorFile, start: int, size: int) -> bytes:
    digest = hashlib.sha256()
    if size <= SAMPLE:
        digest.update(_read(file, start, size))
    else:
        for i in range(PIECES):
            digest.update(_read(file, start + (size - _PIECE) * i // (PIECES - 1), _PIECE))
    return digest.digest()


def _read(file: TensorFile, start: int, size: int) -> bytes:
    found = torch.empty(size, dtype=torch.uint8)
    file.fill(start, found)
    return found.numpy().tobytes()
