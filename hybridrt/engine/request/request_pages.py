"""The KV pages of a running request."""

from collections.abc import Sequence

import numpy as np

from hybridrt.mem_cache.pools.page_sets import GroupPages, PageSets, no_sets, pages_of
from hybridrt.mem_cache.pools.slots import Slots


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
        """`sets` [n, G] hold the pages from `starts` on, of a match or of none."""
        self._sets = sets.copy()
        self.starts = list(starts)
        self.ends = [max(len(sets) if group.any() else 0, start) for group, start in zip(sets.T, starts)]
        self.spare: list[Slots] = [Slots() for _ in starts]
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

    def leave(self, group: int, end: int) -> Slots:
        """Takes the pages before page index `end` out of a group."""
        start, end = self.starts[group], min(end, self.ends[group])
        if end <= start:
            return Slots()
        gone = Slots.of_keys(self._sets[start:end, group].copy())
        self._sets[start:end, group] = 0
        self.starts[group] = end
        return gone

    def take_spare(self, counts: Sequence[int]) -> GroupPages:
        """At most so many spare pages of each group."""
        taken = tuple([spare[:count] for spare, count in zip(self.spare, counts)])
        self.spare = [spare[count:] for spare, count in zip(self.spare, counts)]
        return taken


def no_pages(groups: int) -> RequestPages:
    return RequestPages(no_sets(groups), [0] * groups)


def matched_starts(sets: PageSets, firsts: Sequence[int]) -> list[int]:
    """Of each group, the first page of a match's sets [n, G]; `firsts` where it has none."""
    return [int(np.flatnonzero(column)[0]) if column.any() else first for column, first in zip(sets.T, firsts)]
