"""Moving bytes from another worker's arena into one's own: the interface, and the transport within a process."""

from collections.abc import Sequence
from typing import Protocol

import torch

from hybridrt.distributed.conv_transfer import PageRead
from hybridrt.errors import TransferError


class Read(Protocol):
    """Reads on their way into our arena. They cannot be called back: until `done` has returned True or raised, they may
    still write there."""

    def done(self) -> bool:
        """True once every byte is there; then and after an error the arena is ours again.

        Raises:
            TransferError: the peer is gone, or the network gave up.
        """
        ...


class Transport(Protocol):
    """One rank's access to the arenas of other workers' ranks. Reads are one-sided: the other side need not help."""

    def describe(self) -> str:
        """What a peer must know to read our arena; text that travels in a message."""
        ...

    def connect(self, description: str) -> str:
        """Makes a peer's arena readable and returns the peer's name. Raises TransferError."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forgets a peer, dead or alive."""
        ...

    def read(self, peer: str, reads: Sequence[PageRead]) -> Read:
        """Starts copying. `source` counts from the start of the peer's arena, `destination` from ours.

        Raises:
            TransferError: the peer is not connected or gone.
        """
        ...

    def close(self) -> None: ...


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

    def read(self, peer: str, reads: Sequence[PageRead]) -> "InProcessRead":
        if peer not in self._peers:
            raise TransferError(f"{peer!r} is not connected")
        pieces = [
            PageRead(read.source + start, read.destination + start, min(self._piece, read.nbytes - start))
            for read in reads
            for start in range(0, read.nbytes, self._piece)
        ]
        return InProcessRead(self._hub, peer, self._buffer, pieces)

    def close(self) -> None:
        self._hub.pop(self._name, None)


class InProcessRead:
    """Copies the rest of `reads`, one at a time."""

    def __init__(self, hub: dict[str, torch.Tensor], peer: str, buffer: torch.Tensor, reads: list[PageRead]) -> None:
        self._hub, self._peer, self._buffer, self._reads = hub, peer, buffer, reads

    def done(self) -> bool:
        if self._peer not in self._hub:
            raise TransferError(f"{self._peer!r} is gone")
        if self._reads:
            read = self._reads.pop(0)
            data = self._hub[self._peer][read.source : read.source + read.nbytes]
            self._buffer[read.destination : read.destination + read.nbytes] = data
        return not self._reads
