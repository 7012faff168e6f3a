"""Safetensors files as they lie on a disk: their tensors by name."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridrt.errors import CheckpointError
from hybridrt.files import check_file

Shards = dict[Path, list[str]]


def keys_of(file: Path) -> list[str]:
    """The tensors of a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    with _opened(file) as f:
        return list(f.keys())


def read_tensor(file: Path, key: str) -> torch.Tensor:
    """One tensor, in main memory.

    Raises:
        CheckpointError: it cannot be read.
    """
    with _opened(file) as f:
        return _mapped(f, file, key)


def mapped_tensors(shards: Shards) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all files, file by file, in memory that the files are mapped to.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    for file, keys in shards.items():
        with _opened(file) as f:
            yield from ((key, _mapped(f, file, key)) for key in keys)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        check_file(file, sys.maxsize)
        opened = safe_open(file, "pt")
    except (SafetensorError, OSError, MemoryError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}; the file is damaged or was not downloaded whole") from e
    with opened as f:
        yield f


def _mapped(opened: Any, file: Path, key: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = opened.get_tensor(key)
    except (SafetensorError, RuntimeError, OSError) as e:
        raise CheckpointError(f"{file}: {key} cannot be read: {e}; the file is damaged or of a newer format") from e
    return tensor
