"""Authenticated messages between processes: msgpack behind a length and a tag, over TCP or a Unix socket.

Both ends hold a key. `channel_auth.py` says how they prove it to each other before the first message, and how every
message is tagged. Nothing here runs code that a message brings: msgpack carries numbers, text, bytes, lists and
dictionaries, and nothing else is taken.
"""

import select
import socket
import struct
import time
from collections import deque
from typing import Any, Protocol

import msgpack

from hybridrt.distributed.channel_auth import TAG_BYTES, Tagger, join
from hybridrt.errors import MessageError, PeerGoneError

Message = dict[str, Any]
Address = tuple[str, int] | str  # host and port of TCP, or the path of a Unix socket

MOST_BYTES = 1 << 24  # of one message
MOST_DEPTH = 8  # of lists and dictionaries within each other
MOST_QUEUED = 1 << 26  # bytes that wait for a peer to read
TIMEOUT_S = 30.0

_LENGTH = struct.Struct("!I")
_AT_ONCE = 1 << 20  # bytes that one `receive` reads at most
_PIECE = 1 << 16
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
# A machine that vanishes is noticed after idle + count * interval seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Channel(Protocol):
    """One end of a connection between two processes. None of these methods waits."""

    def send(self, message: Message) -> None:
        """Hands a message over, now or when the peer reads. Raises PeerGoneError."""
        ...

    def receive(self) -> list[Message]:
        """The messages that have come since the last call.

        Raises:
            PeerGoneError: the other end is gone and its last message has been returned, or it does not read.
            MessageError: it sent something else than messages.
        """
        ...

    def close(self) -> None:
        """The other end's next `receive` raises. Closing again does nothing."""
        ...


def pack(message: Message) -> bytes:
    """The bytes of a message. Raises MessageError if it holds what no message may hold, or too much."""
    try:
        data: bytes = msgpack.packb(message, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as e:
        raise MessageError(f"this cannot be sent as a message: {e}") from e
    if len(data) > MOST_BYTES:
        raise MessageError(f"a message has {len(data)} bytes; it may have {MOST_BYTES}")
    return data


def unpack(data: bytes) -> Message:
    """The message that `pack` made these bytes of. Raises MessageError if they are none."""
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)
    except Exception as e:  # msgpack's own errors share no base class with those of its callbacks and of UTF-8
        raise MessageError(f"a message is not msgpack: {type(e).__name__}") from e
    if not isinstance(message, dict):
        raise MessageError(f"a message is {type(message).__name__}; it must be a dictionary")
    _check(message, MOST_DEPTH)
    return message


def _check(value: dict[Any, Any] | list[Any], depth: int) -> None:
    """Raises MessageError unless `value` consists of plain values, `depth` levels deep at most."""
    if not depth:
        raise MessageError(f"a message has more than {MOST_DEPTH} levels")
    items: Any = value
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            raise MessageError("a dictionary in a message has a key that is no text")
        items = value.values()
    if _PLAIN.issuperset(map(type, items)):
        return
    for item in items:
        if isinstance(item, (dict, list)):
            _check(item, depth - 1)
        elif type(item) not in _PLAIN:
            raise MessageError(f"a message holds {type(item).__name__}; it may hold numbers, text and bytes")


