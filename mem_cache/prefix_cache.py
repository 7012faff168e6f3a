"""Reuse of computed prefixes across requests: the protocol that the coordinator speaks, and a cache of nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridrt.mem_cache.allocator import Slot


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix that needs no computing, `length` tokens long.

    Attributes:
        pages: the cache's whole KV pages of it, in order.
        staged: of a prefix that was computed elsewhere, where its state and KV lie in the executor's arena: they are
            copied into the request's own slot and pages as it is admitted.
    """

    length: int = 0
    pages: Sequence[Slot] = ()
    staged: int | None = None


class PrefixCache(Protocol):
    """Maps token prefixes to KV pages that the cache owns (`SlotAllocator.to_cache`) and requests borrow under a lock.

    Of a model with recurrent layers, a prefix counts as cached only where the state after it is kept as well.
    """

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix, shorter than `tokens`: the last token is always computed, to give logits."""
        ...

    def lock(self, match: PrefixMatch) -> None:
        """Keeps the match's pages, if it has any, from eviction until `unlock`. Locks count."""
        ...

    def unlock(self, match: PrefixMatch) -> None: ...

    def insert(self, tokens: Sequence[int], pages: Sequence[Slot]) -> Sequence[Slot]:
        """Offers the pages of computed `tokens`; returns those the cache took over and now owns (the caller frees
        what it owns of the rest)."""
        ...

    def evict(self, num_pages: int) -> None:
        """Frees unlocked pages of the cache, least recently used first, until num_pages are freed or none is left."""
        ...


class NoPrefixCache:
    """Never matches, keeps nothing."""

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        return PrefixMatch()

    def lock(self, match: PrefixMatch) -> None:
        pass

    def unlock(self, match: PrefixMatch) -> None:
        pass

    def insert(self, tokens: Sequence[int], pages: Sequence[Slot]) -> Sequence[Slot]:
        return ()

    def evict(self, num_pages: int) -> None:
        pass
