"""A mirror of a prefix cache, made from events alone, finds the prefixes that the tree itself finds."""

import numpy as np
import pytest
from hypothesis import strategies as st

from hybridrt.fleet import prefix_mirror
from hybridrt.fleet.prefix_mirror import CacheLayout, PrefixMirror, PrefixNames, names_of, root_name
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from tests.mem_cache.test_cache_events import act, offer, play_trees
from tests.mem_cache.test_radix_cache import CASES, TEXTS, Ledger, array
from tests.support.levels import drawn


@pytest.mark.parametrize(
    ("page_size", "recurrent", "lookahead", "windows", "examples"), drawn(CASES, 6, 3, 8, 200, thin=3)
)
def test_a_mirror_answers_as_the_tree_does(
    page_size: int, recurrent: bool, lookahead: int, windows: tuple[int | None, ...], examples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(prefix_mirror, "BLOCK", 4)

    play_trees(play, examples, page_size, recurrent, lookahead, windows)


def play(ledger: Ledger, data: st.DataObject) -> None:
    """Random operations; after each one the mirror's prefix of a random prompt is the tree's."""
    tree = ledger.tree
    mirror = PrefixMirror(CacheLayout(tree.page_size, tree.recurrent, tree.lookahead, tree.windows))
    events = tree.events.subscribe([(tree.present(), tree.tier)], 10_000)
    locked: list[PrefixMatch] = []
    for _ in range(data.draw(st.integers(1, 20))):
        act(ledger, data, locked)
        mirror.update(events.read())
        prompt = data.draw(TEXTS)
        found, own = mirror.match(names_of(prompt)), tree.match(array(prompt)).length
        assert found == own or (found > own and ledger.tails_of_one_owner), (prompt, found, own)


def test_names_are_those_of_the_text_and_its_key() -> None:
    text = np.arange(1000, dtype=np.int32)
    whole, longer = names_of(text), names_of(np.concatenate([text, text]))
    for length in (0, 1, 63, 64, 65, 128, 999, 1000):
        assert whole.at(length) == longer.at(length) != names_of(text, CacheKey("a")).at(length)
    rest = PrefixNames(text[128:], whole.at(128), 128)
    assert [rest.at(length) for length in (128, 200, 1000)] == [whole.at(length) for length in (128, 200, 1000)]
    assert len({whole.at(length) for length in range(1001)}) == 1001


def test_a_cleared_tier_is_empty_and_keys_share_nothing() -> None:
    tree = Ledger(0, True).tree
    mirror = PrefixMirror(CacheLayout(0, True, windows=()))
    events = tree.events.subscribe([], 100)
    offer(tree, (1, 2, 3), CacheKey("a"))
    mirror.update(events.read())
    prompt = (1, 2, 3, 4)
    assert [mirror.match(names_of(prompt, CacheKey(salt))) for salt in ("a", "b")] == [3, 0]
    tree.clear("reset")
    mirror.update(events.read())
    assert mirror.match(names_of(prompt, CacheKey("a"))) == 0 and len(mirror) == 0


class Counted(PrefixNames):
    """Counts the names that are asked for."""

    asked = 0

    def at(self, length: int) -> int:
        self.asked += 1
        return super().at(length)


LONG = np.arange(2**16, dtype=np.int32)


def test_what_a_match_looks_up_is_bounded() -> None:
    """Of a replica that says that it has states everywhere, and lacks a page before each of them."""
    mirror = PrefixMirror(CacheLayout(4, True, 0, (64,)))
    pages = np.array([(0, i, 4 * i + 4) for i in range(2**14) if i % 16], np.int32)
    mirror.change("gained", "device", names_of(LONG), pages, range(4, 2**16, 4))
    names = Counted(LONG, root_name())
    assert names.blocks and mirror.match(names, 2000) == 0 and names.asked < 2**10 + 2 * 2000 + 2
    mirror.change("gained", "device", names_of(LONG), np.array([(0, 2**14 - 16, 2**16 - 60)], np.int32), ())
    assert mirror.match(names, 2000) == 2**16 - 4


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_last_page_of_a_long_text_is_found_by_halving(lookahead: int) -> None:
    mirror = PrefixMirror(CacheLayout(4, False, lookahead))
    pages = np.array([(0, i, 4 * i + 4 + lookahead) for i in range(1000)], np.int32)
    mirror.change("gained", "device", names_of(LONG), pages, ())
    names = Counted(LONG, root_name())
    assert mirror.match(names, 100) == 4000 and names.asked < 30


def test_a_mirror_forgets_what_was_lost() -> None:
    """Its memory is that of what the cache holds."""
    ledger = Ledger(2, True, 0, (None, 3))
    mirror = PrefixMirror(CacheLayout(2, True, 0, (None, 3)))
    events = ledger.tree.events.subscribe([], 100)
    ledger.offer((1, 2, 3, 4, 5), (4, 5))
    mirror.update(events.read())
    assert len(mirror) > 0
    ledger.evict(9, 9)
    mirror.update(events.read())
    assert len(mirror) == 0 and not any(tier._rests for tier in mirror._tiers.values())


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_long_prompt_costs_few_look_ups(recurrent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 replicas, one after the other: the router serves nobody else meanwhile."""
    mirror, text = PrefixMirror(CacheLayout(16, recurrent)), np.arange(100_000, dtype=np.int32)
    kept = names_of(text[:50_000])
    pages = np.array([(0, index, 16 * index + 16) for index in range(3125)], np.int32)
    mirror.change("gained", "device", kept, pages, [100, 49_990])
    asked, at = [0], PrefixNames.at

    def counted(names: PrefixNames, length: int) -> int:
        asked[0] += 1
        return at(names, length)

    monkeypatch.setattr(PrefixNames, "at", counted)
    assert mirror.match(names_of(text)) == (49_990 if recurrent else 50_000)
    assert mirror.match(names_of(text + 1)) == 0
    assert asked[0] < 100
