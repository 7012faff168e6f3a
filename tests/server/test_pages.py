"""What a browser can send for a web page does not reach the application, nor is its body read: on every path."""

import asyncio
import json
from typing import Any

import pytest

from hybridrt.base.errors import ConfigError
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.guard import Guard
from tests.support.http_server import Served
from tests.support.levels import sweep

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/tokenize", "/abort",
    "/reset_prefix_cache", "/health", "/ready", "/load", "/metrics", "/version", "/openapi.json", "/nowhere",
)  # fmt: skip
JSON = ("content-type", "application/json")
BODY = ("content-length", "2")
HOST = ("host", "localhost:8000")
PAGE = "https://page.example"


class Sent:
    """A request, and what became of it."""

    def __init__(self, *headers: tuple[str, str], method: str = "POST", path: str = "/abort", **settings: Any) -> None:
        server = settings.pop("server", ("127.0.0.1", 8000))
        self.reads, self.reached, self.status, self.headers = 0, False, 0, dict[bytes, bytes]()
        self.body = b""
        guard = Guard(self._app, ServerConfig(access_log=False, **settings))
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        scope = {"type": "http", "method": method, "path": path, "headers": encoded, "server": server}
        asyncio.run(guard(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """Takes any body as JSON, as FastAPI does in some versions."""
        self.reached = True
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def _receive(self) -> Any:
        self.reads += 1
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.headers |= dict(message.get("headers", ()))
        self.body += message.get("body", b"")

    @property
    def refused(self) -> bool:
        """With an error, and before anything was read."""
        assert self.reached == (self.status == 200) == (self.reads > 0)
        return not self.reached


@pytest.mark.parametrize("path", sweep(PATHS, 5))
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_every_path_refuses_other_hosts_and_pages(method: str, path: str) -> None:
    sent = {"method": method, "path": path}
    assert not Sent(HOST, JSON, BODY, **sent).refused  # type: ignore[arg-type]
    assert Sent(("host", "evil.example:8000"), JSON, BODY, **sent).status == 403  # type: ignore[arg-type]
    assert Sent(HOST, JSON, BODY, ("origin", PAGE), **sent).status == 403  # type: ignore[arg-type]
    for kind in ([], [("content-type", "text/plain")]):
        assert Sent(HOST, BODY, *kind, **sent).refused  # type: ignore[arg-type]


LOOPBACK = (
    "localhost", "localhost:1", "LocalHost:8000", "localhost.", "localhost.:8000", "127.0.0.1", "127.0.0.1:8000",
    "127.9.8.7", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000", "[::ffff:127.0.0.1]:8000", "localhost:",
)  # fmt: skip
FOREIGN = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost",
    "xn--lcalhost-54a", "192.168.1.5:8000", "0.0.0.0:8000", "[::]:8000", "[2001:db8::1]:8000", "169.254.169.254",
    "128.0.0.1", "localhost..", "0x7f.0.0.1", "a.localhost",
)  # fmt: skip
MALFORMED = (
    "", " ", ":8000", ".", "localhost:port", "localhost:-1", "localhost:8000:8000", "localhost@evil.example",
    "evil.example@localhost", "localhost/evil", "localhost, evil.example", "http://localhost", "[::1", "::1", "[::1]x",
    "[fe80::1%25lo]", "localh\xf6st", "localhost\x00", "localhost evil", "[localhost]", "2130706433", "1.2.3.4.5",
)  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_hosts(host: str) -> None:
    for settings in ({}, {"host": "0.0.0.0"}, {"host": "::1"}, {"host": "192.168.1.5"}):
        assert not Sent(("host", host), **settings).refused  # type: ignore[arg-type]


@pytest.mark.parametrize("host", FOREIGN)
def test_other_hosts(host: str) -> None:
    sent = Sent(("host", host), ("x-forwarded-host", "localhost"), ("forwarded", "host=localhost"))
    assert sent.refused and sent.status == 403 and b"--allowed-host" in sent.body
    assert not Sent(("host", host), allowed_hosts=("*",)).refused


@pytest.mark.parametrize("host", MALFORMED)
def test_texts_that_are_no_host(host: str) -> None:
    for allowed in ((), ("*",)):
        sent = Sent(("host", host), allowed_hosts=allowed)
        assert sent.refused and sent.status == 400 and sent.headers[b"connection"] == b"close"


EVIL = ("host", "evil.example")


@pytest.mark.parametrize("hosts", [[], [HOST, HOST], [HOST, EVIL], [EVIL, HOST]])
def test_there_is_one_host(hosts: list[tuple[str, str]]) -> None:
    sent = Sent(*hosts)
    assert sent.refused and sent.status == 400


@pytest.mark.parametrize(
    ("settings", "right", "wrong"),
    [
        ({"host": "192.168.1.5"}, ("192.168.1.5:8000",), ("192.168.1.6", "evil.example")),
        ({"host": "Box.example."}, ("box.example", "BOX.example.:80"), ("evil.example", "box.example.evil.example")),
        ({"host": "box", "server": ("10.0.0.7", 8000)}, ("10.0.0.7", "box"), ("10.0.0.8",)),
        ({"host": "0.0.0.0"}, ("10.0.0.7", "0.0.0.0:8000", "[2001:db8::1]"), ("evil.example", "box")),
        ({"host": "::"}, ("10.0.0.7", "[::]:8000", "[2001:db8::1]:8000"), ("evil.example", "1.2.3.4.evil.example")),
        ({"host": "fe80::1%eth0", "server": ("fe80::1%eth0", 8000)}, ("[fe80::1]:8000",), ("[fe80::2]:8000",)),
        ({"allowed_hosts": ("api.example", "::2", "[::3]", "10.1.1.1")},
         ("api.example:443", "API.example.", "[::2]:80", "[0::3]", "10.1.1.1"),
         ("x.api.example", "api.example.evil", "[::4]", "10.1.1.2")),
    ],
)  # fmt: skip
def test_which_hosts_belong_to_an_address(settings: dict[str, Any], right: Any, wrong: Any) -> None:
    """A health check names the address to which it connects, so a server on all addresses answers to all of them. A
    page whose host is a name cannot."""
    for host in right:
        assert not Sent(("host", host), **settings).refused, host
    for host in wrong:
        assert Sent(("host", host), **settings).status == 403, host


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:8000", True),
        ("https://LOCALHOST:8000", True),
        ("http://localhost:3000", False),
        ("http://localhost", False),
        ("http://127.0.0.1:8000", False),
        ("http://evil.example:8000", False),
        ("null", False),
        ("", False),
        ("file://", False),
        ("chrome-extension://localhost:8000", False),
        ("http://localhost:8000.evil.example", False),
        ("http://localhost:8000@evil.example", False),
        (PAGE, False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_its_own_and_no_others(origin: str, allowed: bool, method: str) -> None:
    assert Sent(HOST, ("origin", origin), method=method).refused == (not allowed)
    assert Sent(HOST, ("origin", PAGE), ("origin", origin), method=method).refused, "one page sends a request"


def test_the_port_that_a_scheme_has_need_not_be_named() -> None:
    for host, origin in (("localhost", "http://localhost:80"), ("localhost:443", "https://localhost")):
        assert not Sent(("host", host), ("origin", origin)).refused
    assert Sent(("host", "localhost"), ("origin", "http://localhost:443")).refused


def test_pages_that_are_named_may_call() -> None:
    for origins in ((PAGE,), ("https://Page.example",), ("*",)):
        sent = Sent(HOST, JSON, BODY, ("origin", PAGE), allowed_origins=origins)
        assert not sent.refused
        wrong = Sent(HOST, BODY, ("content-type", "text/plain"), ("origin", PAGE), allowed_origins=origins)
        assert wrong.status == 400
    assert Sent(("host", "evil.example"), ("origin", PAGE), allowed_origins=("*",)).status == 403
    assert Sent(HOST, ("origin", "https://other.example"), allowed_origins=(PAGE,)).status == 403
    asks = (HOST, ("origin", PAGE), ("access-control-request-method", "POST"))
    preflight = Sent(*asks, method="OPTIONS", allowed_origins=(PAGE,))
    assert preflight.headers[b"access-control-allow-origin"] == PAGE.encode() and not preflight.reached
    other = Sent(("host", "evil.example"), *asks[1:], method="OPTIONS", allowed_origins=(PAGE,))
    assert other.status == 403 and b"access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/json;charset=utf-8", True),
        ("application/problem+json", True),
        ("text/plain", False),
        ("text/plain; application/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=application/json", False),
        ("application/json, text/plain", False),
        ("text/json", False),
        ("application/jsonp", False),
        ("application", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("size", [BODY, ("transfer-encoding", "chunked")])
def test_a_body_is_json(kind: str, right: bool, size: tuple[str, str]) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        assert Sent(HOST, size, ("content-type", kind), method=method).refused == (not right)
    assert Sent(HOST, size, JSON, ("content-type", kind)).refused, "there is one type"
    assert Sent(HOST, size).refused, "and it is named"


def test_without_a_body_there_need_be_no_type() -> None:
    for length in ([], [("content-length", "0")]):
        for method in ("GET", "POST"):
            assert not Sent(HOST, *length, method=method).refused
        assert Sent(HOST, *length, ("content-type", "text/plain")).refused, "a form of a page"
        assert not Sent(HOST, *length, ("content-type", "text/plain"), method="GET").refused


@pytest.mark.parametrize("host", ["", "a b", "api.example:80", "https://api.example", "*.example", "[::1"])
def test_hosts_that_cannot_be_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed host .* a name without a port"):
        ServerConfig(allowed_hosts=(host,))


@pytest.mark.parametrize("host", ["", "0", "127.1", "localhost:8000", "http://localhost", "[::1"])
def test_addresses_that_cannot_be_bound(host: str) -> None:
    """Sockets take "" and "0" for every address of the machine."""
    with pytest.raises(ConfigError, match=r"host is .* without a port"):
        ServerConfig(host=host)


def test_a_server_refuses_them_before_a_key(served: Served) -> None:
    with served.http() as client:
        for path in ("/metrics", "/health", "/v1/models"):
            answer = client.get(path, headers={"host": "evil.example"})
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
            assert answer.headers["x-request-id"]
            assert client.get(path, headers={"host": "localhost:1"}).status_code == 200
        content = json.dumps({"request_id": "x"}).encode()
        for kind in ({}, {"content-type": "text/plain"}):
            assert client.post("/abort", content=content, headers=kind).status_code == 400
        assert client.post("/abort", content=content, headers={"content-type": "application/json"}).json() == {
            "aborted": False
        }
        answer = client.post("/v1/messages", content=content, headers={"host": "evil.example"})
        assert answer.json()["type"] == "error", "in the form of its path"
