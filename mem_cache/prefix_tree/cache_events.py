"""The stream of events of the prefix cache: which entries it has gained, lost and moved, and why.

Whoever replays the events of a subscription knows the contents of both tiers at every time. An
operation on a tree notes its changes in an `EntryLog`, but only while somebody listens.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hybridrt.mem_cache.pools.page_groups import PageSets
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.mem_cache.prefix_tree.radix_node import Node

What = Literal["gained", "lost", "moved", "cleared"]
Tier = Literal["device", "host"]
Why = Literal[
    "computed", "finished", "aborted", "retracted", "loaded", "present", "kept", "copied", "fetched", "evicted",
    "superseded", "thinned", "dropped", "reset", "failed",
]  # fmt: skip
EVENTS = 65_536  # that a subscription holds until they are read


@dataclass(frozen=True, slots=True, eq=False)
class CacheEvent:
    """Entries of one text that a tier of the prefix cache has gained or lost.

    Attributes:
        number: counts the events that were published.
        what: "gained", "lost"; "moved": gained as a copy of the other tier's, which keeps its own;
            "cleared": all entries of the tier are lost, of every text.
        why: for "gained": "computed" (a prompt, while its request runs), "finished", "aborted" or
            "retracted" (what a request leaves when it ends), "loaded" (from a session), "present"
            (before the subscription), "kept" (of a lost page, the tokens that a state needs). For
            "moved": "copied" to main memory, "fetched" from there. For "lost": "evicted" for space,
            "superseded" by a later state of the conversation, "thinned" (too many states within
            answers), "dropped" (not finite), "reset". For "cleared": "reset" or "failed".
        tier: "device", or "host" for main memory.
        key, tokens: the text; tokens [n] int32 end with the last of the entries or after it. They are
            int64 if some are of images, which have ids from 2**62 on.
        pages: [m, 3] int32: page group, page index in the text, and how many first tokens of the
            text are its content: the KV of a page may depend on one token after it.
        states: numbers of first tokens after which there is a state.
        rank: of the engine that it belongs to, with `dp_size` engines.
    """

    number: int
    what: What
    why: Why
    tier: Tier
    key: CacheKey = DEFAULT_KEY
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    pages: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int32))
    states: tuple[int, ...] = ()
    rank: int = 0


class CacheSubscription:
    """Events since `LLM.cache_events`. It ends with `close`, or when it is garbage collected.

    Read it from one thread at a time, which may be any.

    Attributes:
        missed: events that were dropped because the reader was slow. A new subscription begins with
            the present contents.
    """

    def __init__(self, present: list[CacheEvent], number: int, limit: int) -> None:
        self.missed = 0
        self.closed = False
        self._present, self._next = present, number
        self._ring = deque[CacheEvent](maxlen=limit)

    def put(self, event: CacheEvent) -> None:
        """Adds an event. The oldest one is lost, and counted in `missed`, if `limit` events wait."""
        self._ring.append(event)

    def read(self) -> list[CacheEvent]:
        """The events since the last call, in order; the first call begins with the contents at the
        subscription ("gained", "present"). Never waits.
        """
        found, self._present = self._present, []
        for _ in range(len(self._ring)):
            event = self._ring.popleft()
            self.missed += event.number - self._next
            self._next = event.number + 1
            found.append(event)
        return found

    def close(self) -> None:
        """Drops the events that were not read. No later ones come."""
        self.closed = True
        self._ring.clear()


@dataclass(slots=True)
class _Record:
    """Entries of one node's path."""

    what: What
    why: Why | None
    node: Node
    key: CacheKey
    tokens: np.ndarray
    pages: list[np.ndarray] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def event(self, number: int, why: Why, tier: Tier) -> CacheEvent:
        why = self.why or why
        what = "moved" if why in ("copied", "fetched") else self.what
        pages = np.concatenate(self.pages) if self.pages else np.empty((0, 3), np.int32)
        return CacheEvent(number, what, why, tier, self.key, self.tokens, pages, tuple(self.states))


class EntryLog:
    """Entries that one operation adds to a tree and removes from it, in order."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self._page_size, self._lookahead = page_size, lookahead
        self.records: list[_Record] = []

    def pages(
        self, what: What, node: Node, sets: PageSets, index: int, end: int | None = None, why: Why | None = None
    ) -> None:
        """Notes the pages of sets [n, G], which are those of a node's path from page `index` on.
        `end`: the set is a tail, with the tokens up to there. `why`: if it is not the operation's.
        """
        places, groups = np.nonzero(sets)
        record = self._record(what, node, why) if len(places) else None
        if record is not None:
            indices = places + index
            ends = np.full_like(indices, end) if end else (indices + 1) * self._page_size + self._lookahead
            record.pages.append(np.stack((groups, indices, ends), axis=1).astype(np.int32))

    def state(self, what: What, node: Node) -> None:
        record = self._record(what, node, None)
        if record is not None:
            record.states.append(node.end)

    def _record(self, what: What, node: Node, why: Why | None) -> _Record | None:
        """None for a node that no match finds: its entries were noted as lost when it was hidden."""
        if node.hidden:
            return None
        last = self.records[-1] if self.records else None
        if last is not None and last.node is node and last.what == what:
            return last
        path = list(node.path)
        root = path[-1].parent
        assert root is not None, "an entry belongs to a node below a root"
        tokens = np.concatenate([step.tokens for step in reversed(path)])
        self.records.append(_Record(what, why, node, root.key, tokens))
        return self.records[-1]


class CacheEvents:
    """Publishes the events of an engine's prefix cache to its subscriptions.

    Attributes:
        readers: while it is empty, nothing needs to be noted.
        number: of the next event.
    """

    def __init__(self) -> None:
        self.readers: list[weakref.ref[CacheSubscription]] = []
        self.number = 0

    def publish(self, log: EntryLog, why: Why, tier: Tier) -> None:
        for record in log.records:
            self.put(record.event(self.number, why, tier))

    def cleared(self, why: Why, tier: Tier, rank: int = 0) -> None:
        if self.readers:
            self.put(CacheEvent(self.number, "cleared", why, tier, rank=rank))

    def subscribe(self, present: Iterable[tuple[EntryLog, Tier]], limit: int) -> CacheSubscription:
        """A subscription that begins with the entries of each tier now, `present`."""
        found = [record.event(self.number, "present", tier) for log, tier in present for record in log.records]
        return self.subscribe_after(found, limit)

    def subscribe_after(self, present: list[CacheEvent], limit: int) -> CacheSubscription:
        """A subscription that begins with the events `present`, which say what is there now."""
        made = CacheSubscription(present, self.number, limit)
        self.readers.append(weakref.ref(made))
        return made

    def put(self, event: CacheEvent) -> None:
        """Publishes the event with the number `number`."""
        self.number += 1
        readers: Sequence[CacheSubscription | None] = [reader() for reader in self.readers]
        open_ones = [reader for reader in readers if reader is not None and not reader.closed]
        if len(open_ones) < len(readers):
            self.readers = [weakref.ref(reader) for reader in open_ones]
        for reader in open_ones:
            reader.put(event)
