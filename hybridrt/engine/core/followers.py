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

    leader: Request
    end: int


class Followers:
    """Requests by the leader whose prompt they wait for.

    Args:
        store: where prompts leave states.
    """

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._leaders = dict[tuple[CacheKey, bytes], list[Request]]()  # running prompts by their beginning
        self._held = dict[int, list[tuple[Request, int]]]()  # by the leader's arrival, with ends of places
        self._leader_of = dict[int, Place]()  # by the follower's arrival

    def __len__(self) -> int:
        return len(self._leader_of)

    def __iter__(self) -> Iterator[Request]:
        return (request for held in self._held.values() for request, _ in held)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._leader_of

    def add_leader(self, leader: Request) -> None:
        """The prompt of an admitted request is going to be computed."""
        if (key := self._key(leader)) is not None and leader.reads_cache and not leader.audits:
            self._leaders.setdefault(key, []).append(leader)
            leader.leads = True

    def place_for(self, request: Request) -> Place | None:
        """The place that a waiting request should wait for. None: it should not wait."""
        first = request.leader
        if first is not None and first.finish_reason is None and not first.output and request.arrived is None:
            return Place(first, len(first.prompt)) if self._store.shares(len(request.prompt)) else None
        if not self._leaders or request.arrived is not None or not request.reads_cache:
            return None
        key = self._key(request)
        leaders = () if key is None else self._leaders.get(key, ())
        if not leaders:
            return None
        known = self._store.match(request).length
        places = [Place(leader, self._end_for(leader, request, known)) for leader in leaders[-MOST_COMPARED:]]
        best = max(places, key=lambda place: place.end)
        return best if best.end >= known + LEAST_SHARED else None

    def hold(self, request: Request, place: Place) -> None:
        """Makes a request wait until its leader has computed the prompt up to the place, and leaves a state there."""
        place.leader.leads = True
        self._store.leave_at(place.leader, place.end)
        self._held.setdefault(place.leader.arrival, []).append((request, place.end))
        self._leader_of[request.arrival] = place

    def drop(self, request: Request) -> None:
        """A request no longer waits."""
        leader = self._leader_of.pop(request.arrival).leader
        held = self._held[leader.arrival]
        held[:] = [each for each in held if each[0] is not request]
        if not held:
            del self._held[leader.arrival]

    def waited(self, leader: Request, now: float) -> float:
        """Seconds that all followers have waited."""
        return sum(now - request.metrics.arrival_time for request, _ in self._held.get(leader.arrival, ()))

    def release_ready(self, leader: Request) -> list[Request]:
        """Call after reading a step of a running prompt. Returns the followers that can go on."""
        if leader.arrival not in self._held:
            return []
        ends = {end for _, end in self._held[leader.arrival] if end <= leader.settled}
        if ends and not leader.shared:
            self._store.share(leader, leader.settled)
        return self._release(leader, ends)

    def end_leader(self, leader: Request) -> list[Request]:
        """The prompt is computed, or will not be. Returns all followers."""
        leader.leads = False
        key = self._key(leader) if self._leaders else None
        if key is not None and leader in (leaders := self._leaders.get(key, [])):
            leaders.remove(leader)
            if not leaders:
                del self._leaders[key]
        return self._release(leader, None)

    def clear(self) -> None:
        self._leaders.clear()
        self._held.clear()
        self._leader_of.clear()

    def _release(self, leader: Request, ends: set[int] | None) -> list[Request]:
        held = self._held.get(leader.arrival, ())
        gone = [request for request, end in held if ends is None or end in ends]
        for request in gone:
            self.drop(request)
        return gone

    def _end_for(self, leader: Request, request: Request, known: int) -> int:
        """Where the leader leaves, or can leave, the last state that the request may start from."""
        shared = in_common(leader.prompt_ids, request.prompt_ids[:-1])
        if shared < known + LEAST_SHARED:
            return 0
        return self._store.last_place(leader, shared)

    @staticmethod
    def _key(request: Request) -> tuple[CacheKey, bytes] | None:
        if len(request.prompt) <= LEAST_SHARED:
            return None
        return request.cache_key, request.prompt_ids[:LEAST_SHARED].astype(np.int64).tobytes()
