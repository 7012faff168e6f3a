"""Copies prefixes of waiting requests from main memory to the device while others run."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hybridrt.engine.cache.adoption import adopt, clear_later, give_up_room, slabs_to_clear, take_room_for_fetch
from hybridrt.engine.cache.host_tier import HostTier
from hybridrt.engine.cache.prefix_store import PrefixStore
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import GroupPages, PageSets, no_sets, pages_of
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from hybridrt.mem_cache.prefix_tree.state_worth import NewState
from hybridrt.runtime.step.plan import HostState

LOOK_AHEAD = 8  # requests at the head of the queue whose prefixes are fetched
LEAST_TOKENS = 64  # that a fetch must save: computing fewer is faster
PATIENCE_S = 1.0  # after this a request is admitted without its fetch


@dataclass(eq=False)
class _Fetch:
    """A prefix that is being copied to the device.

    Attributes:
        tokens, key: its text, as far as it is a prefix.
        length: tokens with KV.
        gain: of these, those that the device had no state for.
        held: the pages that the device already has, locked.
        sets: [n, G] page sets of the text on the device, with those of `held` and `pages`.
        pages, state: of the device; the fetch owns them until it ends.
        ticket: of its copy.
        deadline: until when requests wait for it, in seconds of time.monotonic().
    """

    tokens: np.ndarray
    key: CacheKey
    length: int
    gain: int
    held: PrefixMatch
    sets: PageSets
    pages: GroupPages
    state: Handle | None
    ticket: int
    deadline: float


class HostFetches:
    """Fetches by the arrival of their request. A fetched prefix becomes an ordinary entry of the
    prefix cache, which the request hits at admission.

    A fetch owns pages and a slot of the device until its copies have ended. It takes only entries
    that no request needs. If running requests need pages later, all fetches are cancelled
    (`cancel_all`).
    """

    def __init__(self, store: PrefixStore, tier: HostTier) -> None:
        self._store, self._tier = store, tier
        self._fetches: dict[int, _Fetch] = {}
        self._looked: dict[int, tuple[int, ...]] = {}  # by arrival: the room when nothing could be fetched

    def __bool__(self) -> bool:
        return bool(self._fetches)

    def awaited(self, request: Request) -> bool:
        """Whether a request should still wait for its fetch."""
        fetch = self._fetches.get(request.arrival)
        return fetch is not None and time.monotonic() < fetch.deadline

    def finish(self) -> bool:
        """Gives the prefix cache the prefixes whose copies have ended. True if there were any."""
        over = [arrival for arrival, fetch in self._fetches.items() if self._tier.has_copied(fetch.ticket)]
        for arrival in over:
            fetch, store = self._fetches.pop(arrival), self._store
            self._tier.wait_for(fetch.ticket)  # other ranks may not have ended
            states = {} if fetch.state is None else {fetch.length: fetch.state}
            adopt(store, fetch.tokens, fetch.sets, fetch.pages, states, fetch.key, "fetched")
            store.unlock(fetch.held)
            store.counts.fetched += fetch.gain
        return bool(over)

    def start(self, waiting: Iterable[Request], room: tuple[int, ...], spare_pages: int) -> None:
        """Begins fetches for waiting requests.

        Args:
            room: changes when something has become free.
            spare_pages: further pages of the device that must stay free or evictable.
        """
        looked, self._looked = self._looked, {}
        for request in waiting:
            if request.arrival not in self._fetches:
                seen = looked.get(request.arrival) == room
                if seen or not self._start(request, spare_pages):
                    self._looked[request.arrival] = room

    def cancel(self, arrival: int) -> bool:
        """Frees the entries of a request's fetch; later steps that write them wait for the copies.
        False if there is no fetch.
        """
        fetch = self._fetches.pop(arrival, None)
        if fetch is None:
            return False
        clear_later(self._store, self._tier.withdraw(fetch.ticket))
        give_up_room(self._store, fetch.pages, [] if fetch.state is None else [fetch.state])
        self._store.unlock(fetch.held)
        return True

    def cancel_all(self) -> bool:
        return any([self.cancel(arrival) for arrival in list(self._fetches)])

    def clear(self) -> None:
        """Forgets all fetches. Their entries have been freed already."""
        self._fetches.clear()
        self._looked.clear()

    def _start(self, request: Request, spare_pages: int) -> bool:
        store, tree, key = self._store, self._tier.tree, request.cache_key
        if request.arrived is not None or not request.reads_cache:
            return False
        found = tree.match(request.ids, key)
        gain = found.length - store.match(request).length
        if gain < LEAST_TOKENS:
            return False
        tokens = request.ids[: store.known_at(found.length)]
        held = store.tree.cached_pages(request.ids[: found.length], key)[0]
        hosted = found.pages if found.tail is None else np.concatenate((found.pages, found.tail))
        sets = no_sets(hosted.shape[1], len(hosted))
        sets[: len(held.pages)] = held.pages[: len(sets)]
        lacking = (hosted > 0) & (sets == 0)
        if found.state is None and not lacking.any():  # the cache keeps no prefix without pages
            return False
        store.lock(held)
        new = None if found.state is None else NewState(gain, [request.arrival])
        room = take_room_for_fetch(store, np.count_nonzero(lacking, axis=0).tolist(), spare_pages, new)
        if room is None:
            store.unlock(held)
            return False
        pages, slot = room
        for column, where, fresh in zip(sets.T, lacking.T, pages):
            column[where] = fresh.keys
        places = pages_of(np.where(lacking, hosted, 0))
        states = [] if found.state is None or slot is None else [HostState(found.length, slot.index, found.state.index)]
        ticket = self._tier.fetch(pages, places, states, slabs_to_clear(store))
        tree.touch(tokens, key)
        deadline = time.monotonic() + PATIENCE_S
        self._fetches[request.arrival] = _Fetch(
            tokens, key, found.length, gain, held, sets, pages, slot, ticket, deadline
        )
        return True
