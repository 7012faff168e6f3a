"""Matches, entries and counts that the prefix cache exchanges with its users."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridrt.mem_cache.pools.slots import Slot, Slots

NO_SLOTS = Slots()


class CacheEntries(NamedTuple):
    """KV pages and state slots that change owners together."""

    pages: Slots = NO_SLOTS
    states: Sequence[Slot] = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix of `length` tokens that needs no computing. The request copies `tail` and `window`.

    Attributes:
        pages: the cache's whole KV pages of it, in order; none without attention layers.
        state: the cache's slot with the state after it; None without recurrent layers. The
            request's first step reads this slot and writes the request's own.
        tail: the cache's page with the tokens after the last whole page, if the state is in the
            middle of a page.
        known: first tokens of the prompt that are in the tree: more than `length` if a state is
            missing.
        fork: `known`, if another prompt in the tree goes on differently from there; else 0.
        window: the cache's pages with the KV that the next token sees, if all attention layers have
            a sliding window.
        node, tail_node: the tree's entries of the match and the tail.
        retokenised: tokens of a cached answer after the place where the prompt leaves it.
        staged: of a prefix that was computed elsewhere: its place in the executor's arena, until
            admission.
        staged_from: of such a prefix, the tokens whose KV is in `pages` instead.
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
