"""The stream of events says what the tree holds, at every time and to every reader."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.prefix_tree.cache_events import What
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheEntries, Gone, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_drop import drop
from hybridrt.mem_cache.prefix_tree.radix_node import StateKind
from tests.mem_cache.test_radix_cache import CASES, NO_SETS, TEXTS, Ledger, Text, array, by_group
from tests.support.cache_replica import Entry, Replica, contents
from tests.support.levels import drawn


def play_trees(
    play: Callable[[Ledger, st.DataObject], None], examples: int, page_size: int, recurrent: bool, lookahead: int,
    windows: tuple[int | None, ...],
) -> None:  # fmt: skip
    """Plays with `examples` new trees of these parameters."""

    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def actions(data: st.DataObject) -> None:
        play(Ledger(page_size, recurrent, lookahead if page_size else 0, windows), data)

    actions()


@pytest.mark.parametrize(
    ("page_size", "recurrent", "lookahead", "windows", "examples"), drawn(CASES, 3, 3, 10, 200, thin=3)
)
def test_the_events_give_the_contents_of_the_tree(
    page_size: int, recurrent: bool, lookahead: int, windows: tuple[int | None, ...], examples: int
) -> None:
    play_trees(play, examples, page_size, recurrent, lookahead, windows)


def play(ledger: Ledger, data: st.DataObject) -> None:
    """Random operations; after each one every reader knows the contents, the latest one too."""
    tree = ledger.tree
    readers = [subscribed(tree)]
    locked: list[PrefixMatch] = []
    for _ in range(data.draw(st.integers(1, 20))):
        act(ledger, data, locked)
        for reader in readers:
            reader.update()
            assert reader.held["device"] == contents(tree)
        if data.draw(st.booleans()):
            readers[1:] = [subscribed(tree)]


def act(ledger: Ledger, data: st.DataObject, locked: list[PrefixMatch]) -> None:
    tree, text = ledger.tree, data.draw(TEXTS)
    action = data.draw(st.sampled_from(["offer", "offer", "offer", "read", "leave", "evict", "thin", "take", "drop"]))
    if action == "offer":
        positions = data.draw(st.sets(st.integers(1, 14), max_size=3)) if ledger.recurrent else set()
        ledger.offer(text, tuple(positions), starts=by_group(ledger, data, 3) if ledger.groups > 1 else None)
    elif action == "read":
        match = tree.match(array(text))
        tree.lock(match)
        ledger.lock(match)
        locked.append(match)
    elif action == "leave" and locked:
        leave(ledger, locked.pop(data.draw(st.integers(0, len(locked) - 1))))
    elif action == "evict":
        ledger.evict(by_group(ledger, data, 6), data.draw(st.integers(0, 3)))
    elif action == "thin" and (nodes := list(tree.nodes())):
        ledger.gone(tree.thin(data.draw(st.sampled_from(nodes)), data.draw(st.integers(0, 1))))
    elif action == "take" and (state := tree.supersede(tree.match(array(text)))) is not None:
        ledger.gone(CacheEntries((), [state]))
    elif action == "drop" and not locked:
        ledger.gone(drop(tree, array(text), DEFAULT_KEY, whole=data.draw(st.booleans())))


def leave(ledger: Ledger, match: PrefixMatch) -> None:
    ledger.lock(PrefixMatch(pages=match.pages), -1)
    if match.state is not None:
        ledger.has_read(match)
    ledger.tree.unlock(match)


def subscribed(tree: RadixCache, limit: int = 10_000) -> Replica:
    return Replica(tree.events.subscribe([(tree.present(), tree.tier)], limit))


def offer(tree: RadixCache, text: Text, key: CacheKey = DEFAULT_KEY) -> None:
    """A text with a state at its end, in a tree without pages."""
    tree.insert(array(text), NO_SETS, {len(text): Handle(len(text), 0)}, key)


def test_an_event_says_what_and_why() -> None:
    tree = RadixCache(2, True)
    events = tree.events.subscribe([], 10)
    sets = np.array([[Handle(i, 0)] for i in (1, 2, 3)])
    tree.insert(array((1, 2, 3, 4, 5)), sets, {5: Handle(9, 0)}, CacheKey("a"), why="finished")
    tree.evict([0], 1)
    gained, lost = events.read()
    for event, what, why in ((gained, "gained", "finished"), (lost, "lost", "evicted")):
        assert (event.what, event.why, event.tier, event.key) == (what, why, "device", CacheKey("a"))
        assert event.tokens.tolist() == [1, 2, 3, 4, 5] and event.states == (5,)
    assert gained.pages.tolist() == [[0, 0, 2], [0, 1, 4], [0, 2, 5]] and lost.pages.tolist() == [[0, 2, 5]]
    assert (gained.number, lost.number) == (0, 1) and events.read() == []


def test_what_a_state_needs_of_an_evicted_page_is_kept() -> None:
    tree = RadixCache(4, True)
    tree.insert(array((1, 2, 3, 4, 5)), np.array([[Handle(1, 0)], [Handle(2, 0)]]), {3: Handle(8, 0), 5: Handle(9, 0)})
    reader, page = subscribed(tree), Entry(DEFAULT_KEY, (1, 2, 3, 4), 0, 0)
    reader.update()
    assert page in reader.held["device"]
    tree.lock(match := tree.match(array((1, 2, 3, 9))))
    tree.unlock_state(match)
    tree.evict([2], 0)
    reader.update()
    assert reader.why["device", "gained", "kept"] == 1
    assert reader.held["device"] == contents(tree) == {
        Entry(DEFAULT_KEY, (1, 2, 3)), Entry(DEFAULT_KEY, (1, 2, 3), 0, 0)
    }  # fmt: skip


def test_a_tail_is_lost_once_it_has_been_read() -> None:
    """The state that it was kept for has gone before, so what the state above needs of it is kept."""
    tree = RadixCache(4, True)
    tree.insert(array((1, 2, 3)), np.array([[Handle(1, 0)]]), {2: Handle(8, 0), 3: Handle(9, 0)})
    reader, tail = subscribed(tree), Entry(DEFAULT_KEY, (1, 2, 3), 0, 0)
    tree.lock(match := tree.match(array((1, 2, 9))))
    assert tree.evict([0], 1).states == [Handle(9, 0)]
    reader.update()
    assert tail in reader.held["device"]
    tree.unlock_state(match)
    reader.update()
    assert tail not in reader.held["device"] and reader.held["device"] == contents(tree)
    assert Entry(DEFAULT_KEY, (1, 2), 0, 0) in contents(tree)


def test_thinned_states_are_lost() -> None:
    tree = RadixCache(0, True)
    states = {end: Handle(end, 0) for end in (2, 4, 6)}
    _, node = tree.insert(array((1, 2, 3, 4, 5, 6)), NO_SETS, states, kinds=dict.fromkeys(states, StateKind.ANSWER))
    reader = subscribed(tree)
    tree.thin(node, 1)
    reader.update()
    assert reader.why["device", "lost", "thinned"] == 2
    assert reader.held["device"] == contents(tree) == {Entry(DEFAULT_KEY, (1, 2, 3, 4, 5, 6))}


def test_a_reader_that_is_slow_knows_how_much_it_missed() -> None:
    tree = RadixCache(0, True)
    slow, quick = tree.events.subscribe([], 3), tree.events.subscribe([], 99)
    for i in range(5):
        offer(tree, (i,))
    assert [event.number for event in slow.read()] == [2, 3, 4] and slow.missed == 2
    offer(tree, (9, 9))
    assert len(slow.read()) == 1 and slow.missed == 2
    assert len(quick.read()) == 6 and not quick.missed


def test_the_contents_before_a_subscription_come_first_whatever_its_limit() -> None:
    tree = RadixCache(0, True)
    for i in range(5):
        offer(tree, (i,), CacheKey(str(i)))
    late = subscribed(tree, 1)
    offer(tree, (7,))
    late.update()
    assert late.held["device"] == contents(tree) and not late.events.missed
    assert late.why == {("device", "gained", "present"): 5, ("device", "gained", "computed"): 1}


def test_nothing_is_noted_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first subscription, and once the last one was closed or has been forgotten."""
    made = list[bool]()
    collect = RadixCache.collect

    def noted(tree: RadixCache, *what: What) -> Gone:
        made.append((gone := collect(tree, *what)).log is not None)
        return gone

    monkeypatch.setattr(RadixCache, "collect", noted)
    tree = RadixCache(0, True)
    offer(tree, (1,))
    closed, forgotten = tree.events.subscribe([], 9), tree.events.subscribe([], 9)
    offer(tree, (2,))
    assert made == [False, True] and len(forgotten.read()) == 1
    closed.close()
    del forgotten
    gc.collect()
    offer(tree, (3,))  # the stream notices now
    offer(tree, (4,))
    assert made == [False, True, True, False] and closed.read() == []
