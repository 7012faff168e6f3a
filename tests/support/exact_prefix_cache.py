"""A prefix cache of few words: states and KV pages at exact positions, found by the whole text before them."""

from collections import Counter
from collections.abc import Sequence

from hybridrt.engine.cache_coordinator import CacheCoordinator
from hybridrt.mem_cache.allocator import Slot
from hybridrt.mem_cache.prefix_cache import CacheEntries, PrefixMatch


class ExactPrefixCache:
    """Keeps what every request leaves where a page ends, least recently used first out.

    Args:
        page_size: 0 for a model without attention layers.
        recurrent: a prefix needs a state.
    """

    def __init__(self, page_size: int, recurrent: bool = True) -> None:
        self.page_size, self.recurrent = page_size, recurrent
        self.clear()

    def clear(self) -> None:
        self.entries: dict[tuple[int, ...], CacheEntries] = {}  # least recently used first
        self.uses: Counter[Slot] = Counter()  # entries that a page belongs to
        self.locks: Counter[tuple[str, Slot]] = Counter()
        self.hits = 0

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        for length in range(len(tokens) - 1, 0, -1):
            key = tuple(tokens[:length])
            if key in self.entries:
                pages, states = self.entries[key] = self.entries.pop(key)
                return PrefixMatch(length, pages, *states)
        return PrefixMatch()

    def lock(self, entries: CacheEntries) -> None:
        self.hits += any(entries)
        self.locks.update(_named(entries))

    def unlock(self, entries: CacheEntries) -> None:
        self.locks.subtract(_named(entries))
        assert min(self.locks.values(), default=0) >= 0
        self.locks = +self.locks

    def insert(self, tokens: Sequence[int], pages: Sequence[Slot], state: Slot | None, length: int) -> CacheEntries:
        if not self.recurrent and self.page_size:
            length = len(tokens) // self.page_size * self.page_size
        key, page = tuple(tokens[:length]), self.page_size or 1
        if not length or length % page or key in self.entries or (state is None) == self.recurrent:
            return CacheEntries()
        mine = tuple(pages[: length // page] if self.page_size else ())
        new = tuple(p for p in mine if not self.uses[p])
        self.uses.update(mine)
        states = () if state is None else (state,)
        self.entries[key] = CacheEntries(mine, states)
        return CacheEntries(new, states)

    def evict(self, num_pages: int, num_states: int) -> CacheEntries:
        pages: list[Slot] = []
        states: list[Slot] = []
        for key, entry in list(self.entries.items()):
            if len(pages) >= num_pages and len(states) >= num_states:
                break
            last = [p for p in entry.pages if self.uses[p] == 1]
            if any(self.locks[name] for name in _named(CacheEntries(last, entry.states))):
                continue
            del self.entries[key]
            self.uses.subtract(entry.pages)
            self.uses = +self.uses
            pages += last
            states += entry.states
        return CacheEntries(pages, states)

    def check(self, pools: CacheCoordinator) -> None:
        """The ledger says what the cache says: which entries are the cache's, and how often each is locked."""
        states = [state for entry in self.entries.values() for state in entry.states]
        for kind, pool, mine in (("page", pools.pages, list(self.uses)), ("state", pools.slots, states)):
            pool.check()
            assert pool.num_cached == len(mine) == len(set(mine))
            for slot in mine:
                assert (pool._state[slot.index], pool._generation[slot.index]) == (2, slot.generation)
                assert pool._locks[slot.index] == self.locks[kind, slot]


def _named(entries: CacheEntries) -> list[tuple[str, Slot]]:
    return [("page", page) for page in entries.pages] + [("state", state) for state in entries.states]
