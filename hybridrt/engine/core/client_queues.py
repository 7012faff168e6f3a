"""Waiting requests of each client and of all, and the order in which a step computes prompts."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from hybridrt.engine.core.prompt_waiters import PromptWaiters
from hybridrt.engine.core.scheduler import goes_first_from
from hybridrt.engine.core.step_cost import PromptWork
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.sample_request import Request

ACTIVE_SECONDS = 60.0  # how long a client is active after its last request came or was computed
# A client floods from so many seconds of waiting prompts on, until so many are left of all its prompts.
FLOOD_SECONDS, ENDED_SECONDS = 2.5, 0.05
_FEW_CLIENTS = 64
_arrival = attrgetter("arrival")


class _Entry(NamedTuple):
    request: Request
    priority: int
    size: int
    work: PromptWork


class RequestQueue:
    """Requests by priority, then first come, first served.

    Requests of about equal seconds are one size class. Its earliest arrival has its highest response ratio,
    so PromptOrder compares only the first request of each class, however many wait.

    Args:
        policy: predicts seconds and has the clock.

    Attributes:
        pending: prompt tokens that these requests compute.
    """

    def __init__(self, policy: TrafficPolicy) -> None:
        self.pending = PromptWork()
        self._policy = policy
        self._entries = dict[int, _Entry]()  # by arrival
        self._levels = dict[int, dict[int, list[Request]]]()  # by priority and size class, in order of arrival
        self._priorities = list[int]()  # of waiting requests, in order
        # Arrivals by the time from which a request goes before later ones of a higher priority. May have those of
        # requests that no longer wait, but not these requests: their prompts and images would stay in memory.
        self._by_age = list[tuple[float, int]]()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._entries

    def __iter__(self) -> Iterator[Request]:
        """Requests in their order if none passes, without regard to their age. Lazy: costs as much as is read."""
        for priority in self._priorities:
            yield from heapq.merge(*self._levels[priority].values(), key=_arrival)

    def add(self, request: Request, work: PromptWork) -> None:
        """`work`: of its prompt, without what is cached."""
        priority = request.params.priority
        entry = self._entries[request.arrival] = _Entry(request, priority, self._size(work), work)
        self.pending += work
        if priority not in self._levels:
            insort(self._priorities, priority)
        insort(self._levels.setdefault(priority, {}).setdefault(entry.size, []), request, key=_arrival)
        self._note_age(request)

    def remove(self, request: Request) -> None:
        entry = self._entries.pop(request.arrival)
        self.pending -= entry.work
        level = self._levels[entry.priority]
        queue = level[entry.size]
        del queue[bisect_left(queue, request.arrival, key=_arrival)]
        if not queue:
            del level[entry.size]
        if not level:
            del self._levels[entry.priority]
            del self._priorities[bisect_left(self._priorities, entry.priority)]

    def candidates(self) -> Sequence[Request]:
        """Requests of which one starts next, whatever PromptOrder lets pass: the first ones of the size classes of the
        highest priority, and the one that has aged most."""
        if not self._entries:
            return ()
        firsts = [queue[0] for queue in self._levels[self._priorities[0]].values()]
        return firsts if len(self._priorities) == 1 else [*firsts, self._oldest()]

    def ratio(self, request: Request) -> float:
        return self._policy.ratio(self._policy.waited(request), self._entries[request.arrival].work)

    def tokens(self, request: Request) -> int:
        """Tokens of its prompt that are not cached."""
        return self._entries[request.arrival].work.tokens

    def _size(self, work: PromptWork) -> int:
        """The class: seconds differ by up to a factor of 1.4 within one."""
        return round(2 * math.log2(self._policy.prompt_seconds(work)))

    def _note_age(self, request: Request) -> None:
        heap = self._by_age
        if len(heap) > 64 + 2 * len(self._entries):
            heap[:] = [each for each in heap if each[1] in self._entries and each[1] != request.arrival]
            heapq.heapify(heap)
        heapq.heappush(heap, (goes_first_from(request), request.arrival))

    def _oldest(self) -> Request:
        while self._by_age[0][1] not in self._entries:
            heapq.heappop(self._by_age)
        return self._entries[self._by_age[0][1]].request


class ClientQueues:
    """A queue for each client. The client that has got the fewest seconds for its weight goes
    first. One that had nothing to do gets no credit for that time (start-time fair queueing, Goyal,
    Vin and Cheng 1996).

    Args:
        policy: of RequestQueue. It also has the shares of clients.
    """

    def __init__(self, policy: TrafficPolicy) -> None:
        self.policy = policy
        self._queues = dict[str, RequestQueue]()  # of clients with waiting requests
        self._spent = dict[str, float]()  # seconds / weight
        self._now = 0.0  # `_spent` of the client that was served last, before that
        self._active = dict[str, float]()  # until when, by client
        self._flooding = set[str]()
        self._many = _FEW_CLIENTS  # clients from which on idle ones are forgotten

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum([len(queue) for queue in self._queues.values()])

    def __iter__(self) -> Iterator[Request]:
        clients = sorted(self._queues, key=self.spent)
        return chain.from_iterable([self._queues[client] for client in clients])

    @property
    def clients(self) -> Sequence[str]:
        return tuple(self._queues)

    @property
    def pending(self) -> PromptWork:
        """Prompt tokens that waiting requests compute."""
        return sum([queue.pending for queue in self._queues.values()], PromptWork())

    def candidates(self, client: str) -> Sequence[Request]:
        """See RequestQueue.candidates."""
        return self._queues[client].candidates() if client in self._queues else ()

    def add(self, request: Request, work: PromptWork) -> None:
        client = request.client
        if client not in self._queues:
            self._queues[client] = RequestQueue(self.policy)
            self._spent[client] = max(self.spent(client), self._now)
        self._queues[client].add(request, work)
        self._note_active(client)
        if self.policy.prompt_seconds(self._queues[client].pending) > FLOOD_SECONDS:
            self._flooding.add(client)

    def remove(self, request: Request) -> None:
        client = request.client
        queue = self._queues[client]
        queue.remove(request)
        if not queue:
            del self._queues[client]

    def spent(self, client: str) -> float:
        return self._spent.get(client, 0.0)

    def charge(self, request: Request, work: PromptWork) -> None:
        """Call when a step computes this part of a request's prompt: its client has used so much of its share."""
        client = request.client
        self._note_active(client)
        self._now = self.spent(client)
        self._spent[client] = self._now + self.policy.prompt_seconds(work) / self.policy.weights.get(client, 1.0)

    def end_floods(self, admitted: Iterable[Request]) -> None:
        """Call before a step is planned: a flood is over once its client's prompts, those that wait and those that are
        `admitted` and not computed, take less than ENDED_SECONDS. (The last long one delays others, too.)"""
        if not self._flooding:
            return
        left = {client: queue.pending for client, queue in self._queues.items() if client in self._flooding}
        for request in admitted:
            if request.client in self._flooding:
                work = PromptWork.between(request.computed, request.prefill_end)
                left[request.client] = left.get(request.client, PromptWork()) + work
        self._flooding = {client for client, work in left.items() if self.policy.prompt_seconds(work) > ENDED_SECONDS}

    @property
    def flooded(self) -> bool:
        """A client floods while another one, which does not, is active."""
        if not self._flooding:
            return False
        now = self.policy.clock()
        return any(until >= now and client not in self._flooding for client, until in self._active.items())

    def _note_active(self, client: str) -> None:
        self._active[client] = self.policy.clock() + ACTIVE_SECONDS
        if len(self._active) > self._many:
            self._forget_idle(self.policy.clock())

    def _forget_idle(self, now: float) -> None:
        idle = [client for client, until in self._active.items() if until < now and client not in self._queues]
        for client in idle:
            del self._active[client], self._spent[client]
        self._many = max(_FEW_CLIENTS, 2 * len(self._active))

    def ratio(self, request: Request) -> float:
        return self._queues[request.client].ratio(request)

    def tokens(self, request: Request) -> int:
        return self._queues[request.client].tokens(request)

    def clear(self) -> None:
        self._queues.clear()
        self._flooding.clear()


