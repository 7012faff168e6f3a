"""Reads all tensors of safetensors files; for a GPU by several threads, through pinned memory.

READERS threads read blocks of BLOCK bytes. Tensors come in order; up to AHEAD bytes are read ahead.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.device import current_stream, pinned_empty, record_event
from hybridrt.base.errors import CheckpointError
from hybridrt.base.files_safetensors import DTYPES, DamagedFileError, TensorEntry, TensorFile, read_exactly
from hybridrt.models.loading.weight_files import Shards, opened, tensors_of

READERS, BLOCK, AHEAD = 8, 32 << 20, 2 << 30
SMALL = 1 << 20  # bytes; smaller tensors are converted in main memory


def read_tensors(shards: Shards, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, file by file. For a GPU large ones are on the device, valid until the next
    tensor is requested.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    return staged_tensors(shards, device) if device.type == "cuda" else tensors_of(shards)


def staged_tensors(shards: Shards, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """`read_tensors` with threads, for any device."""
    with _Readers(device) as readers, ExitStack() as files:
        waiting: deque[tuple[str, int, Callable[[], torch.Tensor]]] = deque()
        ahead = 0
        sources = [files.enter_context(opened(file)) for file in shards]  # checks at the end that files stayed the same
        for held, keys in zip(sources, shards.values()):
            for entry in sorted((held.entry(key) for key in keys), key=lambda entry: entry.start):
                waiting.append((entry.key, entry.size, readers.read(held, entry)))
                ahead += entry.size
                while ahead > AHEAD:
                    key, size, tensor = waiting.popleft()
                    yield key, tensor()
                    ahead -= size
        while waiting:
            key, _, tensor = waiting.popleft()
            yield key, tensor()


class _Readers(AbstractContextManager["_Readers"]):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream: reused memory is written after its last use.
        self._in_stream = current_stream(device)
        self._local, self._files = threading.local(), ExitStack()
        self._pool = ThreadPoolExecutor(READERS, "weights")

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._files.close()

    def read(self, file: TensorFile, entry: TensorEntry) -> Callable[[], torch.Tensor]:
        """Returns a function that waits for it."""
        device = self._device if entry.size >= SMALL else torch.device("cpu")
        flat = torch.empty(entry.size, dtype=torch.uint8, device=device)
        blocks = [(at, min(at + BLOCK, entry.size)) for at in range(0, entry.size, BLOCK)]
        reads = [self._pool.submit(self._block, file, entry.start + at, flat[at:end]) for at, end in blocks]
        return lambda: _joined(file.path, entry, flat.view(DTYPES[entry.dtype]).view(entry.shape), reads)

    def _block(self, source: TensorFile, start: int, into: torch.Tensor) -> None:
        """Runs in a reader's thread."""
        file, size = self._file(source), into.numel()
        if not into.is_cuda:
            return _fill(file, start, into)
        with self._in_stream():
            staging = self._staging()[:size]
            _fill(file, start, staging)
            into.copy_(staging, non_blocking=True)
            record_event(into.device).synchronize()  # the staging memory is free then

    def _staging(self) -> torch.Tensor:
        if not hasattr(self._local, "staging"):
            self._local.staging = pinned_empty(BLOCK, torch.uint8)
        return self._local.staging

    def _file(self, source: TensorFile) -> int:
        """Opens one per thread, because the system reads ahead by descriptor."""
        files: dict[TensorFile, int] = self._local.__dict__.setdefault("files", {})
        if source not in files:
            files[source] = source.again()
            self._files.callback(os.close, files[source])
        return files[source]


def _fill(file: int, start: int, into: torch.Tensor) -> None:
    found: Any = into.numpy()
    os.posix_fadvise(file, start, into.numel(), os.POSIX_FADV_WILLNEED)
    read_exactly(file, start, memoryview(found))


def _joined(file: Path, entry: TensorEntry, tensor: torch.Tensor, reads: list[Future[None]]) -> torch.Tensor:
    try:
        for read in reads:
            read.result()
    except (OSError, DamagedFileError) as e:
        raise CheckpointError(f"{file}: {entry.key} cannot be read: {e}") from e
    return tensor
