"""Planted causes of misses are named: the first token that each concerns, and how many it has cost."""

from typing import Any

import numpy as np
import pytest

from hybridrt import CacheMiss
from hybridrt.engine.core.engine import Engine
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.radix_cache import OTHER_KEYS
from hybridrt.mem_cache.prefix_tree.texts import BLOCK
from tests.engine.test_prefix_states import rig_with_cache
from tests.support.engine_harness import VOCAB, Rig
from tests.support.mock_executor import tokens_alone

TEXT = tokens_alone([4, 2], 5, 300, VOCAB)
ROOM = {"pages": 400, "slots": 9, "page_size": 4, "max_model_len": 400, "chunk": 256}


def ask(rig: Rig, prompt: list[int], **params: Any) -> list[int]:
    return rig.finish(prompt, **({"max_tokens": 1, "seed": 1, "ignore_eos": True} | params)).token_ids


def miss(rig: Rig, prompt: list[int], **params: Any) -> CacheMiss | None:
    ask(rig, prompt, **params)
    metrics = rig.outputs[list(rig.outputs)[-1]].metrics
    found = metrics.cache_miss
    assert found is None or (found.helps and metrics.cached_tokens <= found.token < len(prompt))
    return found


def other(token: int) -> int:
    return (token + 1) % VOCAB


@pytest.mark.parametrize(("slots", "length"), [(9, 13), (0, 13), (0, 15)])
def test_nothing_was_missed(slots: int, length: int) -> None:
    """Without states a prompt of 15 tokens reuses its whole pages, 12 tokens."""
    rig = rig_with_cache(grid=4, **ROOM | {"slots": slots})
    ask(rig, TEXT[:length])
    assert miss(rig, TEXT[:length]) is None
    assert rig.pools.prefixes.counts.hit == 12


def test_a_text_that_was_never_seen() -> None:
    rig = rig_with_cache(**ROOM)
    assert miss(rig, TEXT[:40]) == CacheMiss("new", 0)
    answer = ask(rig, TEXT[100:140], max_tokens=4)
    second = [*TEXT[100:140], *answer, *TEXT[:9]]
    assert miss(rig, second) == CacheMiss("new", rig.outputs[list(rig.outputs)[-1]].metrics.cached_tokens)


def test_no_state_where_the_prompt_parts() -> None:
    """The second prompt leaves one there, which the third one finds."""
    rig = rig_with_cache(**ROOM)
    ask(rig, TEXT[:80])
    parted = [[*TEXT[:50], other(TEXT[50] + i), *TEXT[200:220]] for i in range(2)]
    assert miss(rig, parted[0]) == CacheMiss("no_state", 0, 50)
    assert miss(rig, parted[1]) == CacheMiss("no_state", 48, 2)


@pytest.mark.parametrize("slots", [9, 0])
def test_evicted_tokens(slots: int) -> None:
    rig = rig_with_cache(**ROOM | {"slots": slots})
    ask(rig, TEXT[: 2 * BLOCK + 5])
    rig.pools.prefixes.evict([400], 9)
    assert miss(rig, TEXT[: 2 * BLOCK + 9]) == CacheMiss("evicted", 0, 2 * BLOCK)


def test_evicted_tokens_of_a_window() -> None:
    """Without recurrent layers. The tree knows the text, and its last window has gone."""
    rig = rig_with_cache(**ROOM | {"slots": 0}, windows=(None, 8))
    ask(rig, TEXT[:80])
    rig.pools.prefixes.evict([0, 400], 0)
    assert miss(rig, TEXT[:90]) == CacheMiss("evicted", 0, 80)


def test_a_changed_answer() -> None:
    rig = rig_with_cache(**ROOM)
    answer = ask(rig, TEXT[:20], max_tokens=60)
    changed = [*TEXT[:20], *answer[:5], other(answer[5]), *answer[6:], 9, 8]
    assert miss(rig, changed) == CacheMiss("changed", 25, 54)


def test_no_room_for_the_prefix_next_to_the_request() -> None:
    """The only slot that no other request has is that of the prefix."""
    rig = rig_with_cache(**ROOM | {"slots": 2}, rows=2)
    ask(rig, TEXT[:34])
    rig.add(TEXT[100:130], max_tokens=30, ignore_eos=True, seed=1)
    rig.step()
    assert rig.pools.prefixes.tree.match(np.array([*TEXT[:34], 9], np.int32)).length == 34
    assert miss(rig, [*TEXT[:34], 9, 8]) == CacheMiss("no_room", 0, 34)


def test_a_request_that_skips_the_cache() -> None:
    rig = rig_with_cache(**ROOM)
    ask(rig, TEXT[:40])
    assert miss(rig, TEXT[:40], prompt_logprobs=0) == CacheMiss("skipped", 0)


@pytest.mark.parametrize("field", CacheKey._fields)
def test_a_text_of_another_key(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def become(value: str) -> None:
        monkeypatch.setattr(Engine, "cache_key", lambda self, params: CacheKey(**{field: value}))

    rig = rig_with_cache(**ROOM)
    become("one")
    ask(rig, TEXT[:40])
    become("two")
    assert miss(rig, [*TEXT[:40], 9]) == CacheMiss(f"other_{field}", 0, 40)
    assert miss(rig, [*TEXT[:40], 9, 9]) is None, "its own key has it now"
    for i in range(OTHER_KEYS):
        become(f"later {i}")
        ask(rig, TEXT[200 + i : 210 + i])
    become("three")
    assert miss(rig, [*TEXT[:40], 9]) == CacheMiss("new", 0), "the latest ones alone are examined"
