"""Which prompts wait for admission: the next uses of cached states that are known."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hybridrt.mem_cache.radix_node import in_common

NEAREST = 32


class _Text(NamedTuple):
    tokens: np.ndarray
    salt: str


class WaitingTexts:
    """Prompts by order of arrival."""

    def __init__(self) -> None:
        self._texts = dict[int, _Text]()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, arrival: int, tokens: np.ndarray, salt: str) -> None:
        """A prompt [n] int32 waits."""
        self._texts[arrival] = _Text(tokens, salt)

    def remove(self, arrival: int) -> None:
        """It waits no longer."""
        self._texts.pop(arrival, None)

    def behind(self, tokens: np.ndarray, salt: str) -> set[int]:
        """Arrivals of the prompts that begin with `tokens` [n] int32 and are longer."""
        size = len(tokens)
        last = tokens[-1]
        return {
            arrival
            for arrival, text in self._texts.items()
            if len(text.tokens) > size
            and text.tokens[size - 1] == last
            and text.salt == salt
            and np.array_equal(text.tokens[:size], tokens)
        }

    def partings(self, tokens: np.ndarray, salt: str) -> Iterator[int]:
        """How many first tokens `tokens` [n] int32 has in common with each of the nearest prompts."""
        for i, text in enumerate(self._texts.values()):
            if i == NEAREST:
                return
            if text.salt == salt and len(text.tokens) and text.tokens[0] == tokens[0]:
                yield in_common(text.tokens, tokens)
