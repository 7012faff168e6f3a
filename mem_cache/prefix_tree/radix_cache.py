"""The prefix tree: a radix tree over tokens with the KV pages and recurrent states of prefixes.

A node is a prefix: the tokens on the path from the root. Its edge holds the tokens since its
parent. It owns the KV pages that become complete within its edge and at most one recurrent state,
that after its last token. Page i is complete once the tokens up to (i + 1) * page_size + lookahead
are on the path: the KV of a prediction head depends on the next token too (lookahead 1). So a page
depends only on tokens of its own path, and a node can be cut anywhere. A state in the middle of a
page has a tail: the page with the tokens between the last complete page and the state. (A hit
copies the tail with the head's KV of the last token before the state, which may have been computed
with another next token. That can make one draft worse; it changes no output token.)

    root ── "You are a helpful ..." ──┬── "Hi"            state, tail
                   state              └── "What is ..." ── ...

A prefix is usable up to the deepest node with a state (without recurrent layers: up to the last
complete page). Eviction removes pages from the ends of leaves, least recently used first, with the
states that need them. It removes states in the order of mem_cache/prefix_tree/state_worth.py.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType

import numpy as np

from hybridrt.mem_cache.pools.slots import Slot, Slots
from hybridrt.mem_cache.prefix_tree.prefix_cache import NO_MATCH, CacheEntries, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_node import (
    Node,
    StateKind,
    in_common,
    is_idle_leaf,
    leaves_prompt,
    left_answer,
)
from hybridrt.mem_cache.prefix_tree.state_worth import NewState, StateWorths


class RadixCache:
    """The prefix cache of an engine: bookkeeping in host memory.

    Args:
        page_size: tokens of a KV page; 0 for a model without attention layers.
        recurrent: the model has recurrent layers, so a prefix needs a state.
        lookahead: 1 if the KV of a token depends on the next one (prediction heads), else 0.
    """

    def __init__(self, page_size: int, recurrent: bool, lookahead: int = 0) -> None:
        self.page_size, self.recurrent, self.lookahead = page_size, recurrent, lookahead
        self.clear()

    def clear(self) -> None:
        """Forgets everything, readers included. The coordinator has freed all entries."""
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._worths = StateWorths()
        self.waiting = self._worths.waiting
        self._order = count()
        self._size = 0  # nodes, without roots
        self._leaves: list[tuple[int, int, Node]] = []  # heap by `used`; entries may be out of date

    # -- requests

    def match(self, tokens: np.ndarray, salt: str = "") -> PrefixMatch:
        """The longest usable prefix of a prompt, shorter than the prompt: its last token gives
        logits.

        Args:
            tokens: [n] int32.
            salt: prompts share nothing with those of another salt.
        """
        node, known = self._descend(salt, tokens)
        if not known:
            return NO_MATCH
        limit, left = len(tokens) - 1, left_answer(node, known, len(tokens))
        if not self.recurrent:
            pages = self.complete(min(known, limit + self.lookahead))
            if not pages:
                return PrefixMatch(known=known, retokenised=left)
            found = self._covering(node, pages)
            held = self._pages(found)[:pages]
            return PrefixMatch(pages * self.page_size, held, known=known, node=found, retokenised=left)
        fork = known if leaves_prompt(node, known) else 0
        while node.parent is not None and (node.state is None or node.end > min(known, limit)):
            node = node.parent
        if node.parent is None:
            return PrefixMatch(known=known, retokenised=left, fork=fork)
        owner, held = self._tail_node(node), self._pages(node)
        tail = None if owner is None else owner.tail if owner is node or not owner.pages else owner.pages[0]
        return PrefixMatch(node.end, held, node.state, tail, known, node, owner, retokenised=left, fork=fork)

    def held(self, tokens: np.ndarray, salt: str = "") -> tuple[PrefixMatch, set[int]]:
        """The complete pages of a text, to be locked or used, and the positions of its states. They
        need not be a usable prefix.
        """
        node, known = self._descend(salt, tokens)
        states = {step.end for step in node.path if step.state is not None and step.end <= known}
        pages = self.complete(known)
        node = self._covering(node, pages) if pages else node
        length = pages * self.page_size
        return PrefixMatch(length, self._pages(node)[:pages], node=None if node.parent is None else node), states

    def touch(self, tokens: np.ndarray, salt: str) -> int:
        """Marks a text as used now. Returns how many of its tokens are in complete pages."""
        held, _ = self.held(tokens, salt)
        self.lock(held)
        self.unlock(held)
        return held.length

    def complete(self, position: int) -> int:
        return max(position - self.lookahead, 0) // self.page_size if self.page_size else 0

    def expect(self, tokens: np.ndarray, arrival: int, salt: str = "") -> None:
        """Notes that a request waits, of this prompt and number of arrival. It awaits the deepest
        state of its prompt, whatever is inserted or evicted meanwhile.
        """
        self.waiting.add(arrival, tokens, salt)
        match = self.match(tokens, salt)
        if match.node is not None:
            self._use(match.node)
            if match.state is not None:
                self._worths.await_state(match.node, {arrival})

    def forget(self, arrival: int) -> None:
        self._worths.admitted = max(self._worths.admitted, arrival)
        self.waiting.remove(arrival)
        self._worths.forget(arrival)

    def lock(self, match: PrefixMatch) -> None:
        """Keeps a match from eviction until `unlock`. Locks count."""
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

    def unlock_state(self, match: PrefixMatch) -> Slots:
        """The request has read state and tail of its match. Returns pages that were kept for it
        alone.
        """
        freed, owner = Slots(), match.tail_node
        if match.node is not None and match.state is not None:
            match.node.state_readers -= 1
            self._worths.enlist(match.node)
        if owner is not None:
            owner.readers -= 1
            owner.tail_readers -= 1
            if owner.state is None:
                self._drop_tail(owner, freed)
            self._prune(owner)
        return freed

    def unlock(self, match: PrefixMatch) -> None:
        """The request no longer reads the pages of its match. Call `unlock_state` first."""
        if match.node is not None:
            match.node.readers -= 1
            self._worths.left(match.node)
            self._prune(match.node)

    def insert(
        self,
        tokens: np.ndarray,
        pages: Sequence[Slot],
        states: Mapping[int, Slot],
        salt: str = "",
        prompt: int | None = None,
        kinds: Mapping[int, StateKind] = MappingProxyType({}),
    ) -> tuple[CacheEntries, "Node"]:
        """Offers KV and states of a text.

        Args:
            tokens: [n] int32, those whose KV the pages hold; the last page may be partly filled.
            pages: all pages of the text, in order. The tree recognises by their index those that it
                already has.
            states: slots by the number of tokens in the state.
            prompt: how many of the tokens were a prompt; None: all.
            kinds: kinds of `states` at forks and within an answer.

        Returns:
            The entries that the tree takes over (the caller keeps the others), and the deepest node
                of the text: a root (parent None) if the tree keeps nothing of it.
        """
        pages, taken_pages = Slots(pages), Slots()
        answer = len(tokens) if prompt is None else prompt
        ends = sorted(end for end in states if 0 < end <= len(tokens))
        complete = self.complete(len(tokens))
        last = max(complete * self.page_size + self.lookahead if complete else 0, ends[-1] if ends else 0)
        path = [self._root(salt)]
        for end in (*ends, last):
            path.append(self._extend(path[-1], tokens[:end], pages, taken_pages, answer))
        deepest, made = path[-1], [node for node in path[1:-1] if node.state is None]
        # Deepest first: a page of a deeper node may hold the tail of a state above.
        for node in reversed(made):
            whole = node.end + self.lookahead >= len(tokens)
            node.kind = kinds.get(node.end, StateKind.END if whole else StateKind.PROMPT)
            self._keep_state(node, states[node.end], pages, taken_pages)
        self._worths.made(made, tokens, salt)
        self._use(deepest)
        self._prune(deepest, kept=deepest)
        return CacheEntries(taken_pages, [node.state for node in made if node.state is not None]), deepest

    def evict(self, num_pages: int, num_states: int, *, new: NewState | None = None) -> CacheEntries:
        """Removes and returns up to so many entries that no request reads. `new`: the state that
        replaces the evicted one, if that is worth less.
        """
        pages, states = Slots(), list[Slot]()
        while len(pages) < num_pages and (leaf := self._oldest_leaf()) is not None:
            self._shorten(leaf, num_pages - len(pages), pages, states)
        while len(states) < num_states and (node := self._worths.least(new, self._clock)) is not None:
            if not node.awaited:
                self._worths.inflation = max(self._worths.inflation, self._worths.of(node))
            self._drop_state(node, pages, states)
            self._prune(node)
        return CacheEntries(pages, states)

    def thin(self, node: Node, most: int) -> CacheEntries:
        """Removes and returns the states within answers on the path of a node, except the deepest
        `most`.
        """
        within = [step for step in node.path if step.state is not None and step.kind is StateKind.ANSWER]
        pages, states = Slots(), list[Slot]()
        for step in within[most:]:
            self._drop_state(step, pages, states)
            self._prune(step, kept=node)
        return CacheEntries(pages, states)

    def supersede(self, match: PrefixMatch) -> Slot | None:
        """Removes the state that a request has started from, so that its slot can hold a later
        state of the request. The request's lock on it ends.

        Returns:
            The slot. None, with nothing changed, if the state is at a fork, another request has
                used or awaits it, or its tail is still being read.
        """
        node = match.node
        if node is None or node.state is None or node.end != match.length or node.kind is StateKind.FORK:
            return None
        others = node.hits > 1 or node.awaited or node.state_readers > (match.state is not None)
        if others or node.tail is not None or match.tail_node is not None:
            return None
        self._worths.dropped(node)
        state, node.state, node.state_readers = node.state, None, 0
        return state

    @property
    def num_within(self) -> int:
        return len(self._worths.answers)

    def nodes(self) -> Iterator[Node]:
        below = [node for root in self._roots.values() for node in root.children.values()]
        while below:
            yield (node := below.pop())
            below += node.children.values()

    # -- walking

    def _root(self, salt: str) -> Node:
        return self._roots.get(salt) or self._roots.setdefault(salt, Node(np.empty(0, np.int32), 0, salt=salt))

    def _descend(self, salt: str, tokens: np.ndarray) -> tuple[Node, int]:
        node, known = self._roots.get(salt) or Node(np.empty(0, np.int32), 0), 0
        while known < len(tokens) and (child := node.children.get(int(tokens[known]))) is not None:
            shared = in_common(child.tokens, tokens[known:])
            node, known = child, known + shared
            if shared < len(child.tokens):
                break
        return node, known

    def _pages(self, node: Node) -> Slots:
        path = list(node.path)
        return Slots(*[step.pages for step in reversed(path)])

    def _covering(self, node: Node, pages: int) -> Node:
        while node.parent is not None and self.complete(node.parent.end) >= pages:
            node = node.parent
        return node

    def _tail_node(self, node: Node) -> Node | None:
        """Owner of the page with the tokens after a node's last complete page; None if there are no
        such tokens. It is the node, or one below with a page of the same tokens and more.
        """
        index = self.complete(node.end)
        if not self.page_size or index * self.page_size == node.end:
            return None
        below = [node] if node.tail is not None else node.found
        while below:
            node = below.pop()
            if node.pages or node.tail is not None:
                return node
            below += node.found
        return None

    # -- growing

    def _extend(self, node: Node, tokens: np.ndarray, pages: Slots, taken: Slots, answer: int) -> Node:
        while node.end < len(tokens):
            child = node.children.get(int(tokens[node.end]))
            if child is None:
                fresh = pages[self.complete(node.end) : self.complete(len(tokens))]
                edge = tokens[node.end :].copy()
                child = Node(edge, node.end, node, pages=fresh, answer=answer, first=int(edge[0]))
                node.children[child.first] = child
                self._size += 1
                taken.extend(fresh)
                return child
            shared = in_common(child.tokens, tokens[node.end :])
            node = child if shared == len(child.tokens) else self._split(child, shared)
        return node

    def _split(self, node: Node, at: int) -> Node:
        kept = node.state or node.tail or node.readers or node.children
        if not kept and self.complete(node.start) + len(node.pages) <= self.complete(node.start + at):
            node.tokens = node.tokens[:at].copy()  # nothing would be left below
            return node
        self._size += 1
        return node.cut(at, self.complete(node.start + at) - self.complete(node.start))

    def _keep_state(self, node: Node, state: Slot, pages: Slots, taken: Slots) -> None:
        node.state = state
        index = self.complete(node.end)
        if self.page_size and index * self.page_size < node.end and self._tail_node(node) is None:
            node.tail = pages[index]
            taken.append(node.tail)

    # -- giving up

    def _use(self, node: Node) -> None:
        self._clock += 1
        for step in node.path:
            step.used = self._clock

    def _enlist(self, node: Node) -> None:
        if is_idle_leaf(node):
            heapq.heappush(self._leaves, (node.used, next(self._order), node))
        if len(self._leaves) > 64 + 4 * self._size:
            self._leaves = [(n.used, next(self._order), n) for n in self.nodes() if is_idle_leaf(n)]
            heapq.heapify(self._leaves)

    def _oldest_leaf(self) -> Node | None:
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if is_idle_leaf(node):
                if used == node.used:
                    return node
                heapq.heappush(self._leaves, (node.used, next(self._order), node))
        return None

    def _shorten(self, leaf: Node, max_pages: int, pages: Slots, states: list[Slot]) -> None:
        first, wanted = self.complete(leaf.start), len(pages) + max_pages
        self._drop_state(leaf, pages, states)
        if leaf.pages:  # all their tokens are the leaf's, so no state above needs one as its tail
            own = len(leaf.pages) + first - -(-leaf.start // self.page_size)
            pages.extend(leaf.pages.cut(max(min(own, wanted - len(pages)), 0)))
        while leaf.pages and len(pages) < wanted:
            self._let_go(leaf, first + len(leaf.pages) - 1, leaf.pages.cut(1)[0], pages)
        end = (first + len(leaf.pages)) * self.page_size + self.lookahead if leaf.pages else leaf.start
        leaf.tokens = leaf.tokens[: end - leaf.start].copy()
        # With recurrent layers no request can use the rest of the leaf without a state: evict it
        # next.
        leaf.used = 0 if self.recurrent else leaf.used
        self._prune(leaf)

    def _drop_state(self, node: Node, pages: Slots, states: list[Slot]) -> None:
        if node.state is not None:
            states.append(node.state)
            self._worths.dropped(node)
        node.state = None
        self._drop_tail(node, pages)

    def _drop_tail(self, node: Node, pages: Slots) -> None:
        """Releases the tail of a node without a state, unless a request reads it for a state
        further up.
        """
        if node.tail is not None and not node.tail_readers:
            tail, node.tail = node.tail, None
            self._let_go(node, self.complete(node.end), tail, pages)

    def _let_go(self, node: Node, index: int, page: Slot, pages: Slots) -> None:
        """Adds page `index` of `node` to `pages`. If a state above ends in the middle of it and has
        no other tail, the page becomes its tail instead.
        """
        for step in node.path:
            if step.end <= index * self.page_size:
                break
            if step is not node and step.state is not None and self._tail_node(step) is None:
                step.tail = page
                return
        pages.append(page)

    def _prune(self, node: Node, kept: Node | None = None) -> None:
        while node.parent is not None and not (node.children or node.pages or node.state or node.tail or node.readers):
            parent, node.parent = node.parent, None
            del parent.children[node.first]
            self._size -= 1
            node = parent
        if node.parent is None and not node.children:
            self._roots.pop(node.salt, None)
        # Without recurrent layers, tokens above may have been used later than those below.
        if self.recurrent and node is not kept and node.join():
            self._size -= 1
        self._enlist(node)
