"""Reads all tensors of safetensors files: for a GPU in blocks by several threads, through pinned memory.

A mapped file is read page by page, as a copy to the device asks for the pages, on one thread. Here READERS threads read
blocks of BLOCK bytes, each into pinned memory of its own, from where a copy takes them to the device. The tensors come
in order; those behind are read meanwhile, up to AHEAD bytes.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrt.errors import CheckpointError
from hybridrt.models.weight_files import Shards, mapped_tensors, read_tensor

READERS, BLOCK, AHEAD = 8, 32 << 20, 2 << 30
SMALL = 1 << 20  # bytes; smaller tensors stay in main memory: what is made of them is computed there
_LENGTH = 8  # bytes in front of a file's header, which say how long it is
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def read_tensors(shards: Shards, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all files, file by file. For a GPU large ones come on the device, where their memory is lent
    until the next is asked for.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    return staged_tensors(shards, device) if device.type == "cuda" else mapped_tensors(shards)


@dataclass(frozen=True)
class Entry:
    """Where a tensor stands in its file: from byte `start`, `size` bytes. `dtype` is safetensors' name of it."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def staged_tensors(shards: Shards, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_tensors`, for any device, with threads."""
    with _Readers(device) as readers:
        waiting: deque[tuple[str, int, Callable[[], torch.Tensor]]] = deque()
        ahead = 0
        for file, keys in shards.items():
            for entry in sorted(entries_of(file, keys), key=lambda entry: entry.start):
                waiting.append((entry.key, entry.size, readers.read(entry)))
                ahead += entry.size
                while ahead > AHEAD:
                    key, size, tensor = waiting.popleft()
                    yield key, tensor()
                    ahead -= size
        while waiting:
            key, _, tensor = waiting.popleft()
            yield key, tensor()


def entries_of(file: Path, keys: Iterable[str]) -> Iterator[Entry]:
    """These tensors of a file that `safe_open` (`keys_of`) has found to be whole."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    for key in keys:
        told = header[key]
        first, end = told["data_offsets"]
        start = _LENGTH + length + first
        yield Entry(file, key, told["dtype"], tuple(told["shape"]), start, end - first)


class _Readers(AbstractContextManager["_Readers"]):
    """Threads that read tensors to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        # One stream for the copies and for what is done with them: memory that is lent again is written after its last
        # use.
        self._stream = torch.cuda.current_stream(device) if self._pinned else None
        self._local, self._files = threading.local(), ExitStack()
        self._pool = ThreadPoolExecutor(READERS, "weights")

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    def read(self, entry: Entry) -> Callable[[], torch.Tensor]:
        """Begins to read a tensor; what it returns waits for it."""
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:  # safetensors reads it, or says why not
            return lambda: read_tensor(entry.file, entry.key)
        device = self._device if entry.size >= SMALL else torch.device("cpu")
        flat = torch.empty(entry.size, dtype=torch.uint8, device=device)
        blocks = [(at, min(at + BLOCK, entry.size)) for at in range(0, entry.size, BLOCK)]
        reads = [self._pool.submit(self._block, entry, at, flat[at:end]) for at, end in blocks]
        return lambda: _joined(entry, flat.view(dtype).view(entry.shape), reads)

    def _block(self, entry: Entry, at: int, into: torch.Tensor) -> None:
        """In a reader's thread: bytes of a tensor from `at` on."""
        file, start, size = self._file(entry.file), entry.start + at, into.numel()
        if not into.is_cuda:
            return _fill(file, start, into, entry)
        with torch.cuda.stream(self._stream):
            staging = self._staging()[:size]
            _fill(file, start, staging, entry)
            into.copy_(staging, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()  # this thread's staging memory is free again

    def _staging(self) -> torch.Tensor:
        """[BLOCK] bytes of pinned memory of this thread."""
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        return self._local.staging

    def _file(self, path: Path) -> int:
        """A descriptor of this thread: the system reads ahead by descriptor."""
        files: dict[Path, int] = self._local.__dict__.setdefault("files", {})
        if path not in files:
            files[path] = os.open(path, os.O_RDONLY)
            self._files.callback(os.close, files[path])
        return files[path]


def _fill(file: int, start: int, into: torch.Tensor, entry: Entry) -> None:
    """Reads [n] bytes from `start` on into main memory."""
    found: Any = into.numpy()
    view, done = memoryview(found), 0
    os.posix_fadvise(file, start, len(view), os.POSIX_FADV_WILLNEED)
    while done < len(view):
        read = os.preadv(file, [view[done:]], start + done)
        if not read:
            raise CheckpointError(f"{entry.file}: {entry.key} cannot be read: the file became shorter meanwhile")
        done += read


def _joined(entry: Entry, tensor: torch.Tensor, reads: list[Future[None]]) -> torch.Tensor:
    try:
        for read in reads:
            read.result()
    except OSError as e:
        raise CheckpointError(f"{entry.file}: {entry.key} cannot be read: {e}") from e
    return tensor
