"""Prompts of waiting requests: which of them go on from a text, and where they leave one."""

import numpy as np

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.texts import NEAREST, WaitingTexts

A, B = CacheKey("a"), CacheKey("b")


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def waiting() -> WaitingTexts:
    texts = WaitingTexts()
    texts.add(4, array(1, 2, 3, 4), A)
    texts.add(5, array(1, 2, 9, 4), A)
    texts.add(6, array(1, 2, 3), A)
    texts.add(7, array(1, 2, 3, 4, 5), B)
    return texts


def test_prompts_that_go_on_from_a_text() -> None:
    texts = waiting()
    found = [texts.continuing(array(*tokens), A) for tokens in ((1,), (1, 2, 3), (1, 2, 3, 4), (2,), (5, 3))]
    assert found == [{4, 5, 6}, {4}, set(), set(), set()]
    texts.remove(4)
    texts.remove(99)
    assert texts.continuing(array(1, 2, 3), A) == set() and len(texts) == 3


def test_prompts_that_go_on_from_each_beginning_of_a_text() -> None:
    texts = waiting()
    beginnings = [array(1, 2, 3, 4, 5)[:n] for n in (1, 2, 3, 4, 5)]
    for key in (A, B, CacheKey("c")):
        assert list(texts.continuing_each(beginnings, key)) == [texts.continuing(tokens, key) for tokens in beginnings]


def test_where_the_nearest_prompts_leave_a_text() -> None:
    texts = waiting()
    assert list(texts.partings(array(1, 2, 3, 7), A)) == [3, 2, 3]
    for i in range(NEAREST):
        texts.add(10 + i, array(1, 8), A)
    assert len(list(texts.partings(array(1, 2, 3, 7), A))) == NEAREST - 1, "one of the nearest has another key"
