"""A digest of a model's configuration and weights, from samples of every tensor."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridrt.config import EngineConfig
from hybridrt.errors import CheckpointError

SAMPLE = 1 << 16  # bytes of a tensor that are read; smaller tensors are read whole
PIECES = 16
_PIECE = SAMPLE // PIECES


def model_digest(path: Path, config: EngineConfig) -> str:
    """32 hex digits over config.json and the weights (random weights: their seed).

    Of every tensor in every weight file: name, dtype, shape, and all of its bytes or, above 64 KiB, 16 pieces of 4 KiB
    at equal distances, the first and the last bytes among them. Any change of a small tensor changes the digest. In a
    tensor of n bytes above that, any change of n / 15 bytes or more in a row does; a shorter one may not. It does not
    matter how tensors are spread over files.

    Raises:
        CheckpointError: a weight file is not a safetensors file.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    if config.load_format == "dummy":
        digest.update(f"dummy {config.seed}".encode())
    else:
        parts = [part for file in sorted(path.glob("*.safetensors")) for part in _tensors(file)]
        for name, description, sampled in sorted(parts, key=lambda part: part[0]):
            digest.update(json.dumps([name, description]).encode() + sampled)
    return digest.hexdigest()[:32]


def _tensors(file: Path) -> Iterator[tuple[str, list[Any], bytes]]:
    """(name, dtype and shape, digest of samples) of every tensor in a file, of which only the samples are read."""
    try:
        with safe_open(file, framework="pt") as found:
            for name in found.keys():  # noqa: SIM118  (it is no dictionary)
                tensor = found.get_tensor(name)
                yield name, [str(tensor.dtype), list(tensor.shape)], _sampled(tensor.reshape(-1).view(torch.uint8))
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {type(e).__name__}: {e}") from e


def _sampled(data: torch.Tensor) -> bytes:
    """Digest of samples of [n] bytes."""
    digest, last = hashlib.sha256(), len(data) - _PIECE
    starts = [last * i // (PIECES - 1) for i in range(PIECES)] if len(data) > SAMPLE else range(0, len(data), _PIECE)
    for start in starts:
        digest.update(data[start : start + _PIECE].numpy())
    return digest.digest()
