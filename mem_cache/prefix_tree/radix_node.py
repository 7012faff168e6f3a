"""A node of the radix tree: its edge, and the entries at the edge's end. Idle leaves in the order of their eviction,
and the page sets of a path."""

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

import numpy as np

from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import PageSets, no_sets
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey


class StateKind(IntEnum):
    """Where in a text a state is: at the end of its prompt (on the grid), at the end of the text,
    at a fork, within an answer, or at an even distance within a prompt. States of one kind are used
    about equally often. A state within an answer becomes one of a prompt when a prompt needs it.
    """

    PROMPT, END, FORK, ANSWER, SPACED = range(5)

    @property
    def is_for_partings(self) -> bool:
        """Whether prompts of other conversations go on from there."""
        return self in (StateKind.FORK, StateKind.SPACED)


@dataclass(eq=False, slots=True)
class Node:
    """One edge of the tree and the entries at its end.

    Attributes:
        tokens: [n] ids of the edge.
        end: tokens on the path up to the edge's end.
        pages: [n, G] page sets of the edge's complete pages, in order.
        state: the slot with the state after the last token.
        tail: [1, G] page set with the tokens after the last complete page, if a state is in the
            middle of a page.
        readers: requests that read the path up to here.
        state_readers: requests that are about to read the state and the tail.
        tail_readers: requests that are about to read this node's tail, or its first page, as the
            tail of their state.
        used: when the node was last matched or inserted.
        answer: tokens before the answer of the text that brought the edge.
        first: the first token of the edge, the parent's key for the node. Below 0: no match finds
            it.
        key: of a root: that of all texts below.
        base: GreedyDual's inflation when the state was last used. Its worth is that plus the tokens
            that it saves.
        hits: how often the state has been used.
        kind: where in a text the state is.
        passed: the state was used once, and its request has left a state further down.
        awaited: order of arrival of waiting requests that match the state.
    """

    tokens: np.ndarray
    end: int
    pages: PageSets
    parent: "Node | None" = None
    children: "dict[int, Node]" = field(default_factory=dict)
    state: Handle | None = None
    tail: PageSets | None = None
    readers: int = 0
    state_readers: int = 0
    tail_readers: int = 0
    used: int = 0
    answer: int = 0
    base: float = 0.0
    hits: int = 0
    kind: StateKind = StateKind.PROMPT
    passed: bool = False
    awaited: set[int] = field(default_factory=set)
    first: int = -1
    key: CacheKey = DEFAULT_KEY

    @property
    def start(self) -> int:
        """Tokens on the path before the edge."""
        return self.end - len(self.tokens)

    @property
    def is_needed(self) -> bool:
        """True if something is stored at the node's end, or a request reads up to there."""
        return self.state is not None or self.tail is not None or self.readers > 0

    @property
    def hidden(self) -> bool:
        """No match finds it: it, or a node above, was dropped."""
        return any(node.first < 0 for node in self.path)

    @property
    def found(self) -> "list[Node]":
        """The children that matches may find."""
        return [child for first, child in self.children.items() if first >= 0]

    @property
    def path(self) -> "Iterator[Node]":
        """This node and those above it, deepest first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def cut(self, at: int, held: int) -> "Node":
        """Cuts the edge after `at` tokens, within which `held` of its pages become complete.
        Returns the upper node.
        """
        assert self.parent is not None
        above, self.pages = self.pages[:held], self.pages[held:]
        upper = Node(
            self.tokens[:at], self.start + at, above, self.parent, used=self.used, answer=self.answer, first=self.first
        )
        self.parent.children[self.first] = upper
        self.tokens, self.parent = self.tokens[at:], upper
        self.first = int(self.tokens[0])
        upper.children[self.first] = self
        return upper

    def join(self) -> "Node | None":
        """Joins an unneeded node's edge with that of its only child. Returns the child; the node
        has then left the tree. None: nothing has changed.
        """
        if self.parent is None or self.is_needed or len(self.children) != 1:
            return None
        (below,) = self.children.values()
        if below.answer != self.answer or below.first < 0:
            return None
        below.tokens = np.concatenate((self.tokens, below.tokens))
        below.pages = np.concatenate((self.pages, below.pages))
        below.parent, below.first = self.parent, self.first
        self.parent.children[self.first], self.parent = below, None
        return below


def edges_after(node: Node, known: int) -> Collection[Node]:
    """The edges on which texts go on after their first `known` tokens, which end at or in `node`."""
    return [node] if known < node.end else node.found


def left_answer(edges: Collection[Node], known: int, asked: int) -> int:
    """Tokens of a cached answer after the place where a prompt leaves it: the prompt shares at
    least one token of the answer and differs after `known` tokens, where `edges` go on.
    """
    left, end = [edge for edge in edges if edge.answer < known], known
    while left:
        edge = left.pop()
        end = max(end, edge.end)
        left += (child for child in edge.children.values() if child.answer == edge.answer)
    return min(end, asked) - known


def leaves_prompt(edges: Collection[Node], known: int) -> bool:
    """True if another prompt goes on differently after `known` tokens. Answers do not count: the
    same conversation has left them.
    """
    return max([edge.answer for edge in edges], default=0) > known


def is_idle_leaf(node: Node) -> bool:
    """Nothing is below the node, and no request reads it: sets can be taken off its end."""
    return node.parent is not None and not node.children and not node.readers


def has_idle_state(node: Node) -> bool:
    """The node has a state that no request reads."""
    return node.state is not None and not node.state_readers


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
        `node`, or one below with a page of the same tokens and more. Whole sets are preferred.

        All pages of a set are of one owner: a match locks one, a tail is dropped with one, and a state goes with
        the last one. Pages of two owners would save few hits: those where a window has given up its page at one
        node and another group at the other. Then an earlier state is used."""
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
