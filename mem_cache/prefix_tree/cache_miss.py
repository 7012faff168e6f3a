"""Why a prompt's reuse of the prefix cache ended where it did, and what would help."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch

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


def other_key(ours: CacheKey, theirs: CacheKey, token: int, tokens: int) -> CacheMiss:
    if ours.salt != theirs.salt:
        return CacheMiss("other_salt", token, tokens)
    return CacheMiss("other_weights" if ours.weights != theirs.weights else "other_adapter", token, tokens)
