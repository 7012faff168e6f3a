"""Which pages of its windows a prefix in the radix tree needs, and the order in which they go."""

import heapq
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from hybridrt.mem_cache.pools.page_groups import PageSets, first_page
from hybridrt.mem_cache.prefix_tree.radix_node import Node


class TreeWindows:
    """The window groups of a tree.

    Pages are evicted in this order. First passed ones: a request that goes on from the end of a node
    does not need them. Then others. In both, least recently used first.

    Args:
        windows: as of RadixCache.
        complete_pages: PathPages.complete_pages.
    """

    def __init__(
        self, windows: Sequence[int | None], page_size: int, recurrent: bool, complete_pages: Callable[[int], int]
    ) -> None:
        self.groups = {group: window for group, window in enumerate(windows) if window is not None}
        self._page_size, self._recurrent, self._complete_pages = page_size, recurrent, complete_pages
        self._order = count()
        self.clear()

    def clear(self) -> None:
        # Heaps by `used`; entries may be out of date.
        self._heaps: dict[int, list[tuple[bool, int, int, Node]]] = {group: [] for group in self.groups}

    # -- matching

    def without_passed(self, sets: PageSets, length: int) -> PageSets:
        """`sets`, changed in place: without the pages that the token after `length` tokens does not
        see.
        """
        for group, window in self.groups.items():
            sets[: first_page(length, window, self._page_size), group] = 0
        return sets

    def usable(self, sets: PageSets, most: int) -> int:
        """The greatest number of first pages, at most `most`, after which no window lacks a page."""
        if not self.groups:
            return most
        counts, usable = np.arange(most + 1), np.ones(most + 1, np.bool_)
        for group, window in self.groups.items():
            lacking = np.where(sets[:most, group] == 0, counts[:-1], -1)
            last_lacking = np.maximum.accumulate(np.concatenate(([-1], lacking)))
            usable &= last_lacking < np.maximum(counts * self._page_size - window + 1, 0) // self._page_size
        return int(usable.nonzero()[0][-1])

    def are_whole(self, node: Node, sets: PageSets, tail: PageSets | None) -> bool:
        """Whether all pages are there that the token after a node sees.

        Args:
            sets: of the node's path or a longer one.
            tail: of the node.
        """
        end = self._complete_pages(node.end)
        if end * self._page_size < node.end and (tail is None or not tail.all()):
            return False
        firsts = [(g, first_page(node.end, window, self._page_size)) for g, window in self.groups.items()]
        return all(sets[first:end, g].all() for g, first in firsts)

    # -- the order

    def enlist(self, node: Node, group: int) -> None:
        """Enters a node that has pages of a group in the order of their eviction."""
        if node.parent is not None and node.pages[:, group].any():
            last = self._num_passed(node, group) == 0
            heapq.heappush(self._heaps[group], (last, node.used, next(self._order), node))

    def enlist_all(self, node: Node, size: int) -> None:
        """`enlist` for each group. `size`: nodes of the tree, which bound the lists."""
        for group, heap in self._heaps.items():
            self.enlist(node, group)
            if len(heap) > 64 + 4 * size:
                nodes = dict.fromkeys(entry[3] for entry in heap if entry[3].parent is not None)
                heap[:] = [(self._num_passed(n, group) == 0, n.used, next(self._order), n) for n in nodes]
                heapq.heapify(heap)

    def enlist_passed(self, node: Node) -> None:
        """Enters the nodes again whose pages a state of `node` needed: it has been dropped, so they may be
        evicted earlier now."""
        for group, window in self.groups.items():
            for step in node.path:
                if step.end <= node.end - window:
                    break
                self.enlist(step, group)

    def next_node(self, group: int) -> tuple[Node, int] | None:
        """Removes the next node from the order. Returns it and the number of its first pages that no
        request needs; 0: none of them, but the node was used least recently. None: no node has
        pages."""
        heap = self._heaps[group]
        while heap:
            last, used, _, node = heapq.heappop(heap)
            if node.parent is None or not node.pages[:, group].any():
                continue
            passed = self._num_passed(node, group)
            if (last, used) == (passed == 0, node.used):
                return node, passed
            self.enlist(node, group)
        return None

    def _num_passed(self, node: Node, group: int) -> int:
        """First pages of a node that no request needs which goes on from the node's end or from a
        state below; 0 if the group has none of them."""
        first, end = self._complete_pages(node.start), self._first_needed(node, self.groups[group])
        useless = min(max(end - first, 0), len(node.pages))
        return useless if node.pages[:useless, group].any() else 0

    def _first_needed(self, node: Node, window: int) -> int:
        """The first page that a request needs which goes on from a node's end or, with recurrent
        layers, from the first states at or below it.
        """
        end = self._complete_pages(node.end)
        if not self._recurrent or node.state is not None:
            return first_page(node.end, window, self._page_size)
        below, first = node.found, end
        while below:
            step = below.pop()
            if step.state is not None:
                first = min(first, first_page(step.end, window, self._page_size))
            elif first_page(step.end, window, self._page_size) < end:
                below += step.found
        return first
