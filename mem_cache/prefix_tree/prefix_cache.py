"""What the prefix cache and the requests that use it tell each other: matches, entries and counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridrt.mem_cache.pools.slots import Slot, Slots

NO_SLOTS = Slots()


class CacheEntries(NamedTuple):
    """KV pages and state slots that change hands together."""

    pages: Slots = NO_SLOTS
    states: Sequence[Slot] = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix that needs no computing, `length` tokens long.

    Attributes:
        pages: the cache's whole KV pages of it, in order; none for a model without attention layers.
        state: the cache's slot with the recurrent state after it; None for a model without recurrent layers. The
            request's first step reads this slot and writes the request's own.
        tail: the cache's page with the tokens behind the last whole page, where the state is in the middle of a
            page. The request copies it into its own page.
        known: tokens of the prompt that are in the tree, from the first on: more than `length` where a state is
            missing.
        fork: `known`, if another prompt in the tree goes on differently from there; else 0.
        window: the cache's pages with the KV that the next token sees, where all attention layers have a sliding
            window. The request copies them into its own pages.
        node, tail_node: the tree's entries of the match and the tail.
        retokenised: tokens of a cached answer behind a place within it where the prompt leaves it.
        staged: of a prefix that was computed elsewhere, where its state and KV lie in the executor's arena: they are
            copied into the request's own slot and pages as it is admitted.
        staged_from: of such a prefix, the tokens whose KV is not there: it is in `pages`.
    """

    length: int = 0
    pages: Slots = field(default_factory=Slots)
    state: Slot | None = None
    tail: Slot | None = None
    known: int = 0
    node: Any = None
    tail_node: Any = None
    staged: int | None = None
    staged_from: int = 0
    window: Sequence[Slot] = ()
    retokenised: int = 0
    fork: int = 0


NO_MATCH = PrefixMatch()


@dataclass(slots=True)
class CacheCounts:
    """Tokens of requests that were admitted, since the start; those of a retracted request count once.

    Attributes:
        asked: all of them.
        hit: of these, tokens that needed no computing.
        without_state: tokens that the cache knew, but had no state at or behind.
        without_kv: tokens of a text whose KV the cache has evicted.
        retokenised: tokens of a cached answer behind a place within it where the prompt leaves it: most often because
            the history was tokenised anew.
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