class PromptOrder:
    """The prompts of a step, in the order of their computation: by client, by priority, first come, first served,
    except that short ones pass: of these the one with the highest response ratio, (waited + own seconds) / own seconds
    (Brinch Hansen 1971).

    Args:
        admitted: requests with uncomputed prompts, in order of admission.

    Attributes:
        admits: False: no more waiting requests.
        passing: tokens of short prompts that may still pass earlier ones. So a long prompt does not
            delay short ones by its own time.
    """

    def __init__(self, queues: ClientQueues, waiters: PromptWaiters, admitted: Sequence[Request]) -> None:
        self.passing = queues.policy.passing
        self._queues, self._waiters, self._policy = queues, waiters, queues.policy
        self.admits = True
        self._admitted = dict[str, list[Request]]()  # by client
        for request in admitted:
            self._admitted.setdefault(request.client, []).append(request)

    def __bool__(self) -> bool:
        """False if `next` has none."""
        return bool(self._admitted) or (self.admits and bool(self._queues))

    def next(self) -> Request | None:
        """An admitted request is returned once; a waiting one until it leaves its queue."""
        if (client := self._client()) is None:
            return None
        admitted = self._admitted.get(client, [])
        waiting = self._queues.candidates(client) if self.admits else ()
        first = self._first(admitted, waiting)
        if first not in waiting:
            admitted.remove(first)
            if not admitted:
                del self._admitted[client]
        return first

    def _client(self) -> str | None:
        clients = [*self._admitted, *(self._queues.clients if self.admits else ())]
        return min(clients, key=self._queues.spent, default=None)

    def _first(self, admitted: Sequence[Request], waiting: Sequence[Request]) -> Request:
        ratios = [(self._ratio(request), request) for request in admitted]
        ratios += [(self._queues.ratio(request), request) for request in waiting]
        top = min(request.params.priority for _, request in ratios)
        oldest = min((request for _, request in ratios), key=goes_first_from)
        if oldest.params.priority > top:
            return oldest
        level = [each for each in ratios if each[1].params.priority == top]
        first = min((request for _, request in level), key=_arrival)
        short = [each for each in level if self._tokens(each[1]) <= self.passing]
        best = max(short, key=lambda each: each[0])[1] if short else first
        if best is not first:
            self.passing -= self._tokens(best)
        return best

    def _tokens(self, request: Request) -> int:
        """Tokens of its prompt that are to be computed."""
        return self._queues.tokens(request) if request.row is None else request.prefill_end - request.computed

    def _ratio(self, request: Request) -> float:
        policy = self._policy
        waited = policy.waited(request) + self._waiters.waited(request, policy.clock())
        return policy.ratio(waited, PromptWork.between(request.computed, request.prefill_end))
