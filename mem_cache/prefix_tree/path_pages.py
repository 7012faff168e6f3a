"""Which page sets the texts of a prefix tree have: by position, by path, and after a state."""

import numpy as np

from hybridrt.mem_cache.pools.page_groups import PageSets, no_sets
from hybridrt.mem_cache.prefix_tree.radix_node import Node


class PathPages:
    """The page sets of paths in a tree. `page_size` and `lookahead` as of RadixCache."""

    def __init__(self, page_size: int, lookahead: int, num_groups: int) -> None:
        self.page_size, self.lookahead, self._num_groups = page_size, lookahead, num_groups

    def no_sets(self, count: int = 0) -> PageSets:
        """So many sets without pages."""
        return no_sets(self._num_groups, count)

    def complete_pages(self, position: int) -> int:
        """How many first pages of a text are complete at `position`; 0 without attention layers."""
        return max(position - self.lookahead, 0) // self.page_size if self.page_size else 0

    def sets(self, node: Node) -> PageSets:
        """All complete sets of a prefix, from its first page on."""
        parts = [step.pages for step in node.path]
        return np.concatenate(parts[::-1]) if parts else self.no_sets()

    def covering(self, node: Node, count: int) -> Node:
        """The first node of a path in which its first `count` pages are complete."""
        while node.parent is not None and self.complete_pages(node.parent.end) >= count:
            node = node.parent
        return node

    def tail_index(self, node: Node) -> int | None:
        """The page with the tokens between a node's last complete page and its end. None: there are no
        such tokens."""
        index = self.complete_pages(node.end)
        return index if self.page_size and index * self.page_size < node.end else None

    def tail(self, node: Node) -> tuple[Node, PageSets] | tuple[None, None]:
        """The set [1, G] of `tail_index`, and the node that owns it. None: there is none. The owner is
        `node`, or one below with a page of the same tokens and more. Whole sets are preferred."""
        if self.tail_index(node) is None:
            return None, None
        if node.tail is not None and node.tail.all():
            return node, node.tail
        found, below = None if node.tail is None else (node, node.tail), node.found
        while below:
            step = below.pop()
            sets = step.pages[:1] if len(step.pages) else step.tail
            if sets is not None and sets.all():
                return step, sets
            found = found or (None if sets is None else (step, sets))
            if not len(step.pages):
                below += step.found
        return found or (None, None)
