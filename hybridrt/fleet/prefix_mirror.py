"""What a replica's prefix cache holds, by its events alone: names of prefixes, not their tokens.

A name is a hash of a cache key and of a text's first tokens. Whoever knows the text can make it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from hybridrt.mem_cache.pools.page_groups import first_page
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent, Tier, What
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey

BLOCK = 64  # tokens of a step in the chain of hashes
LOOKS = 2**14  # entries that a match looks up; a microsecond or two each


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What decides which cached entries a prefix needs. Attributes as the arguments of RadixCache.
    `ranks`: engines of the replica, each with a cache of its own. `model`: a digest of its configuration
    and weights; "" if it is not known."""

    page_size: int
    recurrent: bool
    lookahead: int = 0
    windows: tuple[int | None, ...] = (None,)
    ranks: int = 1
    model: str = ""


class PrefixNames:
    """Names of the prefixes of one text, made when they are asked for.

    Args:
        tokens: [n] int32, from token `start` of the text on.
        parent: name of the first `start` tokens, a multiple of BLOCK: `root_name` at 0.
    """

    def __init__(self, tokens: np.ndarray, parent: int, start: int = 0) -> None:
        self._bytes, self._start = np.ascontiguousarray(tokens, "<i4").tobytes(), start
        self._chain, self._known = [parent], dict[int, int]()
        self.length = start + len(tokens)

    def at(self, length: int) -> int:
        """The name of the first `length` tokens, at least `start`."""
        name = self._known.get(length)
        if name is None:
            blocks, rest = divmod(length - self._start, BLOCK)
            while len(self._chain) <= blocks:
                begin = (len(self._chain) - 1) * BLOCK
                self._chain.append(self._next(begin, begin + BLOCK))
            name = self._next(blocks * BLOCK, blocks * BLOCK + rest) if rest else self._chain[blocks]
            self._known[length] = name
        return name

    @cached_property
    def blocks(self) -> dict[int, int]:
        """Every whole block's end by its name, 0 for none. Making it hashes the whole text."""
        self.at(self.length - self.length % BLOCK)
        return {name: self._start + i * BLOCK for i, name in enumerate(self._chain)}

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of the text."""
        return np.frombuffer(self._bytes, "<i4")[start - self._start : end - self._start].tolist()

    def _next(self, begin: int, end: int) -> int:
        parent = self._chain[begin // BLOCK].to_bytes(8, "little")
        return _hash(self._bytes[begin * 4 : end * 4], parent)


def root_name(key: CacheKey = DEFAULT_KEY) -> int:
    """The name of no tokens under a key. It does not show the salt."""
    return _hash(json.dumps(key).encode())


def names_of(tokens: Sequence[int] | np.ndarray, key: CacheKey = DEFAULT_KEY) -> PrefixNames:
    return PrefixNames(np.asarray(tokens, np.int32), root_name(key))


def _hash(data: bytes, parent: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=parent).digest(), "little")


class PrefixMirror:
    """The contents of both tiers of a replica's prefix cache, for each of its engines."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._tiers = {(rank, tier): _TierMirror(layout) for rank in range(layout.ranks) for tier in get_args(Tier)}

    def update(self, events: Iterable[CacheEvent]) -> None:
        """Takes events in their order, the first ones of a subscription included."""
        for event in events:
            names = names_of(event.tokens, event.key)
            self.change(event.what, event.tier, names, event.pages, event.states, event.rank)

    def change(
        self, what: What, tier: Tier, names: PrefixNames, pages: np.ndarray, states: Iterable[int], rank: int = 0
    ) -> None:
        """One event. Attributes as of CacheEvent; `names` are those of its text."""
        if what == "cleared":
            self._tiers[rank, tier] = _TierMirror(self.layout)
        else:
            self._tiers[rank, tier].count(-1 if what == "lost" else 1, names, pages, states)

    def match(self, names: PrefixNames, looks: int = LOOKS) -> int:
        """Tokens of the longest usable prefix of a prompt, at most all but its last one. Each tier looks up
        an equal share of `looks` entries; one that needs more counts as empty.
        """
        return max(tier.match(names, looks // len(self._tiers)) for tier in self._tiers.values())

    def __len__(self) -> int:
        """Entries that it stores, a measure of its memory."""
        return sum(len(tier) for tier in self._tiers.values())


class _TierMirror:
    """Entries of one tier.

    `_states` counts states by name. `_rests` has, for the name at the last multiple of BLOCK tokens,
    how many tokens follow up to each state: a match looks up only these.

    `_pages` counts pages. In layers without a window, all earlier pages of a text are there if a
    later entry is. So a match looks up only the last one, and with recurrent layers none is counted.
    In a window group, a state may need only the first tokens of a page. So the page is counted after
    each of its tokens.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._states = Counter[int]()
        self._rests: dict[int, Counter[int]] = {}
        self._looks = 0  # that the match which runs has left
        self._pages = Counter[tuple[int, int, int]]()  # group, page index, name

    def __len__(self) -> int:
        return len(self._states) + len(self._pages)

    def count(self, by: int, names: PrefixNames, pages: np.ndarray, states: Iterable[int]) -> None:
        for end in states:
            _count(self._states, names.at(end), by)
            before = names.at(end - end % BLOCK)
            rests = self._rests.setdefault(before, Counter())
            _count(rests, end % BLOCK, by)
            if not rests:
                del self._rests[before]
        for group, index, end in pages.tolist():
            if self._layout.windows[group] is not None:
                for place in range(index * self._layout.page_size + 1, end + 1):
                    _count(self._pages, (group, index, names.at(place)), by)
            elif not self._layout.recurrent:
                _count(self._pages, (group, index, names.at(end)), by)

    def match(self, names: PrefixNames, looks: int) -> int:
        if not (self._states if self._layout.recurrent else self._pages):
            return 0
        self._looks = looks
        ends = self._state_ends(names) if self._layout.recurrent else self._page_ends(names)
        return next((end for end in ends if self._sees(names, end) and self._looks > 0), 0)

    def _state_ends(self, names: PrefixNames) -> Iterator[int]:
        """Lengths after which there is a state, the longest first, while looks are left."""
        known = names.blocks
        for start in sorted((known[name] for name in self._rests.keys() & known.keys()), reverse=True):
            for rest in sorted(self._rests[names.at(start)], reverse=True):
                self._looks -= 1
                if self._looks <= 0:
                    return
                end = start + rest
                if end < names.length and names.at(end) in self._states:
                    yield end

    def _page_ends(self, names: PrefixNames) -> Iterator[int]:
        """Lengths in whole pages, the longest first, while looks are left. Of layers without a
        window a page is there if a later one is: the last one is found by halving.
        """
        size, most = self._layout.page_size, (names.length - 1) // self._layout.page_size
        if None in self._layout.windows:
            group, least = self._layout.windows.index(None), 0
            while least < most:
                middle = (least + most + 1) // 2
                found = (group, middle - 1, names.at(middle * size + self._layout.lookahead)) in self._pages
                least, most = (middle, most) if found else (least, middle - 1)
        for length in range(most * size, 0, -size):
            if self._looks <= 0:
                return
            yield length

    def _sees(self, names: PrefixNames, length: int) -> bool:
        """Whether the pages are there that the token after `length` tokens sees."""
        layout = self._layout
        for group, window in enumerate(layout.windows):
            after = -(-length // layout.page_size)
            if window is None:
                seen = range(0 if layout.recurrent else after - 1, 0 if layout.recurrent else after)
            else:
                seen = range(first_page(length, window, layout.page_size), after)
            for index in seen:
                end = (index + 1) * layout.page_size + layout.lookahead
                end = min(end, length) if layout.recurrent else end
                self._looks -= 1
                if self._looks <= 0 or (group, index, names.at(end)) not in self._pages:
                    return False
        return True


def _count(counter: Counter, entry: object, by: int) -> None:
    counter[entry] += by
    if counter[entry] <= 0:
        del counter[entry]
