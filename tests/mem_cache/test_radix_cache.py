"""The radix tree against a dictionary of all prefixes that have been offered and not evicted."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import no_sets, pages_of
from hybridrt.mem_cache.prefix_tree import radix_cache
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheEntries, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import Node
from tests.support.levels import draw, drawn, examples
from tests.support.random_windows import random_windows

Text = tuple[int, ...]
NO_SETS = no_sets(0)


class Page(NamedTuple):
    """A page of the tree: its index in the text, and the text that it was offered for."""

    index: int
    text: Text


@dataclass
class Ledger:
    """What every page and state of the tree holds: the tokens that it was offered for.

    Attributes:
        windows: of the page groups. pages: by group, then by handle.
    """

    page_size: int
    recurrent: bool
    lookahead: int = 0
    windows: tuple[int | None, ...] = (None,)
    pages: dict[int, dict[Handle, Page]] = field(default_factory=lambda: defaultdict(dict))
    states: dict[Handle, Text] = field(default_factory=dict)
    next: int = 0

    def __post_init__(self) -> None:
        self.locked = Counter[tuple[int, int]]()
        self.tree = RadixCache(self.page_size, self.recurrent, self.lookahead, self.windows, self.idle)

    @property
    def groups(self) -> int:
        return len(self.tree.windows)

    @property
    def tails_of_one_owner(self) -> bool:
        """Whether a match may be shorter than the pages allow: a state inside a page needs the page of every group,
        and the tree takes all of them from one owner."""
        has_tails = self.page_size > 1 or (self.page_size == 1 and self.lookahead > 0)
        return self.recurrent and self.groups > 1 and has_tails

    def idle(self, group: int, keys: np.ndarray) -> np.ndarray:
        return np.array([not self.locked[group, key] for key in keys.tolist()], np.bool_)

    def slot(self) -> Handle:
        self.next += 1
        return Handle(self.next, 0)

    def offer(
        self, text: Text, positions: tuple[int, ...] = (), match: PrefixMatch | None = None,
        starts: Sequence[int] | None = None,
    ) -> PrefixMatch:  # fmt: skip
        """Inserts a text as a request that had `match` would leave it. Window groups have only the pages from index
        `starts` on, by group; None: all pages."""
        size = self.page_size
        sets = no_sets(self.groups, -(-len(text) // size) if size else 0)
        if match is not None:
            sets[: len(match.pages)] = match.pages
        for index, line in enumerate(sets):
            for group in range(self.groups):
                if not line[group] and (self.windows[group] is None or starts is None or index >= starts[group]):
                    line[group] = self.slot()
        states = {p: self.slot() for p in positions if p <= len(text)}
        taken, node = self.tree.insert(array(text), sets, states)
        for group, pages in enumerate(taken.pages):
            assert len(set(pages)) == len(pages)
            for page in pages:
                (index,) = np.flatnonzero(sets[:, group] == page)
                ends = min((int(index) + 1) * size + self.lookahead, len(text))
                self.pages[group][page] = Page(int(index), text[:ends])
        for position, state in states.items():
            if state in taken.states:
                self.states[state] = text[:position]
        return PrefixMatch(node=node)

    def evict(self, pages: int | Sequence[int], states: int) -> None:
        """pages: of each group, or one number for all."""
        counts = [pages] * self.groups if isinstance(pages, int) else pages
        self.gone(self.tree.evict(counts, states))

    def gone(self, entries: CacheEntries) -> None:
        for group, pages in enumerate(entries.pages):
            for page in pages:
                assert not self.locked[group, page], "a request has locked it"
                del self.pages[group][page]
        for state in entries.states:
            del self.states[state]

    def lock(self, match: PrefixMatch, by: int = 1) -> None:
        """Locks the pages of a match, as a request would."""
        for sets in (match.pages, match.tail):
            if sets is not None:
                self.locked.update({(int(g), int(sets[i, g])): by for i, g in np.argwhere(sets)})

    def has_read(self, match: PrefixMatch) -> None:
        if match.tail is not None:
            self.lock(PrefixMatch(pages=match.tail), -1)
        self.gone(self.tree.unlock_state(match))

    def check(self) -> None:
        """The tree owns what the ledger says, each entry once, and every state can be used unless a window lacks
        pages."""
        nodes = list(self.tree.nodes())
        assert self.tree._size == len(nodes)
        assert sorted(s for n in nodes if (s := n.state)) == sorted(self.states)
        for group in range(self.groups):
            held = [p for n in nodes for sets in (n.pages, n.tail) if sets is not None for p in sets[:, group] if p]
            assert sorted(held) == sorted(self.pages[group])
        for node in nodes:
            text = text_of(node)
            assert len(text) == node.end and len(node.tokens) and node.parent.children[node.first] is node
            assert node.children or len(node.pages) or node.state or node.readers
            for index, line in enumerate(node.pages, self.tree.paths.complete_pages(node.start)):
                self.holds(line, text, index, (index + 1) * self.page_size + self.lookahead)
            if node.state is not None:
                assert self.states[node.state] == text
                index = self.tree.paths.complete_pages(node.end)
                owner, tail = self.tree.paths.tail(node)
                has_tail = index * self.page_size < node.end and self.page_size > 0
                assert has_tail if owner is not None else not has_tail or None not in self.windows
                if tail is not None:
                    self.holds(tail[0], text, index, node.end)

    def holds(self, line: np.ndarray, text: Text, index: int, end: int) -> None:
        """The set `line` [G] of page `index` has the KV of text[: end], from its first token on. Groups without a
        window have a page."""
        for group, key in enumerate(line.tolist()):
            if not key:
                assert self.windows[group] is not None
                continue
            page = self.pages[group][Handle(key & 0xFFFFFFFF, 0)]
            assert page.text[:end] == text[:end] and len(page.text) >= end > index * self.page_size
            assert page.index == index

    def check_match(self, prompt: Text) -> None:
        """No usable prefix is longer than the match, and the match has what it says."""
        match = self.tree.match(array(prompt))
        size, n = self.page_size, match.length
        assert n < len(prompt)
        behind = self.lookahead if self.recurrent else 0
        assert len(match.pages) == ((n - behind) // size if size and n else 0)
        for index, line in enumerate(match.pages):
            self.holds(line, prompt, index, (index + 1) * size + self.lookahead)
            seen = [window is None or index >= max(n - window + 1, 0) // size for window in self.tree.windows]
            assert (line > 0).tolist() == seen, "what the next token sees, and no more"
        if self.recurrent:
            known = self.common(prompt)
            usable = [len(s) for s in self.states.values() if s == prompt[: len(s)] and len(s) <= known]
            most = max((length for length in usable if length < len(prompt) and self.sees(prompt, length)), default=0)
            assert n == most or (n < most and self.tails_of_one_owner)
            assert (match.state is not None) == bool(n)
            if match.state is not None:
                assert self.states[match.state] == prompt[:n]
            assert (match.tail is not None) == (size > 0 and len(match.pages) * size < n)
            if match.tail is not None:
                assert match.tail.all()
                self.holds(match.tail[0], prompt, len(match.pages), n)
        else:
            known = min(self.common(prompt), len(prompt) - 1 + self.lookahead)  # a window of 1 sees no page of the tree
            ends = range(0, self.tree.paths.complete_pages(known) * size + 1, size)
            assert n == max(end for end in ends if self.sees(prompt, end))

    def sees(self, prompt: Text, length: int) -> bool:
        """Whether the tree has the pages that the token after prompt[: length] sees."""
        size = self.page_size
        for group, window in enumerate(self.tree.windows):
            first = 0 if window is None else max(length - window + 1, 0) // size
            for index in range(first, -(-length // size)):
                end = (index + 1) * size + self.lookahead
                end = min(end, length) if self.recurrent else end
                found = (page for page in self.pages[group].values() if page.index == index)
                if not any(len(page.text) >= end and page.text[:end] == prompt[:end] for page in found):
                    return False
        return True

    def common(self, prompt: Text) -> int:
        """Tokens that the tree's texts have in common with the prompt, at most."""
        return max((in_common(text_of(n), prompt) for n in self.tree.nodes()), default=0)


