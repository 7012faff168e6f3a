"""Statistics and hashes of a checkpoint's tensors, read in pieces of bounded size."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridrt.base.files_safetensors import DTYPES, TensorEntry, TensorFile
from hybridrt.models.loading.weight_files import Shards, opened

SEGMENTS = 64
LEAST_BYTES, MOST_BYTES = 64, 1 << 24  # of a segment
SAMPLE, SAMPLES = 1 << 16, 16  # bytes and number of segments of a sampled tensor


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
    """Statistics of every tensor. Memory holds one segment.

    Args:
        sampled: large tensors are read at SAMPLES places.

    Raises:
        CheckpointError: a file is damaged.
    """
    for file, keys in shards.items():
        with opened(file) as f:
            for key in keys:
                yield _stats(f, f.entry(key), file, sampled)


def _stats(file: TensorFile, entry: TensorEntry, path: Path, sampled: bool) -> TensorStats:
    places = _places(entry.size, sampled)
    whole = sum(size for _, size in places) == entry.size
    digest, sums, counts, total, peak, bad, zeros = hashlib.sha256(), [], [], 0.0, 0.0, 0, 0
    for start, size in places:
        raw = torch.empty(size, dtype=torch.uint8)
        file.fill(entry.start + start, raw)
        if whole:
            digest.update(raw.numpy().data)
        zeros += not bool(raw.any())
        square, plain, largest, strange = _sizes(raw, DTYPES[entry.dtype])
        sums.append(square)
        total += plain
        counts.append(size // DTYPES[entry.dtype].itemsize)
        peak, bad = max(peak, largest), bad + strange
    rms = math.sqrt(sum(sums) / max(sum(counts), 1))
    segments = tuple(math.sqrt(square / count) for square, count in zip(sums, counts) if count)
    sha = digest.hexdigest() if whole else ""
    mean = total / max(sum(counts), 1)
    return TensorStats(
        entry.key, path.name, entry.dtype, tuple(entry.shape), bad, rms, peak, mean, segments, zeros, sha
    )  # fmt: skip


def _places(size: int, sampled: bool) -> list[tuple[int, int]]:
    """(first byte, bytes) of each segment. All but the last are multiples of 16 bytes."""
    if sampled and size > SAMPLE * SAMPLES:
        step = (size - SAMPLE) // (SAMPLES - 1)
        return [(i * step // 16 * 16, SAMPLE) for i in range(SAMPLES)]
    length = min(max(-(-size // SEGMENTS), LEAST_BYTES), MOST_BYTES)
    length = -(-length // 16) * 16
    return [(start, min(length, size - start)) for start in range(0, size, length)]


def _sizes(raw: torch.Tensor, dtype: torch.dtype) -> tuple[float, float, float, int]:
    """Sum of squares, sum, largest size, and how many numbers are not finite."""
    if not dtype.is_floating_point:
        return 0.0, 0.0, 0.0, 0
    values = raw.view(dtype).float().double()
    finite = values.isfinite()
    bad = values.numel() - int(finite.sum())
    values = values[finite]
    largest = float(values.abs().max()) if len(values) else 0.0
    return float(values.square().sum()), float(values.sum()), largest, bad
