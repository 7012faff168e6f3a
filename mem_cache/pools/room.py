"""How many KV pages and state slots can be lent together, where states have memory of their own."""

from collections.abc import Sequence

from hybridrt.mem_cache.pools.entries import EntryAllocator
from hybridrt.mem_cache.pools.page_groups import PageAllocators


class Room:
    """What is free in the allocators of an engine, or would be if the cache gave up everything that
    nobody reads. `Slabs` answers the same questions where states share the memory of pages.

    Counts are those of each page group, then that of state slots.
    """

    def __init__(self, pages: PageAllocators, slots: EntryAllocator) -> None:
        self._pages, self._slots = pages, slots

    def shortages(self, counts: Sequence[int]) -> list[int]:
        """How many of these entries are not free, if all are lent together."""
        *pages, slots = counts
        return [*self._pages.shortages(pages), max(slots - self._slots.num_free, 0)]

    def may_have(self, counts: Sequence[int]) -> bool:
        """Whether so many entries can be lent together."""
        *pages, slots = counts
        if slots > _own(self._slots):
            return False
        if self._pages.slabs is not None:
            return self._pages.slabs.may_have(pages)
        return all([count <= _own(group) for count, group in zip(pages, self._pages.groups)])

    def most(self) -> list[int]:
        """Entries of each pool, if only one of them is lent."""
        slabs = self._pages.slabs
        pages = list(map(_own, self._pages.groups)) if slabs is None else slabs.most()
        return [*pages, _own(self._slots)]


def _own(allocator: EntryAllocator) -> int:
    """Entries that are free or evictable."""
    return allocator.num_free + allocator.num_cached - allocator.num_locked
