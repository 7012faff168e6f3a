"""Stamps of tokens on their way through a server."""

import asyncio

import pytest

from benchmarks.http_stamps import POINTS, Stamps
from hybridrt.engine.api.async_llm import AsyncLLM, DeltaStream
from hybridrt.engine.request.outputs import Delta
from tests.support.fake_llm import FIVE, make


def test_each_token_is_stamped_at_each_point_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    put = DeltaStream.put

    async def main(served: AsyncLLM) -> list[Delta]:
        return [delta async for delta in served.generate([1, 2], FIVE)]

    with llm, AsyncLLM(llm) as served:
        stamps = Stamps(served)
        with stamps.noting():
            tokens = [token for delta in asyncio.run(main(served)) for token in delta.token_ids]
        assert DeltaStream.put is put, "nothing is noted any more"
    ((_, ways),) = stamps._tokens.items()
    assert len(tokens) == len(ways) == 5
    assert all(len(way) == len(POINTS) and list(way) == sorted(way) for way in ways)
    found = stamps.figures()
    assert found["way_p50_ms"] > 0 and found["between_written_p99_ms"] >= found["between_written_p50_ms"] > 0
    stamps.clear()
    assert not any(stamps.figures().values())
