"""HTTP/1.1 by uvicorn with httptools, one request of a connection at a time, written without a wait."""

import asyncio
import re
import resource
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from hybridrt.server.wire.errors import APIError
from hybridrt.server.wire.sse import encode

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256  # each takes more memory than its bytes
# uvicorn would wait for a head without an end.
HEAD_SECONDS = 30.0
LINGER_SECONDS = 1.0  # after a refusal; a reset would take the answer from a client that still sends
MAX_HELD_BYTES = 64 * 1024  # not parsed; then the system's buffers slow the sender
# Parsed of one connection before others have their turn.
TURN_BYTES, TURN_PARTS = 16 * 1024, 256
LINE_BYTES = 1024  # while the number of parts is unknown
# Time between turns of many small parts, and after an answer if the next request came before it:
# such clients cannot fill the event loop.
GAP_SECONDS = 0.005
BODY_WRITER = "hybridrt.body_writer"  # where a request's scope keeps a BodyWriter
_BLANK_LINE = re.compile(rb"(?:\A|\n)\r?\n")  # a line may have ended before


def most_connections() -> int:
    """Connections of clients that are kept."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class BodyWriter:
    """Adds to the body of an answer without known length. ASGI's `send` is a coroutine in each
    layer of the application, which takes longer than the write."""

    __slots__ = ("_chunked", "_cycle")

    def __init__(self, cycle: RequestResponseCycle, chunked: bool) -> None:
        self._cycle, self._chunked = cycle, chunked

    @property
    def ready(self) -> bool:
        """The client takes what is written."""
        return not self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Writes a part of the body, unless the client has gone."""
        if data and not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


async def send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """`cycle.send` for HTTP/1.0, which knows no chunks: the end of the connection is that of a body
    without a length."""
    is_start = message["type"] == "http.response.start"
    lengths = [value for name, value in message.get("headers", ()) if name.lower() == b"content-length"]
    if cycle.chunked_encoding is None and (not is_start or lengths or cycle.scope["method"] == "HEAD"):
        await RequestResponseCycle.send(cycle, message)
        return
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    if is_start:
        cycle.response_started, cycle.chunked_encoding, cycle.keep_alive = True, True, False
        lines = [b"%b: %b\r\n" % header for header in message["headers"]]
        cycle.transport.write(b"".join([STATUS_LINE[message["status"]], *lines, b"connection: close\r\n\r\n"]))
        return
    cycle.transport.write(message.get("body", b""))
    if not message.get("more_body", False):
        cycle.response_complete = True
        cycle.message_event.set()
        cycle.transport.close()
        cycle.on_response()


