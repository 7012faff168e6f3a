"""Audited hits: a sample of cached prefixes is computed again, and log-probabilities are compared."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrt.base.errors import EngineError
from hybridrt.engine.request.outputs import Delta, DeltaQueue
from hybridrt.engine.request.sample_request import Request, derive_seed
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey

MOST_WAITING = 64  # hits; the oldest ones make room
LOGPROBS = 8
# Log-probabilities of the same text in other chunks differ by so much.
EXACT_TOLERANCE, TOLERANCE = 1e-3, 0.25
log = logging.getLogger("hybridrt.cache")


@dataclass(frozen=True)
class Hit:
    """A prefix that a request has started from: all of `tokens` but the last one."""

    tokens: Sequence[int]
    key: CacheKey

    @property
    def length(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Running:
    """An audit that runs: a request that starts from the cached prefix, and one that computes it."""

    hit: Hit
    names: tuple[str, str]
    queue: DeltaQueue = field(default_factory=DeltaQueue)
    ended: dict[str, Delta] = field(default_factory=dict)


class HitAudit:
    """Which hits are audited, and what came out.

    Args:
        fraction: of hits, 0 to 1.
        tolerance: greatest difference of log-probabilities of an entry that is kept.
        seed: chooses the hits.

    Attributes:
        running: None: no audit runs.
        audited: hits so far; error: their greatest difference; differed: entries that were dropped.
    """

    def __init__(self, fraction: float, tolerance: float, seed: int = 0) -> None:
        self.fraction, self.tolerance = fraction, tolerance
        self.running: Running | None = None
        self.audited, self.differed, self.error = 0, 0, 0.0
        self._seed, self._hits = seed, 0
        self._waiting = deque[Hit](maxlen=MOST_WAITING)

    @property
    def wants(self) -> bool:
        """An audit runs or waits."""
        return self.running is not None or bool(self._waiting)

    def counters(self) -> dict[str, Any]:
        """Fields of EngineCounters."""
        return {"audited": self.audited, "audit_differed": self.differed, "audit_error": self.error}

    def note(self, request: Request) -> None:
        """Call when a request has ended: its hit may be chosen for an audit."""
        cached = request.metrics.cached_tokens
        if not cached or request.audits or request.error is not None:
            return
        if request.spans and request.spans[0].start <= cached:
            return  # an audit has no images
        self._hits += 1
        if derive_seed(self._seed, self._hits) < self.fraction * 2**63:
            self._waiting.append(Hit(request.tokens[: cached + 1], request.cache_key))

    def next(self) -> Hit | None:
        return self._waiting.popleft() if self._waiting else None

    def put_back(self) -> None:
        """Call when the running audit was broken off: its hit is the next one to be audited."""
        if self.running is not None:
            self._waiting.appendleft(self.running.hit)
            self.running = None

    def compare(self, cached: Delta, anew: Delta) -> bool:
        """Counts the difference of two ended requests of a hit. True if it is too large."""
        if cached.error is not None or anew.error is not None or not cached.logprobs or not anew.logprobs:
            log.warning("an audit of a cached prefix failed: %s", cached.error or anew.error or "no log-probabilities")
            return False
        found = difference(cached.logprobs[0], anew.logprobs[0])
        self.audited += 1
        self.error = max(self.error, found)
        if found <= self.tolerance:
            return False
        self.differed += 1
        text = "a cached prefix of %d tokens gives log-probabilities that differ by %.3g; its entries are dropped"
        log.error(text, cached.metrics.cached_tokens if cached.metrics else 0, found)
        return True


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """The greatest difference of two lists of the likeliest tokens that is certain. A token that one list
    lacks has at most the least value of that list.
    """
    if not first or not second:
        raise EngineError("an audit got no log-probabilities")
    both = [abs(first[token] - second[token]) for token in first.keys() & second.keys()]
    alone = [first[token] - min(second.values()) for token in first.keys() - second.keys()]
    alone += [second[token] - min(first.values()) for token in second.keys() - first.keys()]
    return max([0.0, *both, *alone])
