"""Random conversations in which cached prefixes turn out to be useless: tokens stay right, nothing leaks."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hybridrt.engine.cache import host_fetches
from hybridrt.engine.request.outputs import FinishReason
from hybridrt.engine.request.sample_request import NOT_FINITE, NotFinite, Request
from tests.engine.test_prefix_soak import Talks
from tests.support.mock_executor import Windows


@pytest.mark.parametrize("windows", [(None,), (7,), (None, 7)])
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (0, 120),
        pytest.param(1, 120, marks=pytest.mark.slow),
        pytest.param(2, 250, marks=pytest.mark.slow),
        *(pytest.param(s, 2000, marks=pytest.mark.soak) for s in range(4)),
    ],
)
def test_dropped_prefixes_leave_the_ledgers_and_the_tokens_right(
    seed: int, steps: int, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts and without, chunks, overlap, main memory, several samples, aborts. One hit in eight ends in NaN."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    draws, append, restarted = random.Random(seed), Request.append, list[str]()

    def broken(request: Request, tokens: Sequence[int], logprobs: Any) -> FinishReason | None:
        if request.prefix.length and not request.afresh and draws.random() < 0.12:
            restarted.append(request.request_id)
            raise NotFinite(NOT_FINITE)
        return append(request, tokens, logprobs)

    monkeypatch.setattr(Request, "append", broken)
    talks = Talks(seed, windows)
    talks.run(steps)
    counters = talks.rig.engine.counters()
    assert counters.cache_dropped == len(restarted) > 0 and counters.failed == 0 and counters.cache_hit > 0
    assert talks.rig.engine.reset_prefix_cache()
    assert talks.rig.pools.slots.num_free == talks.rig.pools.slots.total
    assert talks.rig.pools.pages.num_free == talks.rig.pools.pages.total
    assert not list(talks.rig.pools.prefixes.tree.nodes())
