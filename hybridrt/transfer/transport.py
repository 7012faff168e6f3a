"""Moving bytes from another worker's arena into one's own: the interface."""

from collections.abc import Sequence
from typing import Protocol

from hybridrt.distributed.conv_transfer import RangeRead


class Read(Protocol):
    """Reads into our arena that have been started. They cannot be stopped: until `done` returns True or raises, they
    may write there."""

    def done(self) -> bool:
        """True once every byte is there; then and after an error the arena is ours again.

        Raises:
            TransferError: the peer is gone, or the network failed.
        """


class Transport(Protocol):
    """One rank's access to the arenas of other workers' ranks. Reads are one-sided: the other side need not help."""

    def describe(self) -> str:
        """What a peer must know to read our arena; text that travels in a message."""

    def connect(self, description: str) -> str:
        """Makes a peer's arena readable and returns the peer's name. Raises TransferError."""

    def disconnect(self, peer: str) -> None:
        """Forgets a peer, dead or alive."""

    def read(self, peer: str, reads: Sequence[RangeRead]) -> Read:
        """Starts copying. `source` counts from the start of the peer's arena, `destination` from ours.

        Raises:
            TransferError: the peer is not connected or gone.
        """

    def close(self) -> None: ...
