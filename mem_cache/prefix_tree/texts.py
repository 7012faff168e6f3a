"""Texts next to the prefix tree: prompts that wait, and hashes of all texts so far.

Prompts that wait for admission are the known next uses of cached states. The hashes show what
eviction has cost: they also have texts that are not cached.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey

NEAREST = 32
BLOCK = 128
MAX_BLOCKS = 65_536


class _Text(NamedTuple):
    tokens: np.ndarray
    key: CacheKey


class WaitingTexts:
    """Prompts by order of arrival."""

    def __init__(self) -> None:
        self._texts = dict[int, _Text]()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, arrival: int, tokens: np.ndarray, key: CacheKey) -> None:
        self._texts[arrival] = _Text(tokens, key)

    def remove(self, arrival: int) -> None:
        self._texts.pop(arrival, None)

    def continuing(self, tokens: np.ndarray, key: CacheKey) -> set[int]:
        """Arrivals of the longer prompts that begin with `tokens` [n] int32."""
        return self._going_on(tokens, key, self._texts)

    def continuing_each(self, beginnings: Iterable[np.ndarray], key: CacheKey) -> Iterator[set[int]]:
        found: Collection[int] = self._texts
        for tokens in beginnings:
            yield (found := self._going_on(tokens, key, found))

    def _going_on(self, tokens: np.ndarray, key: CacheKey, arrivals: Collection[int]) -> set[int]:
        size = len(tokens)
        last = tokens[-1] if arrivals else None
        return {
            arrival
            for arrival in arrivals
            if len((text := self._texts[arrival]).tokens) > size
            and text.tokens[size - 1] == last
            and text.key == key
            and np.array_equal(text.tokens[:size], tokens)
        }

    def partings(self, tokens: np.ndarray, key: CacheKey) -> Iterator[int]:
        """Length of the common prefix of `tokens` [n] int32 with each of the nearest prompts."""
        for i, text in enumerate(self._texts.values()):
            if i == NEAREST:
                return
            if text.key == key and len(text.tokens) and text.tokens[0] == tokens[0]:
                yield in_common(text.tokens, tokens)


def in_common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first entries of a [n] and b [m] are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


class SeenTexts:
    """Hashes of the beginnings of texts in blocks of BLOCK tokens; the latest MAX_BLOCKS of them."""

    def __init__(self) -> None:
        self._blocks = dict[int, None]()

    def clear(self) -> None:
        self._blocks.clear()

    def note(self, tokens: np.ndarray, key: CacheKey) -> None:
        for block in _hashes(tokens, key):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]

    def length(self, tokens: np.ndarray, key: CacheKey) -> int:
        """How many first tokens another text had too, in whole blocks."""
        count = 0
        for block in _hashes(tokens, key):
            if block not in self._blocks:
                break
            count += BLOCK
        return count


def _hashes(tokens: np.ndarray, key: CacheKey) -> list[int]:
    data, size, before, found = tokens.astype(np.int64).tobytes(), BLOCK * 8, hash(key), list[int]()
    for start in range(0, len(data) - size + 1, size):
        before = hash((before, data[start : start + size]))
        found.append(before)
    return found
