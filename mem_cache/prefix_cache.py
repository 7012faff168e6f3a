"""Reuse of computed prefixes across requests: the protocol that the coordinator speaks, and a cache of nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hybridrt.mem_cache.allocator import Slot


class CacheEntries(NamedTuple):
    """KV pages and state slots that change hands together."""

    pages: Sequence[Slot] = ()
    states: Sequence[Slot] = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix that needs no computing, `length` tokens long.

    Attributes:
        pages: the cache's whole KV pages of it, in order; none for a model without attention layers.
        state: the cache's slot with the recurrent state after it; None for a model without recurrent layers. The
            request's first step reads this slot and writes the request's own.
        tail: the cache's page with the tokens behind the last whole page, where the state stands in the middle of a
            page. The request copies it into its own page.
        known: tokens of the prompt whose KV the cache has, from the first on: more than `length` where a state is missing.
        node, tail_node: what the cache knows the match and the tail by.
        staged: of a prefix that was computed elsewhere, where its state and KV lie in the executor's arena: they are
            copied into the request's own slot and pages as it is admitted.
    """

    length: int = 0
    pages: Sequence[Slot] = ()
    state: Slot | None = None
    tail: Slot | None = None
    known: int = 0
    node: Any = None
    tail_node: Any = None
    staged: int | None = None

    @property
    def entries(self) -> CacheEntries:
        """What of the cache the match names."""
        return CacheEntries(self.pages, () if self.state is None else (self.state,))


class PrefixCache(Protocol):
    """Maps token prefixes to KV pages and recurrent states.

    A cache is bookkeeping alone: which tokens lead to which entries, and what to give up first. The coordinator's
    allocators say who owns an entry, a request or the cache; the coordinator moves entries as `insert` and `evict` say.
    """

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix, shorter than `tokens`: the last token is always computed, to give logits. It has
        both the KV and the state that the model needs, and ends where a page ends if there are pages."""
        ...

    def lock(self, entries: CacheEntries) -> None:
        """Keeps entries of a match from eviction until they are unlocked. Locks count."""
        ...

    def unlock(self, entries: CacheEntries) -> None:
        """Takes one lock off each. A request unlocks the state of its match before the pages."""
        ...

    def insert(self, tokens: Sequence[int], pages: Sequence[Slot], state: Slot | None, length: int) -> CacheEntries:
        """Offers what a request leaves behind.

        Args:
            tokens: those that the pages hold KV of, in order; the last page may be partly filled.
            pages: the request's pages. Those that its match had borrowed come first.
            state: a slot that holds the state after `length` of the tokens; None: there is none to have.

        Returns:
            The entries that the cache takes over. The coordinator frees the rest.
        """
        ...

    def evict(self, num_pages: int, num_states: int) -> CacheEntries:
        """Gives up unlocked entries until so many are given up or none is left. The coordinator frees them."""
        ...

    def clear(self) -> None:
        """Forgets everything, locks included. The coordinator has freed all entries."""
        ...


class NoPrefixCache:
    """Never matches, keeps nothing."""

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        return PrefixMatch()

    def lock(self, entries: CacheEntries) -> None:
        pass

    def unlock(self, entries: CacheEntries) -> None:
        pass

    def insert(self, tokens: Sequence[int], pages: Sequence[Slot], state: Slot | None, length: int) -> CacheEntries:
        return CacheEntries()

    def evict(self, num_pages: int, num_states: int) -> CacheEntries:
        return CacheEntries()

    def clear(self) -> None:
        pass
