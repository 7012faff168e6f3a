"""A router in a thread of the tests' process."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import httpx

from hybridrt.fleet.router import Router, RouterConfig, RouterServer
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.run import bind
from tests.support.http_server import WAIT

FLEET_KEY = "f" * 32


@dataclass
class Routed:
    """A router that runs."""

    server: RouterServer
    url: str

    @property
    def router(self) -> Router:
        return self.server.router

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, **options)

    def wait_for(self, ready: int) -> None:
        """Until so many replicas are ready."""
        self.wait_until(lambda: sum(replica.ready for replica in self.router.replicas) == ready)

    def wait_for_caches(self) -> None:
        self.wait_until(lambda: all(replica.placed.mirror is not None for replica in self.router.replicas))

    @staticmethod
    def wait_until(holds: Any, seconds: float = WAIT) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextmanager
def routing(
    *replicas: str,
    tokenizer: str | None = None,
    replica_key: str | None = None,
    discover: str | None = None,
    resume: bool = False,
    **settings: Any,
) -> Iterator[Routed]:
    server_config = ServerConfig(**{"port": 0, "access_log": False, "fleet_key": FLEET_KEY} | settings)
    config = RouterConfig(server_config, replicas, replica_key, server_config.fleet_key, tokenizer, discover, resume)
    ready = threading.Event()
    with bind(server_config) as listener:
        server = RouterServer(config)
        startup = server.startup

        async def noting(sockets: Any = None) -> None:
            await startup(sockets)
            ready.set()

        server.startup = noting  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            assert ready.wait(WAIT), "the router does not start"
            yield Routed(server, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.handle_exit(15, None)
            thread.join(WAIT)
            assert not thread.is_alive(), "the router does not end"


def _request(connection: socket.socket) -> bytes:
    """To its end: closing a connection with unread bytes resets it."""
    found = b""
    while (part := connection.recv(65536)) and (found := found + part):
        head, ended, body = found.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if ended and len(body) >= (int(length[1]) if length else 0):
            break
    return found


@contextmanager
def failing(*answers: bytes, endless: bytes = b"", fleet: bool = False) -> Iterator[str]:
    """A replica that is ready, sends these bytes to each request, one after the other, and ends the connection;
    with `endless` it sends these bytes again and again first. `fleet`: also to those of routers and decode servers."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            head = _request(connection)
            if head.startswith(b"GET /ready"):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            if not fleet and b"/fleet/" in head.split(b"\r\n")[0]:
                return
            with suppress(OSError):
                for part in chain(answers, repeat(endless) if endless else ()):
                    connection.sendall(part)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
