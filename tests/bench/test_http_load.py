"""Answers that do not end: a load gives them up."""

import asyncio

import pytest

from hybridrt.bench import http_load
from hybridrt.bench.http_load import Received


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
