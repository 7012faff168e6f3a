"""A digest of a model's configuration and weights, from samples of every tensor.

Headers are parsed here. Reading the samples through tensors that the safetensors library maps took 73 s for a file of
17 GB that was not in the page cache.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridrt.config import EngineConfig
from hybridrt.errors import CheckpointError

SAMPLE = 1 << 16  # bytes of a tensor that are read; smaller tensors are read whole
PIECES = 16
_PIECE = SAMPLE // PIECES
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library


def model_digest(path: Path, config: EngineConfig) -> str:
    """32 hex digits over config.json and the weights (random weights: their seed).

    Of every tensor in every weight file: name, dtype, shape, and all of its bytes or, above 64 KiB, 16 pieces of 4 KiB
    at equal distances, the first and the last bytes among them. Any change of a small tensor changes the digest. In a
    large one of n bytes, any change of n / 15 bytes or more in a row does; a shorter one may not. The digest does not
    depend on how tensors are spread over files.

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
    """(name, dtype and shape, digest of samples) of every tensor in a file."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            nbytes = int.from_bytes(stream.read(8), "little")
            if not 0 < nbytes <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {nbytes} bytes")
            for name, entry in json.loads(stream.read(nbytes)).items():
                if name != "__metadata__":
                    start, end = (8 + nbytes + int(offset) for offset in entry["data_offsets"])
                    if not 8 + nbytes <= start <= end <= size:
                        raise ValueError(f"{name} is outside the file")
                    yield name, [entry["dtype"], entry["shape"]], _sampled(stream.fileno(), start, end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {type(e).__name__}: {e}") from e


def _sampled(fd: int, start: int, end: int) -> bytes:
    digest = hashlib.sha256()
    if end - start <= SAMPLE:
        digest.update(os.pread(fd, end - start, start))
    else:
        for i in range(PIECES):
            digest.update(os.pread(fd, _PIECE, start + (end - start - _PIECE) * i // (PIECES - 1)))
    return digest.digest()