def array(text: Text) -> np.ndarray:
    return np.array(text, np.int32)


def text_of(node: Node) -> Text:
    return tuple(int(t) for step in reversed(list(node.path)) for t in step.tokens)


def in_common(a: Text, b: Text) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


WINDOWS = (None,), (None, 3), (2,), (None, None, 1, 5, 5), (3, 6)
KINDS = [(1, True), (2, True), (4, True), (0, True), (1, False), (4, False)]


CASES = [
    (*kind, lookahead, windows)
    for kind in KINDS
    for lookahead in (0, 1)
    for windows in (WINDOWS if kind[0] else WINDOWS[:1])
]


@pytest.mark.parametrize(
    ("page_size", "recurrent", "lookahead", "windows", "examples"), drawn(CASES, 1, 3, 10, 200, thin=3)
)
def test_the_tree_is_a_dictionary_of_prefixes(
    page_size: int, recurrent: bool, lookahead: int, windows: tuple[int | None, ...], examples: int
) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(data=st.data())
    def actions(data: st.DataObject) -> None:
        play(Ledger(page_size, recurrent, lookahead if page_size else 0, windows), data)

    actions()


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_prefix_needs_what_each_of_three_windows_sees(group: int, recurrent: bool) -> None:
    text, windows = tuple(range(12)), (3, 5, 9)
    for lacking in (0, 1):
        ledger, starts = Ledger(1, recurrent, windows=windows), [0, 0, 0]
        starts[group] = len(text) - windows[group] + 1 + lacking
        ledger.offer(text, (len(text),) if recurrent else (), starts=starts)
        assert ledger.tree.match(array((*text, 99))).length == (0 if lacking else len(text))


