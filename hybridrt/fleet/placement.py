"""Which replica takes a request: the one with the longest usable prefix, among those with room."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from hybridrt.base.errors import ConfigError
from hybridrt.fleet.prefix_mirror import PrefixMirror, PrefixNames

MOST_OVER_MEAN = 1.35  # requests of a replica, compared with the mean of all
# A waiting token of another request delays this one once. A token that is computed again delays all.
WAITING = 1 / 16  # waiting tokens, compared with tokens that are computed again
SESSIONS = 65_536  # that are remembered
# Entries that a request may look up in all mirrors, and in one of very many: replicas that say much
# more than their caches hold cost no more.
MOST_LOOKS, LEAST_LOOKS = 2**15, 2**11


@dataclass(eq=False)
class Replica:
    """One engine.

    Attributes:
        mirror: of its prefix cache. None: nothing is known of it.
        requests: placed here and not ended.
        tokens: of their prompts, those that must still be computed.
    """

    name: str
    mirror: PrefixMirror | None = None
    requests: int = 0
    tokens: int = 0


@dataclass(eq=False)
class Placed:
    """A request at its replica. Call `computed` at its first token and `ended` once, at its end.

    Attributes:
        prefix: tokens of the prompt that the replica need not compute.
        tokens: of the prompt, those that count as its load until the first token.
    """

    replica: Replica
    prefix: int
    tokens: int
    _ended: bool = field(default=False, repr=False)

    def computed(self) -> None:
        self.replica.tokens -= self.tokens
        self.tokens = 0

    def ended(self) -> None:
        if not self._ended:
            self._ended = True
            self.computed()
            self.replica.requests -= 1


class Placement:
    """Places requests on replicas. Not for several threads at once.

    A replica may take a request if it then has at most MOST_OVER_MEAN times the mean number of
    requests (consistent hashing with bounded loads, Mirrokni et al. 2018). Of these, the one with the
    longest usable prefix is chosen; waiting tokens count against it.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self._sessions = OrderedDict[str, str]()
        self._turn = 0

    def add(self, replica: Replica) -> None:
        self.replicas[replica.name] = replica

    def remove(self, name: str) -> None:
        """Requests that are there may still call `computed` and `ended`."""
        self.replicas.pop(name, None)

    def place(self, names: PrefixNames, session: str | None = None, among: Collection[str] | None = None) -> Placed:
        """Chooses a replica and counts the request there.

        Args:
            names: of the prompt.
            session: requests of one session go where the last one went, unless another replica has
                a longer prefix or that one has too many requests.
            among: names of replicas that may take it. None: all.

        Raises:
            ConfigError: there is no such replica.
        """
        some = [r for r in self.replicas.values() if among is None or r.name in among]
        if not some:
            raise ConfigError(f"none of {len(self.replicas)} replicas may take a request")
        most = self._most_requests(some)
        free = [r for r in some if r.requests < most]
        looks = max(MOST_LOOKS // len(free), LEAST_LOOKS)
        prefixes = {r.name: r.mirror.match(names, looks) if r.mirror is not None else 0 for r in free}
        last, self._turn = self._sessions.get(session or ""), self._turn + 1

        def cost(place: int) -> tuple[float, bool, int, int]:
            r = free[place]
            tokens = WAITING * r.tokens - prefixes[r.name]
            return tokens, r.name != last, r.requests, (place - self._turn) % len(free)

        chosen = free[min(range(len(free)), key=cost)]
        if session is not None:
            self._remember(session, chosen.name)
        placed = Placed(chosen, prefixes[chosen.name], names.length - prefixes[chosen.name])
        chosen.requests += 1
        chosen.tokens += placed.tokens
        return placed

    def _most_requests(self, some: list[Replica]) -> int:
        """Requests that a replica of `some` may have after it has taken one; at least one has fewer."""
        total = sum(r.requests for r in some) + 1
        return max(int(MOST_OVER_MEAN * total / len(some)), -(-total // len(some)))

    def _remember(self, session: str, name: str) -> None:
        self._sessions[session] = name
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
