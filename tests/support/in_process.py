"""Channels and transports of one process, for workers that are tested without sockets and NIXL."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from hybridrt.base.errors import PeerGoneError, TransferError
from hybridrt.mem_cache.pools.state_slices import RangeRead
from hybridrt.transfer.handshake import Handshake

Raw = dict[str, Any]


def prefill_hello(handshake: Handshake, ranks: list[Any]) -> Raw:
    """A prefill worker's first message."""
    return {"type": "prefillhello", "handshake": handshake, "ranks": ranks}


def decode_hello(handshake: Handshake) -> Raw:
    """A decode worker's first message."""
    return {"type": "decodehello", "handshake": handshake}


class QueueChannel:
    """A channel of one process, whose messages are bytes as on a socket. `QueueChannel.pair()` gives both ends."""

    def __init__(self, incoming: deque[bytes], outgoing: deque[bytes], alive: list[bool]) -> None:
        self._incoming, self._outgoing, self._alive = incoming, outgoing, alive

    @classmethod
    def pair(cls) -> tuple["QueueChannel", "QueueChannel"]:
        one, other, alive = deque[bytes](), deque[bytes](), [True]
        return cls(one, other, alive), cls(other, one, alive)

    def send(self, message: bytes | Raw) -> None:
        """A dictionary is sent as it is, whether it is a right message or not."""
        if not self._alive[0]:
            raise PeerGoneError("the channel is closed")
        self._outgoing.append(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def receive(self) -> list[bytes]:
        messages = list(self._incoming)
        self._incoming.clear()
        if not messages and not self._alive[0]:
            raise PeerGoneError("the channel is closed")
        return messages

    def expect(self, timeout: float) -> bytes:
        if not self._incoming:
            raise PeerGoneError(f"nothing came for {timeout:g} seconds")
        return self._incoming.popleft()

    def heard(self) -> list[Raw]:
        """What `receive` returns, as dictionaries."""
        return [msgspec.msgpack.decode(message) for message in self.receive()]

    def close(self) -> None:
        self._alive[0] = False


class InProcessTransport:
    """Arenas of one process. A read copies a piece whenever it is asked whether it is done, so that anything can happen
    in the middle of a transfer.

    Args:
        hub: arenas by name, shared by all transports that shall see one another.
        piece: bytes of one copy.
    """

    def __init__(self, hub: dict[str, torch.Tensor], name: str, buffer: torch.Tensor, piece: int = 1 << 20) -> None:
        self._hub, self._name, self._buffer, self._piece = hub, name, buffer, piece
        self._peers: set[str] = set()
        hub[name] = buffer

    def describe(self) -> str:
        return self._name

    def connect(self, description: str) -> str:
        if description not in self._hub:
            raise TransferError(f"no arena of the name {description!r} in this process")
        self._peers.add(description)
        return description

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)

    def read(self, peer: str, reads: Sequence[RangeRead]) -> "InProcessRead":
        if peer not in self._peers:
            raise TransferError(f"{peer!r} is not connected")
        pieces = [
            RangeRead(read.source + start, read.destination + start, min(self._piece, read.nbytes - start))
            for read in reads
            for start in range(0, read.nbytes, self._piece)
        ]
        return InProcessRead(self._hub, peer, self._buffer, pieces)

    def close(self) -> None:
        self._hub.pop(self._name, None)


class InProcessRead:
    """Copies the rest of `reads`, one at a time."""

    def __init__(self, hub: dict[str, torch.Tensor], peer: str, buffer: torch.Tensor, reads: list[RangeRead]) -> None:
        self._hub, self._peer, self._buffer, self._reads = hub, peer, buffer, reads

    def done(self) -> bool:
        if self._peer not in self._hub:
            raise TransferError(f"{self._peer!r} is gone")
        if self._reads:
            read = self._reads.pop(0)
            data = self._hub[self._peer][read.source : read.source + read.nbytes]
            self._buffer[read.destination : read.destination + read.nbytes] = data
        return not self._reads
