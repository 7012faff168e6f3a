"""Requests of one connection that do not wait for answers: one is worked on, little is held, and nothing is lost."""

import asyncio
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.server import ServerState

from hybridrt.server.wire import http_limits
from hybridrt.server.wire.http_limits import MAX_HEAD_BYTES, MAX_HEADERS, MAX_HELD_BYTES, LimitedHttp
from tests.server.test_concurrency import address, body, expected, request, token_ids
from tests.support.http_server import WAIT, Served

READ = 256 * 1024  # the most that one read of uvloop brings
GET = b"GET / HTTP/1.1\r\n\r\n"


class Transport:
    """Of a client whose bytes the test hands in."""

    def __init__(self) -> None:
        self.written, self.reading, self.closed = b"", True, False

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> Any:
        return None


class Connection:
    """One connection of an application: what it holds, and what was worked on at once."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        config = uvicorn.Config(self._count, interface="asgi3", lifespan="off", ws="none", log_config=None)
        config.load()
        self.app, self.transport, self.state = app, Transport(), ServerState()
        self.http = LimitedHttp(config, self.state, {})
        self.http.connection_made(self.transport)  # type: ignore[arg-type]
        self.running = self.most = self.begun = 0
        self.bodies: list[bytes] = []
        self.scopes: list[Any] = []

    async def _count(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        self.scopes.append(scope)
        await self.app(self, receive, send)
        self.running -= 1

    @property
    def held(self) -> int:
        """Bytes of all that has come and is not the application's yet."""
        waiting = 0 if self.http.cycle is None else len(self.http.cycle.body)
        return len(self.http._held) + waiting

    def send(self, data: bytes) -> int:
        """Sends while the server reads; how much it has taken."""
        sent = 0
        while sent < len(data) and self.transport.reading and not self.transport.closed:
            self.http.data_received(data[sent : sent + READ])
            sent += READ
        return min(sent, len(data))

    async def deliver(self, data: bytes) -> None:
        """Sends all of it."""
        while (data := data[self.send(data) :]) and not self.transport.closed:
            await asyncio.sleep(0)

    async def send_all(self, data: bytes) -> None:
        """Sends all of it, and waits for the answers."""
        await self.deliver(data)
        while (self.http._held or self.running or self.state.tasks) and not self.transport.closed:
            await asyncio.sleep(0)


async def read(receive: Any) -> bytes:
    got = b""
    while (message := await receive())["type"] == "http.request":
        got += message["body"]
        if not message["more_body"]:
            return got
    raise ConnectionError


async def echo(connection: Connection, receive: Any, send: Any) -> None:
    """Answers with the body."""
    connection.bodies.append(await read(receive))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def never(connection: Connection, receive: Any, send: Any) -> None:
    """Waits for the end of the connection, as one that computes does."""
    await read(receive)
    await receive()


async def ignore(connection: Connection, receive: Any, send: Any) -> None:
    """Computes without a look at the body."""
    await asyncio.Event().wait()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "GAP_SECONDS", 0)


