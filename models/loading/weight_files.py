"""The safetensors files of a checkpoint: their tensors by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hybridrt.base.errors import CheckpointError
from hybridrt.base.files import WEIGHTS_HEADER_BYTES
from hybridrt.base.files_safetensors import DamagedFileError, TensorFile

Shards = dict[Path, list[str]]
_COMPARED = 1 << 24  # bytes of two tensors that are compared at a time


def keys_of(file: Path) -> list[str]:
    """The tensors of a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    with opened(file) as f:
        return list(f.entries)


def equal_tensors(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two tensors (file, name) have the same dtype, shape and bytes. Little of them is in memory at a time.

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
    """The tensors of all files, file by file, in main memory of their own.

    Raises:
        CheckpointError: a tensor cannot be read, or the file was changed meanwhile.
    """
    for file, keys in shards.items():
        with opened(file) as f:
            yield from ((key, f.read(key)) for key in keys)


@contextmanager
def opened(file: Path) -> Iterator[TensorFile]:
    """An open file. Whatever is wrong with it, or changes before the end, is a CheckpointError."""
    try:
        with TensorFile(file, WEIGHTS_HEADER_BYTES) as f:
            yield f
            f.check_unchanged()
    except (DamagedFileError, OSError, MemoryError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}; the file is damaged or was not downloaded whole") from e
