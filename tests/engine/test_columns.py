"""The columns of running requests say what the requests say, and a blocked request costs nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from tests.support.engine_harness import Rig


@pytest.mark.parametrize("changes", [{}, {"drafts": 3}, {"pages": 12, "rows": 6}, {"windows": (6,), "slots": 0}])
def test_columns_agree_with_requests_after_every_step(changes: dict[str, Any]) -> None:
    rig = Rig(late=1, max_model_len=40, **changes)
    for i in range(9):
        rig.add([3 + i] * (1 + 3 * i), max_tokens=12, ignore_eos=True, seed=i)
    columns, steps = rig.pools.columns, 0
    while rig.engine.has_unfinished():
        rig.step()
        for request in rig.engine._scheduler.running.values():
            assert request.row is not None
            row = request.row.index
            assert columns.output_index[row] == len(request.output) + request.pending
            assert columns.prefill_end[row] == request.prefill_end
            assert columns.max_output[row] == request.max_len - len(request.prompt)
            assert columns.capacity[row] == request.end_page * 4
            assert 0 <= request.pending <= 2 * (1 + changes.get("drafts", 0))
            assert request.settled <= request.computed <= columns.capacity[row]
        steps += 1
    assert steps > 12


def test_a_request_that_found_no_room_is_not_looked_at_before_room_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching a long prompt anew in every step would cost every step."""
    matched: list[int] = []

    def match(self: RadixCache, tokens: Sequence[int], key: CacheKey) -> PrefixMatch:
        matched.append(len(tokens))
        return PrefixMatch()

    monkeypatch.setattr(RadixCache, "match", match)
    rig = Rig(rows=4, pages=10, cache=True)
    rig.add([5], max_tokens=12, ignore_eos=True)
    rig.step()
    rig.step()
    rig.add([7] * 33, max_tokens=2, ignore_eos=True)
    before = len(matched)
    for _ in range(2):
        rig.step()
    assert len(matched) == before + 1, "once, and not before a page is taken"
    rig.run()
    assert matched.count(33) < 8
