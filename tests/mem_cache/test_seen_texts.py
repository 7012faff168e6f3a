"""SeenTexts: beginnings in whole blocks, by salt, and no more of them than there is room for."""

import numpy as np
import pytest

from hybridrt.mem_cache.prefix_tree import texts
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.mem_cache.prefix_tree.texts import BLOCK, SeenTexts


def test_beginnings_in_whole_blocks() -> None:
    seen, text = SeenTexts(), np.arange(3 * BLOCK + 5, dtype=np.int32)
    assert seen.length(text, DEFAULT_KEY) == 0
    seen.note(text, DEFAULT_KEY)
    assert seen.length(text, DEFAULT_KEY) == 3 * BLOCK and seen.length(text, CacheKey("salt")) == 0
    assert seen.length(np.concatenate((text[: BLOCK + 1], text)), DEFAULT_KEY) == BLOCK
    seen.clear()
    assert seen.length(text, DEFAULT_KEY) == 0


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_BLOCKS", 3)
    seen, two = SeenTexts(), [np.full(2 * BLOCK, i, np.int32) for i in range(2)]
    for text in two:
        seen.note(text, DEFAULT_KEY)
    assert [seen.length(text, DEFAULT_KEY) for text in two] == [0, 2 * BLOCK]
