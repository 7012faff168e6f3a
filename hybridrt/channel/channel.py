"""Authenticated messages between processes over TCP: length, tag, bytes.

Both ends hold a key. `auth.py` has its proof and the tags, `codec.py` the bytes of a message.

Why not a library: pyzmq 27 with CURVE does not limit unauthenticated connections, does not report
that a peer has closed its connection, and cannot close one peer's. The standard library's
multiprocessing.connection waits in `accept` for a stranger that sends nothing, and without limit
for the rest of a message.
"""

import select
import socket
import struct
import time
from collections import deque
from contextlib import suppress

from hybridrt.base.errors import MessageError, PeerGoneError
from hybridrt.channel.auth import TAG_BYTES, Tagger, prove_key

MAX_MESSAGE_BYTES = 1 << 24
MAX_QUEUED_BYTES = 1 << 26
TIMEOUT_S = 30.0

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
# A vanished machine is noticed after idle + count * interval seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class SocketChannel:
    """A connected socket of which the other end has proved that it holds the key.

    One thread at a time uses it. `send`, `receive` and `close` do not wait.

    Args:
        tagger: makes and checks tags.
        timeout: seconds that the peer may take to read a message.
    """

    def __init__(self, connection: socket.socket, tagger: Tagger, timeout: float = TIMEOUT_S) -> None:
        connection.setblocking(False)
        _tune(connection)
        self._socket, self._tagger, self._timeout = connection, tagger, timeout
        self._outgoing: deque[tuple[float, memoryview]] = deque()  # messages with queueing times
        self._queued = 0
        self._incoming = bytearray()
        self._messages: deque[bytes] = deque()
        self._gone: PeerGoneError | None = None

    @classmethod
    def connect(cls, address: tuple[str, int], key: bytes, timeout: float = TIMEOUT_S) -> "SocketChannel":
        """Connects to a host and a port, and proves that this process holds the key.

        Raises:
            PeerGoneError: no process answers there within `timeout` seconds.
            AuthenticationError: the process there does not have the key.
        """
        deadline = time.monotonic() + timeout
        try:
            connection = socket.create_connection(address, timeout)
        except OSError as e:
            raise PeerGoneError(f"no process answers at {address[0]}:{address[1]} ({e})") from e
        try:
            tagger = prove_key(connection, key, deadline)
        except BaseException:
            connection.close()
            raise
        return cls(connection, tagger, timeout)

    def fileno(self) -> int:
        """For select and poll; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Sends or queues a message.

        Raises:
            PeerGoneError: the other end is gone.
            MessageError: the message is too long; nothing was sent.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise MessageError(f"a message has {len(message)} bytes; it may have {MAX_MESSAGE_BYTES}")
        self._check()
        frame = _LENGTH.pack(len(message)) + self._tagger.tag(message) + message
        self._outgoing.append((time.monotonic(), memoryview(frame)))
        self._queued += len(frame)
        self._flush()
        self._check()

    def receive(self) -> list[bytes]:
        """The messages since the last call.

        Raises:
            PeerGoneError: the other end is gone and all its messages have been returned, or it does
                not read.
            MessageError: it sent something else than messages.
        """
        self._flush()
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        if not messages:
            self._check()
        return messages

    def expect(self, timeout: float) -> bytes:
        """Waits for the next message. PeerGoneError also if none comes within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._messages:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerGoneError(f"the other process has sent nothing for {timeout:g} seconds")
            self.wait(left)
            self._messages.extend(self.receive())
        return self._messages.popleft()

    def wait(self, seconds: float) -> None:
        """Returns when something was received, when some queued bytes were sent, or after
        `seconds`."""
        if self._gone is None and not self._messages:
            self._poll(select.POLLIN | (select.POLLOUT if self._outgoing else 0), seconds)

    @property
    def has_messages(self) -> bool:
        """Whether `receive` returns some at once."""
        return bool(self._messages)

    def is_drained(self, *, read: bool) -> bool:
        """Sends queued bytes, and says whether the operating system has all of them. Does not wait.

        Args:
            read: reads if it has not. Messages that came are for `receive`.

        Raises:
            PeerGoneError: the other end is gone.
        """
        self._flush()
        if read and self._outgoing:
            self._read()
        self._check()
        return not self._outgoing

    def close(self, reason: PeerGoneError | None = None) -> None:
        """The other end's next `receive` raises, and this one's `reason`. May be repeated."""
        self._flush()
        self._end(reason or PeerGoneError("the channel is closed"))

    def _check(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _poll(self, events: int, seconds: float) -> None:
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(self._socket, events)
        poll.poll(max(0, 1000 * seconds))
        self._flush()

    def _flush(self) -> None:
        """Ends the channel if the peer does not read."""
        while self._outgoing and self._gone is None:
            queued_at, data = self._outgoing[0]
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                if time.monotonic() - queued_at > self._timeout or self._queued > MAX_QUEUED_BYTES:
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
        """Reads a bounded amount: a peer that sends without end does not delay others."""
        try:
            for _ in range(_READ_BYTES // _PIECE_BYTES):
                if self._gone is not None:
                    return
                data = self._socket.recv(_PIECE_BYTES)
                if not data:
                    return self._end(PeerGoneError("the other process has closed the connection"))
                self._incoming += data
                self._split()
        except BlockingIOError:
            return
        except MessageError as e:
            self._end(e)
        except OSError as e:
            self._end(PeerGoneError(f"the connection to the other process broke ({e})"))

    def _split(self) -> None:
        start, head = 0, _LENGTH.size + TAG_BYTES
        while len(self._incoming) - start >= head:
            (nbytes,) = _LENGTH.unpack_from(self._incoming, start)
            if nbytes > MAX_MESSAGE_BYTES:
                raise MessageError(f"a message of {nbytes} bytes comes; it may have {MAX_MESSAGE_BYTES}")
            end = start + head + nbytes
            if len(self._incoming) < end:
                break
            message = bytes(self._incoming[start + head : end])
            self._tagger.check_tag(message, bytes(self._incoming[start + _LENGTH.size : start + head]))
            self._messages.append(message)
            start = end
        del self._incoming[:start]

    def _end(self, reason: PeerGoneError) -> None:
        """Keeps the first reason, which `receive` raises."""
        self._gone = self._gone or reason
        self._outgoing.clear()
        self._incoming.clear()
        self._queued = 0
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that polls it, which `close` does not
        self._socket.close()


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
