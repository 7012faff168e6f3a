"""A channel within one process: a pair of queues, whose messages go through the same bytes as on a socket."""

from collections import deque

from hybridrt.distributed.channel import Message, pack, unpack
from hybridrt.errors import PeerGoneError


class QueueChannel:
    """`QueueChannel.pair()` gives both ends."""

    def __init__(self, incoming: deque[bytes], outgoing: deque[bytes], alive: list[bool]) -> None:
        self._incoming, self._outgoing, self._alive = incoming, outgoing, alive

    @classmethod
    def pair(cls) -> tuple["QueueChannel", "QueueChannel"]:
        one, other, alive = deque[bytes](), deque[bytes](), [True]
        return cls(one, other, alive), cls(other, one, alive)

    def send(self, message: Message) -> None:
        if not self._alive[0]:
            raise PeerGoneError("the channel is closed")
        self._outgoing.append(pack(message))

    def receive(self) -> list[Message]:
        messages = [unpack(data) for data in self._incoming]
        self._incoming.clear()
        if not messages and not self._alive[0]:
            raise PeerGoneError("the channel is closed")
        return messages

    def close(self) -> None:
        self._alive[0] = False