class Flow(FlowControl):
    """Stops reading while uvicorn wants it (`read_paused`), and while too much is held that is not
    parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._reader, self._full, self._stopped = transport, False, False

    def pause_reading(self) -> None:
        self.read_paused = True
        self._apply()

    def resume_reading(self) -> None:
        self.read_paused = False
        self._apply()

    def hold(self, full: bool) -> None:
        """Says whether too much is held."""
        self._full = full
        self._apply()

    def _apply(self) -> None:
        stop = self.read_paused or self._full
        if stop != self._stopped and not self._reader.is_closing():
            self._stopped = stop
            (self._reader.pause_reading if stop else self._reader.resume_reading)()


class LimitedHttp(HttpToolsProtocol):
    """Limits the cost of one connection.

    - A request is parsed GAP_SECONDS after the one before was answered. Until then it waits as
      bytes: MAX_HELD_BYTES and one read at most, then the connection is not read.
    - The parser gets TURN_BYTES and TURN_PARTS at a time, then other connections have their turn.
    - A connection ends that sends more than MAX_HEAD_BYTES without a byte of a body (a head,
      trailers, extensions of chunks) or more than MAX_HEADERS: httptools would keep all of it.
    - A connection ends if a head takes more than HEAD_SECONDS from its beginning or from the first
      byte after an answer. The rest of a body whose request was refused has the same time.
    - A connection ends at once while clients have half of the files that this process may open: the
      others are for its own work, such as a router's connections to replicas.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        self._held = bytearray()
        self._body_left = 0
        self._parts = 0
        self._refusal: APIError | None = None
        self._bare_bytes = 0  # since the last byte of a body, or a request's end
        self._in_head, self._is_whole, self._is_over = True, False, False
        self._next: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()
        if len(self.connections) > most_connections():
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._next is not None:
            self._next.cancel()
        self._held.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._held += data
        if self._next is None:
            self._parse()
        self.flow.hold(len(self._held) > MAX_HELD_BYTES)

    def on_message_begin(self) -> None:
        if self._waits:  # pieces are cut so that it does not
            raise ValueError("a request begins before the one before it is answered")
        self._in_head, self._is_whole = True, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drops trailers: the application has checked the headers when they come."""
        self._parts += 1
        if not self._in_head:
            return
        if len(self.headers) == MAX_HEADERS:
            self._refusal = APIError(431, f"the request has more than {MAX_HEADERS} headers: send fewer")
            raise ValueError("uvicorn then calls send_400_response")
        if name.lower() == b"content-length" and value.isdigit():
            self._body_left = int(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head, self._bare_bytes = False, 0
        if not self.url.startswith(b"/"):
            self._take_host(httptools.parse_url(self.url))
        super().on_headers_complete()
        chunked = self.scope["http_version"] != "1.0"
        if not chunked:
            self.cycle.send = partial(send_unchunked, self.cycle)  # type: ignore[method-assign]
        self.scope["extensions"] = {BODY_WRITER: BodyWriter(self.cycle, chunked)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        self._parts += 1
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_whole, self._bare_bytes, self._body_left = True, 0, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and self._next is None:
            self._next = self.loop.call_later(GAP_SECONDS, self._parse_on)

    @property
    def _waits(self) -> bool:
        return self._is_whole and not self.cycle.response_complete

    def _parse_on(self) -> None:
        self._next = None
        self._parse()
        self.flow.hold(len(self._held) > MAX_HELD_BYTES)

    def _parse(self) -> None:
        size = self._parts = 0
        while self._held and not self._waits:
            if self._is_over or self.transport.is_closing():
                self._held.clear()
            elif size >= TURN_BYTES or self._parts >= TURN_PARTS:
                seconds = GAP_SECONDS if self._parts >= TURN_PARTS else 0
                self._next = self.loop.call_later(seconds, self._parse_on)
                return
            else:
                piece = self._take_piece()
                size += len(piece)
                self._parse_piece(piece)

    def _parse_piece(self, piece: bytes) -> None:
        if self._timer is None and self.cycle is not None and self.cycle.response_complete:
            self._start_timer()
        self._parts += 1
        self._bare_bytes += len(piece)
        super().data_received(piece)
        if self._bare_bytes > MAX_HEAD_BYTES and not self._is_over and not self.transport.is_closing():
            self._refusal = APIError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes: send fewer")
            self.send_400_response("")

    def _take_piece(self) -> bytes:
        """Takes the rest of a body, or up to the next blank line: no piece ends one request and
        begins another.
        """
        if self._body_left and not self._in_head:
            size = min(self._body_left, TURN_BYTES)
            self._body_left -= min(size, len(self._held))
        else:
            blank = _BLANK_LINE.search(self._held, 0, LINE_BYTES)
            size = blank.end() if blank else LINE_BYTES
        piece = bytes(self._held[:size])
        del self._held[:size]
        return piece

    def send_400_response(self, msg: str) -> None:
        """Ends the connection with an error in OpenAI's form. What the client still sends is dropped for a
        while."""
        error = self._refusal or APIError(400, "this is no HTTP request")
        body = encode(error.body(anthropic=False))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self._is_over = True
        if self.cycle is not None and not self.cycle.response_complete:  # it would go on writing
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _take_host(self, url: httptools.parser.url_parser.URL) -> None:
        """An address with a host replaces the header (RFC 9112, 3.2.2)."""
        if url.host is not None:
            host = b"[%b]" % url.host if b":" in url.host else url.host
            port = b"" if url.port is None else b":%d" % url.port
            self.headers[:] = [header for header in self.headers if header[0] != b"host"] + [(b"host", host + port)]

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
