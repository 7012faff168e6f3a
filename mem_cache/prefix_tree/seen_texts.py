"""Hashes of all texts so far, cached or not: they show what eviction has cost."""

import numpy as np

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey

BLOCK = 128
MAX_BLOCKS = 65_536


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
    data, size, before, found = tokens.tobytes(), BLOCK * tokens.itemsize, hash(key), list[int]()
    for start in range(0, len(data) - size + 1, size):
        before = hash((before, data[start : start + size]))
        found.append(before)
    return found
