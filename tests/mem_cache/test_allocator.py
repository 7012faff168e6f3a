"""Allocator: conservation under random histories, generations, ownership moves, all-or-nothing errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import OutOfSlotsError, PoolError
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handle


def counts(pool: EntryAllocator) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_used, pool.num_cached


def test_never_hands_out_index_0() -> None:
    pool = EntryAllocator(3, "slot")
    assert sorted(slot.index for slot in pool.alloc(3)) == [1, 2, 3]


def test_short_allocation_takes_nothing() -> None:
    pool = EntryAllocator(3, "KV page")
    pool.alloc(1)
    with pytest.raises(OutOfSlotsError, match="3 x KV page wanted, 2 of 3 free"):
        pool.alloc(3)
    assert counts(pool) == (2, 1, 0)


def test_a_free_list_with_an_entry_twice_is_found() -> None:
    pool = EntryAllocator(3, "slot")
    pool._free[0] = pool._free[1]
    with pytest.raises(PoolError, match="holds an entry twice"):
        pool.check()


def test_one_entry_is_taken_as_one_of_several_is() -> None:
    single, several = EntryAllocator(3, "slot"), EntryAllocator(3, "slot")
    for _ in range(2):
        one, (other,) = single.alloc_one(), several.alloc(1)
        assert isinstance(one, Handle) and one == other and counts(single) == counts(several)
        single.free([one])
        several.free([other])
    single.alloc(3)
    with pytest.raises(OutOfSlotsError, match="1 x slot wanted, 0 of 3 free"):
        single.alloc_one()
    assert counts(single) == (0, 3, 0)


def test_double_free_frees_nothing() -> None:
    pool = EntryAllocator(3, "slot")
    a, b = pool.alloc(2)
    pool.free([a])
    with pytest.raises(PoolError, match="stale"):
        pool.free([b, a])
    assert counts(pool) == (2, 1, 0)
    with pytest.raises(PoolError, match="twice"):
        pool.free([b, b])
    assert counts(pool) == (2, 1, 0)


def test_stale_handle_of_a_reused_entry_is_refused() -> None:
    pool = EntryAllocator(1, "slot")
    (old,) = pool.alloc(1)
    pool.free([old])
    (new,) = pool.alloc(1)
    assert new.index == old.index and new.generation != old.generation
    with pytest.raises(PoolError, match="stale"):
        pool.free([old])
    with pytest.raises(PoolError, match="does not exist"):
        pool.free([Handle(0, 0)])
    for wrong in ([new, Handle(2, 0)], [Handle(2, 0)]):
        with pytest.raises(PoolError, match="slot 2 does not exist"):
            pool.free(wrong)
    pool.free([new])


def test_an_entry_is_a_requests_or_the_caches_never_both() -> None:
    pool = EntryAllocator(2, "slot")
    a, b = pool.alloc(2)
    pool.to_cache([a])
    assert counts(pool) == (0, 1, 1)
    for wrong in ([b, a], [a]):
        with pytest.raises(PoolError, match="owned by the cache"):
            pool.free(wrong)
    with pytest.raises(PoolError, match="not owned by the cache"):
        pool.evict([b])
    pool.evict([a])
    pool.free([b])
    assert counts(pool) == (2, 0, 0)


def test_the_cache_cannot_give_up_what_requests_have_locked() -> None:
    pool = EntryAllocator(2, "slot")
    a, b = pool.alloc(2)
    with pytest.raises(PoolError, match="not owned by the cache"):
        pool.lock([a])
    pool.to_cache([a, b])
    pool.lock([a])
    pool.lock([a, b])
    pool.unlock([a, b])
    with pytest.raises(PoolError, match=f"gives up slot {a.index}, which a running request has locked"):
        pool.evict([b, a])
    assert counts(pool) == (0, 0, 2)
    with pytest.raises(PoolError, match=f"slot {b.index} is not locked"):
        pool.unlock([a, b])
    pool.unlock([a])
    pool.evict([b, a])
    assert counts(pool) == (2, 0, 0)


def test_reclaim_frees_everything_and_makes_all_handles_stale() -> None:
    pool = EntryAllocator(3, "slot")
    a, b = pool.alloc(2)
    pool.to_cache([a])
    pool.lock([a])
    pool.reclaim()
    assert counts(pool) == (3, 0, 0)
    for old in (a, b):
        with pytest.raises(PoolError, match="stale"):
            pool.free([old])
    pool.to_cache(pool.alloc(3))
    assert counts(pool) == (0, 0, 3)


def test_check_notices_a_ledger_that_disagrees() -> None:
    pool = EntryAllocator(3, "slot")
    pool.alloc(1)
    pool.num_free += 1  # the entry that was handed out last is in the list once more
    with pytest.raises(PoolError):
        pool.check()
    pool = EntryAllocator(3, "slot")
    pool._free[0] = pool._free[1]
    with pytest.raises(PoolError, match="twice"):
        pool.check()


@settings(deadline=None)
@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(["alloc", "free", "cache", "evict"]), st.integers(0, 4))))
def test_conservation_over_random_histories(total: int, history: list[tuple[str, int]]) -> None:
    pool = EntryAllocator(total, "slot")
    used: list[Handle] = []
    cached: list[Handle] = []
    for op, n in history:
        if op == "alloc" and n <= pool.num_free:
            used += pool.alloc(n)
        elif op == "free":
            pool.free(used[:n])
            del used[:n]
        elif op == "cache":
            pool.to_cache(used[:n])
            cached += used[:n]
            del used[:n]
        elif op == "evict":
            pool.evict(cached[:n])
            del cached[:n]
        assert counts(pool) == (total - len(used) - len(cached), len(used), len(cached))
        assert len({slot.index for slot in used + cached}) == len(used) + len(cached)
