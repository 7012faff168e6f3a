"""HTTP/1.1 as uvicorn reads it with httptools, with limits on what comes before the body, and writes without a wait."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Browsers and proxies send a few hundred bytes; other servers stop at 8 to 64 KiB.
MAX_HEAD_BYTES = 64 * 1024
# Clients send a head at once. uvicorn itself would wait for the rest of one, or for the first byte, without an end.
HEAD_SECONDS = 30.0
BODY_WRITER = "hybridrt.body_writer"  # the ASGI extension: where a request's scope keeps a BodyWriter


class BodyWriter:
    """Adds to the body of an answer that has begun and whose length is not known. ASGI's `send` does the same, but is a
    coroutine within one of each layer of the application, which takes longer than to write."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """The client takes what is written."""
        return not self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Writes a part of the body. Nothing is written to a client that has gone."""
        if data and not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class LimitedHttp(HttpToolsProtocol):
    """Ends a connection whose address and headers are longer than MAX_HEAD_BYTES: httptools would keep all of it. Ends
    one that has not sent them after HEAD_SECONDS, counted from the connection's beginning or from the first byte behind
    an answer. The rest of a body whose request was refused has the same time."""

    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._answers: list[RequestResponseCycle] = []  # not complete; several if requests do not wait
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended, for every request that is not answered: uvicorn tells the latest one alone."""
        self._stop_timer()
        for answer in self._answers:
            if not answer.response_complete:
                answer.disconnected = True
                answer.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come. While a request is answered, its own deadline holds."""
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._start_timer()
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body begins."""
        self._stop_timer()
        super().on_headers_complete()
        self._answers = [*(a for a in self._answers if not a.response_complete), self.cycle]
        self.scope["extensions"] = {BODY_WRITER: BodyWriter(self.cycle)}  # type: ignore[dict-item]

    def _count(self, length: int) -> None:
        self._head_bytes += length
        if self._head_bytes > MAX_HEAD_BYTES:
            # httptools turns what a callback raises into a parser's error, which uvicorn answers with 400 and the end.
            raise ValueError(f"more than {MAX_HEAD_BYTES} bytes of headers")

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
