"""Slabs: allocators that share memory never lend a byte twice, and give everything back."""

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import OutOfSlotsError, PoolError
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import PageAllocators, PageDemand
from hybridrt.mem_cache.pools.slabs import SlabAllocator, Slabs, SlabShare

SHARES = SlabShare(3, 5), SlabShare(1, 1), SlabShare(4, 9)
TOTAL = 5
steps = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc_one", "free", "to_cache", "lock", "unlock", "evict", "lend_cached"]),
        st.integers(0, len(SHARES) - 1), st.integers(0, 7), st.randoms(use_true_random=False),
    ),
    max_size=60,
)  # fmt: skip


def made() -> tuple[Slabs, list[SlabAllocator]]:
    slabs = Slabs(TOTAL)
    return slabs, [SlabAllocator(slabs, share, f"entry {i}") for i, share in enumerate(SHARES)]


def check(slabs: Slabs, held: list[dict[Handle, str]], allocators: list[SlabAllocator]) -> None:
    """Numbers name bytes of slabs that may be lent, and each slab has entries of one allocator."""
    slabs.check()
    owners: dict[int, int] = {}
    for i, (allocator, entries) in enumerate(zip(allocators, held)):
        allocator.check()
        share = allocator.share
        for entry in entries:
            slab, place = divmod(entry.index, share.apart)
            assert place < share.per_slab and 1 <= slab <= TOTAL
            assert owners.setdefault(slab, i) == i, "a slab has two owners"
        kinds = [*entries.values()]
        assert (allocator.num_used, allocator.num_cached) == (kinds.count("used"), len(kinds) - kinds.count("used"))
        assert allocator.num_locked == kinds.count("locked")
    assert slabs.num_free == TOTAL - len(owners), "a slab without entries is not free"


@given(steps)
@settings(deadline=None)
def test_no_slab_has_two_owners_and_all_come_back(history: list[tuple[str, int, int, Any]]) -> None:
    slabs, allocators = made()
    held: list[dict[Handle, str]] = [{} for _ in SHARES]
    gone: list[tuple[int, Handle]] = []
    sources = {"free": "used", "to_cache": "used", "lock": "cached", "unlock": "locked"}
    sources |= {"evict": "cached", "lend_cached": "cached"}
    for what, i, count, rng in history:
        allocator, entries = allocators[i], held[i]
        if what in ("alloc", "alloc_one"):
            count = 1 if what == "alloc_one" else count
            if not any(slabs.shortages([0] * i + [count])):
                fresh = [allocator.alloc_one()] if what == "alloc_one" else [*allocator.alloc(count)]
                assert len({*fresh} - entries.keys()) == count
                entries |= dict.fromkeys(fresh, "used")
            else:
                with pytest.raises(OutOfSlotsError):
                    allocator.alloc(count)
        else:
            chosen = [entry for entry, kind in entries.items() if kind == sources[what]]
            chosen = rng.sample(chosen, min(count, len(chosen)))
            if what == "lend_cached":
                fresh = [allocator.lend_cached(entry) for entry in chosen]
                assert [entry.index for entry in fresh] == [entry.index for entry in chosen]
                entries |= dict.fromkeys(fresh, "used")
            else:
                getattr(allocator, what)(chosen)
            for entry in chosen:
                if what in ("free", "evict", "lend_cached"):
                    del entries[entry]
                    gone.append((i, entry))
                else:
                    entries[entry] = {"to_cache": "cached", "lock": "locked", "unlock": "cached"}[what]
        check(slabs, held, allocators)
    for i, entry in gone:
        with pytest.raises(PoolError, match="stale"):
            allocators[i].free([entry])
    for allocator, entries in zip(allocators, held):
        allocator.unlock([entry for entry, kind in entries.items() if kind == "locked"])
        allocator.evict([entry for entry, kind in entries.items() if kind != "used"])
        allocator.free([entry for entry, kind in entries.items() if kind == "used"])
    assert slabs.num_free == TOTAL and not any(a.num_slabs for a in allocators)


def test_a_number_between_the_entries_of_two_slabs_is_refused() -> None:
    _, (first, *_) = made()
    first.alloc(1)
    for number in (0, 3, 4, 8, 9, 13, 30, 10**6):
        with pytest.raises(PoolError, match=f"{number} does not exist|handle of entry 0 {number}:"):
            first.free([Handle(number, 0)])


