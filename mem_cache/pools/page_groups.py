"""KV pages by page group: their ledgers, what requests need, and what they have.

A page group has attention layers of one window and of one size of a token, and pages of its own.
Groups without a window come first. A page index of a text has one page in each group. A window group
gives its page up when all windows of later tokens have passed it.

Page sets are an array [n, G] int64 of handles; 0: the group has no page there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrt.base.errors import OutOfSlotsError
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handles, indices_of
from hybridrt.mem_cache.pools.slabs import SlabAllocator, Slabs, SlabShare

PageSets = np.ndarray
GroupPages = tuple[Handles, ...]  # pages of each group


def no_sets(groups: int, count: int = 0) -> PageSets:
    """[count, groups] sets without pages."""
    return np.zeros((count, groups), np.int64)


def pages_of(sets: PageSets) -> GroupPages:
    """The pages of sets [n, G] by group, in order."""
    return tuple([Handles.of_keys(column[column > 0]) for column in sets.T])


def page_numbers(sets: PageSets) -> np.ndarray:
    """[n, G] int32 numbers of the pages in their pools; 0, the scratch page, where there is none."""
    return indices_of(sets).astype(np.int32)


def in_every_group(numbers: np.ndarray, groups: int) -> np.ndarray:
    """[n, G] page numbers: `numbers` [n] in each page group."""
    return np.repeat(numbers[:, None], groups, 1)


@dataclass(frozen=True)
class PageDemand:
    """How many KV pages of a page group requests need.

    A page of a window group is given up as soon as the windows of all later steps are past it. Then
    a request holds a bounded number of pages, whatever its length.

    Attributes:
        window: keys that a token sees, its own included; None: all.
        step_tokens: most tokens of one request in one step: the prefill chunk.
        verify_tokens: tokens of a row in a decode step, drafts included.
        back: tokens before the window that a request holds too, so that the prefix up to its last
            whole page is usable.
    """

    page_size: int
    window: int | None = None
    step_tokens: int = 1
    verify_tokens: int = 1
    back: int = 0

    def whole(self, num_tokens: int) -> int:
        """Pages of so many tokens, without a window."""
        return -(-num_tokens // self.page_size)

    def least(self, num_tokens: int) -> int:
        """Fewest pages with which a request of `num_tokens` tokens can run alone, one token a step."""
        return self._bounded(num_tokens, 1)

    def fitting(self, num_pages: int) -> int:
        """Tokens of the longest request that can run alone in so many pages; 2**31 if a window
        bounds its pages to fewer."""
        if self.window is not None and self.least(2**31) <= num_pages:
            return 2**31
        return num_pages * self.page_size

    def decoding(self, num_tokens: int) -> int:
        """Pages of a decoding request, with one step launched ahead and one page to spare for
        growth.
        """
        return self._bounded(num_tokens, 1 + self.verify_tokens, spare=1)

    def prefilling(self, num_tokens: int) -> int:
        """Pages to compute a prompt of `num_tokens` tokens in whole chunks, with one launched
        ahead.
        """
        return self._bounded(num_tokens, 2 * self.step_tokens)

    def pool(self, rows: int, num_tokens: int) -> int:
        """Pages that `rows` requests of up to `num_tokens` tokens can use: all decode, but for the
        chunks in work.
        """
        chunks = self.whole(2 * self.step_tokens) + 1
        return min(rows * self.whole(num_tokens), rows * self.decoding(num_tokens) + chunks)

    @property
    def kept(self) -> int:
        """Most pages that a cached state needs in a window group."""
        return 0 if self.window is None else self._bounded(2**31, 0)

    def first_page(self, position: int) -> int:
        """First page that a step reads if its first token is at `position` or later."""
        return 0 if self.window is None else first_page(position, self.window, self.page_size)

    def first_held(self, position: int) -> int:
        """First page that a request holds whose next token is at `position`."""
        return self.first_page(position - self.back)

    def _bounded(self, num_tokens: int, step_tokens: int, spare: int = 0) -> int:
        if self.window is None:
            return self.whole(num_tokens)
        # The step's first token sees window - 1 tokens before it. So many adjacent tokens touch
        # these pages.
        span = self.window - 1 + self.back + step_tokens
        return min(self.whole(num_tokens), (span + self.page_size - 2) // self.page_size + 1 + spare)


def first_page(position: int, window: int, page_size: int) -> int:
    """First page that the token at `position` sees through a window of so many keys, its own
    included.
    """
    return max(position - window + 1, 0) // page_size


class RequestPages:
    """Page sets of a request, by page index and group.

    Attributes:
        starts, ends: of each group, the first page index that the request has and the one after the
            last. Earlier pages have left the window.
        spare: of each group, pages that have left the window and that the rest of the prompt needs.
        partial: of each group, the number of first pages that lack tokens, so that no other request
            may have them: they came from elsewhere, from the window's start on.
    """

    def __init__(self, sets: PageSets, starts: Sequence[int]) -> None:
        """`sets` [n, G]: pages of a match from `starts` on."""
        self._sets = sets.copy()
        self.starts = list(starts)
        self.ends = [max(len(sets) if group.any() else 0, start) for group, start in zip(sets.T, starts)]
        self.spare: list[Handles] = [Handles() for _ in starts]
        self.partial = [0] * len(self.starts)

    @property
    def sets(self) -> PageSets:
        """[n, G], from the first page index on. A view."""
        return self._sets[: self.end]

    @property
    def shareable(self) -> PageSets:
        """`sets` without partial pages: a copy."""
        sets = self.sets.copy()
        for group, count in enumerate(self.partial):
            sets[:count, group] = 0
        return sets

    @property
    def end(self) -> int:
        return max(self.ends, default=0)

    @property
    def whole_end(self) -> int:
        """Page index up to which every group has pages."""
        return min(self.ends, default=0)

    @property
    def held(self) -> GroupPages:
        return pages_of(self.sets)

    def append(self, pages: GroupPages) -> int:
        """Adds pages at the end of each group. Returns the first page index that has changed."""
        first = min([end for end, fresh in zip(self.ends, pages) if len(fresh)], default=self.end)
        last = max([end + len(fresh) for end, fresh in zip(self.ends, pages)], default=0)
        if last > len(self._sets):
            grown = no_sets(len(self.ends), max(last, 2 * len(self._sets)))
            grown[: len(self._sets)] = self._sets
            self._sets = grown
        for group, fresh in enumerate(pages):
            if n := len(fresh):
                end = self.ends[group]
                self._sets[end : end + n, group] = fresh.keys
                self.ends[group] = end + n
        return first

    def take_passed(self, group: int, end: int) -> Handles:
        """Removes the pages of a group before page index `end` and returns them: its window has passed
        them."""
        start, end = self.starts[group], min(end, self.ends[group])
        if end <= start:
            return Handles()
        gone = Handles.of_keys(self._sets[start:end, group].copy())
        self._sets[start:end, group] = 0
        self.starts[group] = end
        return gone

    def take_spare(self, counts: Sequence[int]) -> GroupPages:
        """At most so many spare pages of each group."""
        taken = tuple([spare[:count] for spare, count in zip(self.spare, counts)])
        self.spare = [spare[count:] for spare, count in zip(self.spare, counts)]
        return taken


NO_PAGES = RequestPages(no_sets(0), [])


def matched_starts(sets: PageSets, firsts: Sequence[int]) -> list[int]:
    """Of each group, the first page of a match's sets [n, G]; `firsts` where it has none."""
    return [int(np.flatnonzero(column)[0]) if column.any() else first for column, first in zip(sets.T, firsts)]


