"""Requests that wait for the prompt of another one, so that both do not compute the same tokens."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hybridrt.engine.cache.prefix_store import PrefixStore
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.texts import in_common

LEAST_SHARED = 256  # tokens that waiting must save
MOST_COMPARED = 8  # running prompts of the same beginning that are compared with a waiting one


class Place(NamedTuple):
    """Where a running prompt leaves a state that another prompt can start from.

    Attributes:
        end: tokens before the state; all of the prompt's if the state is at its end.
    """

    source: Request
    end: int


class PromptWaiters:
    """Requests that wait for a running prompt. The request with that prompt is their source.

    Args:
        store: where prompts leave states.
    """

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._sources = dict[tuple[CacheKey, bytes], list[Request]]()  # running prompts by their beginning
        self._held = dict[int, list[tuple[Request, int]]]()  # by the source's arrival, with ends of places
        self._place_of = dict[int, Place]()  # by the waiter's arrival

    def __len__(self) -> int:
        return len(self._place_of)

    def __iter__(self) -> Iterator[Request]:
        return (request for held in self._held.values() for request, _ in held)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._place_of

    def add_source(self, source: Request) -> None:
        """The prompt of an admitted request is going to be computed."""
        if (key := self._key(source)) is not None and source.reads_cache and not source.audits:
            self._sources.setdefault(key, []).append(source)
            source.is_source = True

    def place_for(self, request: Request) -> Place | None:
        """The place that a waiting request should wait for. None: it should not wait."""
        first = request.leader
        if first is not None and first.finish_reason is None and not first.output and request.arrived is None:
            return Place(first, len(first.prompt)) if self._store.shares(len(request.prompt)) else None
        if not self._sources or request.arrived is not None or not request.reads_cache:
            return None
        key = self._key(request)
        sources = () if key is None else self._sources.get(key, ())
        if not sources:
            return None
        known = self._store.match(request).length
        places = [Place(source, self._end_for(source, request, known)) for source in sources[-MOST_COMPARED:]]
        best = max(places, key=lambda place: place.end)
        return best if best.end >= known + LEAST_SHARED else None

    def hold(self, request: Request, place: Place) -> None:
        """Makes a request wait until its source has computed the prompt up to the place, and leaves a state there."""
        place.source.is_source = True
        self._store.leave_at(place.source, place.end)
        self._held.setdefault(place.source.arrival, []).append((request, place.end))
        self._place_of[request.arrival] = place

    def drop(self, request: Request) -> None:
        """A request no longer waits."""
        source = self._place_of.pop(request.arrival).source
        held = self._held[source.arrival]
        held[:] = [each for each in held if each[0] is not request]
        if not held:
            del self._held[source.arrival]

    def waited(self, source: Request, now: float) -> float:
        """Seconds that all waiters have waited."""
        return sum(now - request.metrics.arrival_time for request, _ in self._held.get(source.arrival, ()))

    def release_ready(self, source: Request) -> list[Request]:
        """Call after reading a step of a running prompt. Returns the waiters that can go on."""
        if source.arrival not in self._held:
            return []
        ends = {end for _, end in self._held[source.arrival] if end <= source.settled}
        if ends and not source.shared:
            self._store.share(source, source.settled)
        return self._release(source, ends)

    def end_source(self, source: Request) -> list[Request]:
        """The prompt is computed, or will not be. Returns all waiters."""
        source.is_source = False
        key = self._key(source) if self._sources else None
        if key is not None and source in (sources := self._sources.get(key, [])):
            sources.remove(source)
            if not sources:
                del self._sources[key]
        return self._release(source, None)

    def clear(self) -> None:
        self._sources.clear()
        self._held.clear()
        self._place_of.clear()

    def _release(self, source: Request, ends: set[int] | None) -> list[Request]:
        held = self._held.get(source.arrival, ())
        gone = [request for request, end in held if ends is None or end in ends]
        for request in gone:
            self.drop(request)
        return gone

    def _end_for(self, source: Request, request: Request, known: int) -> int:
        """Where the source leaves, or can leave, the last state that the request may start from."""
        shared = in_common(source.prompt_ids, request.prompt_ids[:-1])
        if shared < known + LEAST_SHARED:
            return 0
        return self._store.last_place(source, shared)

    @staticmethod
    def _key(request: Request) -> tuple[CacheKey, bytes] | None:
        if len(request.prompt) <= LEAST_SHARED:
            return None
        return request.cache_key, request.prompt_ids[:LEAST_SHARED].astype(np.int64).tobytes()
