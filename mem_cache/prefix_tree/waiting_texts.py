"""Prompts that wait for admission: the known next uses of cached states."""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.radix_node import in_common

NEAREST = 32


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

    def behind(self, tokens: np.ndarray, key: CacheKey) -> set[int]:
        """Arrivals of the longer prompts that begin with `tokens` [n] int32."""
        return self._going_on(tokens, key, self._texts)

    def behind_each(self, beginnings: Iterable[np.ndarray], key: CacheKey) -> Iterator[set[int]]:
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
