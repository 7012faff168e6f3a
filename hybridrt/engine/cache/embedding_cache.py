"""Which rows of an embedding cache hold the embeddings of which span, on the device or in main memory: host integers.

A prompt pins an entry until it is past the entry's span. Entries without a pin are evicted, least
recently used first. A launched step may still read evicted rows: it runs before the encoder writes
them again.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.runtime.step.plan import NO_INTEGERS


class SpanKey(NamedTuple):
    """Requests share embeddings as they share prefixes: with those of an equal key alone."""

    key: CacheKey
    digest: bytes


@dataclass(eq=False, slots=True)
class EmbeddingEntry:
    """The embeddings of a span.

    Attributes:
        rows: [n] int32 rows of the device's cache.
        ticket: of the encoder task that makes them; 0: they are fetched, and there.
        readers: arrivals of requests that have pinned it.
    """

    rows: np.ndarray
    ticket: int
    readers: set[int] = field(default_factory=set)


class EmbeddingCache:
    """The ledger of `num_rows` embeddings."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.clear()

    def clear(self) -> None:
        """Forgets everything, pins included."""
        self._free = np.arange(self.num_rows, dtype=np.int32)
        self._entries = OrderedDict[SpanKey, EmbeddingEntry]()  # least recently used first
        self._pinned = dict[int, set[SpanKey]]()  # by arrival

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, key: SpanKey) -> EmbeddingEntry | None:
        """The entry of a span, which is used now."""
        if (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return entry

    def add(self, key: SpanKey, length: int, ticket: int) -> EmbeddingEntry | None:
        """A new entry. None, with nothing changed, if pinned ones leave too few rows."""
        gone, room = list[SpanKey](), len(self._free)
        for known, entry in self._entries.items():
            if room >= length:
                break
            if not entry.readers:
                gone.append(known)
                room += len(entry.rows)
        if room < length:
            return None
        rows = np.concatenate((self._free, *(self._entries.pop(known).rows for known in gone), NO_INTEGERS))
        entry = self._entries[key] = EmbeddingEntry(rows[:length], ticket)
        self._free = rows[length:]
        return entry

    def pin(self, key: SpanKey, arrival: int) -> None:
        """Keeps a span's rows for the request of this number."""
        self._entries[key].readers.add(arrival)
        self._pinned.setdefault(arrival, set()).add(key)

    def unpin(self, key: SpanKey, arrival: int) -> None:
        """The request of this number has read the rows."""
        if key in (pinned := self._pinned.get(arrival, set())):
            pinned.remove(key)
            self._entries[key].readers.remove(arrival)

    def unpin_all(self, arrival: int) -> None:
        for key in self._pinned.pop(arrival, ()):
            self._entries[key].readers.remove(arrival)

    def check(self) -> None:
        """AssertionError unless every row is free or in one entry, and pins agree."""
        rows = np.concatenate((self._free, *(entry.rows for entry in self._entries.values())))
        assert np.array_equal(np.sort(rows), np.arange(self.num_rows)), "rows are lost, or in two entries"
        pins = {(key, arrival) for arrival, keys in self._pinned.items() for key in keys}
        assert pins == {(key, arrival) for key, entry in self._entries.items() for arrival in entry.readers}
