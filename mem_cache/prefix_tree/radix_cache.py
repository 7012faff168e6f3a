"""The prefix tree: a radix tree over tokens with the KV pages and recurrent states of prefixes.

A node is a prefix: the tokens on the path from the root. Its edge holds the tokens since its
parent. It owns the page sets (mem_cache/pools/page_groups.py) that become complete within its edge
and at most one recurrent state, that after its last token. Page i is complete once the tokens up
to (i + 1) * page_size + lookahead are on the path: the KV of a prediction head depends on the next
token too (lookahead 1). So a page depends only on tokens of its own path, and a node can be cut
anywhere. A state in the middle of a page has a tail: the page set with the tokens between the last
complete page and the state. (A hit copies the tail. The head's KV of its last token may belong to
another next token. That can make one draft worse; it changes no output token.)

    root ── "You are a helpful ..." ──┬── "Hi"            state, tail
                   state              └── "What is ..." ── ...

A prefix is usable up to the deepest node with a state (without recurrent layers: up to the last
complete page), if each window group has the pages that the next token sees. Sets always have the
pages of layers without a window. Eviction removes sets from the ends of leaves, least recently
used first, with the states that need them; also pages of a window group alone (tree_windows.py),
and states alone (state_worth.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from types import MappingProxyType

import numpy as np

from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import PageSets
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvents, EntryLog, Tier, What, Why
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheEntries, Gone, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_node import (
    IdleLeaves,
    Node,
    PathPages,
    StateKind,
    edges_after,
    is_idle_leaf,
    leaves_prompt,
    left_answer,
)
from hybridrt.mem_cache.prefix_tree.state_worth import NewState, StateWorths
from hybridrt.mem_cache.prefix_tree.texts import in_common
from hybridrt.mem_cache.prefix_tree.tree_windows import TreeWindows

OTHER_KEYS = 8
# [n] bool: which of these pages [n] of a group no request has locked.
Idle = Callable[[int, np.ndarray], np.ndarray]


class RadixCache:
    """The prefix cache of an engine: bookkeeping in host memory.

    Args:
        page_size: tokens of a KV page; 0 for a model without attention layers.
        recurrent: the model has recurrent layers, so a prefix needs a state.
        lookahead: 1 if the KV of a token depends on the next one (prediction heads), else 0.
        windows: of each page group, in tokens; None for those of layers without a window, which are
            the first. Empty without attention layers.
        idle: None: no request locks pages.
        events: gets what the tree gains and loses, as entries of `tier`.

    Attributes:
        paths: which page sets a text has.
    """

    def __init__(
        self,
        page_size: int,
        recurrent: bool,
        lookahead: int = 0,
        windows: Sequence[int | None] = (None,),
        idle: Idle | None = None,
        events: CacheEvents | None = None,
        tier: Tier = "device",
    ) -> None:
        self.page_size, self.recurrent, self.lookahead = page_size, recurrent, lookahead
        self.windows = tuple(windows) if page_size else ()
        self.paths = PathPages(page_size, lookahead, len(self.windows))
        self._windows = TreeWindows(self.windows, page_size, recurrent, self.paths.complete_pages)
        self._windowed = len(self._windows.groups) > 0
        self._idle = idle
        self.events, self.tier = CacheEvents() if events is None else events, tier
        self.clear("reset")

    def clear(self, why: Why) -> None:
        """Forgets everything, readers included. The coordinator has freed all entries."""
        self.events.cleared(why, self.tier)
        self._roots: dict[CacheKey, Node] = {}
        self._clock = 0
        self._worths = StateWorths()
        self.waiting = self._worths.waiting
        self._hidden = count(2)  # hidden nodes by number: -1 marks a token that no text has
        self._size = 0  # nodes, without roots
        self._leaves = IdleLeaves()
        self._windows.clear()

    @property
    def has_full_group(self) -> bool:
        """True if a page group has no window, so that a set is never empty."""
        return len(self._windows.groups) < len(self.windows)

    # -- requests

    def match(self, tokens: np.ndarray, key: CacheKey = DEFAULT_KEY) -> PrefixMatch:
        """The longest usable prefix of a prompt, shorter than the prompt: its last token gives
        logits.

        Args:
            tokens: [n] ids of the prefix cache: int32, or int64 where some name tokens of images.
            key: texts share nothing with those of another key.
        """
        node, known = self._descend(key, tokens)
        none = self.paths.no_sets()
        if not known:
            return PrefixMatch(pages=none)
        limit, edges = len(tokens) - 1, edges_after(node, known)
        left = left_answer(edges, known, len(tokens))
        if not self.recurrent:
            sets = self.paths.sets(node)
            pages = self._windows.usable(sets, self.paths.complete_pages(min(known, limit + self.lookahead)))
            if not pages:
                return PrefixMatch(pages=none, known=known, retokenised=left)
            found, length = self.paths.covering(node, pages), pages * self.page_size
            return PrefixMatch(length, self._seen(sets, length), known=known, node=found, retokenised=left)
        fork, end = known if leaves_prompt(edges, known) else 0, min(known, limit)
        sets = self.paths.sets(node) if self._windowed else none
        while node.parent is not None and not (node.state and node.end <= end and self._has_windows(node, sets)):
            node = node.parent
        if node.parent is None:
            return PrefixMatch(pages=none, known=known, retokenised=left, fork=fork)
        owner, tail = self.paths.tail(node)
        held = self._seen(self.paths.sets(node), node.end)
        return PrefixMatch(node.end, held, node.state, tail, known, node, owner, retokenised=left, fork=fork)

    def cached_pages(self, tokens: np.ndarray, key: CacheKey = DEFAULT_KEY) -> tuple[PrefixMatch, set[int]]:
        """The complete pages that the tree has of a text, to be locked or used, and the positions of
        the text's states. The pages need not be a usable prefix.
        """
        node, known = self._descend(key, tokens)
        states = {step.end for step in node.path if step.state is not None and step.end <= known}
        pages = self.paths.complete_pages(known)
        node = self.paths.covering(node, pages) if pages else node
        length = pages * self.page_size
        return PrefixMatch(length, self.paths.sets(node)[:pages], node=None if node.parent is None else node), states

    def known_elsewhere(self, tokens: np.ndarray, key: CacheKey) -> tuple[int, CacheKey]:
        """How many first tokens a text of another key has, and that key. Only the latest OTHER_KEYS
        are examined.
        """
        others = islice((other for other in reversed(self._roots) if other != key), OTHER_KEYS)
        return max(((self._descend(other, tokens)[1], other) for other in others), default=(0, key))

    def touch(self, tokens: np.ndarray, key: CacheKey) -> int:
        """Marks a text as used now. Returns how many of its tokens are in complete pages of layers
        without a window.
        """
        held, _ = self.cached_pages(tokens, key)
        self.lock(held)
        self.unlock(held)
        return held.length if self.has_full_group else 0

    def expect(self, tokens: np.ndarray, arrival: int, key: CacheKey = DEFAULT_KEY) -> PrefixMatch:
        """Notes that a request waits, of this prompt and number of arrival. It awaits the deepest
        state of its prompt, whatever is inserted or evicted meanwhile. Returns its present match.
        """
        self.waiting.add(arrival, tokens, key)
        match = self.match(tokens, key)
        if match.node is not None:
            self._use(match.node)
            if match.state is not None:
                self._worths.await_state(match.node, {arrival})
        return match

    def forget(self, arrival: int) -> None:
        """The request of this number no longer waits: it was admitted, or has ended."""
        self._worths.admitted = max(self._worths.admitted, arrival)
        self.waiting.remove(arrival)
        self._worths.forget(arrival)

    def lock(self, match: PrefixMatch) -> None:
        """Keeps the nodes of a match from eviction until `unlock`. Locks count."""
        node = match.node
        if node is None:
            return
        node.readers += 1
        self._use(node)
        if match.state is not None:
            node.state_readers += 1
            self._worths.used(node)
        if match.tail_node is not None:
            match.tail_node.readers += 1
            match.tail_node.tail_readers += 1

    def unlock_state(self, match: PrefixMatch) -> CacheEntries:
        """The request has read state and tail of its match. Returns pages that were kept for it
        alone.
        """
        gone, owner = self.collect(), match.tail_node
        if match.node is not None and match.state is not None:
            match.node.state_readers -= 1
            self._worths.enlist(match.node)
        if owner is not None:
            owner.readers -= 1
            owner.tail_readers -= 1
            if owner.state is None:
                self._drop_tail(owner, gone)
            self._prune(owner)
        return self.given_up(gone, "evicted")

    def unlock(self, match: PrefixMatch) -> None:
        """The request no longer reads the pages of its match. Call `unlock_state` first."""
        if match.node is not None:
            match.node.readers -= 1
            self._worths.left(match.node)
            self._prune(match.node)

    def insert(
        self,
        tokens: np.ndarray,
        pages: PageSets,
        states: Mapping[int, Handle],
        key: CacheKey = DEFAULT_KEY,
        prompt: int | None = None,
        kinds: Mapping[int, StateKind] = MappingProxyType({}),
        why: Why = "computed",
    ) -> tuple[CacheEntries, "Node"]:
        """Offers KV and states of a text.

        Args:
            tokens: [n] ids, those whose KV the pages hold; the last page may be partly filled.
            pages: [m, G] sets of the text, from its first page on. The tree recognises by their
                index and group those that it already has. Window groups may lack pages.
            states: slots by the number of tokens in the state.
            prompt: how many of the tokens were a prompt; None: all.
            kinds: kinds of `states` at forks and within an answer.
            why: what CacheEvent says.

        Returns:
            The entries that the tree takes over (the caller keeps the others), and the deepest node
                of the text: a root (parent None) if the tree keeps nothing of it.
        """
        taken = self.collect("gained")
        answer = len(tokens) if prompt is None else prompt
        ends = sorted([end for end in states if 0 < end <= len(tokens)])
        complete = self.paths.complete_pages(len(tokens))
        last = max(complete * self.page_size + self.lookahead if complete else 0, ends[-1] if ends else 0)
        path = [self._root(key)]
        for end in (*ends, last):
            path.append(self._extend(path[-1], tokens[:end], pages, taken, answer))
        deepest, made = path[-1], [node for node in path[1:-1] if node.state is None]
        if self._windowed:
            for node in deepest.path:
                self._fill_windows(node, pages, taken)
        # Deepest first: a page of a deeper node may hold the tail of a state above.
        for node in reversed(made):
            whole = node.end + self.lookahead >= len(tokens)
            node.kind = kinds.get(node.end, StateKind.END if whole else StateKind.PROMPT)
            node.state = states[node.end]
            taken.add_state(node)
        for node in self._holders(key, tokens) if self._windowed else reversed(path[1:-1]):
            self._keep_tail(node, pages, taken)
        if made:
            self._worths.made(made, tokens, key)
        self._use(deepest)
        self._prune(deepest, kept=deepest)
        return self.given_up(taken, why), deepest

    def evict(
        self, num_pages: Sequence[int], num_states: int, *, new: NewState | None = None, why: Why = "evicted"
    ) -> CacheEntries:
        """Removes and returns at most so many entries that no request reads: pages of each group, and
        states. `new`: the state that replaces the evicted one, if that is worth less.
        """
        gone = self.collect()
        if self.has_full_group:
            most = max([count for count, window in zip(num_pages, self.windows) if window is None])
            while gone.counts[0] < most and (leaf := self._leaves.take_oldest()) is not None:
                self.shorten(leaf, most, gone)
        for group in self._windows.groups:
            self._evict_window(group, num_pages[group], gone)
        while len(gone.states) < num_states and (node := self._worths.least(new, self._clock)) is not None:
            if not node.awaited:
                self._worths.inflation = max(self._worths.inflation, self._worths.worth_of(node))
            self._drop_state(node, gone)
            node.used = node.used if node.children else 0  # nobody can use its pages: evict them next
            self._prune(node)
        return self.given_up(gone, why)

    def evict_passed(self, num_pages: Sequence[int]) -> CacheEntries:
        """Removes and returns at most `num_pages` pages of each window group, of those that a request does
        not need if it goes on from the end of a node."""
        gone = self.collect()
        for group in self._windows.groups:
            self._evict_window(group, num_pages[group], gone, passed_only=True)
        return self.given_up(gone, "evicted")

    def evict_leaf(self, num_sets: int, *, stateless: bool = False) -> CacheEntries:
        """Removes and returns about so many sets from the end of the idle leaf that was used least
        recently, and its state. If it has none to give, the next leaf's; nothing if no leaf is idle,
        or, with `stateless`, if it has a state.
        """
        gone = self.collect()
        while not any(gone.counts) and (leaf := self._leaves.take_oldest()) is not None:
            if stateless and leaf.state is not None:
                self._leaves.enlist(leaf, self._size)
                break
            self.shorten(leaf, num_sets, gone)
        return self.given_up(gone, "evicted")

    def thin(self, node: Node, most: int) -> CacheEntries:
        """Removes and returns the states within answers on the path of a node, except the deepest
        `most`.
        """
        within = [step for step in node.path if step.state is not None and step.kind is StateKind.ANSWER]
        gone = self.collect()
        for step in within[most:]:
            self._drop_state(step, gone)
            self._prune(step, kept=node)
        return self.given_up(gone, "thinned")

    def supersede(self, match: PrefixMatch) -> Handle | None:
        """Removes the state that a request has started from, so that its slot can hold a later
        state of the request. The request's lock on it ends.

        Returns:
            The slot. None, with nothing changed, if other conversations may part there, another
                request has used or awaits it, or its tail is still being read.
        """
        node = match.node
        if node is None or node.state is None or node.end != match.length or node.kind.is_for_partings:
            return None
        others = node.hits > 1 or node.awaited or node.state_readers > (match.state is not None)
        if others or node.tail is not None or match.tail_node is not None:
            return None
        gone = self.collect()
        gone.add_state(node)
        self.given_up(gone, "superseded")
        self._worths.dropped(node)
        state, node.state, node.state_readers = node.state, None, 0
        self._windows.enlist_passed(node)
        return state

    @property
    def num_within(self) -> int:
        """States within answers."""
        return len(self._worths.answers)

    @property
    def roots(self) -> dict[CacheKey, Node]:
        """The nodes without tokens on top of all texts of a key, not to be changed."""
        return self._roots

    @property
    def num_nodes(self) -> int:
        """Nodes, without roots."""
        return self._size

    def nodes(self) -> Iterator[Node]:
        below = [node for root in self._roots.values() for node in root.children.values()]
        while below:
            yield (node := below.pop())
            below += node.children.values()

    # -- events

    def collect(self, what: What = "lost") -> Gone:
        """Begins an operation on the tree, which `given_up` ends: collects the entries that change owners."""
        log = EntryLog(self.page_size, self.lookahead) if self.events.readers else None
        return Gone(len(self.windows), log, what)

    def given_up(self, gone: Gone, why: Why) -> CacheEntries:
        """Ends an operation: publishes its events, and returns the entries that change owners."""
        if gone.log is not None:
            self.events.publish(gone.log, why, self.tier)
        return gone.entries()

    def note_entries(self, node: Node, what: What, log: EntryLog) -> None:
        """Notes all entries of a node."""
        log.pages(what, node, node.pages, self.paths.complete_pages(node.start))
        if node.tail is not None:
            log.pages(what, node, node.tail, self.paths.complete_pages(node.end), node.end)
        if node.state is not None:
            log.state(what, node)

    def present(self) -> EntryLog:
        """The entries that matches may find now."""
        log = EntryLog(self.page_size, self.lookahead)
        for node in self.nodes():
            self.note_entries(node, "gained", log)
        return log

    # -- walking

    def _new_root(self, key: CacheKey = DEFAULT_KEY) -> Node:
        return Node(np.empty(0, np.int32), 0, self.paths.no_sets(), key=key)

    def _root(self, key: CacheKey) -> Node:
        return self._roots.get(key) or self._roots.setdefault(key, self._new_root(key))

    def _descend(self, key: CacheKey, tokens: np.ndarray) -> tuple[Node, int]:
        node, known = self._roots.get(key) or self._new_root(), 0
        while known < len(tokens) and (child := node.children.get(int(tokens[known]))) is not None:
            shared = in_common(child.tokens, tokens[known:])
            node, known = child, known + shared
            if shared < len(child.tokens):
                break
        return node, known

    def _seen(self, sets: PageSets, length: int) -> PageSets:
        """The complete sets of a prefix of `length` tokens that the next token sees. Changes
        `sets`."""
        return self._windows.without_passed(sets, length)[
            : self.paths.complete_pages(length) if self.recurrent else length // max(self.page_size, 1)
        ]

    def _has_windows(self, node: Node, sets: PageSets) -> bool:
        """`sets`: of the node's path or a longer one."""
        return not self._windowed or self._windows.are_whole(node, sets, self.paths.tail(node)[1])

    # -- growing

    def _extend(self, node: Node, tokens: np.ndarray, pages: PageSets, taken: Gone, answer: int) -> Node:
        while node.end < len(tokens):
            child = node.children.get(int(tokens[node.end]))
            if child is None:
                fresh = pages[self.paths.complete_pages(node.end) : self.paths.complete_pages(len(tokens))].copy()
                edge = tokens[node.end :].copy()
                child = Node(edge, len(tokens), fresh, node, answer=answer, first=int(edge[0]))
                node.children[child.first] = child
                self._size += 1
                taken.add(fresh, child, self.paths.complete_pages(child.start))
                return child
            shared = in_common(child.tokens, tokens[node.end :])
            node = child if shared == len(child.tokens) else self._split(child, shared)
        return node

    def _split(self, node: Node, at: int) -> Node:
        first, end = self.paths.complete_pages(node.start), self.paths.complete_pages(node.start + at)
        if not (node.is_needed or node.children) and first + len(node.pages) <= end:
            node.tokens, node.end = node.tokens[:at].copy(), node.start + at  # nothing would be left below
            return node
        self._size += 1
        upper = node.cut(at, end - first)
        if self._windowed:
            self._windows.enlist_all(node, self._size)
        return upper

    def _fill_windows(self, node: Node, pages: PageSets, taken: Gone) -> None:
        """Takes from `pages` [m, G] of a text the pages that window groups lack in a node."""
        first = self.paths.complete_pages(node.start)
        offered = pages[first : first + len(node.pages)]
        fresh = np.where(node.pages[: len(offered)] == 0, offered, 0)
        if fresh.any():
            node.pages[: len(offered)] += fresh
            taken.add(fresh, node, first)
        self._windows.enlist_all(node, self._size)

    def _holders(self, key: CacheKey, tokens: np.ndarray) -> list[Node]:
        """Nodes with states on the path of a text, deepest first. A window group may have given up
        the tails of earlier ones."""
        node, known = self._descend(key, tokens)
        return [step for step in node.path if step.state is not None and step.end <= known]

    def _keep_tail(self, node: Node, pages: PageSets, taken: Gone) -> None:
        """Takes the offered tail of a node's state, unless the tree has a whole one."""
        index = self.paths.tail_index(node)
        if index is None or node.tail_readers:
            return
        (owner, held), own = self.paths.tail(node), pages[index : index + 1].copy()
        if not len(own):
            return
        if held is None:
            node.tail = own
            taken.add(own, node, index, node.end)
        elif not held.all() and own.all():
            if owner is node:
                own[held > 0] = 0
                node.tail = held + own
            else:
                node.tail = own
            taken.add(own, node, index, node.end)

    # -- giving up

    def _use(self, node: Node) -> None:
        self._clock += 1
        for step in node.path:
            step.used = self._clock

    def _evict_window(self, group: int, wanted: int, gone: Gone, passed_only: bool = False) -> None:
        """In the order of TreeWindows; with `passed_only` only pages that no request needs. A
        prefix that lacks a page is not usable any more; its state goes too."""
        busy = list[Node]()
        while gone.counts[group] < wanted and (found := self._windows.next_node(group)) is not None:
            node, passed = found
            if passed_only and not passed:
                busy.append(node)
                break
            if self._drop_window(node, group, passed or len(node.pages), wanted - gone.counts[group], gone):
                self._windows.enlist(node, group)
            else:
                busy.append(node)
        for node in busy:
            self._windows.enlist(node, group)
        if passed_only:
            return
        while gone.counts[group] < wanted and (holder := self._worths.least(None, self._clock)) is not None:
            self._drop_state(holder, gone)  # the other pages are tails of states
            self._prune(holder)

    def _drop_window(self, node: Node, group: int, end: int, most: int, gone: Gone) -> bool:
        """Removes at most `most` idle pages among the first `end` of a node. False if there are
        none."""
        column = node.pages[:end, group]
        places = column.nonzero()[0]
        if self._idle is not None:
            places = places[self._idle(group, column[places])]
        if not len(places):
            return False
        dropped, places = self.paths.no_sets(end), places[:most]
        dropped[places, group] = column[places]
        column[places] = 0
        gone.add(dropped, node, self.paths.complete_pages(node.start))
        if node.state is not None and not node.state_readers and end == len(node.pages):
            self._drop_state(node, gone)
        if not self.has_full_group:
            self._trim(node)
        return True

    def _trim(self, node: Node) -> None:
        """Cuts sets without pages off the end of a leaf."""
        if not is_idle_leaf(node) or node.state is not None:
            return
        rows = np.flatnonzero(node.pages.any(axis=1))
        self._cut_leaf(node, int(rows[-1]) + 1 if len(rows) else 0)

    def _cut_leaf(self, leaf: Node, pages: int) -> None:
        first = self.paths.complete_pages(leaf.start)
        leaf.pages = leaf.pages[:pages]
        end = (first + pages) * self.page_size + self.lookahead if pages else leaf.start
        leaf.tokens, leaf.end = leaf.tokens[: end - leaf.start].copy(), end
        self._prune(leaf)

    def shorten(self, leaf: Node, wanted: int | None, gone: Gone) -> None:
        """Removes the state of a leaf, and sets from its end until `gone` has so many pages of the
        first group; None: all sets.
        """
        first, left = self.paths.complete_pages(leaf.start), len(leaf.pages)
        self._drop_state(leaf, gone)
        own = max(left + first - -(-leaf.start // max(self.page_size, 1)), 0)
        # All tokens of these are the leaf's, so no state above needs one as its tail.
        cut = own if wanted is None else min(own, max(wanted - gone.counts[0], 0))
        gone.add(leaf.pages[left - cut :], leaf, first + left - cut)
        left, leaf.pages = left - cut, leaf.pages[: left - cut]
        while left and (wanted is None or gone.counts[0] < wanted):
            left -= 1
            page, leaf.pages = leaf.pages[left:], leaf.pages[:left]
            self._let_go(leaf, first + left, page, gone)
        # With recurrent layers no request can use the rest of the leaf without a state: evict it
        # next.
        leaf.used = 0 if self.recurrent else leaf.used
        self._cut_leaf(leaf, left)

    def _drop_state(self, node: Node, gone: Gone) -> None:
        if node.state is not None:
            gone.add_state(node)
            self._worths.dropped(node)
            node.state = None
            self._windows.enlist_passed(node)
        self._drop_tail(node, gone)

    def _drop_tail(self, node: Node, gone: Gone) -> None:
        """Keeps a tail that a request reads for a state further up."""
        if node.tail is not None and not node.tail_readers:
            tail, node.tail = node.tail, None
            self._let_go(node, self.paths.complete_pages(node.end), tail, gone, node.end)

    def _let_go(self, node: Node, index: int, page: PageSets, gone: Gone, end: int | None = None) -> None:
        """Gives up the set `page`, number `index` of `node`. If a state above ends within it and
        has no other tail, the set becomes that tail. `end`: it is a tail itself."""
        for step in node.path:
            if step.end <= index * self.page_size:
                break
            if step is not node and step.state is not None and self.paths.tail(step)[0] is None:
                step.tail = page
                if gone.log is not None:
                    gone.log.pages("lost", node, page, index, end)
                    gone.log.pages("gained", step, page, index, step.end, "kept")
                return
        gone.add(page, node, index, end)

    def _has_pages(self, node: Node) -> bool:
        return len(node.pages) > 0 and (self.has_full_group or bool(node.pages.any()))

    def _prune(self, node: Node, kept: Node | None = None) -> None:
        while node.parent is not None and not (node.children or node.is_needed or self._has_pages(node)):
            parent, node.parent = node.parent, None
            del parent.children[node.first]
            self._size -= 1
            node = parent
        if node.parent is None and not node.children:
            self._roots.pop(node.key, None)
        # Without recurrent layers, tokens above may have been used later than those below.
        if self.recurrent and node is not kept and (below := node.join()) is not None:
            self._size -= 1
            if self._windowed:
                self._windows.enlist_all(below, self._size)
        self._leaves.enlist(node, self._size)
