"""Requests of all sorts for an hour: what the server holds afterwards is what it held before."""

import asyncio
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.http_server import WAIT, Served

AT_ONCE = 8
GROWTH = 16 << 20  # bytes that memory may grow by: an allocator keeps what it was given


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(served: Served) -> dict[str, int]:
    """What must not grow at all: files and sockets, threads, streams, series of metrics."""
    found = {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "streams": len(served.service.llm._streams),
    }
    with served.http() as client:
        return found | {"series": client.get("/metrics").text.count("\n")}


async def one(client: httpx.AsyncClient, draw: random.Random) -> str:
    """A request of any sort, read to its end, refused, or left in the middle. Returns which."""
    body = {
        "prompt": [draw.randrange(5, 60) for _ in range(draw.choice((1, 7, 40)))],
        "max_tokens": draw.choice((1, 5, 12)),
        "seed": draw.randrange(99), "n": draw.choice((1, 1, 1, 3)), "logprobs": draw.choice((None, None, 2)),
        "ignore_eos": True, "temperature": draw.choice((0.0, 1.0)), "stop": draw.choice((None, None, "e")),
    }  # fmt: skip
    sort = draw.choice(("whole", "whole", "stream", "stream", "left", "wrong", "probe"))
    if sort == "probe":
        answer = await client.get(draw.choice(("/health", "/metrics", "/v1/models", "/load")))
        assert answer.status_code == 200
    elif sort in ("whole", "wrong"):
        wrong = {"max_tokens": -1} if sort == "wrong" else {}
        answer = await client.post("/v1/completions", json=body | wrong)
        assert answer.status_code == (400 if wrong else 200), answer.text
    else:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
                if sort == "left" and line:
                    break
            assert sort == "left" or last == "data: [DONE]"
    return sort


def load(served: Served, goes_on: Callable[[int], bool], seed: int) -> int:
    """Requests, AT_ONCE at a time, while `goes_on(their number)`. Returns their number."""
    count = 0

    async def client_of(number: int) -> None:
        nonlocal count
        draw = random.Random(seed * AT_ONCE + number)
        async with httpx.AsyncClient(base_url=served.url, timeout=WAIT) as client:
            while goes_on(count):
                count += 1
                await one(client, draw)

    async def all_of_them() -> None:
        await asyncio.gather(*map(client_of, range(AT_ONCE)))

    asyncio.run(all_of_them())
    served.wait_until_idle()
    return count


def settled(served: Served) -> dict[str, int]:
    """What is held once the server has closed what clients have closed: a busy machine takes its time."""
    found, since, deadline = held(served), time.monotonic(), time.monotonic() + WAIT
    while time.monotonic() - since < 2 and time.monotonic() < deadline:
        time.sleep(0.25)
        if (now := held(served)) != found:
            found, since = now, time.monotonic()
    return found


def soak(served: Served, seconds: float, warm: int) -> dict[str, float]:
    """Warms up with `warm` requests, then keeps the server busy."""
    load(served, lambda count: count < warm, 0)
    held(served)  # its own connection
    before, memory, end = settled(served), resident(), time.monotonic() + seconds
    requests = load(served, lambda count: time.monotonic() < end, 1)
    deadline = time.monotonic() + WAIT
    while (after := held(served)) != before and time.monotonic() < deadline:
        time.sleep(0.5)  # the server closes what clients have closed
    assert after == before
    growth = resident() - memory
    assert growth < GROWTH, f"{growth / 2**20:.1f} MiB more after {requests} requests"
    return {"requests": requests, "growth in MiB": growth / 2**20}


@pytest.mark.slow
def test_requests_of_all_sorts_for_a_while(served: Served) -> None:
    assert soak(served, 5, warm=100)["requests"] > 20


@pytest.mark.soak
def test_requests_of_all_sorts_for_an_hour(served: Served, record_property: Callable[[str, object], None]) -> None:
    """HYBRIDRT_SOAK_SECONDS makes it shorter or longer."""
    figures = soak(served, float(os.environ.get("HYBRIDRT_SOAK_SECONDS", "3600")), warm=2000)
    record_property("soak", figures)
    print(figures)
