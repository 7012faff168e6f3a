"""Why a prompt's reuse of the prefix cache ended where it did, what would help, and the sums of it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheCounts, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.texts import SeenTexts

MissReason = Literal[
    "new", "changed", "no_state", "evicted", "no_room", "skipped", "other_salt", "other_weights", "other_adapter"
]
_HELPS: dict[MissReason, str] = {
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
        return _HELPS[self.why]


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
        grid: a prefix of at most so many tokens has no state, so no other text could share it.

    Attributes:
        texts: all that were given to the cache.
    """

    def __init__(self, tree: RadixCache, counts: CacheCounts, grid: int) -> None:
        self._tree, self._counts, self._grid = tree, counts, grid
        self.texts = SeenTexts()

    def count(self, prompt: np.ndarray, key: CacheKey, match: PrefixMatch) -> CacheMiss | None:
        """Counts the losses of a prompt [n] int32. Returns their greatest cause; None if no more of
        the prompt could be reused."""
        last = len(prompt) - 1
        lost = LostTokens.from_match(match, last, self.texts.length(prompt[:last], key), self._tree.recurrent)
        self._counts.without_kv += lost.evicted
        self._counts.retokenised += lost.changed
        self._counts.without_state += lost.no_state
        return self._cause(prompt[:last], key, match, lost)

    def _cause(self, tokens: np.ndarray, key: CacheKey, match: PrefixMatch, lost: LostTokens) -> CacheMiss | None:
        recurrent = self._tree.recurrent
        least = 1 if recurrent else self._tree.page_size + self._tree.lookahead  # tokens that can be reused
        if len(tokens) - match.length < least:
            return None
        if match.refused:
            return CacheMiss("no_room", 0, match.refused)
        gap = match.known - match.length
        if gap >= least and not recurrent:
            return CacheMiss("evicted", match.length, gap)  # of a window
        found = lost.cause(match)
        elsewhere, other = self._tree.known_elsewhere(tokens, key)
        gain = elsewhere - match.known - lost.evicted
        return found if gain <= max(found.tokens, self._grid) else _other_key(key, other, match.known, gain)


def _other_key(ours: CacheKey, theirs: CacheKey, token: int, tokens: int) -> CacheMiss:
    if ours.salt != theirs.salt:
        return CacheMiss("other_salt", token, tokens)
    return CacheMiss("other_weights" if ours.weights != theirs.weights else "other_adapter", token, tokens)
