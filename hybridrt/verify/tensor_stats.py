"""Statistics and hashes of a checkpoint's tensors, read in pieces of bounded size."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridrt.base.files_safetensors import DTYPES, TensorEntry, TensorFile
from hybridrt.models.loading.weight_files import Shards, opened

SEGMENTS = 64
LEAST_BYTES, MOST_BYTES = 64, 1 << 24  # of a segment
SAMPLE, SAMPLES = 1 << 16, 16  # bytes and number of segments of a sampled tensor
THREADS = 4  # each has MOST_BYTES of segments, and these numbers in float32


@dataclass(frozen=True)
class TensorStats:
    """What one tensor looks like. Numbers that are not finite count in `not_finite` alone.

    Attributes:
        rms, peak, mean: root of the mean square, the largest size, and the mean; 0 for integers.
        segments: root of the mean square of pieces of the tensor, in order.
        zeros: how many of those pieces hold zeros alone.
        sha256: of its bytes; "" if only samples were read.
    """

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    not_finite: int
    rms: float
    peak: float
    mean: float
    segments: tuple[float, ...]
    zeros: int
    sha256: str

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_number(self) -> bool:
        return DTYPES[self.dtype].is_floating_point


def scan(shards: Shards, sampled: bool) -> Iterator[TensorStats]:
    """Statistics of every tensor, in order.

    Args:
        sampled: large tensors are read at SAMPLES places.

    Raises:
        CheckpointError: a file is damaged.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        for file, keys in shards.items():
            with opened(file) as f:
                entries = [f.entry(key) for key in keys]
                yield from pool.map(lambda entry: _stats(f, entry, file, sampled), entries)  # noqa: B023


def _stats(file: TensorFile, entry: TensorEntry, path: Path, sampled: bool) -> TensorStats:
    places, dtype = _places(entry.size, sampled), DTYPES[entry.dtype]
    whole = sum(size for _, size in places) == entry.size
    digest, found = hashlib.sha256(), list[_Sizes]()
    for together in _batches(places):
        raw = torch.empty(len(together), together[0][1], dtype=torch.uint8)
        for row, (start, _) in zip(raw, together):
            file.fill(entry.start + start, row)
        if whole:
            digest.update(raw.numpy().data)
        found.append(_sizes(raw, dtype))
    squares = [square for each in found for square in each.squares]
    counts = [size // dtype.itemsize for _, size in places]
    total = max(sum(counts), 1)
    return TensorStats(
        entry.key, path.name, entry.dtype, tuple(entry.shape), sum(each.strange for each in found),
        math.sqrt(sum(squares) / total), max((each.peak for each in found), default=0.0),
        sum(each.total for each in found) / total,
        tuple(math.sqrt(square / count) for square, count in zip(squares, counts) if count),
        sum(each.zeros for each in found), digest.hexdigest() if whole else "",
    )  # fmt: skip


def _places(size: int, sampled: bool) -> list[tuple[int, int]]:
    """(first byte, bytes) of each segment. All but the last are multiples of 16 bytes."""
    if sampled and size > SAMPLE * SAMPLES:
        step = (size - SAMPLE) // (SAMPLES - 1)
        return [(i * step // 16 * 16, SAMPLE) for i in range(SAMPLES)]
    length = min(max(-(-size // SEGMENTS), LEAST_BYTES), MOST_BYTES)
    length = -(-length // 16) * 16
    return [(start, min(length, size - start)) for start in range(0, size, length)]


def _batches(places: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Segments of the same length that are read together: many short ones would take longer than their numbers."""
    begin = 0
    for end in range(1, len(places) + 1):
        sizes = [size for _, size in places[begin : end + 1]]
        if end == len(places) or sizes[-1] != sizes[0] or sum(sizes) > MOST_BYTES:
            yield places[begin:end]
            begin = end


@dataclass(frozen=True)
class _Sizes:
    """Of some segments. Numbers that are not finite count in `strange` alone.

    Attributes:
        squares: the sum of squares of each. total, peak: the sum of all numbers, and the largest size.
        zeros: how many segments hold zeros alone.
    """

    squares: list[float]
    total: float
    peak: float
    strange: int
    zeros: int


def _sizes(raw: torch.Tensor, dtype: torch.dtype) -> _Sizes:
    """`raw`: [segments, bytes] uint8."""
    zeros = len(raw) - int(raw.any(1).sum())
    if not dtype.is_floating_point or not raw.shape[1]:
        return _Sizes([0.0] * len(raw), 0.0, 0.0, 0, zeros)
    values = raw.view(dtype).float()
    finite = values.isfinite()
    if strange := values.numel() - int(finite.sum()):
        values = values.where(finite, 0.0)
    low, high = values.aminmax()
    squares = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square()
    total = float(values.sum(dtype=torch.float64))
    return _Sizes(squares.tolist(), total, max(-float(low), float(high)), strange, zeros)
