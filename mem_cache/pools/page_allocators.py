"""Ledgers of the KV pages of all page groups, on the host."""

from collections.abc import Iterator, Sequence

import numpy as np

from hybridrt.mem_cache.pools.allocator import SlotAllocator
from hybridrt.mem_cache.pools.page_demand import PageDemand
from hybridrt.mem_cache.pools.page_sets import GroupPages


class PageAllocators:
    """One SlotAllocator for each page group. Pages are given by group, as GroupPages.

    Args:
        totals: pages of each group; none without attention layers.
        demands: of each group.
        what: name of one page, for error messages.
        page_bytes: of a page of each group, for `held_bytes`.

    Attributes:
        groups: the allocators.
        has_windows: a group has a window.
        total, num_free, num_used, num_cached, num_locked: pages of all groups.
    """

    def __init__(
        self,
        totals: Sequence[int],
        demands: Sequence[PageDemand],
        what: str = "KV page",
        page_bytes: Sequence[int] | None = None,
    ) -> None:
        self.demands, self._page_bytes = tuple(demands), tuple(page_bytes or [0] * len(demands))
        self.has_windows = any(demand.window is not None for demand in demands)
        self.groups = tuple(
            SlotAllocator(total, what if demand.window is None else f"{what} (window {demand.window})")
            for total, demand in zip(totals, demands, strict=True)
        )

    def __iter__(self) -> Iterator[tuple[SlotAllocator, PageDemand]]:
        return zip(self.groups, self.demands)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def total(self) -> int:
        return sum([group.total for group in self.groups])

    @property
    def num_free(self) -> int:
        return sum([group.num_free for group in self.groups])

    @property
    def num_used(self) -> int:
        return sum([group.num_used for group in self.groups])

    @property
    def num_cached(self) -> int:
        return sum([group.num_cached for group in self.groups])

    @property
    def num_locked(self) -> int:
        return sum([group.num_locked for group in self.groups])

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that running requests have: their own, and those of the cache that they
        read.
        """
        return sum([(g.num_used + g.num_locked) * nbytes for g, nbytes in zip(self.groups, self._page_bytes)])

    def room(self) -> tuple[int, ...]:
        """Pages of each group that are free, or that the cache may give up."""
        return tuple([group.num_free + group.num_cached - group.num_locked for group in self.groups])

    def shortages(self, counts: Sequence[int]) -> list[int]:
        """How many of `counts` pages of each group are not free."""
        return [max(count - group.num_free, 0) for count, group in zip(counts, self.groups)]

    def alloc(self, counts: Sequence[int]) -> GroupPages:
        """Takes so many pages of each group.

        Raises:
            OutOfSlotsError: fewer are free; nothing was taken.
        """
        for count, group in zip(counts, self.groups):
            group.check_free(count)
        return tuple([group.alloc(count) for count, group in zip(counts, self.groups)])

    def free(self, pages: GroupPages) -> None:
        for group, held in zip(self.groups, pages):
            group.free(held)

    def free_used(self, pages: GroupPages) -> None:
        """Frees those pages that requests use. The others are the cache's."""
        for group, held in zip(self.groups, pages):
            group.free_used(held)

    def to_cache(self, pages: GroupPages) -> None:
        for group, held in zip(self.groups, pages):
            group.to_cache(held)

    def lock(self, pages: GroupPages) -> None:
        for group, held in zip(self.groups, pages):
            group.lock(held)

    def unlock(self, pages: GroupPages) -> None:
        for group, held in zip(self.groups, pages):
            group.unlock(held)

    def evict(self, pages: GroupPages) -> None:
        for group, held in zip(self.groups, pages):
            group.evict(held)

    def cached_of(self, pages: GroupPages) -> GroupPages:
        """Those pages that are the cache's."""
        return tuple([held.at(~group.are_used(held)) for group, held in zip(self.groups, pages)])

    def are_idle(self, group: int, keys: np.ndarray) -> np.ndarray:
        return self.groups[group].are_idle(keys)

    def reclaim(self) -> None:
        for group in self.groups:
            group.reclaim()

    def check(self) -> None:
        for group in self.groups:
            group.check()
