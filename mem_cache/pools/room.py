"""Room: KV pages and state slots that can be lent together."""

from collections.abc import Sequence

from hybridrt.mem_cache.pools.entries import EntryAllocator
from hybridrt.mem_cache.pools.page_groups import PageAllocators
from hybridrt.mem_cache.pools.slabs import SlabAllocator, Slabs


class Room:
    """What is free in the allocators of an engine, or would be if the cache gave up everything that
    nobody reads.

    Args:
        pages, slots: the allocators. If they share slabs, those of `slots` were made last.

    Attributes:
        slabs: what page groups, and states, share; None: nothing.
        one_memory: states share it.
    """

    def __init__(self, pages: PageAllocators, slots: EntryAllocator) -> None:
        self._pages, self._slots = pages, slots
        self.slabs: Slabs | None = pages.slabs
        self.one_memory = isinstance(slots, SlabAllocator)

    @property
    def num_free_slots(self) -> int:
        return self._slots.most_free

    def shortages(self, pages: Sequence[int], slots: int) -> tuple[list[int], int]:
        """How many of `pages` of each group and of `slots` are not free, if all are lent together."""
        if self.slabs is not None and self.one_memory:
            *short, lacking = self.slabs.shortages([*pages, slots])
            return short, lacking
        return self._pages.shortages(pages), max(slots - self._slots.num_free, 0)

    def may_have(self, pages: Sequence[int], slots: int) -> bool:
        """Whether so many pages of each group and slots can be lent together."""
        if self.slabs is not None and self.one_memory:
            return self.slabs.may_have([*pages, slots])
        if slots > _own(self._slots):
            return False
        if self.slabs is not None:
            return self.slabs.may_have(pages)
        return all([count <= _own(group) for count, group in zip(pages, self._pages.groups)])

    def most(self) -> tuple[tuple[int, ...], int]:
        """Pages of each group, and slots, if only one of them is lent."""
        pools = (*self._pages.groups, self._slots)
        free_slabs, own = (0, list(map(_own, pools))) if self.slabs is None else self.slabs.room()
        if self.slabs is not None and not self.one_memory:
            own.append(_own(self._slots))
        found = [
            count + free_slabs * pool.share.per_slab if isinstance(pool, SlabAllocator) else count
            for count, pool in zip(own, pools)
        ]
        return tuple(found[:-1]), found[-1]


def _own(allocator: EntryAllocator) -> int:
    """Free and evictable entries of slabs that it owns."""
    return allocator.num_free + allocator.num_cached - allocator.num_locked
