"""Makes clients wait after a refused large body: REST times as long as the refusal took.

A refused body costs its sender almost nothing, and this process the time to read it.
"""

import asyncio
import time

from starlette.types import Message, Receive

from hybridrt.server.core.bodies import SMALL

REST = 4  # a client wastes at most a fifth of the time
MAX_REST = 5.0  # seconds
MAX_CLIENTS = 1024

Client = tuple[str, bytes]


class Refusals:
    """Until when clients rest: by address, and by key if the server checks one. An unchecked header
    could change each time."""

    def __init__(self) -> None:
        self._until: dict[Client, float] = {}

    def rest(self, client: Client) -> float:
        """Seconds that a client has to wait now."""
        return max(0.0, self._until.get(client, 0.0) - time.monotonic())

    def note(self, client: Client, seconds: float) -> None:
        """A client was refused. `seconds`: how long that took. The times that the client has to wait add up,
        to MAX_REST at most."""
        now = time.monotonic()
        until = min(max(now, self._until.pop(client, now)) + REST * seconds, now + MAX_REST)
        if len(self._until) >= MAX_CLIENTS:
            self._until = {each: end for each, end in self._until.items() if end > now}
        while len(self._until) >= MAX_CLIENTS:
            del self._until[next(iter(self._until))]
        self._until[client] = until


class LargeBody:
    """The body of one request. Its client rests before the first byte is read if it may have more
    than SMALL bytes.

    Attributes:
        client: the sender; set it before the body is received.
        complete: when its last byte came, in seconds of `time.monotonic()`; None: not yet, or it is
            small.
    """

    def __init__(self, refusals: Refusals, headers: dict[bytes, bytes], receive: Receive) -> None:
        self._refusals, self._receive, self._size = refusals, receive, 0
        self.client: Client = "", b""
        length = headers.get(b"content-length", b"")
        self._wait = b"transfer-encoding" in headers or (length.isdigit() and int(length) > SMALL)
        self.complete: float | None = None

    async def receive(self) -> Message:
        while self._wait and (seconds := self._refusals.rest(self.client)):
            await asyncio.sleep(seconds)
        self._wait = False
        message = await self._receive()
        self._size += len(message.get("body", b""))
        if self._size > SMALL and message["type"] == "http.request" and not message.get("more_body", False):
            self.complete = time.monotonic()
        return message

    def ended(self, status: int) -> None:
        if self.complete is not None and 400 <= status < 499:
            self._refusals.note(self.client, time.monotonic() - self.complete)