@examples(40, 400)
def test_so_it_is_with_random_windows_of_two_and_three_groups(examples: int) -> None:
    cases = st.tuples(st.sampled_from([kind for kind in KINDS if kind[0]]), st.sampled_from([0, 1]))

    @settings(max_examples=examples, deadline=None)
    @given(cases, random_windows(2, 3), st.data())
    def actions(case: tuple[tuple[int, bool], int], windows: tuple[int | None, ...], data: st.DataObject) -> None:
        kind, lookahead = case
        play(Ledger(*kind, lookahead, windows), data)

    actions()


def play(ledger: Ledger, data: st.DataObject) -> None:
    locked: list[tuple[PrefixMatch, Text, bool]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["offer", "offer", "match", "read", "state", "leave", "evict"]))
        if action == "offer":
            text = data.draw(TEXTS)
            positions = data.draw(st.sets(st.integers(1, 14), max_size=3)) if ledger.recurrent else set()
            starts = by_group(ledger, data, 3) if ledger.groups > 1 else [0]
            ledger.offer(text, tuple(positions), starts=starts)
            if not any(starts):
                check_offered(ledger, text, positions)
        elif action == "match":
            ledger.check_match(data.draw(TEXTS))
        elif action == "read":
            prompt = data.draw(TEXTS)
            match = ledger.tree.match(array(prompt))
            ledger.tree.lock(match)
            ledger.lock(match)
            locked.append((match, prompt[: match.length], match.state is not None))
        elif action == "state" and locked:
            index = data.draw(st.integers(0, len(locked) - 1))
            match, text, state = locked[index]
            if state:
                ledger.has_read(match)
            locked[index] = match, text, False
        elif action == "leave" and locked:
            match, _, state = locked.pop(data.draw(st.integers(0, len(locked) - 1)))
            leave(ledger, match, state)
        elif action == "evict":
            ledger.evict(by_group(ledger, data, 6), data.draw(st.integers(0, 3)))
        ledger.check()
        for match, text, state in locked:
            held = [match.pages, *([match.tail] if state and match.tail is not None else [])]
            assert all(page in ledger.pages[group] for sets in held for group, pages in enumerate(pages_of(sets))
                       for page in pages)  # fmt: skip
            assert not state or ledger.states[match.state] == text
    for match, _, state in locked:
        leave(ledger, match, state)
    ledger.evict(10**6, 10**6)
    assert not any(ledger.pages.values()) and not ledger.states and not list(ledger.tree.nodes())