@pytest.mark.parametrize("app", [never, ignore])
@pytest.mark.parametrize(
    "request_",
    [
        GET,
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\n\n\n\n\n",
        b"\r\n\r\nGET / HTTP/1.1\r\nX: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_one_request_of_a_connection_is_begun_and_reading_stops(request_: bytes, app: Any) -> None:
    """Whatever the application does: the rest of a pipeline stays with the system."""

    async def main() -> None:
        connection = Connection(app)
        for _ in range(50):
            connection.send(request_ * (READ // len(request_)))
            await asyncio.sleep(0)
        assert not connection.transport.reading
        assert connection.most == connection.begun == len(connection.state.tasks) == 1
        assert connection.held <= MAX_HELD_BYTES + READ
        connection.http.connection_lost(None)
        await asyncio.sleep(0)
        assert connection.held == 0 or connection.http.cycle.disconnected
        for task in connection.state.tasks:
            task.cancel()

    run(main())


def test_requests_in_a_row_are_answered_one_after_another() -> None:
    async def main() -> None:
        connection = Connection(echo)
        await connection.send_all(GET * 2000)
        assert connection.begun == 2000 and connection.most == 1
        assert connection.transport.written.count(b"HTTP/1.1 200") == 2000 and connection.transport.reading

    run(main())


def test_the_work_of_a_request_does_not_grow_with_their_number() -> None:
    async def calls(count: int) -> int:
        """Functions that are called, the C ones included."""
        made = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        connection = Connection(echo)
        sys.setprofile(note)
        try:
            await connection.send_all(GET * count)
        finally:
            sys.setprofile(None)
        return made

    async def main() -> None:
        few, many = await calls(100), await calls(2000)
        assert many < 22 * few, (few, many)

    run(main())


def test_a_long_pipeline_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer the loop waits, whatever has come."""

    async def main() -> None:
        connection = Connection(echo)
        connection.send(GET * 1000)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert connection.begun == 1
        connection.http.connection_lost(None)

    monkeypatch.setattr(http_limits, "GAP_SECONDS", 3600)
    run(main())


CHUNKED = b"POST /d HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
MIXED = [
    (b"GET /a HTTP/1.1\r\n\r\n", b""),
    (b"POST /b HTTP/1.1\r\nContent-Length: 11\r\n\r\nGET / HTTP/\n", b"GET / HTTP/"),
    (b"\r\nGET /c HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b""),
    (CHUNKED + b"4\r\n\n\r\n\n\r\n2;x=y\r\n\r\n\r\n0\r\nT: v\r\n\r\n", b"\n\r\n\n\r\n"),
    (b"POST /e HTTP/1.1\r\nContent-Length: 40000\r\n\r\n" + b"\r\n" * 20000, b"\r\n" * 20000),
]  # fmt: skip


def test_bodies_of_every_kind_cut_anywhere() -> None:
    """What the application gets depends neither on where reads end, nor on what bodies look like."""

    async def main() -> None:
        draw = random.Random(5)
        for _ in range(40):
            order = [draw.choice(MIXED[:-1]) for _ in range(8)] + [MIXED[-1]] * draw.randint(0, 1)
            draw.shuffle(order)
            sent, connection = b"".join(data for data, _ in order), Connection(echo)
            while sent:
                size = draw.choice((1, 2, 7, 100, len(sent)))
                await connection.deliver(sent[:size])
                sent = sent[size:]
            await connection.send_all(b"")
            assert [got for got in connection.bodies] == [want for _, want in order]
            assert connection.most == 1 and not connection.transport.closed

    run(main())


@pytest.mark.parametrize("cut", range(len(GET)))
def test_a_read_that_ends_within_a_head(cut: int) -> None:
    """What follows its blank line is the next request's, wherever the line's parts come."""

    async def main() -> None:
        connection = Connection(echo)
        await connection.deliver(GET[:cut])
        await connection.send_all(GET[cut:] + GET * 3)
        assert (connection.begun, connection.most, connection.transport.closed) == (4, 1, False)

    run(main())


def test_a_body_that_the_application_does_not_take_is_not_read() -> None:
    async def main() -> None:
        connection = Connection(ignore)
        sent = connection.send(b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
        for _ in range(200):
            sent += connection.send(bytes(READ))
            await asyncio.sleep(0)
        assert not connection.transport.reading and sent <= 3 * READ and connection.held <= 3 * READ
        for task in connection.state.tasks:
            task.cancel()

    run(main())


@pytest.mark.parametrize(
    ("head", "unit", "parts"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", 600),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n\n\r\n", 600),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1;a=b\r\na\r\n", 600),
        (b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a:\r\n", 600),
        (b"", b"\r\n", 600),
        (b"Content-Length: 9999999\r\n\r\n", b"\n", 3),
        (b"Content-Length: 9999999\r\n\r\n", b"a", 3),
    ],
)
def test_a_turn_parses_a_bounded_part_of_a_read(
    head: bytes, unit: bytes, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small parts end it, and the next one comes later. Large parts go on at once."""
    monkeypatch.setattr(http_limits, "GAP_SECONDS", 3600)

    async def main() -> None:
        connection = Connection(never)
        calls = list[str]()
        for name in ("on_header", "on_body"):
            monkeypatch.setattr(connection.http, name, _noting(getattr(connection.http, name), calls))
        connection.http.parser = httptools.HttpRequestParser(connection.http)  # it looks for callbacks when it is made
        if head:
            connection.send(b"POST / HTTP/1.1\r\n" + head)
            await asyncio.sleep(0)
        calls.clear()
        connection.send(unit * (READ // len(unit)))
        assert len(calls) < parts and len(connection.http._held) > 0.9 * READ
        for _ in range(100):
            await asyncio.sleep(0)
        assert (len(connection.http._held) == 0) == (parts < 600)
        connection.http.connection_lost(None)

    run(main())


def _noting(function: Callable[..., None], calls: list[str]) -> Callable[..., None]:
    def note(*arguments: Any) -> None:
        calls.append(function.__name__)
        function(*arguments)

    return note


ENDLESS = {
    "header": b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEAD_BYTES,
    "name": b"GET / HTTP/1.1\r\n" + b"a" * 2 * MAX_HEAD_BYTES,
    "address": b"GET /" + b"a" * 2 * MAX_HEAD_BYTES,
    "blank lines": b"\r\n" * MAX_HEAD_BYTES,
    "headers": b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    "trailer": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 2 * MAX_HEAD_BYTES,
    "trailers": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a:\r\n" * MAX_HEAD_BYTES,
    "extension": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 2 * MAX_HEAD_BYTES,
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_comes_without_a_body_has_an_end(kind: str) -> None:
    """A parser keeps a header until it is complete."""

    async def main() -> None:
        connection = Connection(never)
        await connection.send_all(ENDLESS[kind])
        assert connection.transport.closed and connection.transport.written.startswith(b"HTTP/1.1 431")
        connection.http.connection_lost(None)

    run(main())


def test_trailers_are_no_headers() -> None:
    async def main() -> None:
        connection = Connection(echo)
        await connection.send_all(
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nContent-Type: text/plain\r\n\r\n"
        )
        assert [name for name, _ in connection.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]

    run(main())


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"/", b"localhost"),
        (b"//evil.example/", b"localhost"),
        (b"http://evil.example/", b"evil.example"),
        (b"HTTP://Evil.example:81/a?b", b"Evil.example:81"),
        (b"http://[::1]:8000/", b"[::1]:8000"),
        (b"http://localhost@evil.example/", b"evil.example"),
    ],
)
def test_the_host_of_a_whole_address_is_the_host(target: bytes, host: bytes) -> None:
    async def main() -> None:
        connection = Connection(echo)
        await connection.send_all(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert [value for name, value in connection.scopes[0]["headers"] if name == b"host"] == [host]

    run(main())


def test_a_client_that_does_not_read_gets_no_further_answer() -> None:
    async def main() -> None:
        connection = Connection(echo)
        connection.http.pause_writing()
        connection.send(GET * 1000)
        for _ in range(50):
            await asyncio.sleep(0)
        assert (connection.begun, connection.transport.written) == (1, b"")
        connection.http.resume_writing()
        await connection.send_all(b"")
        assert connection.begun == 1000

    run(main())


@pytest.fixture
def pipeline(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(address(served), timeout=WAIT) as connection:
        yield connection


def test_a_pipeline_of_completions_is_answered_in_order(served: Served, pipeline: socket.socket) -> None:
    requests = b"".join(request(seed).replace(b"close", b"keep-alive") for seed in range(4)) + request(4)
    pipeline.sendall(requests)
    got = b""
    while part := pipeline.recv(65536):
        got += part
    answers = got.split(b"HTTP/1.1 200")[1:]
    assert [token_ids(answer.split(b"\r\n0\r\n\r\n")[0]) for answer in answers] == expected(served.llm, 5)


def test_others_are_answered_while_a_pipeline_waits(served: Served, pipeline: socket.socket) -> None:
    """It is sent as far as the server and the system take it."""
    pipeline.setblocking(False)
    data = memoryview(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 30_000)
    sent = pipeline.send(data)
    assert sent > READ
    answer = served.post("/v1/completions", body(1, stream=False))
    assert answer.json()["choices"][0]["token_ids"] == expected(served.llm, 2)[1]


def test_clients_have_half_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router could reach no replica without the others."""
    monkeypatch.setattr(http_limits, "most_connections", lambda: 1)

    async def connect() -> None:
        first = Connection(lambda *_: asyncio.sleep(0))
        second = Transport()
        LimitedHttp(first.http.config, first.state, {}).connection_made(second)  # type: ignore[arg-type]
        assert second.closed and not first.transport.closed

    asyncio.run(connect())