class PageAllocators:
    """One EntryAllocator for each page group. Pages are given by group, as GroupPages.

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
        self.slabs, self.shares, self._totals = slabs, tuple(shares), tuple(totals)
        self.groups: tuple[EntryAllocator, ...] = (
            tuple([EntryAllocator(total, name) for total, name in zip(totals, names, strict=True)])
            if slabs is None
            else tuple([SlabAllocator(slabs, share, name) for share, name in zip(shares, names, strict=True)])
        )

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

    def shortages(self, counts: Sequence[int]) -> list[int]:
        """How many of `counts` pages of each group are not free."""
        if self.slabs is not None:
            return self.slabs.shortages(counts)
        return [max(count - group.num_free, 0) for count, group in zip(counts, self.groups)]

    def bounds(self, num_tokens: int) -> Sequence[int]:
        """Most pages of each group that a request of so many tokens can have when it runs alone. If
        groups share memory and lack some for the request, those of one group are too few."""
        if self.slabs is None:
            return self._totals
        least = [share.slabs(demand.least(num_tokens)) for share, demand in zip(self.shares, self.demands)]
        of_state = any([allocator.of_states for allocator in self.slabs.allocators])
        spare, found = self.slabs.total - of_state - sum(least), list[int]()
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
        """Frees pages of requests. Those of the cache are freed by `evict`."""
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
        """Frees pages of the cache, which no request has locked."""
        for group, held in zip(self.groups, pages):
            group.evict(held)

    def cached_of(self, pages: GroupPages) -> GroupPages:
        """Those of a running request's `pages` that the cache owns. It has locked them, so there are none
        where nothing is locked."""
        return tuple(
            [
                held.at(~group.are_used(held)) if group.num_locked else Handles()
                for group, held in zip(self.groups, pages)
            ]
        )

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
