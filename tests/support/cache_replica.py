"""What a reader of the stream of cache events believes that both tiers hold, and what they hold."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent, CacheSubscription
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache

Text = tuple[int, ...]


class Entry(NamedTuple):
    """A page, or a state (group and index -1), and the tokens that decide its content."""

    key: CacheKey
    text: Text
    group: int = -1
    index: int = -1


class Replica:
    """The contents of each tier by the events alone: nothing is gained twice, or lost without having been there."""

    def __init__(self, events: CacheSubscription) -> None:
        self.events = events
        self.held: dict[str, set[Entry]] = {"device": set(), "host": set()}
        self.why = Counter[tuple[str, str, str]]()

    def update(self) -> None:
        for event in self.events.read():
            held, entries = self.held[event.tier], entries_of(event)
            self.why[event.tier, event.what, event.why] += 1
            if event.what == "cleared":
                held.clear()
            elif event.what == "lost":
                assert entries and entries <= held, event
                held -= entries
            else:
                assert entries and not entries & held, event
                held |= entries

    def check(self, pools: CacheCoordinator) -> None:
        self.update()
        assert self.held["device"] == contents(pools.prefixes.tree)
        assert self.held["host"] == (contents(pools.prefixes.tier.tree) if pools.prefixes.tier is not None else set())


def entries_of(event: CacheEvent) -> set[Entry]:
    text = tuple(event.tokens.tolist())
    pages = [Entry(event.key, text[:end], group, index) for group, index, end in event.pages.tolist()]
    found = {*pages, *(Entry(event.key, text[:end]) for end in event.states)}
    assert len(found) == len(event.pages) + len(event.states), "an event has an entry twice"
    assert all(end <= len(text) for end in (*event.states, *event.pages[:, 2].tolist()))
    return found


def contents(tree: RadixCache) -> set[Entry]:
    """The entries that matches may find."""
    found = set[Entry]()
    for node in tree.nodes():
        path = list(node.path)
        if any(step.first < 0 for step in path):
            continue
        key, text = path[-1].parent.key, tuple(np.concatenate([step.tokens for step in reversed(path)]).tolist())
        lines = list(enumerate(node.pages, tree.paths.complete_pages(node.start)))
        ends = [(index + 1) * tree.page_size + tree.lookahead for index, _ in lines]
        if node.tail is not None:
            lines.append((tree.paths.complete_pages(node.end), node.tail[0]))
            ends.append(node.end)
        for (index, line), end in zip(lines, ends, strict=True):
            found |= {Entry(key, text[:end], group, index) for group in np.flatnonzero(line).tolist()}
        if node.state is not None:
            found.add(Entry(key, text))
    return found