def by_group(ledger: Ledger, data: st.DataObject, most: int) -> list[int]:
    """A number of up to `most` for each group."""
    return data.draw(st.lists(st.integers(0, most), min_size=ledger.groups, max_size=ledger.groups))


def check_offered(ledger: Ledger, text: Text, positions: set[int]) -> None:
    """A text that was offered with all of its pages is a prefix of the next one, up to its last state or page."""
    size, tree = ledger.page_size, ledger.tree
    most = max((p for p in positions if p <= len(text)), default=0)
    most = most if ledger.recurrent else tree.paths.complete_pages(len(text)) * size
    assert tree.match(array((*text, 9, 9))).length >= most


def leave(ledger: Ledger, match: PrefixMatch, state: bool) -> None:
    """A request ends. `state`: it has not read its state yet."""
    ledger.lock(PrefixMatch(pages=match.pages), -1)
    if state:
        ledger.has_read(match)
    ledger.tree.unlock(match)


@pytest.mark.parametrize(("page_size", "lookahead"), [(0, 0), (1, 0), (2, 1), (4, 0), (4, 1)])
@examples(10, 100)
def test_all_states_at_once_are_as_one_after_the_other(page_size: int, lookahead: int, examples: int) -> None:
    """Some pages are evicted after each text: what is left of its last edge is no whole one."""
    offers = st.lists(st.tuples(TEXTS, st.sets(st.integers(1, 14), min_size=1), st.integers(0, 4)), max_size=8)

    def insert(offers: list[tuple[Text, set[int], int]], asked: list[Text]) -> None:
        insert_both_ways(Ledger(page_size, True, lookahead), Ledger(page_size, True, lookahead), offers, asked)

    draw(examples, insert, offers, st.lists(TEXTS, max_size=8))


def insert_both_ways(
    at_once: Ledger, one_by_one: Ledger, offers: list[tuple[Text, set[int], int]], asked: list[Text]
) -> None:
    for text, positions, gone in offers:
        at_once.offer(text, tuple(positions))
        for position in sorted(positions, reverse=True):
            one_by_one.offer(text, (position,))
        for ledger in (at_once, one_by_one):
            ledger.evict(gone, 0)
            ledger.check()
        assert sorted(at_once.pages[0].values()) == sorted(one_by_one.pages[0].values())
        assert sorted(at_once.states.values()) == sorted(one_by_one.states.values())
    for prompt in asked:
        for ledger in (at_once, one_by_one):
            ledger.check_match(prompt)


