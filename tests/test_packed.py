"""Records in one buffer: what was packed comes back, aligned, whatever parts and shapes a record has."""

from typing import Generic, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrt.kernels.core.packed import (
    A,
    Record,
    arrays_of,
    map_arrays,
    pack_arrays,
    packed_size,
    section_starts,
    unpack,
)


class Leaf(NamedTuple, Generic[A]):
    first: A | None
    second: A | None = None


class Pair(NamedTuple, Generic[A]):
    leaf: Leaf[A] | None
    several: tuple[A | Leaf[A], ...]
    last: A | None


def array(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-(2**31), 2**31, shape).astype(np.int32)


arrays = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple).map(array)
views = arrays.map(lambda made: made.T if made.ndim == 1 else made[:, ::2])  # not all of them are contiguous
parts = st.one_of(st.none(), arrays, views)
leaves = st.builds(Leaf, parts, parts)
records = st.builds(Pair, st.none() | leaves, st.lists(arrays | leaves, max_size=3).map(tuple), parts)


def plainly(record: Record) -> Record:
    """A record with lists instead of arrays."""
    return type(record), *(p if p is None else plainly(p) if isinstance(p, tuple) else p.tolist() for p in record)


@given(records)
def test_a_record_comes_back_from_its_buffer(record: Pair[np.ndarray]) -> None:
    """Triton compiles for aligned arguments and again for others: a step must not be the first of its kind."""
    found = arrays_of(record)
    flat = np.full(packed_size(found), 77, np.int32)
    pack_arrays(found, flat)
    again: Pair[torch.Tensor] = unpack(record, torch.from_numpy(flat))
    assert plainly(again) == plainly(map_arrays(np.copy, record)) == plainly(record)
    assert [view.storage_offset() for view in arrays_of(again) if view.numel()] == [
        start for start, each in zip(section_starts(found), found, strict=True) if each.size
    ]
    assert [tuple(view.shape) for view in arrays_of(again)] == [each.shape for each in found]
    assert all(view.storage_offset() % 4 == 0 for view in arrays_of(again))
    assert packed_size(found) == sum(-(-each.size // 4) * 4 for each in found), "None takes no room"
    for view in arrays_of(again):
        view.zero_()
    assert not flat.any(), "each integer belongs to one array, or is a gap of zeros"
