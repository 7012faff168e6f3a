"""Tensors of a checkpoint's safetensors files by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hybridrt.base.errors import CheckpointError
from hybridrt.base.files import WEIGHTS_HEADER_BYTES
from hybridrt.base.files_safetensors import DamagedFileError, TensorFile

Shards = dict[Path, list[str]]
_COMPARED = 1 << 24


def keys_of(file: Path) -> list[str]:
    """The tensors of a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    with opened(file) as f:
        return list(f.entries)


def equal_tensors(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two tensors (file, name) have equal dtype, shape and bytes. Compares block by block.

    Raises:
        CheckpointError: one cannot be read.
    """
    with opened(first[0]) as f, opened(second[0]) as g:
        a, b = f.entry(first[1]), g.entry(second[1])
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        for at in range(0, a.size, _COMPARED):
            left, right = torch.empty((2, min(_COMPARED, a.size - at)), dtype=torch.uint8)
            f.fill(a.start + at, left)
            g.fill(b.start + at, right)
            if not torch.equal(left, right):
                return False
        return True


def tensors_of(shards: Shards) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, file by file, as copies in main memory.

    Raises:
        CheckpointError: a tensor cannot be read, or the file was changed meanwhile.
    """
    for file, keys in shards.items():
        with opened(file) as f:
            yield from ((key, f.read(key)) for key in keys)


@contextmanager
def opened(file: Path) -> Iterator[TensorFile]:
    """An open file. CheckpointError if it is damaged, or changes before the end."""
    try:
        with TensorFile(file, WEIGHTS_HEADER_BYTES) as f:
            yield f
            f.check_unchanged()
    except (DamagedFileError, OSError, MemoryError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}; the file is damaged or was not downloaded whole") from e
