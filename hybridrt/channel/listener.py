"""Accepts authenticated channels, and limits the others in number, memory and time."""

import errno
import socket
import time
from collections import deque
from dataclasses import dataclass, field

from hybridrt.base.errors import AuthenticationError, ConfigError
from hybridrt.channel.auth import ANSWER_BYTES, Challenge
from hybridrt.channel.channel import TIMEOUT_S, SocketChannel

MAX_STRANGERS = 64
STRANGER_S = 10.0  # seconds to prove the key
_MAX_ACCEPTED = 16
# No descriptor or memory is left, or the other side has closed.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO, errno.EINTR}


@dataclass(slots=True, eq=False)
class _Stranger:
    socket: socket.socket
    challenge: Challenge
    deadline: float
    answer: bytearray = field(default_factory=bytearray)


class Listener:
    """Accepts connections of processes that hold the key, without waiting.

    A connection is closed after a wrong proof, or without a proof after STRANGER_S seconds. If more
    than MAX_STRANGERS wait, or no file descriptor is left, the oldest one is closed.

    Args:
        address: host and port; port 0 picks a free one, see `port`.
        timeout: timeout of the channels, see SocketChannel.

    Attributes:
        refused: connections closed because they did not prove that they hold the key.

    Raises:
        ConfigError: it cannot listen at the address.
    """

    def __init__(self, address: tuple[str, int], key: bytes, timeout: float = TIMEOUT_S) -> None:
        self._key, self._timeout = key, timeout
        try:
            self._socket = socket.create_server(
                address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            )
        except OSError as e:
            raise ConfigError(f"cannot listen at {address}: {e}") from e
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.refused = 0
        self._strangers: deque[_Stranger] = deque()  # the longest wait first

    def accept(self) -> list[SocketChannel]:
        """Does not wait. Returns the channels whose processes have proved since the last call that they
        hold the key. Closes connections that gave a wrong proof, or none in time."""
        self._take_strangers()
        found = []
        for stranger in list(self._strangers):
            try:
                channel = self._authenticate(stranger)
            except (OSError, EOFError, AuthenticationError):
                self._refuse(stranger)
                continue
            if channel is not None:
                self._strangers.remove(stranger)
                found.append(channel)
            elif time.monotonic() > stranger.deadline:
                self._refuse(stranger)
        return found

    def close(self) -> None:
        """Closes the socket and unauthenticated connections; channels stay open. May be repeated."""
        for stranger in self._strangers:
            stranger.socket.close()
        self._strangers.clear()
        self._socket.close()

    def _take_strangers(self) -> None:
        """Sends each its challenge."""
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno not in _PASSING:
                    raise
                if self._strangers:
                    self._refuse(self._strangers[0])
                return
            connection.setblocking(False)
            stranger = _Stranger(connection, Challenge(self._key), time.monotonic() + STRANGER_S)
            self._strangers.append(stranger)
            try:
                connection.send(stranger.challenge.data)  # fits into a new buffer
            except OSError:
                self._refuse(stranger)
            if len(self._strangers) > MAX_STRANGERS:
                self._refuse(self._strangers[0])

    def _authenticate(self, stranger: _Stranger) -> SocketChannel | None:
        """Returns None until its whole answer has come and proves the key."""
        try:
            data = stranger.socket.recv(ANSWER_BYTES - len(stranger.answer))
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        stranger.answer += data
        if len(stranger.answer) < ANSWER_BYTES:
            return None
        proof, tagger = stranger.challenge.check_answer(bytes(stranger.answer))
        stranger.socket.send(proof)
        return SocketChannel(stranger.socket, tagger, self._timeout)

    def _refuse(self, stranger: _Stranger) -> None:
        self.refused += 1
        self._strangers.remove(stranger)
        stranger.socket.close()
