"""Messages between workers: small dictionaries, in order, over a pair of queues or a TCP connection."""

import json
import select
import socket
import struct
from collections import deque
from typing import Any, Protocol

from hybridrt.errors import PeerGoneError

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_SEND_SECONDS = 30.0
_MOST_BYTES = 1 << 27
# A machine that vanishes without a word is noticed after idle + count * interval seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Channel(Protocol):
    """One end of a connection between two workers."""

    def send(self, message: Message) -> None:
        """Raises PeerGoneError if nobody is there to take it."""
        ...

    def receive(self) -> list[Message]:
        """What has come, without waiting. Raises PeerGoneError once the other end is gone and its last message read."""
        ...

    def close(self) -> None:
        """The other end's next `receive` raises. Closing again does nothing."""
        ...


class QueueChannel:
    """Within a process. `QueueChannel.pair()` gives both ends."""

    def __init__(self, incoming: deque[Message], outgoing: deque[Message], alive: list[bool]) -> None:
        self._incoming, self._outgoing, self._alive = incoming, outgoing, alive

    @classmethod
    def pair(cls) -> tuple["QueueChannel", "QueueChannel"]:
        one, other, alive = deque[Message](), deque[Message](), [True]
        return cls(one, other, alive), cls(other, one, alive)

    def send(self, message: Message) -> None:
        if not self._alive[0]:
            raise PeerGoneError("the channel is closed")
        self._outgoing.append(message)

    def receive(self) -> list[Message]:
        messages = list(self._incoming)
        self._incoming.clear()
        if not messages and not self._alive[0]:
            raise PeerGoneError("the channel is closed")
        return messages

    def close(self) -> None:
        self._alive[0] = False


class SocketChannel:
    """Over TCP: JSON behind its length in 4 bytes. Unauthenticated: for a network that is the workers' own."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = connection
        self._received = bytearray()
        self._gone: PeerGoneError | None = None

    @classmethod
    def connect(cls, host: str, port: int) -> "SocketChannel":
        """Raises PeerGoneError if nobody listens there."""
        try:
            return cls(socket.create_connection((host, port), timeout=_SEND_SECONDS))
        except OSError as e:
            raise PeerGoneError(f"no worker answers at {host}:{port} ({e})") from e

    def send(self, message: Message) -> None:
        data = json.dumps(message).encode()
        try:
            self._socket.settimeout(_SEND_SECONDS)
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as e:
            raise PeerGoneError(f"the other worker takes no messages any more ({e})") from e

    def receive(self) -> list[Message]:
        self._read()
        messages = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if end > _MOST_BYTES:
                raise PeerGoneError("whoever is at the other end speaks another protocol")
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        if not messages and self._gone is not None:
            raise self._gone
        return messages

    def wait(self, seconds: float) -> None:
        """Until something comes, so many seconds at most."""
        if self._gone is None:
            select.select([self._socket], [], [], seconds)

    def close(self) -> None:
        self._socket.close()
        self._gone = self._gone or PeerGoneError("the channel is closed")

    def _read(self) -> None:
        while self._gone is None:
            try:
                self._socket.settimeout(0)
                data = self._socket.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError as e:
                self._gone = PeerGoneError(f"the connection to the other worker broke ({e})")
                return
            if not data:
                self._gone = PeerGoneError("the other worker has closed the connection")
            self._received += data


class Listener:
    """Accepts TCP connections of other workers, without waiting. Port 0 takes a free one; `port` says which."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = socket.create_server((host, port))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def accept(self) -> list[SocketChannel]:
        """Whoever has connected since the last call."""
        found = []
        while True:
            try:
                found.append(SocketChannel(self._socket.accept()[0]))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()
