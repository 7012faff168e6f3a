"""The two clients of benchmarks.attacks: one that attacks, with a share of a core, and its neighbour, who is timed."""

import http.client
import json
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.attack_cases import COUNTER, NEIGHBOUR, Attack

READ = 1 << 18
MAX_SENT = 100_000  # requests or parts of one run, however long it is
TIMEOUT = 60.0  # for an answer to the neighbour
STREAM_TOKENS = 24
PAUSE = 0.02  # between two requests of the neighbour


class _Connection:
    """One of the attacker's: what it still has to send. It begins again when that is answered, or at once."""

    def __init__(self, address: tuple[str, int], part: bytes, waits: bool) -> None:
        self._address, self._part, self._waits = address, part, waits
        self.statuses: Counter[str] = Counter()
        self.sent = 0
        self.socket: socket.socket | None = None
        self._left = memoryview(b"")

    def open(self) -> socket.socket:
        self.socket = socket.create_connection(self._address, timeout=1.0)
        self.socket.setblocking(False)
        self._begin()
        return self.socket

    def _begin(self) -> None:
        number = b"%0*d" % (len(COUNTER), time.monotonic_ns() % 10 ** len(COUNTER))
        self._left = memoryview(self._part.replace(COUNTER, number) if COUNTER in self._part else self._part)
        self.sent += 1

    @property
    def wanted(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._left else 0)

    def step(self, events: int) -> bool:
        """Sends and reads what goes at once. False: the connection has ended."""
        assert self.socket is not None
        try:
            if events & selectors.EVENT_WRITE:
                self._left = self._left[self.socket.send(self._left[:READ]) :]
                if not self._left and not self._waits:
                    self._begin()
            if events & selectors.EVENT_READ:
                data = self.socket.recv(READ)
                for status in ("200", "400", "403", "413", "429", "500", "503", "504"):
                    self.statuses[status] += data.count(b"HTTP/1.1 " + status.encode())
                return bool(data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def attack(case: Attack, address: tuple[str, int], seconds: float, share: float) -> dict[str, Any]:
    """Attacks for so long, with at most this share of a core: after each step it sleeps as its CPU time demands."""
    connections = [_Connection(address, case.parts[i % len(case.parts)], case.waits) for i in range(case.connections)]
    began, cpu = time.monotonic(), time.process_time()
    with selectors.DefaultSelector() as selector:
        while (passed := time.monotonic() - began) < seconds and sum(c.sent for c in connections) < MAX_SENT:
            for connection in connections:
                if connection.socket is None:
                    _try_to_open(connection, selector)
                else:
                    selector.modify(connection.socket, connection.wanted, connection)
            for key, events in selector.select(0.02):
                if not key.data.step(events):
                    _close(key.data, selector)
            ahead = (time.process_time() - cpu) / share - passed
            if ahead > 0:
                time.sleep(min(ahead, 1.0))
        for connection in connections:
            _close(connection, selector)
    used = (time.process_time() - cpu) / (time.monotonic() - began)
    statuses = sum((connection.statuses for connection in connections), Counter())
    return {"sent": sum(c.sent for c in connections), "cpu_share": round(used, 3), "statuses": dict(statuses)}


def _try_to_open(connection: _Connection, selector: selectors.BaseSelector) -> None:
    try:
        selector.register(connection.open(), connection.wanted, connection)
    except OSError:
        connection.socket = None  # tried again at the next turn


def _close(connection: _Connection, selector: selectors.BaseSelector) -> None:
    if connection.socket is not None:
        selector.unregister(connection.socket)
        connection.socket.close()
        connection.socket = None


@dataclass
class Neighbour:
    """Sends short requests one after another, as clients do. Times are in seconds, by what was measured.

    Attributes:
        picture: of chats that have one, base64 of a file; None: there are none.
    """

    address: tuple[str, int]
    picture: str | None = None
    times: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    _forms: int = 0

    def run(self, seconds: float) -> None:
        """For so long; a request that has begun is timed to its end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for work in (self._stream, self._chat, self._form, *([self._see] if self.picture else [])):
                try:
                    work()
                except (OSError, http.client.HTTPException, ValueError) as e:
                    self.failures[f"{work.__name__.strip('_')}: {str(e) or type(e).__name__}"] += 1
                time.sleep(PAUSE)

    def _note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def _post(self, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", "X-Api-Key": NEIGHBOUR})
        answer = connection.getresponse()
        if answer.status != 200:
            connection.close()
            raise ValueError(f"status {answer.status}")
        return connection, answer

    def _stream(self) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        then = time.monotonic()
        connection, answer = self._post("/v1/completions", body | {"return_token_ids": True})
        name = "first token"
        while line := answer.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                self._note(name, now - then)
                name, then = "between tokens", now
        connection.close()
        if not line and name == "first token":
            raise ValueError("an empty stream")

    def _whole(self, name: str, path: str, body: dict[str, Any]) -> None:
        began = time.monotonic()
        connection, answer = self._post(path, body)
        answer.read()
        connection.close()
        self._note(name, time.monotonic() - began)

    def _chat(self) -> None:
        self._whole("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})

    def _see(self) -> None:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{self.picture}"}}
        content = [image, {"type": "text", "text": "What is this?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        self._whole("picture", "/v1/chat/completions", body)

    def _form(self) -> None:
        """One that the server has not seen."""
        self._forms += 1
        properties = {f"p{self._forms}": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        self._whole("new form", "/v1/completions", {"prompt": [5], "max_tokens": 3, "guided_json": schema})
