"""The prefix cache against the ledgers of the allocators."""

from collections import Counter

from hybridrt.engine.cache_coordinator import CacheCoordinator
from hybridrt.mem_cache.allocator import Slot, SlotAllocator


def check_cache(pools: CacheCoordinator) -> None:
    """free + used + cached == total, and what the allocators say the cache has is what the tree has, once each. What is
    locked in an allocator is read in the tree."""
    pools.check()
    nodes = list(pools.prefixes.tree.nodes())
    pages = [page for node in nodes for page in (*node.pages, *([node.tail] if node.tail else ()))]
    states = [node.state for node in nodes if node.state is not None]
    for pool, mine in ((pools.pages, pages), (pools.slots, states)):
        assert not [entry for entry, times in Counter(mine).items() if times > 1], "an entry stands in the tree twice"
        assert sorted(mine) == sorted(cached(pool)), f"the tree has {sorted(mine)}; {pool!r}"
    for node in nodes:
        if node.state is not None:
            assert bool(node.state_readers) == bool(pools.slots._locks[node.state.index])
    if pools.rows.num_free == pools.rows.total:
        assert not any(node.readers or node.state_readers for node in nodes) and not pools.pages.num_locked


def cached(pool: SlotAllocator) -> list[Slot]:
    """The entries that an allocator says are the cache's."""
    return [Slot(i, pool._generation[i]) for i in range(len(pool._state)) if pool._state[i] == 2]
