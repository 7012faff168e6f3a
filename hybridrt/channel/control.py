"""Links between rank 0 and the other ranks, next to their collectives: messages and heartbeats."""

import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol
from weakref import WeakSet

from hybridrt.base.errors import ConfigError, MessageError, PeerGoneError
from hybridrt.channel.channel import SocketChannel

TIMEOUT_VARIABLE = "HYBRIDRT_RANK_TIMEOUT"
TIMEOUT_S = 10.0
TURN_S = 0.05  # a sender looks as often whether another thread still reads
LOADING_S = 60.0  # at least, while a model is loaded: libraries may keep a process's other threads from running
PART_BYTES, MAX_LINK_BYTES = 2**23, 2**30
_LAST, _MORE = b"\0", b"\1"
BEATS = 6  # heartbeats that a rank sends within a time-out


def rank_timeout() -> float:
    """Seconds after which a silent rank counts as lost. ConfigError if the variable is no such
    number."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise ConfigError(f"{TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds from 0.1 to 86400")
    return seconds


def check_length(message: bytes) -> None:
    """MessageError if a link does not send it."""
    if len(message) > MAX_LINK_BYTES:
        raise MessageError(f"a message has {len(message)} bytes; it may have {MAX_LINK_BYTES}")


class Link:
    """A channel between rank 0 and another rank. One thread may listen while others send.

    Messages may be longer than those of a channel: they are sent in parts. The first byte of a part
    says whether it is the last one.
    """

    def __init__(self, channel: SocketChannel) -> None:
        self._channel, self._lock, self._sending = channel, threading.Lock(), threading.Lock()
        self._listening = False  # a thread reads
        self._parts = list[bytes]()  # of a message that has not come to its end
        self._unread = list[bytes]()  # messages that were put back
        disown_in_child(self)

    def send(self, message: bytes) -> None:
        """Returns when the operating system has the message. PeerGoneError, and the link is closed;
        MessageError if it is too long, before any of it is sent."""
        check_length(message)
        with self._sending:
            try:
                for start in range(0, max(len(message), 1), PART_BYTES):
                    end = start + PART_BYTES
                    with self._lock:
                        self._channel.send((_LAST if end >= len(message) else _MORE) + message[start:end])
                    self._drain()
            except BaseException as e:  # the next message would be joined to the half that was sent
                self.close(e if isinstance(e, PeerGoneError) else None)
                raise

    def _drain(self) -> None:
        """Waits until the operating system has what was sent. Reads meanwhile if no other thread does: if the
        other end sends as much, it waits for a reader, too."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            with self._lock:
                reads = not self._listening
                if self._channel.is_drained(read=reads):
                    return
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerGoneError(f"the other process has not read its messages for {TIMEOUT_S:g} seconds")
            self._poll(select.POLLOUT | (select.POLLIN if reads else 0), min(left, TURN_S))

    def listen(self, seconds: float) -> list[bytes]:
        """Waits for messages, at most so many seconds after the last part; empty if none came.
        PeerGoneError if the other end is gone."""
        if self._unread:
            found, self._unread = self._unread, []
            return found
        with self._lock:
            self._listening = True  # from here on nothing is read that this thread does not see
        try:
            return self._listen(seconds)
        finally:
            self._listening = False

    def _listen(self, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            if not self._channel.has_messages:  # a sender may have read some
                self._poll(select.POLLIN, max(0.0, left))
            with self._lock:
                parts = self._channel.receive()
            messages = self._joined(parts)
            if messages or (left <= 0 and not parts):
                return messages
            if parts:
                deadline = time.monotonic() + seconds

    def _poll(self, events: int, seconds: float) -> None:
        if (descriptor := self._channel.fileno()) >= 0:
            poll = select.poll()  # select takes no descriptor above 1023
            poll.register(descriptor, events)
            poll.poll(1000 * seconds)

    def put_back(self, messages: Sequence[bytes]) -> None:
        """The next `listen` returns these messages, the last that it has returned, once more."""
        self._unread = [*messages]

    def listen_to(self, timeout: float, patience: Callable[[], float], stopped: Callable[[], bool]) -> list[bytes]:
        """Waits for messages; empty once the other end is silent for too long. PeerGoneError as `listen`.

        Args:
            timeout: seconds after which a process that is `stopped` is silent for too long.
            patience: seconds after which any other one is.
        """
        since = time.monotonic()
        while not (messages := self.listen(timeout)):
            if stopped() or time.monotonic() - since >= patience():
                break
        return messages

    def _joined(self, parts: Sequence[bytes]) -> list[bytes]:
        found = list[bytes]()
        for part in parts:
            self._parts.append(part[1:])
            if len(self._parts) * PART_BYTES > MAX_LINK_BYTES + PART_BYTES:
                raise MessageError(f"a message of more than {MAX_LINK_BYTES} bytes comes")
            if part[:1] == _LAST:
                found.append(b"".join(self._parts))
                self._parts = []
        return found

    def listen_and_beat(self, beat: bytes, interval: float, take: Callable[[bytes], object]) -> NoReturn:
        """Gives each message to `take`, and sends `beat` every `interval` seconds. PeerGoneError once
        the other end is gone."""
        beat_at = time.monotonic()
        while True:
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + interval
                self.send(beat)
            for message in self.listen(max(0.0, beat_at - time.monotonic())):
                take(message)

    def close(self, reason: PeerGoneError | None = None) -> None:
        """A thread that listens, and later calls, raise `reason`."""
        with self._lock:
            self._channel.close(reason)

    def disown(self) -> None:
        """In a forked child: closes its copy of the connection, unnoticed by the other end."""
        descriptor = self._channel.fileno()
        if descriptor >= 0:
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), descriptor, inheritable=False)


class Owned(Protocol):
    """An object that only the process that made it may use."""

    def disown(self) -> None:
        """Called in a forked child, whose copy must neither talk to other processes nor wait for
        them."""


_owned: WeakSet[Owned] = WeakSet()


def disown_in_child(owned: Owned) -> None:
    """Registers `owned.disown` to be called in processes forked from this one."""
    _owned.add(owned)


def _disown_all() -> None:
    for owned in list(_owned):
        owned.disown()


os.register_at_fork(after_in_child=_disown_all)