class SocketChannel:
    """A connected socket whose other end has proved that it holds the key. One thread at a time.

    Args:
        tagger: what tags messages and checks tags.
        timeout: seconds that the peer may take to read a message.
    """

    def __init__(self, connection: socket.socket, tagger: Tagger, timeout: float = TIMEOUT_S) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            _tune(connection)
        self._socket, self._tagger, self._timeout = connection, tagger, timeout
        self._outgoing: deque[tuple[float, memoryview]] = deque()  # with the time when each was queued
        self._queued = 0
        self._incoming = bytearray()
        self._messages: deque[Message] = deque()
        self._gone: PeerGoneError | None = None

    @classmethod
    def connect(cls, address: Address, key: bytes, timeout: float = TIMEOUT_S) -> "SocketChannel":
        """Connects, and proves to the other end that this one holds the key.

        Raises:
            PeerGoneError: no process answers there within `timeout` seconds.
            AuthenticationError: the process there does not hold the key.
        """
        deadline = time.monotonic() + timeout
        connection = _connect(address, timeout)
        try:
            tagger = join(connection, key, deadline)
        except BaseException:
            connection.close()
            raise
        return cls(connection, tagger, timeout)

    def fileno(self) -> int:
        """For select and its kin; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        if self._gone is not None:
            raise self._gone
        data = pack(message)
        frame = _LENGTH.pack(len(data)) + self._tagger.tag(data) + data
        self._outgoing.append((time.monotonic(), memoryview(frame)))
        self._queued += len(frame)
        self._flush()
        if self._gone is not None:
            raise self._gone

    def receive(self) -> list[Message]:
        self._flush()
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        if not messages and self._gone is not None:
            raise self._gone
        return messages

    def expect(self, timeout: float) -> Message:
        """The next message. Raises PeerGoneError also if none comes within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._messages:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerGoneError(f"the other process has sent nothing for {timeout:g} seconds")
            self.wait(left)
            self._messages.extend(self.receive())
        return self._messages.popleft()

    def wait(self, seconds: float) -> None:
        """Returns when something has come or `seconds` have passed. What waits for the peer is sent meanwhile."""
        deadline = time.monotonic() + seconds
        while self._gone is None and not self._messages:
            poll, left = select.poll(), deadline - time.monotonic()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            ready = poll.poll(max(0, 1000 * left))
            self._flush()
            if left <= 0 or any(event & ~select.POLLOUT for _, event in ready):
                return

    def drain(self, timeout: float) -> None:
        """Waits until the operating system has all that was sent. Raises PeerGoneError also after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._outgoing:
            left, poll = deadline - time.monotonic(), select.poll()
            if left <= 0:
                raise PeerGoneError(f"the other process has not read its messages for {timeout:g} seconds")
            poll.register(self._socket, select.POLLOUT)
            poll.poll(1000 * left)
            self._flush()
        if self._gone is not None:
            raise self._gone

    def close(self) -> None:
        if self._gone is None:
            self._flush()
        self._end(PeerGoneError("the channel is closed"))

    def _flush(self) -> None:
        """Sends what the peer's buffers take. Ends the channel if the peer does not read."""
        while self._outgoing and self._gone is None:
            queued_at, data = self._outgoing[0]
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                if time.monotonic() - queued_at > self._timeout or self._queued > MOST_QUEUED:
                    self._end(PeerGoneError("the other process does not read its messages"))
                return
            except OSError as e:
                return self._end(PeerGoneError(f"the other process takes no messages any more ({e})"))
            self._queued -= sent
            if sent < len(data):
                self._outgoing[0] = queued_at, data[sent:]
            else:
                self._outgoing.popleft()

    def _read(self) -> None:
        """Reads a bounded amount, so that a peer that sends without end does not delay other peers."""
        try:
            for _ in range(_AT_ONCE // _PIECE):
                if self._gone is not None:
                    return
                data = self._socket.recv(_PIECE)
                if not data:
                    return self._end(PeerGoneError("the other process has closed the connection"))
                self._incoming += data
                self._take()
        except BlockingIOError:
            return
        except MessageError as e:
            self._end(e)
        except OSError as e:
            self._end(PeerGoneError(f"the connection to the other process broke ({e})"))

    def _take(self) -> None:
        """Makes messages of the frames that are complete."""
        start, head = 0, _LENGTH.size + TAG_BYTES
        while len(self._incoming) - start >= head:
            (nbytes,) = _LENGTH.unpack_from(self._incoming, start)
            if nbytes > MOST_BYTES:
                raise MessageError(f"a message of {nbytes} bytes comes; it may have {MOST_BYTES}")
            end = start + head + nbytes
            if len(self._incoming) < end:
                break
            data = bytes(self._incoming[start + head : end])
            self._tagger.check(data, bytes(self._incoming[start + _LENGTH.size : start + head]))
            self._messages.append(unpack(data))
            start = end
        del self._incoming[:start]

    def _end(self, reason: PeerGoneError) -> None:
        """The first reason is the one that `receive` raises."""
        self._gone = self._gone or reason
        self._outgoing.clear()
        self._incoming.clear()
        self._queued = 0
        self._socket.close()


def _connect(address: Address, timeout: float) -> socket.socket:
    try:
        if not isinstance(address, str):
            return socket.create_connection(address, timeout)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout)
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection
    except OSError as e:
        where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise PeerGoneError(f"no process answers at {where} ({e})") from e


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
