"""Matches, entries and counts that the prefix cache exchanges with its users."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import GroupPages, PageSets, no_sets, pages_of
from hybridrt.mem_cache.prefix_tree.cache_events import EntryLog, What
from hybridrt.mem_cache.prefix_tree.radix_node import Node


class CacheEntries(NamedTuple):
    """KV pages, by page group, and state slots that change owners together."""

    pages: GroupPages = ()
    states: Sequence[Handle] = ()


class Gone:
    """Entries that change owners, collected.

    Args:
        log: also notes the entries as `what`; None if nobody listens.

    Attributes:
        counts: pages of each group so far.
    """

    def __init__(self, groups: int, log: EntryLog | None = None, what: What = "lost") -> None:
        self.counts = [0] * groups
        self.states: list[Handle] = []
        self.log, self._what = log, what
        self._sets = [no_sets(groups)]

    def add(self, sets: PageSets, node: Node, index: int, end: int | None = None) -> None:
        """Adds the pages of sets [n, G]; `node`, `index` and `end` as in EntryLog.pages."""
        self._sets.append(sets)
        for group, held in enumerate(np.count_nonzero(sets, axis=0).tolist()):
            self.counts[group] += held
        if self.log is not None:
            self.log.pages(self._what, node, sets, index, end)

    def add_state(self, node: Node) -> None:
        """Adds the state of a node that has one."""
        assert node.state is not None
        self.states.append(node.state)
        if self.log is not None:
            self.log.state(self._what, node)

    def entries(self) -> CacheEntries:
        return CacheEntries(pages_of(np.concatenate(self._sets)), self.states)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix of `length` tokens that needs no computing. The request copies `tail`.

    Attributes:
        pages: [n, G] page sets of its whole KV pages, the cache's, from its first token on. Window
            groups have only the pages that the next token sees. None without attention layers.
        state: the cache's slot with the state after it; None without recurrent layers. The
            request's first step reads this slot and writes the request's own.
        tail: the cache's [1, G] set with the tokens after the last whole page, if the state is in
            the middle of a page.
        known: first tokens of the prompt that are in the tree: more than `length` if a state is
            missing.
        fork: `known`, if another prompt in the tree goes on differently from there; else 0.
        refused: length of a match that there was no room for next to the request; this one is empty.
        node, tail_node: the tree's entries of the match and the tail.
        retokenised: tokens of a cached answer after the place where the prompt leaves it.
        staged: of a prefix that was computed elsewhere: its place in the executor's arena, until
            admission.
        staged_from: of such a prefix, the tokens whose KV in layers without a window is in `pages`
            instead.
    """

    length: int = 0
    pages: PageSets = field(default_factory=lambda: no_sets(0))
    state: Handle | None = None
    tail: PageSets | None = None
    known: int = 0
    node: Node | None = None
    tail_node: Node | None = None
    staged: int | None = None
    staged_from: int = 0
    retokenised: int = 0
    fork: int = 0
    refused: int = 0


NO_MATCH = PrefixMatch()


@dataclass(slots=True)
class CacheCounts:
    """Tokens of admitted requests since the start. A retracted request counts once.

    Attributes:
        asked: all tokens.
        hit: tokens that needed no computing.
        without_state: known tokens with no state at or after them.
        without_kv: tokens whose KV was evicted.
        retokenised: tokens of a cached answer after the place where the prompt leaves it, mostly
            because the history was tokenised anew.
        fetched: tokens that were brought back from main memory, or whose state was.
        dropped: entries, not tokens: their use gave logits that are not finite.
    """

    asked: int = 0
    hit: int = 0
    without_state: int = 0
    without_kv: int = 0
    retokenised: int = 0
    fetched: int = 0
    dropped: int = 0
