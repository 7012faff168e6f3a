"""Waiting requests of all clients, and the order in which a step computes prompts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from hybridrt.engine.core.followers import Followers
from hybridrt.engine.core.request_queue import RequestQueue, goes_first_from
from hybridrt.engine.core.step_cost import PromptWork
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.sample_request import Request

ACTIVE_SECONDS = 60.0  # a client is active for so long after its last request came or was computed
FLOOD_SECONDS = 3.0  # a client with so many seconds of waiting prompts floods, until none waits
_FEW_CLIENTS = 64


class ClientQueues:
    """A queue for each client. The client that has got the fewest seconds for its weight goes
    first. One that had nothing to do gets no credit for that time (start-time fair queueing, Goyal,
    Vin and Cheng 1996).

    Args:
        policy: of RequestQueue.
        weights: shares of clients; 1 for others.
    """

    def __init__(self, policy: TrafficPolicy | None, weights: Mapping[str, float] = MappingProxyType({})) -> None:
        self.policy, self.weights = policy, weights
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

    def best(self, client: str, passing: int = 0) -> Sequence[Request]:
        """See RequestQueue.best."""
        return self._queues[client].best(passing) if client in self._queues else ()

    def client_of(self, request: Request) -> str:
        return request.client if self.policy is not None else ""

    def add(self, request: Request, work: PromptWork) -> None:
        client = self.client_of(request)
        if client not in self._queues:
            self._queues[client] = RequestQueue(self.policy)
            self._spent[client] = max(self.spent(client), self._now)
        self._queues[client].add(request, work)
        if self.policy is not None:
            self._note_active(client, self.policy)
            if self.policy.prompt_seconds(self._queues[client].pending) > FLOOD_SECONDS:
                self._flooding.add(client)

    def remove(self, request: Request) -> None:
        client = self.client_of(request)
        queue = self._queues[client]
        queue.remove(request)
        if not queue:
            del self._queues[client]
            self._flooding.discard(client)

    def spent(self, client: str) -> float:
        return self._spent.get(client, 0.0)

    def charge(self, request: Request, work: PromptWork) -> None:
        """A step computes this much of a request's prompt."""
        if self.policy is not None:
            client = request.client
            self._note_active(client, self.policy)
            self._now = self.spent(client)
            self._spent[client] = self._now + self.policy.prompt_seconds(work) / self.weights.get(client, 1.0)

    @property
    def flooded(self) -> bool:
        """A client floods while another one, which does not, is active."""
        if not self._flooding or self.policy is None:
            return False
        now = self.policy.clock()
        return any(until >= now and client not in self._flooding for client, until in self._active.items())

    def _note_active(self, client: str, policy: TrafficPolicy) -> None:
        self._active[client] = policy.clock() + ACTIVE_SECONDS
        if len(self._active) > self._many:
            self._forget_idle(policy.clock())

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
    """The prompts of a step, in the order of their computation: by client, by priority, by response
    ratio. Without a policy, admitted ones are first.

    Args:
        admitted: requests with uncomputed prompts, in order of admission.
        passing: so many tokens of short prompts pass those that are due. So a long prompt that is
            due does not delay short ones by its own time.

    Attributes:
        admits: False: no more waiting requests.
    """

    def __init__(
        self, queues: ClientQueues, followers: Followers, admitted: Sequence[Request], passing: int = 0
    ) -> None:
        self._passing = passing
        self._queues, self._followers, self._policy = queues, followers, queues.policy
        self.admits = True
        self._admitted = dict[str, list[Request]]()  # by client
        for request in admitted:
            self._admitted.setdefault(queues.client_of(request), []).append(request)

    def next(self) -> Request | None:
        """An admitted request is returned once; a waiting one until it leaves its queue."""
        if (client := self._client()) is None:
            return None
        admitted = self._admitted.get(client, [])
        waiting = self._queues.best(client, self._passing) if self.admits else ()
        first = (admitted or waiting)[0] if self._policy is None else self._first(admitted, waiting)
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
        first = min((request for _, request in level), key=lambda request: request.arrival)
        assert self._policy is not None
        if not self._policy.is_due(first):
            return max(level, key=lambda each: each[0])[1]
        short = [each for each in level if self._tokens(each[1]) <= self._passing]
        if short:
            first = max(short, key=lambda each: each[0])[1]
            self._passing -= self._tokens(first)
        return first

    def _tokens(self, request: Request) -> int:
        """Tokens of its prompt that are to be computed."""
        return self._queues.tokens(request) if request.row is None else request.prefill_end - request.computed

    def _ratio(self, request: Request) -> float:
        policy = self._policy
        assert policy is not None
        waited = policy.waited(request) + self._followers.waited(request, policy.clock())
        return policy.ratio(waited, PromptWork.between(request.computed, request.prefill_end))
