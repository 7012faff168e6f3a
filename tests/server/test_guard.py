"""Around every request: keys, sizes, deadlines, connections, the queue, CORS and request ids."""

import asyncio
import errno
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.llm import LLM
from hybridrt.server import run
from hybridrt.server.app import make_app
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.guard import Guard
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.core.respond import FAILURE
from hybridrt.server.core.service import Service
from hybridrt.server.run import FROZEN_BY_PYTHON, Server, bind
from hybridrt.server.wire import http_limits
from tests.server.test_errors import COMPLETION, assert_error
from tests.support.http_server import WAIT, Served, serving
from tests.support.lazily import lazily

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")


@pytest.fixture(scope="module")
def locked(embedded: LLM) -> Iterator[Served]:
    """A server with keys and narrow limits."""
    with serving(
        embedded,
        api_keys=("first-key", "second-key"),
        max_body_bytes=2000,
        request_timeout=1.0,
        max_waiting=1,
        allowed_origins=("https://page.example",),
    ) as served:
        yield served
        served.wait_until_idle()


KEY = {"authorization": "Bearer second-key"}


def test_without_a_key_only_probes_answer(locked: Served) -> None:
    with locked.http() as client:
        paths = (
            "/v1/models",
            "/metrics",
            "/version",
            "/load",
            "/openapi.json",
            "/nowhere",
            "//health",
            "/health/../load",
        )
        for path in paths:
            assert_error(client.get(path), 401, None, "API key")
        for wrong in ("Bearer", "Bearer first", "Basic first-key", "Bearer first-keyy", "first-key"):
            assert_error(client.get("/v1/models", headers={"authorization": wrong}), 401, None, "API key")
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200
        for right in ("Bearer first-key", "bearer second-key"):
            assert client.get("/v1/models", headers={"authorization": right}).status_code == 200
    assert locked.client(api_key="first-key").models.list().data
    with pytest.raises(openai.AuthenticationError):
        locked.client(api_key="wrong").models.list()


def test_long_bodies_are_refused_with_and_without_a_length(locked: Served) -> None:
    body = json.dumps(COMPLETION | {"user": "x" * 3000}).encode()
    with locked.http() as client:
        assert_error(client.post("/v1/completions", content=body, headers=KEY), 413, None, "2000 bytes")
        headers = KEY | {"content-type": "application/json"}
        parts = (body[i : i + 500] for i in range(0, len(body), 500))
        assert_error(client.post("/v1/completions", content=parts, headers=headers), 413, None, "2000 bytes")


def test_a_request_that_takes_too_long_ends(locked: Served) -> None:
    endless = COMPLETION | {"max_tokens": 250, "ignore_eos": True, "n": 33}
    assert_error(locked.post("/v1/completions", endless, headers=KEY), 504, None, "longer than it may")
    locked.wait_until_idle()
    answer = locked.post("/v1/completions", endless | {"stream": True}, headers=KEY)
    events = [line for line in answer.text.splitlines() if line]
    assert events[-1] == "data: [DONE]" and "longer than it may" in events[-2]
    locked.wait_until_idle()
    for wrong in ("-1", "nan", "5s", "1e5"):
        answer = locked.post("/v1/completions", COMPLETION, headers=KEY | {"x-request-timeout": wrong})
        assert_error(answer, 400, None, "X-Request-Timeout must be a number of seconds")
    short = KEY | {"x-request-timeout": "0.001"}
    assert_error(locked.post("/v1/completions", endless, headers=short), 504, None, "longer than it may")


