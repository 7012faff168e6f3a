"""Images from https addresses: allowed hosts, public addresses, limits, and no redirects."""

import http.server
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hybridrt.base.errors import ConfigError, RequestError
from hybridrt.images import fetch
from hybridrt.images.fetch import Fetcher, FetchLimits, is_public
from hybridrt.images.source import Address, read_image
from tests.support.pictures import png

PICTURE = png(1, 40, 30)


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.path)
        status = {"/redirect": 302, "/missing": 404}.get(self.path, 200)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/picture.png")
        if self.path != "/endless":
            self.send_header("Content-Length", str(len(PICTURE) + (self.path == "/short")))
        self.end_headers()
        if self.path == "/slow":
            time.sleep(3)
        self.wfile.write(PICTURE)
        if self.path == "/endless":
            time.sleep(3)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    key, file = directory / "key.pem", directory / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=pictures.example",
        "-days",
        "2",
    ]
    command += ["-addext", "subjectAltName=DNS:pictures.example", "-keyout", str(key), "-out", str(file)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return file, key


@pytest.fixture(scope="module")
def port(certificate: tuple[Path, Path]) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetcher(port: int, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Fetcher:
    """Its host leads to this machine, as if that were a public address."""
    found = Fetcher([f"pictures.example:{port}"], FetchLimits(seconds=1, max_bytes=len(PICTURE)))
    found._context = ssl.create_default_context(cafile=str(certificate[0]))
    monkeypatch.setattr(fetch, "_resolved", lambda address: "127.0.0.1")
    return found


def address(text: str) -> Address:
    found = read_image(text, "p").content
    assert isinstance(found, Address)
    return found


def test_a_picture_is_fetched(fetcher: Fetcher, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert fetcher(address(f"https://Pictures.example:{port}/a.png?size=1"), "p") == PICTURE
    assert Answers.seen[-1] == "/a.png?size=1"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/redirect", "status 302"),
        ("/missing", "status 404"),
        ("/short", "breaks off"),
        ("/slow", "cannot be fetched"),
        ("/endless", "takes more than 1 seconds"),
    ],
)
def test_other_answers_are_refused(fetcher: Fetcher, port: int, path: str, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match=text) as caught:
        fetcher(address(f"https://pictures.example:{port}{path}"), "messages.0.content.1")
    assert caught.value.field == "messages.0.content.1"
    assert time.monotonic() - start < 2.5 and "/picture.png" not in Answers.seen


def test_a_long_answer_is_refused(fetcher: Fetcher, port: int) -> None:
    fetcher._limits = FetchLimits(seconds=1, max_bytes=len(PICTURE) - 1)
    with pytest.raises(RequestError, match=f"more than {len(PICTURE) - 1} bytes"):
        fetcher(address(f"https://pictures.example:{port}/a.png"), "p")


def test_a_certificate_of_another_name_is_refused(fetcher: Fetcher, port: int) -> None:
    fetcher._hosts = {("other.example", port)}
    with pytest.raises(RequestError, match="CERTIFICATE_VERIFY_FAILED"):
        fetcher(address(f"https://other.example:{port}/a.png"), "p")


@pytest.mark.parametrize("host", ["example.org", "a.pictures.example", "pictures.example.org", "pictures.example:444"])
def test_other_hosts_are_refused(host: str) -> None:
    with pytest.raises(RequestError, match="not allowed"):
        Fetcher(["pictures.example"])(address(f"https://{host}/a.png"), "p")


def test_hosts_at_private_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*arguments: Any, **more: Any) -> list[Any]:
        return [(0, 0, 0, "", (ip, 443)) for ip in ("1.1.1.1", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it connects"))
    with pytest.raises(RequestError, match="not public"):
        Fetcher(["pictures.example"])(address("https://pictures.example/a.png"), "p")


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    "ff02::1", "2001:db8::1", "fec0::1", "::10.0.0.1", "::ffff:0:10.0.0.1", "64:ff9b:1::a00:1", "4000::1",
]  # fmt: skip


def test_public_addresses() -> None:
    assert [ip for ip in PRIVATE if is_public(ip)] == []
    assert all(map(is_public, ("1.1.1.1", "2606:4700:4700::1111", "64:ff9b::101:101", "::ffff:1.1.1.1")))


@pytest.mark.parametrize(
    "host", ["", "*", "https://example.org", "example.org/x", "a b", "-a.org", "a.org:0", "a.org:99999"]
)
def test_hosts_are_names(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed image host"):
        Fetcher([host])
