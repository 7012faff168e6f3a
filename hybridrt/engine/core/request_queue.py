"""Waiting requests of one client, by priority and response ratio."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from hybridrt.engine.core.step_cost import PromptWork
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.sample_request import Request

AGE_SECONDS = 30.0  # a request that waits so much longer goes before one of the next priority
_arrival = attrgetter("arrival")


def goes_first_from(request: Request) -> float:
    """Orders requests of different priorities by age: the lower number goes first."""
    return request.metrics.arrival_time + AGE_SECONDS * request.params.priority


class _Entry(NamedTuple):
    priority: int
    size: int
    work: PromptWork


class RequestQueue:
    """Requests by priority, then by response ratio: (waited + own seconds) / own seconds, highest
    first (Brinch Hansen 1971). So short prompts pass long ones, until these are due.

    Requests of about equal seconds are one size class. Its earliest arrival has its highest ratio,
    so only the first request of each class is compared, however many wait.

    Args:
        policy: predicts seconds and has the clock. None: first come, first served.

    Attributes:
        pending: prompt tokens that these requests compute.
    """

    def __init__(self, policy: TrafficPolicy | None) -> None:
        self.pending = PromptWork()
        self._policy = policy
        self._entries = dict[int, _Entry]()  # by arrival
        self._levels = dict[int, dict[int, list[Request]]]()  # by priority and size class, in order of arrival
        self._priorities = list[int]()  # of waiting requests, in order
        # By the time from which a request goes before later ones of a higher priority. May have
        # requests that no longer wait.
        self._by_age = list[tuple[float, int, Request]]()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._entries

    def __iter__(self) -> Iterator[Request]:
        """In the present order, except for ageing. Makes as much as is taken."""
        for priority in self._priorities:
            heads = [(-self.ratio(queue[0]), size, 0) for size, queue in self._levels[priority].items()]
            heapq.heapify(heads)
            while heads:
                _, size, place = heapq.heappop(heads)
                queue = self._levels[priority][size]
                yield queue[place]
                if place + 1 < len(queue):
                    heapq.heappush(heads, (-self.ratio(queue[place + 1]), size, place + 1))

    def add(self, request: Request, work: PromptWork) -> None:
        """`work`: of its prompt, without what is cached."""
        priority = request.params.priority
        entry = self._entries[request.arrival] = _Entry(priority, self._size(work), work)
        self.pending += work
        if priority not in self._levels:
            insort(self._priorities, priority)
        insort(self._levels.setdefault(priority, {}).setdefault(entry.size, []), request, key=_arrival)
        if self._policy is not None:
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

    def best(self) -> Request | None:
        """The one to start next."""
        if not self._entries:
            return None
        if len(self._priorities) > 1 and self._policy is not None:
            oldest = self._oldest()
            if oldest.params.priority > self._priorities[0]:
                return oldest
        firsts = [queue[0] for queue in self._levels[self._priorities[0]].values()]
        if self._policy is not None and self._policy.is_due(oldest := min(firsts, key=_arrival)):
            return oldest
        return max(firsts, key=self.ratio)

    def ratio(self, request: Request) -> float:
        if self._policy is None:
            return 0.0
        return self._policy.ratio(self._policy.waited(request), self._entries[request.arrival].work)

    def _size(self, work: PromptWork) -> int:
        """The size class: seconds within one differ by a factor of at most 1.4."""
        return 0 if self._policy is None else round(2 * math.log2(self._policy.prompt_seconds(work)))

    def _note_age(self, request: Request) -> None:
        heap = self._by_age
        if len(heap) > 64 + 2 * len(self._entries):
            heap[:] = [each for each in heap if each[1] in self._entries and each[1] != request.arrival]
            heapq.heapify(heap)
        heapq.heappush(heap, (goes_first_from(request), request.arrival, request))

    def _oldest(self) -> Request:
        while self._by_age[0][1] not in self._entries:
            heapq.heappop(self._by_age)
        return self._by_age[0][2]