def test_the_last_chunk_that_a_client_does_not_take_in_time() -> None:
    """The server waits with it, at the deadline too, for a client that still has to read earlier ones."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        if message.get("body") == b"last":
            await asyncio.Event().wait()
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope[FAILURE] = lambda error, scope: error.message.encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    guard = Guard(app, ServerConfig(request_timeout=0.02, access_log=False))
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
    asyncio.run(guard(scope, send, send))  # type: ignore[arg-type]
    assert b"longer than it may" in sent[-1]["body"]


def test_a_body_that_never_comes_ends_with_the_deadline(locked: Served) -> None:
    host, port = locked.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first-key\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert b" 504 " in connection.recv(4096)


def test_connections_that_do_not_ask_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, and heads that never come to their end, on a new connection and after an answer. A body and an
    answer may take longer."""
    monkeypatch.setattr(http_limits, "HEAD_SECONDS", 0.3)
    body = json.dumps(COMPLETION).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n"
    )
    host, port = served.url.removeprefix("http://").split(":")
    with ExitStack() as stack:

        def connect(sent: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            connection.sendall(sent)
            return connection

        late = connect(head % len(body))
        silent, half = connect(b""), connect(b"GET /health HTTP/1.1\r\nX: ")
        again = connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(4096).startswith(b"HTTP/1.1 200")
        again.sendall(b"\r\n")
        for connection in (silent, half, again):
            assert connection.recv(4096) == b"", "ended by the server"
        with served.llm.engine.turns:  # the answer takes its time, too
            late.sendall(body)
            late.settimeout(0.5)
            with pytest.raises(TimeoutError):
                late.recv(4096)
        late.settimeout(30)
        assert late.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_full_queue_answers_429(locked: Served) -> None:
    most = locked.llm.plan.num_rows + 1
    with ThreadPoolExecutor(1) as pool, locked.llm.engine.turns:  # nothing runs meanwhile
        first = pool.submit(locked.post, "/v1/completions", COMPLETION | {"n": most}, headers=KEY)
        while locked.service.llm.unfinished < most:
            time.sleep(0.01)
        answer = locked.post("/v1/completions", COMPLETION, headers=KEY)
        with pytest.raises(openai.RateLimitError):
            locked.client(api_key="first-key").completions.create(**COMPLETION)  # type: ignore[call-overload]
    assert_error(answer, 429, None, "try again later")
    assert int(answer.headers["retry-after"]) >= 1
    assert first.done()


def test_what_cannot_be_answered_in_time_is_refused_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the seconds that a request may take is for its answer."""
    most = served.service.config.request_timeout / 2
    for seconds, status in ((most - 1, 200), (most + 6.2, 429)):
        monkeypatch.setattr(served.llm.engine, "wait_seconds", lambda seconds=seconds: seconds)
        answer = served.post("/v1/completions", COMPLETION)
        assert answer.status_code == status
    assert_error(answer, 429, None, f"waits about {most + 6:.0f} seconds")
    assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize(("change", "field"), [({"n": 40}, "n"), ({"prompt": ["x"] * 40}, "prompt")])
def test_a_request_that_never_fits_the_queue_is_not_sent_again(
    change: dict[str, Any], field: str, locked: Served
) -> None:
    assert_error(locked.post("/v1/completions", COMPLETION | change, headers=KEY), 400, field, "at most 33 in all")


def test_pages_of_allowed_origins_alone_may_call(locked: Served, served: Served) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}

    def allowed(server: Served, origin: str) -> str | None:
        with server.http() as client:
            answer = client.options("/v1/completions", headers={"origin": origin, **asks})
        return answer.headers.get("access-control-allow-origin")

    assert allowed(locked, "https://page.example") == "https://page.example"
    assert allowed(locked, "https://other.example") is None
    assert allowed(served, "https://page.example") is None, "off by default"


def test_pages_of_other_origins_do_not_reset_the_cache(locked: Served) -> None:
    """A browser sends a request without a body for any page, and only then keeps the answer from it."""
    for origin, status in (("https://page.example", 200), ("https://other.example", 403), ("null", 403)):
        with locked.http() as client:
            assert client.post("/reset_prefix_cache", headers=KEY | {"origin": origin}).status_code == status, origin


def test_pages_of_allowed_origins_read_errors_and_request_ids(locked: Served) -> None:
    """A browser hides an answer without these headers, its status too."""
    origin = {"origin": "https://page.example"}
    slow, late = COMPLETION | {"max_tokens": 200, "ignore_eos": True}, {"x-request-timeout": "0.001"}
    for status, body, headers in (
        (200, COMPLETION, KEY), (400, {}, KEY), (401, COMPLETION, {}), (413, COMPLETION | {"prompt": "x" * 3000}, KEY),
        (504, slow, KEY | late), (404, COMPLETION | {"model": "none"}, KEY),
    ):  # fmt: skip
        answer = locked.post("/v1/completions", body, headers=origin | headers)
        assert answer.status_code == status, answer.text
        assert answer.headers["access-control-allow-origin"] == "https://page.example", status
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        assert len(answer.headers.get_list("x-request-id")) == 1


def test_request_ids_go_in_and_out(served: Served) -> None:
    with served.http() as client:
        assert client.get("/version", headers={"x-request-id": "mine-5"}).headers["x-request-id"] == "mine-5"
        for bad in ("", "x" * 129, "with space"):
            made = client.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
            assert made and made != bad
        answer = client.post("/v1/completions", json=COMPLETION | {"request_id": "my-run"})
        assert answer.json()["id"] == "cmpl-my-run"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux ends such connections")
def test_a_connection_whose_client_takes_nothing_ends() -> None:
    """What is written when the deadline ends a request would stay in its buffers, and the connection open."""
    with bind(ServerConfig(port=0, request_timeout=0.05)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
            connection.settimeout(WAIT)
            with connection, pytest.raises(TimeoutError, match="timed out") as info:
                while True:
                    connection.send(bytes(65536))
    assert info.value.errno == errno.ETIMEDOUT, "by the system, not by the test"


def test_two_servers_that_start_at_once_at_one_port(embedded: LLM) -> None:
    """Both can take the address before either listens. The second one says so."""
    with bind(ServerConfig(port=0)) as first:
        config = ServerConfig(port=first.getsockname()[1])
        with bind(config) as second, AsyncLLM(embedded) as llm:
            first.listen()
            service = Service(llm, config)
            server = Server(make_app(service, Metrics(llm, "tested")), service)
            with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:.*choose another"):
                asyncio.run(server.startup([second]))


class Collector:
    """Counts instead of walking all of torch."""

    def __init__(self, frozen: int) -> None:
        self.frozen, self.collections = frozen, 0

    def get_freeze_count(self) -> int:
        return self.frozen

    def collect(self) -> None:
        self.collections += 1

    def freeze(self) -> None:
        self.frozen = 2 * FROZEN_BY_PYTHON

    def unfreeze(self) -> None:
        self.frozen = 0


@pytest.mark.parametrize("frozen", [0, 2 * FROZEN_BY_PYTHON])
def test_the_collector_sees_after_a_server_what_it_saw_before(
    frozen: int, embedded: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of a process that froze them itself stay frozen: a collection would walk all of torch."""
    collector = Collector(frozen)
    monkeypatch.setattr(run, "gc", collector)
    with serving(embedded):
        assert (collector.frozen, collector.collections) == (2 * FROZEN_BY_PYTHON, int(not frozen))
    assert collector.frozen == frozen
