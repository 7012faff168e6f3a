"""The prefix cache against the ledgers of the allocators."""

from collections import Counter

import numpy as np

from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handle, Handles
from hybridrt.mem_cache.pools.page_groups import PageAllocators, no_sets, pages_of
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import Node


def check_cache(pools: CacheCoordinator) -> None:
    """free + used + cached == total, and what the allocators say the cache has is what the tree has, once each. What is
    locked in an allocator is read in the tree."""
    pools.check()
    nodes = check_tree(pools.prefixes.tree, pools.pages, pools.slots)
    if (tier := pools.prefixes.tier) is not None:
        hosted = check_tree(tier.tree, tier.pages, tier.slots)
        assert not tier.pages.num_used and not tier.slots.num_used and not any(node.readers for node in hosted)
    for node in nodes:
        if node.state is not None:
            assert bool(node.state_readers) == bool(pools.slots._locks[node.state.index])
    answers = pools.prefixes.answers.places
    assert all(pools.slots._find(slot, 1) for slot in answers), "a state within an answer is in a slot of no request"
    for slot, (request, length) in answers.items():
        assert request.row is not None and request.saves[length] == slot, "a state within an answer has no owner"
    if pools.rows.num_free == pools.rows.total and not pools.fetches:
        assert not answers
        assert not any(node.readers or node.state_readers for node in nodes) and not pools.pages.num_locked


def check_tree(tree: RadixCache, pages: PageAllocators, states: EntryAllocator) -> list[Node]:
    """What the allocators say the cache has is what the tree has, once each. Returns the tree's nodes."""
    nodes = list(tree.nodes())
    sets = [held for node in nodes for held in (node.pages, node.tail) if held is not None]
    by_group = pages_of(np.concatenate([no_sets(len(pages)), *sets]))
    states_of_tree = [node.state for node in nodes if node.state is not None]
    for pool, mine in (*zip(pages.groups, by_group), (states, states_of_tree)):
        assert not [entry for entry, times in Counter(mine).items() if times > 1], "an entry is in the tree twice"
        assert sorted(mine) == sorted(cached(pool)), f"the tree has {sorted(mine)}; {pool!r}"
    return nodes


def cached(pool: EntryAllocator) -> list[Handle]:
    """The entries that an allocator says are the cache's."""
    return [*Handles.of_keys(pool._handles[pool._state == 2])]
