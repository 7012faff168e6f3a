"""Answers that do not end, or are too deep to read: a load gives them up."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hybridrt.bench import http_load
from hybridrt.bench.http_load import Received
from hybridrt.bench.timing import Timing
from hybridrt.verify import two_servers


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[Received, Received]:
        endless, silent = Received(lambda: 0.0), Received(lambda: 0.0)
        for _ in range(9):
            endless.data_received(b"HTTP/1.1 200 OK\r\n")
        silent.data_received(b"HTTP/1.1 200 OK\r\n")
        await asyncio.gather(endless.wait(), silent.wait())
        return endless, silent

    monkeypatch.setattr(http_load, "MOST_BYTES", 1000)
    monkeypatch.setattr(http_load, "SILENT_SECONDS", 0.01)
    endless, silent = asyncio.run(run())
    assert "more than 1000 bytes" in str(endless.failure) and "nothing came for 0.01" in str(silent.failure)


@pytest.mark.parametrize("read", [http_load._read, two_servers._read])
def test_an_answer_that_is_deep_has_failed(read: Callable[[Received, Timing], Any]) -> None:
    async def answered() -> Received:
        received = Received(lambda: 0.0)
        received.data_received(b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"[" * 100_000 + b"\n\n")
        return received

    timing = Timing(0.0, 1)
    read(asyncio.run(answered()), timing)
    assert str(timing.error).startswith("RecursionError")
