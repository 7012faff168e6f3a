"""Ledgers of the KV pages of all page groups, on the host."""

from collections.abc import Iterator, Sequence

import numpy as np

from hybridrt.base.errors import OutOfSlotsError
from hybridrt.mem_cache.pools.allocator import SlotAllocator
from hybridrt.mem_cache.pools.page_demand import PageDemand
from hybridrt.mem_cache.pools.page_sets import GroupPages
from hybridrt.mem_cache.pools.slabs import SlabAllocator, Slabs, SlabShare


class PageAllocators:
    """One SlotAllocator for each page group. Pages are given by group, as GroupPages.

    Args:
        totals: pages of each group; none without attention layers.
        demands: of each group.
        what: name of one page, for error messages.
        page_bytes: of a page of each group, for `held_bytes`.
        slabs, shares: memory that the groups share instead, and how each one sees it.

    Attributes:
        groups: the allocators.
        slabs, shares: None and nothing if no memory is shared.
        has_windows: a group has a window.
        total, num_free, num_used, num_cached, num_locked: pages of all groups.
    """

    def __init__(
        self,
        totals: Sequence[int],
        demands: Sequence[PageDemand],
        what: str = "KV page",
        page_bytes: Sequence[int] | None = None,
        slabs: Slabs | None = None,
        shares: Sequence[SlabShare] = (),
    ) -> None:
        self.demands, self._page_bytes = tuple(demands), tuple(page_bytes or [0] * len(demands))
        self.has_windows = any(demand.window is not None for demand in demands)
        names = [what if demand.window is None else f"{what} (window {demand.window})" for demand in demands]
        self.slabs, self.shares = slabs, tuple(shares)
        self.groups: tuple[SlotAllocator, ...] = (
            tuple([SlotAllocator(total, name) for total, name in zip(totals, names, strict=True)])
            if slabs is None
            else tuple([SlabAllocator(slabs, share, name) for share, name in zip(shares, names, strict=True)])
        )

    def __iter__(self) -> Iterator[tuple[SlotAllocator, PageDemand]]:
        return zip(self.groups, self.demands)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def total(self) -> int:
        return self.num_free + self.num_used + self.num_cached

    @property
    def num_free(self) -> int:
        """Free slabs count as pages of the first group."""
        slabs = 0 if self.slabs is None else self.slabs.num_free * self.shares[0].per_slab
        return slabs + sum([group.num_free for group in self.groups])

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
        """Pages of each group that are free, or that the cache may give up, if only one group takes
        them."""
        if self.slabs is None:
            return tuple([group.num_free + group.num_cached - group.num_locked for group in self.groups])
        slabs, own = self.slabs.room()
        return tuple([count + slabs * share.per_slab for count, share in zip(own, self.shares)])

    def may_have(self, counts: Sequence[int]) -> bool:
        """Whether so many pages of each group are free, or the cache may give them up."""
        if self.slabs is not None:
            return self.slabs.may_have(counts)
        return all([count <= most for count, most in zip(counts, self.room())])

    def shortages(self, counts: Sequence[int]) -> list[int]:
        """How many of `counts` pages of each group are not free."""
        if self.slabs is not None:
            return self.slabs.shortages(counts)
        return [max(count - group.num_free, 0) for count, group in zip(counts, self.groups)]

    def bounds(self, num_tokens: int) -> list[int]:
        """Most pages of each group that a request of so many tokens can have when it runs alone. If
        groups share memory and lack some for the request, those of one group are too few."""
        if self.slabs is None:
            return [group.total for group in self.groups]
        least = [share.slabs(demand.least(num_tokens)) for share, demand in zip(self.shares, self.demands)]
        spare, found = self.slabs.total - sum(least), list[int]()
        for share, demand, count in zip(self.shares, self.demands, least):
            more = max(min(share.slabs(demand.prefilling(num_tokens)) - count, spare), min(spare, 0))
            spare -= more
            found.append((count + more) * share.per_slab)
        return found

    def alloc(self, counts: Sequence[int]) -> GroupPages:
        """Takes so many pages of each group.

        Raises:
            OutOfSlotsError: fewer are free; nothing was taken.
        """
        if self.slabs is not None and any(self.shortages(counts)):
            raise OutOfSlotsError(f"{list(counts)} KV pages wanted, and the groups lack {self.shortages(counts)}")
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
        if self.slabs is not None:
            self.slabs.reclaim()

    def check(self) -> None:
        for group in self.groups:
            group.check()
        if self.slabs is not None:
            self.slabs.check()
