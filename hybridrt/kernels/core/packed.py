"""Records of int32 arrays in one buffer: packed on the host, rebuilt as views on the device.

A record is a tuple of arrays, further records, and None for missing parts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

A = TypeVar("A")  # np.ndarray on the host, torch.Tensor on the device, list[int] before
Record = tuple[Any, ...]
# 16 bytes: Triton recompiles a kernel for every combination of aligned arguments.
ALIGNED = 4
int32_array = partial(np.array, dtype=np.int32)
_GAPS = [np.zeros(size, np.int32) for size in range(ALIGNED)]


def arrays_of(record: Record) -> list[Any]:
    """All arrays of a record, in order."""
    # No recursion: the device waits for this.
    found, open_records = [], [iter(record)]
    while open_records:
        for part in open_records[-1]:
            if isinstance(part, tuple):
                open_records.append(iter(part))
                break
            if part is not None:
                found.append(part)
        else:
            open_records.pop()
    return found


def rebuild(record: Record, arrays: Iterator[Any]) -> Any:
    """The same record with the next ones of `arrays`."""
    parts = list[Any]()
    for part in record:
        if isinstance(part, tuple):
            parts.append(rebuild(part, arrays) if part else part)
        else:
            parts.append(None if part is None else next(arrays))
    return tuple.__new__(type(record), parts)  # faster than a NamedTuple's constructor


def map_arrays(function: Callable[[Any], Any], record: Record) -> Any:
    return rebuild(record, map(function, arrays_of(record)))


def packed_size(arrays: Sequence[np.ndarray]) -> int:
    """Size of a buffer for these arrays, in integers."""
    return sum([array.size + -array.size % ALIGNED for array in arrays])


def section_starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where the section of each array begins in a buffer."""
    return [0, *accumulate(array.size + -array.size % ALIGNED for array in arrays)][: len(arrays)]


def pack_arrays(arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Writes each array as one section of `out` [packed_size] int32."""
    parts = list[np.ndarray]()
    for array in arrays:
        parts += array.reshape(-1), _GAPS[-array.size % ALIGNED]
    if parts:
        np.concatenate(parts, out=out)


def unpack(record: Record, flat: torch.Tensor, arrays: Sequence[np.ndarray] | None = None) -> Any:
    """The record as views of `flat` [packed_size] int32, with the sections of `record`'s arrays, which
    may be given too."""
    sizes, views = list[int](), list[torch.Tensor]()
    arrays = arrays_of(record) if arrays is None else arrays
    for array in arrays:
        sizes += array.size, -array.size % ALIGNED
    for array, view in zip(arrays, flat.split(sizes)[::2] if sizes else ()):
        views.append(view if array.ndim == 1 else view.view(array.shape))
    return rebuild(record, iter(views))