@pytest.mark.parametrize("known", [False, True])
def test_many_states_are_inserted_in_one_walk(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`known`: the tree has the text, with other states."""
    ledger, compared = Ledger(1, True), list[int]()
    text = tuple(range(400))
    if known:
        ledger.offer(text, tuple(range(2, 400, 4)))
    monkeypatch.setattr(radix_cache, "in_common", lambda a, b: compared.append(len(b)) or in_common(a, b))
    ledger.offer(text, tuple(range(4, 401, 4)))
    assert len(compared) <= 200 and sum(compared) <= 800
    ledger.check()


def offered(ledger: Ledger) -> Iterator[int]:
    yield from sorted(len(text) for text in ledger.states.values())


def test_the_state_that_saves_least_goes_first() -> None:
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3, 4, 5, 6, 7, 8), (4, 5, 8))
    ledger.evict(0, 1)
    assert list(offered(ledger)) == [4, 8]  # 5 saved one token after 4


def test_recent_use_counts() -> None:
    ledger = Ledger(0, True)
    for first in range(4):
        ledger.offer((first, 1, 2), (3,))
        ledger.evict(0, 1 if first else 0)
    assert [text[0] for text in ledger.states.values()] == [3]
    ledger.offer((7, 1, 2), (3,))
    match = ledger.tree.match(array((3, 1, 2, 9)))
    ledger.tree.lock(match)
    ledger.has_read(match)
    ledger.tree.unlock(match)
    ledger.evict(0, 1)
    assert [text[0] for text in ledger.states.values()] == [3]


@pytest.mark.parametrize("field", CacheKey._fields)
def test_keys_share_nothing(field: str) -> None:
    """Whichever field differs."""
    tree, a, b = RadixCache(2, False), CacheKey(**{field: "a"}), CacheKey(**{field: "b"})
    tree.insert(array((1, 2, 3, 4)), np.array([[Handle(1, 0)], [Handle(2, 0)]]), {}, a)
    assert tree.match(array((1, 2, 3, 4, 5)), a).length == 4
    assert not tree.match(array((1, 2, 3, 4, 5)), b).length and not tree.match(array((1, 2, 3))).length
    tree.evict([2], 0)
    assert not tree._roots


def tokens_of(ledger: Ledger) -> set[Text]:
    return set(ledger.states.values())


def read(ledger: Ledger, prompt: Text) -> None:
    """A request uses the longest match of a prompt, and ends."""
    match = ledger.tree.match(array(prompt))
    ledger.tree.lock(match)
    ledger.has_read(match)
    ledger.tree.unlock(match)


def test_a_place_where_an_answer_goes_on_is_no_fork() -> None:
    tree = RadixCache(0, True)
    tree.insert(array((1, 2, 3, 4, 5, 6)), NO_SETS, {6: Handle(1, 0)}, prompt=4)
    found = {
        prompt: tree.match(array(prompt)).fork for prompt in ((1, 2, 9), (1, 2, 3, 4, 9), (1, 2, 3, 4, 5, 9), (9,))
    }
    assert list(found.values()) == [2, 0, 0, 0]


def test_a_prompt_that_leaves_an_answer_within_it() -> None:
    ledger = Ledger(0, True)
    tree = ledger.tree
    tree.insert(array((1, 2, 3, 4, 5, 6)), NO_SETS, {6: ledger.slot()}, prompt=2)
    left = {(1, 2, 3, 4, 9, 9, 9): 2, (1, 2, 3, 9): 1, (1, 2, 9, 9): 0, (1, 2, 3, 4, 5, 6, 9): 0, (1, 9, 9): 0}
    assert {prompt: tree.match(array(prompt)).retokenised for prompt in left} == left
    tree.insert(array((1, 2, 3, 4, 8)), NO_SETS, {5: ledger.slot()}, prompt=5)  # cuts the edge
    assert tree.match(array((1, 2, 3, 4, 7, 7, 7))).retokenised == 2


def test_what_is_left_of_an_edge_whose_state_is_gone_is_cut_off() -> None:
    ledger = Ledger(2, True)
    ledger.offer((1, 2, 3, 4, 5), (5,))
    ledger.evict(0, 1)
    ledger.offer((1, 2, 3, 4))
    ledger.check()


def test_a_place_without_state_is_cut_out_of_the_path() -> None:
    """But not while a request reads the path up to there."""
    ledger = Ledger(2, True)
    ledger.offer(tuple(range(1, 13)), (3, 6, 9, 12))
    match = ledger.tree.match(array(tuple(range(1, 8))))
    ledger.tree.lock(match)
    ledger.has_read(match)
    ledger.evict(0, 4)
    assert sorted(node.end for node in ledger.tree.nodes()) == [6, 12]
    ledger.check()
    ledger.tree.unlock(match)
    assert [node.end for node in ledger.tree.nodes()] == [12]
    ledger.check()


def test_the_end_of_a_text_within_a_longer_one_can_be_read() -> None:
    ledger = Ledger(2, True)
    ledger.offer((1, 2, 3, 4, 5, 6), (6,))
    match = ledger.offer((1, 2, 3, 4))
    ledger.tree.lock(match)
    ledger.check()
    assert sorted(node.end for node in ledger.tree.nodes()) == [4, 6]
    ledger.tree.unlock(match)
    assert [node.end for node in ledger.tree.nodes()] == [6]


def test_edges_of_two_answers_stay_apart() -> None:
    ledger = Ledger(0, True)
    ledger.tree.insert(array((1, 2, 3, 4)), NO_SETS, {4: ledger.slot()}, prompt=2)
    ledger.tree.insert(array((1, 2, 3, 4, 5, 6, 7, 8)), NO_SETS, {8: ledger.slot()}, prompt=6)
    prompts = [(1, 2, 3, 9, 9, 9), (1, 2, 3, 4, 5, 9, 9, 9), (1, 2, 3, 4, 5, 6, 7, 9, 9)]
    before = [ledger.tree.match(array(prompt)) for prompt in prompts]
    assert len(ledger.tree.evict([], 1).states) == 1
    after = [ledger.tree.match(array(prompt)) for prompt in prompts]
    for name in ("retokenised", "fork", "known"):
        assert [getattr(match, name) for match in before] == [getattr(match, name) for match in after]


def test_pages_that_no_state_needs_leave_a_window_first() -> None:
    """The window of the state after 8 tokens reaches into the node above, which has no state of its own."""
    tree, first, second = RadixCache(1, True, windows=(4,)), [*range(1, 9)], [*range(1, 7), *range(20, 30)]
    handles = np.arange(1, 25)[:, None]
    tree.insert(array(second), np.concatenate((handles[:6], handles[8:18])), {16: Handle(2, 0)})
    tree.insert(array(first), handles[:8], {8: Handle(1, 0)})

    def cached() -> list[int]:
        return [tree.match(array((*text, 0))).length for text in (first, second)]

    useless = 5 + 7  # of the node that both share, and of the second text
    assert len(tree.evict([useless], 0).pages[0]) == useless and cached() == [8, 16]
    assert len(tree.evict([1], 0).pages[0]) == 1 and cached() == [8, 0]


def test_sets_go_until_no_group_without_a_window_lacks_pages() -> None:
    tree = RadixCache(1, False, windows=(None, None))
    tree.insert(array(range(8)), np.arange(1, 9)[:, None].repeat(2, 1), {})
    gone = tree.evict([1, 3], 0)
    assert [pages.indices.tolist() for pages in gone.pages] == [[6, 7, 8]] * 2
    assert tree.match(array(range(9))).length == 5


def test_a_text_gives_the_states_of_earlier_texts_their_tails() -> None:
    ledger = Ledger(4, True, 1, (2,))
    ledger.offer((1, 0, 0, 0, 0), (1, 2))
    ledger.evict(1, 0)
    ledger.offer((1, 0), (1,))
    ledger.check()
    ledger.check_match((1, 0, 0))
    assert ledger.tree.match(array((1, 0, 0))).length == 2


def test_window_pages_of_a_superseded_state_go_before_those_of_older_texts() -> None:
    tree, old, new = RadixCache(1, True, windows=(None, 4)), array(range(8)), array(range(20, 28))
    for slot, text in enumerate((old, new), 1):
        handles = slot * 10 + np.arange(8)[:, None]
        tree.insert(text, np.concatenate((handles, handles), 1), {8: Handle(slot, 0)})
    assert len(tree.evict_passed([0, 16]).pages[1]) == 10, "all but the last three of each text"
    match = tree.match(np.append(new, 1))
    tree.lock(match)
    assert tree.supersede(match) == Handle(2, 0)
    tree.unlock(match)
    assert tree.evict_passed([0, 16]).pages[1].indices.tolist() == [25, 26, 27]
    assert tree.match(np.append(old, 1)).length == 8
