"""What programs and proxies expect of HTTP itself: long headers, HTTP/1.0, Unix sockets, a path before all paths."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybridrt.base.errors import ConfigError
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.run import bind
from hybridrt.server.wire.http_limits import MAX_HEADERS
from tests.support.http_server import Served, serving

HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"
ASK: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "seed": 1}


def raw(served: Served, text: str) -> tuple[str, str]:
    """Head and body of the answer to the end of the connection."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(text.encode())
        found = b""
        while piece := connection.recv(2**16):
            found += piece
    head, _, body = found.decode().partition("\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("".join(f"a{i}: b\r\n" for i in range(MAX_HEADERS + 1)), 431),
        ("no header\r\n", 400),
    ],
)
def test_headers_that_are_too_long_are_refused_in_json(headers: str, status: int, served: Served) -> None:
    head, body = raw(served, f"GET /health HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ") and "content-type: application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("line", ["X: " + "a" * 2**22, "a: b\r\n" * 2**18])
def test_a_client_that_still_sends_gets_the_refusal(line: str, served: Served) -> None:
    """A connection that ends with bytes unread is reset, and the answer is lost."""
    head, body = raw(served, f"GET /health HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n")
    assert head.startswith("HTTP/1.1 431 ") and json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("method", ["stream", "whole"])
def test_no_chunks_for_http_1_0(method: str, served: Served) -> None:
    body = json.dumps(ASK | {"stream": method == "stream"})
    head, text = raw(served, f"POST /v1/completions HTTP/1.0\r\n{HEAD}Content-Length: {len(body)}\r\n\r\n{body}")
    assert " 200 " in head and "transfer-encoding" not in head.lower() and "connection: close" in head.lower()
    if method == "whole":
        assert json.loads(text)["choices"]
    else:
        assert text.startswith("data: {") and text.endswith("}\n\ndata: [DONE]\n\n")
        want = served.post("/v1/completions", ASK).json()["choices"][0]["text"]
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want


def test_paths_with_a_slash_are_no_redirects(served: Served) -> None:
    """A Location would be made of the request's Host."""
    for path in ("/v1/completions/", "/health/"):
        answer = httpx.request("GET", served.url + path, headers={"host": "localhost"})
        assert answer.status_code in (404, 405) and "location" not in answer.headers


def test_ping(served: Served) -> None:
    with serving(served.llm, api_keys=("secret",)) as locked:
        for method in ("GET", "POST"):
            assert httpx.request(method, f"{locked.url}/ping").status_code == 200


def test_a_path_before_all_paths(served: Served) -> None:
    """A proxy may strip it or not; the rules of single paths hold either way."""
    with serving(served.llm, root_path="/llm", api_keys=("secret",)) as own:
        for prefix in ("", "/llm"):
            assert httpx.get(f"{own.url}{prefix}/health").status_code == 200
            assert httpx.get(f"{own.url}{prefix}/v1/models").status_code == 401
            key = {"x-api-key": "secret"}
            assert httpx.get(f"{own.url}{prefix}/v1/models", headers=key).json()["data"]
            error = httpx.get(f"{own.url}{prefix}/v1/messages", headers=key).json()
            assert error["type"] == "error"
        assert httpx.get(f"{own.url}/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]
        assert httpx.get(f"{own.url}/llmx/health", headers=key).status_code == 404


@pytest.mark.parametrize(
    "settings",
    [
        {"root_path": "llm"},
        {"root_path": "/llm/"},
        {"root_path": "/a?b"},
        {"uds": ""},
        {"uds": "x" * 200},
        {"log_level": "loud"},
    ],
)
def test_wrong_places_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings)


def test_the_root_says_what_this_is(served: Served) -> None:
    found = httpx.get(f"{served.url}/").json()
    assert (found["name"], found["models"]) == ("hybridrt", ["tested"])
    page = httpx.get(served.url + found["docs"])
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == "default-src 'none'" and "<script" not in page.text
    for path in httpx.get(f"{served.url}/openapi.json").json()["paths"]:
        assert f"<td>{path}<td>" in page.text
    with serving(served.llm, served_model_names=("<b>",), api_keys=("secret",)) as own:
        assert httpx.get(f"{own.url}/docs").status_code == 401
        assert "&lt;b&gt;" in httpx.get(f"{own.url}/docs", headers={"x-api-key": "secret"}).text


def test_a_unix_socket(served: Served, tmp_path: Path) -> None:
    from hybridrt.engine.api.async_llm import AsyncLLM
    from hybridrt.server.app import make_app
    from hybridrt.server.core.metrics import Metrics
    from hybridrt.server.core.service import Service
    from hybridrt.server.run import Server

    path = tmp_path / "socket"
    config = ServerConfig(uds=str(path), served_model_names=("tested",))
    bind(config).close()  # its owner has ended
    with AsyncLLM(served.llm, max_waiting=4) as llm, bind(config) as listener:
        service = Service(llm, config)
        server = Server(make_app(service, Metrics(llm, "tested")), service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path), retries=50), timeout=60) as client:
            while not service.ready:
                threading.Event().wait(0.01)
            answer = client.post("http://localhost/v1/completions", json=ASK)
            assert answer.status_code == 200, answer.text
        with pytest.raises(OSError, match="choose another --uds"):
            bind(config)
        server.handle_exit(15, None)
        thread.join(60)
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(OSError, match="choose another --uds"):
        bind(ServerConfig(uds=str(file)))
    assert file.read_text() == "kept"
