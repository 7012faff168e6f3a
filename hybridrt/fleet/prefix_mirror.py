"""What a replica's prefix cache holds, by its events alone: names of prefixes, not their tokens.

A name is a hash of a cache key and of a text's first tokens. Whoever knows the text can make it.
"""

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrt.mem_cache.pools.page_groups import first_page
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent, Tier, What
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey

BLOCK = 64  # tokens of a step in the chain of hashes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What decides which cached entries a prefix needs. Attributes as the arguments of RadixCache."""

    page_size: int
    recurrent: bool
    lookahead: int = 0
    windows: tuple[int | None, ...] = (None,)


class PrefixNames:
    """Names of the prefixes of one text, made when they are asked for.

    Args:
        tokens: [n] int32, from token `start` of the text on.
        parent: name of the first `start` tokens, a multiple of BLOCK: `root_name` at 0.
    """

    def __init__(self, tokens: np.ndarray, parent: int, start: int = 0) -> None:
        self._bytes, self._start = np.ascontiguousarray(tokens, "<i4").tobytes(), start
        self._chain, self._known = [parent], dict[int, int]()
        self._blocks = dict[int, int]()
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

    def blocks(self) -> dict[int, int]:
        """Lengths of all whole blocks, by name."""
        if not self._blocks:
            self.at(self.length - self.length % BLOCK)
            self._blocks = {name: self._start + i * BLOCK for i, name in enumerate(self._chain)}
        return self._blocks

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
    """The contents of both tiers of a replica's prefix cache."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._tiers: dict[Tier, _TierMirror] = {"device": _TierMirror(layout), "host": _TierMirror(layout)}

    def update(self, events: Iterable[CacheEvent]) -> None:
        """Takes events in their order, the first ones of a subscription included."""
        for event in events:
            self.change(event.what, event.tier, names_of(event.tokens, event.key), event.pages, event.states)

    def change(self, what: What, tier: Tier, names: PrefixNames, pages: np.ndarray, states: Iterable[int]) -> None:
        """One event. Attributes as of CacheEvent; `names` are those of its text."""
        if what == "cleared":
            self._tiers[tier] = _TierMirror(self.layout)
        else:
            self._tiers[tier].count(-1 if what == "lost" else 1, names, pages, states)

    def match(self, names: PrefixNames) -> int:
        """Tokens of the longest usable prefix of a prompt, at most all but its last one."""
        return max(tier.match(names) for tier in self._tiers.values())

    def __len__(self) -> int:
        """Entries that it stores, a measure of its memory."""
        return sum(len(tier) for tier in self._tiers.values())


class _TierMirror:
    """Entries of one tier.

    States: their names, and at the name of the block before each the number of tokens since. Pages
    of layers without a window are always there if a later entry of the text is, so only the last one
    is looked up, and none with recurrent layers. Of a page in a window group a state may need its
    first tokens alone, so it has a name after each of its tokens.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._states = Counter[int]()
        self._rests: dict[int, Counter[int]] = {}
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

    def match(self, names: PrefixNames) -> int:
        if not self._layout.recurrent:
            return self._match_pages(names) if self._pages else 0
        limit, blocks = names.length - 1, names.blocks() if self._states else {}
        # One intersection of names: a look-up for each block would hold up the router's event loop.
        for start in sorted((blocks[name] for name in self._rests.keys() & blocks.keys()), reverse=True):
            for rest in sorted(self._rests[names.at(start)], reverse=True):
                end = start + rest
                if end <= limit and names.at(end) in self._states and self._sees(names, end):
                    return end
        return 0

    def _match_pages(self, names: PrefixNames) -> int:
        size, windows = self._layout.page_size, self._layout.windows
        lengths = range(size, names.length, size)
        if None in windows:  # that group has the pages of a text up to some length
            group = windows.index(None)
            lengths = lengths[: bisect_left(lengths, True, key=lambda n: not self._group_sees(names, n, group))]
        return next((length for length in reversed(lengths) if self._sees(names, length)), 0)

    def _sees(self, names: PrefixNames, length: int) -> bool:
        return all(self._group_sees(names, length, group) for group in range(len(self._layout.windows)))

    def _group_sees(self, names: PrefixNames, length: int, group: int) -> bool:
        """Whether those pages of a group are there that the token after `length` tokens sees."""
        layout, window = self._layout, self._layout.windows[group]
        after = -(-length // layout.page_size)
        if window is not None:
            seen = range(first_page(length, window, layout.page_size), after)
        else:
            seen = range(0) if layout.recurrent else range(after - 1, after)
        for index in seen:
            end = (index + 1) * layout.page_size + layout.lookahead
            end = min(end, length) if layout.recurrent else end
            if (group, index, names.at(end)) not in self._pages:
                return False
        return True


def _count(counter: Counter, entry: object, by: int) -> None:
    counter[entry] += by
    if counter[entry] <= 0:
        del counter[entry]
