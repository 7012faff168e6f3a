"""Lists of handles: they grow like lists, and what was taken from them does not change with them."""

import numpy as np
import pytest

from hybridrt.base.errors import PoolError
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handle, Handles


def test_a_handle_is_an_index_and_a_generation() -> None:
    slot = Handle(7, 3)
    assert (slot.index, slot.generation, repr(slot)) == (7, 3, "Handle(7, 3)")
    assert slot == Handle(7, 3) != Handle(7, 4) and {slot: "x"}[Handle(7, 3)] == "x"


def test_slices_and_joined_lists_are_copies() -> None:
    numbers = [Handle(i, i % 3) for i in range(40)]
    slots = Handles(numbers[:5], (), Handles(numbers[5:10]))
    part = slots[2:4]
    for slot in numbers[10:]:
        slots.append(slot)
    assert slots == numbers and len(slots) == 40 and slots[7].index == 7
    assert part == numbers[2:4] and slots.indices.tolist() == list(range(40)) and slots.indices.dtype == np.int32
    assert slots.cut(3) == numbers[37:] and slots == numbers[:37]
    slots.append(numbers[0])
    assert slots[37:] == [numbers[0]] and slots.at(np.arange(38) % 10 == 7) == [*numbers[7:37:10], numbers[0]]
    assert not Handles() and Handles() == [] and Handles() != [Handle(1, 0)]


def test_entries_that_requests_still_use_are_freed() -> None:
    pool = EntryAllocator(5, "KV page")
    slots = pool.alloc(4)
    pool.to_cache(slots[1:3])
    with pytest.raises(PoolError, match="twice"):
        pool.free_used([slots[0], slots[3], slots[3]])
    assert pool.free_used(slots).tolist() == [True, False, False, True]
    assert pool.num_free == 3 and pool.num_cached == 2
    with pytest.raises(PoolError, match="stale"):
        pool.free_used(slots)


def test_an_entry_of_the_cache_goes_to_a_request_unless_another_reads_it() -> None:
    pool = EntryAllocator(3, "state slot")
    first, second, _ = pool.alloc(3)
    pool.to_cache([first, second])
    pool.lock([first])
    with pytest.raises(PoolError, match="locked"):
        pool.lend_cached(first)
    pool.unlock([first])
    fresh = pool.lend_cached(first)
    assert fresh.index == first.index and (pool.num_free, pool.num_used, pool.num_cached) == (0, 2, 1)
    pool.check()
    with pytest.raises(PoolError, match="stale"):
        pool.free([first])
    pool.free([fresh])
