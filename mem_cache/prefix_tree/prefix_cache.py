"""Matches, entries and counts that the prefix cache exchanges with its users, and why reuse ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import GroupPages, PageSets, no_sets, pages_of
from hybridrt.mem_cache.prefix_tree.cache_events import EntryLog, What
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.radix_node import Node
from hybridrt.mem_cache.prefix_tree.texts import SeenTexts


class CacheEntries(NamedTuple):
    """KV pages, by page group, and state slots that change owners together."""

    pages: GroupPages = ()
    states: Sequence[Handle] = ()


class Gone:
    """Entries that change owners, collected.

    Args:
        log: also notes the entries as `what`; None if nobody listens.

    Attributes:
        counts: pages of each group so far.
    """

    def __init__(self, groups: int, log: EntryLog | None = None, what: What = "lost") -> None:
        self.counts = [0] * groups
        self.states: list[Handle] = []
        self.log, self._what = log, what
        self._sets = [no_sets(groups)]

    def add(self, sets: PageSets, node: Node, index: int, end: int | None = None) -> None:
        """Adds the pages of sets [n, G]; `node`, `index` and `end` as in EntryLog.pages."""
        self._sets.append(sets)
        for group, held in enumerate(np.count_nonzero(sets, axis=0).tolist()):
            self.counts[group] += held
        if self.log is not None:
            self.log.pages(self._what, node, sets, index, end)

    def add_state(self, node: Node) -> None:
        """Adds the state of a node that has one."""
        assert node.state is not None
        self.states.append(node.state)
        if self.log is not None:
            self.log.state(self._what, node)

    def entries(self) -> CacheEntries:
        """All that was collected."""
        return CacheEntries(pages_of(np.concatenate(self._sets)), self.states)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A prefix of `length` tokens that needs no computing. The request copies `tail`.

    Attributes:
        pages: [n, G] page sets of its whole KV pages, the cache's, from its first token on. Window
            groups have only the pages that the next token sees. None without attention layers.
        state: the cache's slot with the state after it; None without recurrent layers. The
            request's first step reads this slot and writes the request's own.
        tail: the cache's [1, G] set with the tokens after the last whole page, if the state is in
            the middle of a page.
        known: first tokens of the prompt that are in the tree: more than `length` if a state is
            missing.
        fork: `known`, if another prompt in the tree goes on differently from there; else 0.
        refused: length of a match that there was no room for next to the request; this one is empty.
        node, tail_node: the tree's entries of the match and the tail.
        retokenised: tokens of a cached answer after the place where the prompt leaves it.
        staged: of a prefix that was computed elsewhere: its place in the executor's arena, until
            admission.
        staged_from: of such a prefix, the tokens whose KV in layers without a window is in `pages`
            instead.
    """

    length: int = 0
    pages: PageSets = field(default_factory=lambda: no_sets(0))
    state: Handle | None = None
    tail: PageSets | None = None
    known: int = 0
    node: Node | None = None
    tail_node: Node | None = None
    staged: int | None = None
    staged_from: int = 0
    retokenised: int = 0
    fork: int = 0
    refused: int = 0


NO_MATCH = PrefixMatch()


@dataclass(slots=True)
class CacheCounts:
    """Tokens of admitted requests since the start. A retracted request counts once.

    Attributes:
        asked: all tokens.
        hit: tokens that needed no computing.
        without_state: known tokens with no state at or after them.
        without_kv: tokens whose KV was evicted.
        retokenised: tokens of a cached answer after the place where the prompt leaves it, mostly
            because the history was tokenised anew.
        fetched: tokens that were brought back from main memory, or whose state was.
        dropped: entries, not tokens: their use gave logits that are not finite.
    """

    asked: int = 0
    hit: int = 0
    without_state: int = 0
    without_kv: int = 0
    retokenised: int = 0
    fetched: int = 0
    dropped: int = 0


