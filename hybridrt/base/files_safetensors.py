"""Reads safetensors files without mapping them, so that a file that changes gives an error.

If a mapped file becomes shorter, access past its new end kills the process (SIGBUS). The format's
own library maps; its checks are repeated here. Only prepared weights are mapped.
"""

import json
import math
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LENGTH = 8
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # opening a pipe does not wait
_MAX_SIZE = 1 << 62  # bytes of a tensor, as far as its shape tells, and each of its lengths
_MAX_DIMENSIONS = 64  # of torch
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class DamagedFileError(ValueError):
    """The file is not a whole safetensors file, or changed while it was read. Callers add its name."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in its file: `size` bytes from byte `start`. `dtype` is safetensors' name."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class TensorFile:
    """An open file with a parsed header.

    Args:
        max_header: most bytes of the header. A longer one is refused before it is read.

    Raises:
        DamagedFileError: it is not a whole safetensors file, or its header is too long.
        OSError: it cannot be opened, or is no regular file.

    Attributes:
        entries: tensors by name.
        metadata: the file's texts by name.
    """

    def __init__(self, path: Path, max_header: int) -> None:
        self.path, self._fd = path, os.open(path, _FLAGS)
        try:
            found = os.fstat(self._fd)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError("it is a directory")
            if not stat.S_ISREG(found.st_mode):
                raise OSError("it is not a regular file")
            self._stamp = _stamp(found)
            self.entries, self.metadata = _parsed(*self._header(found.st_size, max_header))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def read(self, key: str) -> torch.Tensor:
        """A copy of a tensor. DamagedFileError: there is none, or the file became shorter."""
        entry = self.entry(key)
        flat = torch.empty(entry.size, dtype=torch.uint8)
        self.fill(entry.start, flat)
        return flat.view(DTYPES[entry.dtype]).view(entry.shape)

    def entry(self, key: str) -> TensorEntry:
        """DamagedFileError: there is no such tensor."""
        if key not in self.entries:
            raise DamagedFileError(f"there is no tensor {key!r}")
        return self.entries[key]

    def fill(self, start: int, into: torch.Tensor) -> None:
        """Reads [n] uint8 from byte `start` on. DamagedFileError: the file became shorter."""
        found: Any = into.numpy()
        read_exactly(self._fd, start, memoryview(found))

    def mapped(self) -> torch.Tensor:
        """The file as [n] uint8 that is mapped, as it was opened. What is written there stays in this
        process. If the file becomes shorter later, access past its end kills the process."""
        return torch.frombuffer(mmap.mmap(self._fd, self._stamp[2], access=mmap.ACCESS_COPY), dtype=torch.uint8)

    def check_unchanged(self) -> None:
        """DamagedFileError if the file was written since it was opened."""
        if _stamp(os.fstat(self._fd)) != self._stamp:
            raise DamagedFileError("the file was changed while it was read")

    def again(self) -> int:
        """Another descriptor, which the caller closes. DamagedFileError if the file was replaced."""
        fd = os.open(self.path, _FLAGS)
        if _stamp(os.fstat(fd))[:2] != self._stamp[:2]:
            os.close(fd)
            raise DamagedFileError("the file was replaced while it was read")
        return fd

    def _header(self, size: int, max_header: int) -> tuple[bytes, int]:
        """Returns also the number of bytes after it."""
        prefix = bytearray(_LENGTH)
        length = 0
        if size >= _LENGTH:
            read_exactly(self._fd, 0, memoryview(prefix))
            length = int.from_bytes(prefix, "little")
        if not 0 < length <= size - _LENGTH:
            raise DamagedFileError(
                f"it is cut off, or no safetensors file: its first bytes tell of a header of {length} bytes, and it "
                f"has {size} in all"
            )
        if length > max_header:
            raise DamagedFileError(f"its header has {length} bytes; it may have {max_header}")
        header = bytearray(length)
        read_exactly(self._fd, _LENGTH, memoryview(header))
        return bytes(header), size - _LENGTH - length


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_exactly(fd: int, start: int, into: memoryview) -> None:
    """Fills `into` from byte `start` of a file. DamagedFileError: the file is too short."""
    done = 0
    while done < len(into):
        read = os.preadv(fd, [into[done:]], start + done)
        if not read:
            raise DamagedFileError("the file became shorter while it was read")
        done += read


def _parsed(header: bytes, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Checks that the tensors cover the `size` bytes after the header, without overlap."""
    try:
        found = json.loads(header, object_pairs_hook=_object)
    except (ValueError, RecursionError) as e:
        raise DamagedFileError(f"it is no safetensors file: its header is no JSON ({e})") from e
    if not isinstance(found, dict):
        raise DamagedFileError("it is no safetensors file: its header is no JSON object")
    metadata = found.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFileError("it is no safetensors file: __metadata__ in its header does not hold texts alone")
    first = _LENGTH + len(header)
    entries, end = [_entry(key, told, first) for key, told in found.items()], first
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.size)):
        if entry.start != end:
            raise DamagedFileError(f"it is damaged: its header puts {entry.key!r} at {entry.start}, not {end}")
        end += entry.size
    if end - first != size:
        raise DamagedFileError(f"it is damaged: its tensors have {end - first} bytes, and {size} follow its header")
    return {entry.key: entry for entry in entries}, metadata


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _entry(key: str, told: Any, first: int) -> TensorEntry:
    """`first`: where the tensors begin in the file."""
    fields: list[Any] = [told.get(name) if isinstance(told, dict) else None for name in _FIELDS]
    dtype, shape, offsets = fields
    if not (isinstance(dtype, str) and _naturals(shape) and _naturals(offsets) and len(offsets) == 2):
        raise DamagedFileError(f"it is damaged: its header does not say where {key!r} is")
    if dtype not in DTYPES:
        raise DamagedFileError(f"{key!r} has dtype {dtype[:20]!r}: the file is damaged or of a newer format")
    if len(shape) > _MAX_DIMENSIONS or not _fits(shape):
        raise DamagedFileError(f"it is damaged: no tensor can have the shape of {key!r}, of {len(shape)} dimensions")
    size = DTYPES[dtype].itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != size:
        raise DamagedFileError(
            f"it is damaged: {key!r} is {dtype} {shape[:9]}, but has {offsets[1] - offsets[0]} bytes"
        )
    return TensorEntry(key, dtype, tuple(shape), first + offsets[0], size)


_FIELDS = "dtype", "shape", "data_offsets"


def _fits(shape: list[int]) -> bool:
    """Whether strides can be computed: torch does so as if no length were 0."""
    return math.prod(max(length, 1) for length in shape) <= _MAX_SIZE


def _naturals(found: Any) -> bool:
    return isinstance(found, list) and all(type(number) is int and number >= 0 for number in found)
