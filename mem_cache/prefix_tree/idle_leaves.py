"""Leaves of the prefix tree that no request reads, in the order of their eviction."""

import heapq
from itertools import count

from hybridrt.mem_cache.prefix_tree.radix_node import Node, is_idle_leaf


class IdleLeaves:
    """A heap by `used`. Its entries may be out of date: they are checked when they are taken."""

    def __init__(self) -> None:
        self._order = count()
        self._heap: list[tuple[int, int, Node]] = []

    def enlist(self, node: Node, size: int) -> None:
        """Enters a node, if it is an idle leaf. `size`: nodes of the tree, which bound the heap."""
        if is_idle_leaf(node):
            heapq.heappush(self._heap, self._entry(node))
        if len(self._heap) > 64 + 4 * size:
            self._heap = [
                self._entry(leaf) for leaf in dict.fromkeys(entry[2] for entry in self._heap) if is_idle_leaf(leaf)
            ]
            heapq.heapify(self._heap)

    def take_oldest(self) -> Node | None:
        """Removes the leaf that was used least recently. The caller changes it or enters it again."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if is_idle_leaf(node):
                if used == node.used:
                    return node
                heapq.heappush(self._heap, self._entry(node))
        return None

    def _entry(self, node: Node) -> tuple[int, int, Node]:
        return node.used, next(self._order), node
