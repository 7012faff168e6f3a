"""Reserves entries for prefixes that no request here has computed, and gives them to the prefix cache."""

from collections.abc import Sequence

import numpy as np

from hybridrt.engine.cache.prefix_store import PrefixStore
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import GroupPages, PageSets
from hybridrt.mem_cache.prefix_tree.cache_events import Why
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.state_worth import NewState


def take_room(store: PrefixStore, pages: Sequence[int], num_states: int) -> tuple[GroupPages, Sequence[Handle]] | None:
    """Takes `pages` of each group and `num_states` state slots, for `adopt`. None if there are too few.
    That may be so although `has_room` was true: an evicted page may become the tail of a state.
    """
    if not store.make_room(pages, num_states):
        return None
    return store.pages.alloc(pages), store.slots.alloc(num_states)


def take_room_for_fetch(
    store: PrefixStore, pages: Sequence[int], spare_pages: int, new: NewState | None
) -> tuple[GroupPages, Handle | None] | None:
    """Pages, and a slot if `new` is given, for `adopt`. None if requests may lack them:
    `spare_pages` more pages of each group must be free or evictable.
    """
    if not store.has_room([count + spare_pages for count in pages], 0):
        return None
    slot = None if new is None else store.spare_slot(new)
    taken = None if new is not None and slot is None else take_room(store, pages, 0)
    if taken is None:
        store.slots.free([slot] if slot is not None else [])
        return None
    return taken[0], slot


def slabs_to_clear(store: PrefixStore) -> list[int]:
    """The slabs that a copy to the device must clear first. The caller has them cleared, or calls
    `clear_later`."""
    return [] if store.slabs is None else store.slabs.pop_unclean()


def clear_later(store: PrefixStore, slabs: Sequence[int]) -> None:
    """Takes back slabs of `slabs_to_clear` that were not cleared."""
    if store.slabs is not None:
        store.slabs.unclean.update(slabs)


def give_up_room(store: PrefixStore, pages: GroupPages, slots: Sequence[Handle]) -> None:
    store.pages.free(pages)
    store.slots.free(slots)


def adopt(
    store: PrefixStore, tokens: np.ndarray, sets: PageSets, pages: GroupPages, states: dict[int, Handle], key: CacheKey,
    why: Why,
) -> None:  # fmt: skip
    """Inserts the text `tokens` [n] int32 into the tree.

    Args:
        sets: [m, G] sets of the text.
        pages, states: entries among them that were reserved with `take_room`; the tree owns the
            others already. Those that another insertion has made redundant are freed.
    """
    store.lost.texts.note(tokens, key)
    taken, _ = store.tree.insert(tokens, sets, states, key, why=why)
    store.pages.to_cache(taken.pages)
    store.slots.to_cache(taken.states)
    store.pages.free_used(pages)
    store.slots.free([slot for slot in states.values() if slot not in taken.states])