def test_the_fullest_slab_is_filled_first() -> None:
    slabs, (first, *_) = made()
    entries = [*first.alloc(9)]
    first.free([*entries[:2], entries[3], entries[6]])  # the first slab has two free entries, the others one
    fresh = [slot.index // 5 for slot in first.alloc(2)]
    assert fresh == [entries[6].index // 5, entries[3].index // 5], "the one that was filled last goes on"
    first.free(entries[2:3])
    assert slabs.num_free == TOTAL - 2, "the slab that was not filled has become free"


def test_entries_of_many_slabs_take_no_more_calls_than_those_of_few() -> None:
    slabs = Slabs(300)
    allocator = SlabAllocator(slabs, SHARES[0], "entry")

    def calls(count: int) -> int:
        """Python functions that are called to take so many entries and to give them back."""
        found = list[str]()
        sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == "call" else None)
        try:
            allocator.free(allocator.alloc(count))
        finally:
            sys.setprofile(None)
        return len(found)

    assert calls(700) == calls(7) and slabs.num_free == 300


def test_what_is_wanted_together_shares_the_free_slabs() -> None:
    slabs, (first, *_) = made()
    assert slabs.shortages([9, 1, 4]) == [0, 0, 0], "three slabs, one and one"
    assert slabs.shortages([10, 1, 4]) == [0, 0, 4] and slabs.shortages([15, 1, 0]) == [0, 1, 0]
    first.to_cache(entries := first.alloc(15))
    assert slabs.shortages([0, 2, 0]) == [0, 2, 0] and slabs.may_have([3, 2, 8]) and not slabs.may_have([4, 2, 8])
    first.lock(entries[:1])
    assert slabs.may_have([2, 2, 8]) and not slabs.may_have([3, 2, 8])
    assert slabs.room() == (4, [2, 0, 0])


def test_room_is_known_without_a_look_at_the_entries() -> None:
    """There may be 100,000, and each prompt asks several times: `PoolError` of `check` guards the counts."""
    slabs, allocators = made()
    allocators[0].alloc(4)
    wanted = slabs.room()
    for allocator in allocators:
        allocator._state = allocator._locks = None  # type: ignore[assignment]
    assert slabs.room() == wanted == (3, [2, 0, 0])


def test_pages_of_several_groups_are_taken_together_or_not_at_all() -> None:
    slabs = Slabs(3)
    pages = PageAllocators([0, 0], [PageDemand(4), PageDemand(4, 8)], slabs=slabs, shares=SHARES[:2])
    with pytest.raises(OutOfSlotsError, match=r"\[4, 2\] KV pages wanted, and the groups lack \[0, 1\]"):
        pages.alloc([4, 2])
    assert slabs.num_free == 3 and pages.num_used == 0 and pages.num_free == pages.total == 9
    taken = pages.alloc([4, 1])
    assert (slabs.num_free, pages.num_used, pages.num_free, pages.total) == (0, 5, 2, 7)
    pages.free(taken)
    pages.alloc([1, 1])
    (slab,) = slabs.take(1)
    with pytest.raises(PoolError, match="of slabs 1 to 3"):
        pages.check()
    slabs.give_back([slab])
    pages.reclaim()
    pages.check()
    assert slabs.num_free == 3 and pages.num_used == 0


def test_a_long_request_alone_may_have_what_its_windows_leave() -> None:
    demands = PageDemand(4, None, 8), PageDemand(4, 5, 8)
    pages = PageAllocators([0, 0], demands, slabs=Slabs(10), shares=SHARES[:2])
    assert [demand.least(80) for demand in demands] == [20, 2] and demands[1].prefilling(80) == 6
    assert pages.bounds(80) == [21, 3], "seven slabs of three pages, and three of one"
    assert pages.bounds(40) == [12, 6] and pages.bounds(100) == [24, 2], "the longest one"
    assert pages.bounds(104)[0] == 24 < demands[0].least(104)


@pytest.mark.parametrize("broken", ["twice", "lost", "another's"])
def test_a_broken_ledger_is_reported(broken: str) -> None:
    slabs, (first, second, _) = made()
    first.alloc(4)
    second.alloc(1)
    if broken == "twice":
        slabs.give_back([first.owned()[0]])
    elif broken == "lost":
        slabs.take(1)
    else:
        first._owned[first._owned.argmax()] = False
    with pytest.raises(PoolError):
        for part in (first, second, slabs):
            part.check()


def test_slabs_of_states_are_cleared_before_they_hold_pages() -> None:
    slabs = Slabs(3)
    pages, states = SlabAllocator(slabs, SlabShare(2, 2), "page"), SlabAllocator(
        slabs, SlabShare(1, 1), "state", of_states=True
    )  # fmt: skip
    pages.free(pages.alloc(6))
    assert not slabs.unclean, "new memory is zero"
    states.free(states.alloc(2))
    held = pages.alloc(6)
    assert len(slabs.unclean) == 2
    cleared = slabs.pop_unclean()
    pages.free(held)
    pages.free(pages.alloc(6))
    assert len(cleared) == 2 and not slabs.unclean, "once is enough"
    states.free(states.alloc(1))
    pages.free(pages.alloc(6))
    assert len(slabs.unclean) == 1, "it is cleared, whoever has it until then"
    states.alloc(3)
    assert not slabs.unclean, "but for states"
    states.reclaim()
    slabs.reclaim()
    pages.alloc(1)
    assert len(slabs.unclean) == 1, "nobody knows who had it"
