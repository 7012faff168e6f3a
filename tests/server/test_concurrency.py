"""Many streams at once, clients that go away or read slowly: no token is lost or wrong, and nothing is left behind."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from tests.support.http_server import WAIT, Served, serving

TOKENS = 6


def body(seed: int, **changes: object) -> dict[str, object]:
    return {
        "model": "tested", "prompt": [5 + seed % 50, 6, 7], "seed": seed, "max_tokens": TOKENS, "ignore_eos": True,
        "temperature": 1.0, "top_p": 1.0, "stream": True, "return_token_ids": True, **changes,
    }  # fmt: skip


def request(seed: int, **changes: object) -> bytes:
    content = json.dumps(body(seed, **changes)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def token_ids(answer: bytes) -> list[int]:
    """Of a stream's chunks, however they lie in the chunks of HTTP."""
    events = [line for line in answer.decode().split("\r\n") if line.startswith("data: ")]
    assert events[-1].strip() == "data: [DONE]", answer[-300:]
    return [t for event in events[:-1] for t in json.loads(event.removeprefix("data: "))["choices"][0]["token_ids"]]


def expected(llm: LLM, count: int) -> list[list[int]]:
    params = [SamplingParams(seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(count)]
    return [o.token_ids for o in llm.generate([[5 + i % 50, 6, 7] for i in range(count)], params)]


async def fetch(address: tuple[str, int], seed: int) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request(seed))
    answer = await reader.read()
    writer.close()
    return answer


def address(served: Served) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.parametrize(
    "count", [100, pytest.param(200, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_streams_at_once_lose_no_token(count: int, served: Served) -> None:
    async def main() -> list[bytes]:
        return await asyncio.gather(*(fetch(address(served), seed) for seed in range(count)))

    got = [token_ids(answer) for answer in asyncio.run(main())]
    assert got == expected(served.llm, count)


@pytest.mark.parametrize(
    "count", [50, pytest.param(200, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.soak)]
)
def test_clients_that_go_away_leave_nothing(count: int, served: Served) -> None:
    """At any point: before the answer, in the middle, at its end; half of them without a stream."""
    draw = random.Random(3)

    async def leave(seed: int) -> None:
        reader, writer = await asyncio.open_connection(*address(served))
        content = request(seed, max_tokens=200, n=1 + seed % 3, stream=seed % 2 == 0)
        writer.write(content[: draw.choice((10, len(content) - 5, len(content), len(content), len(content)))])
        await asyncio.sleep(draw.random() * 0.3)
        if draw.random() < 0.5:
            await asyncio.wait({asyncio.ensure_future(reader.read(draw.choice((1, 300))))}, timeout=0.2)
        if draw.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def main() -> bytes:
        await asyncio.gather(*(leave(seed) for seed in range(count)))
        return await fetch(address(served), 1)

    answer = asyncio.run(main())
    served.wait_until_idle()
    assert token_ids(answer) == expected(served.llm, 2)[1]
    assert not served.service.llm._streams, "no stream is kept"


def test_requests_that_do_not_wait_for_the_answer_before_end_with_the_connection(served: Served) -> None:
    """The one that runs, too: uvicorn tells the last one alone that the client has gone."""
    count = served.llm.engine.counters().aborted
    with socket.create_connection(address(served)) as connection:
        connection.sendall(request(3, max_tokens=200, stream=False).replace(b"close", b"keep-alive") * 3)
        while not served.service.llm.unfinished:
            time.sleep(0.001)
    served.wait_until_idle()
    assert served.llm.engine.counters().aborted == count + 1


@pytest.mark.slow
def test_slow_readers_do_not_delay_others(served: Served) -> None:
    """Clients that ask for more than the buffers on the way hold and read none of it, while others get theirs."""
    slow = []
    for seed in range(4):
        connection = socket.create_connection(address(served))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(request(seed, n=8, max_tokens=100, logprobs=64))
        slow.append(connection)
    assert token_ids(asyncio.run(fetch(address(served), 3))) == expected(served.llm, 4)[3]
    with served.http() as client:
        assert client.get("/health").status_code == 200
    got = b""
    slow[0].settimeout(WAIT)
    while b"[DONE]" not in got[-50:]:
        got += slow[0].recv(65536)
    events = [line for line in got.decode().split("\r\n") if line.startswith("data: {")]
    gained = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert sum(len(choice["token_ids"]) for choice in gained) == 8 * 100, "late, but whole"
    assert sum(choice["finish_reason"] == "length" for choice in gained) == 8
    for connection in slow:
        connection.close()


@pytest.fixture
def own(embedded: LLM) -> Iterator[Served]:
    with serving(embedded, drain_timeout=0.3) as served:
        yield served


def test_draining_lets_requests_end_and_takes_no_more(own: Served) -> None:
    async def main() -> bytes:
        running = asyncio.ensure_future(fetch(address(own), 3))
        while not own.service.llm.unfinished:
            await asyncio.sleep(0.001)
        own.service.config.__dict__["drain_timeout"] = WAIT
        own.server.handle_exit(15, None)
        refused = await fetch(address(own), 4)
        assert b" 503 " in refused and b"shutting down" in refused and b"retry-after" in refused
        return await running

    assert token_ids(asyncio.run(main())) == expected(own.llm, 4)[3]


def test_what_does_not_end_while_draining_ends_with_an_error(own: Served) -> None:
    with socket.create_connection(address(own)) as connection:
        connection.settimeout(WAIT)
        with own.llm.engine.turns:  # nothing runs until the time is over
            connection.sendall(request(3, max_tokens=200))
            while not own.service.llm.unfinished:
                time.sleep(0.001)
            own.server.handle_exit(15, None)
            time.sleep(0.6)
        got = b""
        while part := connection.recv(65536):
            got += part
    assert b'"code":"unavailable"' in got and b'"finish_reason":"abort"' not in got and b"[DONE]" in got


def test_a_crash_turns_health_red_and_ends_every_request(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(embedded) as served:
        with served.llm.engine.turns:
            connections = [socket.create_connection(address(served), timeout=WAIT) for _ in range(3)]
            for i, connection in enumerate(connections):
                connection.sendall(request(i, stream=i > 0))
            while served.service.llm.unfinished < 3:
                time.sleep(0.001)
            monkeypatch.setattr(embedded.engine, "run_step", lambda: 1 // 0)
        answers = []
        for connection in connections:
            got = b""
            while part := connection.recv(65536):
                got += part
            answers.append(got)
        assert b" 503 " in answers[0] and b"ZeroDivisionError" in answers[0]
        assert all(b"ZeroDivisionError" in answer and b"[DONE]" in answer for answer in answers[1:])
        with served.http() as client:
            assert client.get("/health").status_code == client.get("/ready").status_code == 503
            assert client.post("/v1/completions", json=body(1)).status_code == 503
            assert client.get("/metrics").status_code == 200
    monkeypatch.undo()
    embedded.engine.abort_all()
    embedded.engine.drain()


def test_a_step_that_hangs_turns_health_red(embedded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(embedded, step_timeout=0.2) as served:
        run_step = embedded.engine.run_step

        def slow() -> None:
            time.sleep(0.6)
            run_step()

        monkeypatch.setattr(embedded.engine, "run_step", slow)
        with socket.create_connection(address(served)) as connection, served.http() as client:
            connection.sendall(request(1, max_tokens=1))
            while client.get("/health").status_code == 200:
                time.sleep(0.01)
            assert "has not ended" in client.get("/health").text
            monkeypatch.undo()
            while client.get("/health").status_code != 200:
                time.sleep(0.01)
        served.wait_until_idle()