MissReason = Literal[
    "new", "changed", "no_state", "evicted", "no_room", "skipped", "other_salt", "other_weights", "other_adapter"
]
HELPS: dict[str, str] = {
    "new": "nothing: no earlier text goes on like this",
    "changed": "send the answer's own tokens back: pass token ids, or use a chat template that keeps the whole answer",
    "no_state": "the next prompt that leaves the text here finds a state; more cache_slots keep more of them, and the "
    "end of a system prompt has one if it comes through the chat interface",
    "evicted": "more room (memory_fraction, cache_slots, host_cache_bytes), or all turns of a chat on one worker",
    "no_room": "fewer running requests, or more memory: the cached prefix and the new tokens did not fit together",
    "skipped": "leave prompt_logprobs out: a computed prefix gives none",
    "other_salt": "the same cache_salt, if these clients may share",
    "other_weights": "nothing: it was computed with other weights",
    "other_adapter": "nothing: it was computed with another adapter",
}


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The cause that has cost a prompt most of its reuse.

    Attributes:
        why: "new": no text before has gone on like this. "changed": the prompt leaves a cached
            answer within it (tokenised anew, or shortened). "no_state": the KV is cached, but no
            recurrent state at its end. "evicted": the KV was cached once. "no_room": a cached
            prefix could not be locked next to what the request needs. "skipped": the request may
            not use the cache. "other_salt", "other_weights", "other_adapter": the text is cached for
            requests whose CacheKey differs in this.
        token: number of the prompt's first token that the cause concerns.
        tokens: how many tokens it has cost; 0 for "new" and "skipped".
    """

    why: MissReason
    token: int
    tokens: int = 0

    @property
    def helps(self) -> str:
        """What would make such a prompt hit."""
        return HELPS[self.why]


class LostTokens(NamedTuple):
    """Tokens of a prompt that an earlier text had, and that are computed again. None counts twice."""

    no_state: int
    evicted: int
    changed: int

    @classmethod
    def from_match(cls, match: PrefixMatch, last: int, seen: int, recurrent: bool) -> "LostTokens":
        """`last`: most tokens that the prompt could reuse. `seen`: as SeenTexts.length."""
        evicted, known = max(seen - match.known, 0), min(match.known, last)
        changed = max(min(match.retokenised, last - known) - evicted, 0)
        return cls(known - match.length if recurrent else 0, evicted, changed)

    def cause(self, match: PrefixMatch) -> CacheMiss:
        """The greatest loss."""
        tokens = max(self)
        if not tokens:
            return CacheMiss("new", match.known)
        if tokens == self.no_state:
            return CacheMiss("no_state", match.length, tokens)
        return CacheMiss("evicted" if tokens == self.evicted else "changed", match.known, tokens)


class LostReuse:
    """Counts the tokens that prompts compute although an earlier text had them, by cause. No token
    is counted twice. The last token of a prompt is always computed, so never lost.

    Args:
        counts: gets the sums.
        recurrent: as of RadixCache.
        least: the smallest number of tokens that can be reused.
        grid: a prefix of at most so many tokens has no state, so no other text could share it.
        known_elsewhere: RadixCache.known_elsewhere.

    Attributes:
        texts: all that were given to the cache.
    """

    def __init__(
        self,
        counts: CacheCounts,
        recurrent: bool,
        least: int,
        grid: int,
        known_elsewhere: Callable[[np.ndarray, CacheKey], tuple[int, CacheKey]],
    ) -> None:
        self._counts, self._recurrent, self._least, self._grid = counts, recurrent, least, grid
        self._known_elsewhere = known_elsewhere
        self.texts = SeenTexts()

    def count(self, prompt: np.ndarray, key: CacheKey, match: PrefixMatch) -> CacheMiss | None:
        """Counts the losses of a prompt [n] int32. Returns their greatest cause; None if no more of
        the prompt could be reused."""
        tokens = prompt[:-1]
        lost = LostTokens.from_match(match, len(tokens), self.texts.length(tokens, key), self._recurrent)
        self._counts.without_kv += lost.evicted
        self._counts.retokenised += lost.changed
        self._counts.without_state += lost.no_state
        return self._cause(tokens, key, match, lost)

    def _cause(self, tokens: np.ndarray, key: CacheKey, match: PrefixMatch, lost: LostTokens) -> CacheMiss | None:
        if len(tokens) - match.length < self._least:
            return None
        if match.refused:
            return CacheMiss("no_room", 0, match.refused)
        gap = match.known - match.length
        if gap >= self._least and not self._recurrent:
            return CacheMiss("evicted", match.length, gap)  # of a window
        found = lost.cause(match)
        elsewhere, other = self._known_elsewhere(tokens, key)
        gain = elsewhere - match.known - lost.evicted
        return found if gain <= max(found.tokens, self._grid) else _other_key(key, other, match.known, gain)


def _other_key(ours: CacheKey, theirs: CacheKey, token: int, tokens: int) -> CacheMiss:
    if ours.salt != theirs.salt:
        return CacheMiss("other_salt", token, tokens)
    return CacheMiss("other_weights" if ours.weights != theirs.weights else "other_adapter", token, tokens)
