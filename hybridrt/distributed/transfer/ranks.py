"""All ranks of a tensor-parallel worker: each opens its own arena to the network, and rank 0 tells it what to read."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hybridrt.distributed.transfer.channel import Listener, Message, SocketChannel
from hybridrt.distributed.transfer.nixl_transport import NixlTransport
from hybridrt.distributed.transfer.reader import ImageReader, Order, Reader
from hybridrt.distributed.transfer.side import WorkerSide
from hybridrt.errors import PeerGoneError, RankError, TransferError
from hybridrt.runtime.model_runner import ModelRunner
from hybridrt.runtime.ranks import LOOPBACK

_POLL_SECONDS = 0.0002
_JOIN_SECONDS = 60.0


def open_ranks(side: WorkerSide, serve: bool) -> list[Reader]:
    """Opens the arenas of all ranks over NIXL, and returns what reads into each.

    Args:
        serve: others read these arenas; see NixlTransport.

    Raises:
        ProviderNotInstalledError: NIXL is not installed or cannot be loaded.
        RankError: a rank cannot join; says why.
    """
    readers: list[Reader] = [ImageReader(NixlTransport(side.arena, serve), side.layout)]
    if side.split is None:
        return readers
    listener = Listener(os.environ.get("MASTER_ADDR", LOOPBACK))
    side.split.call(JoinTransfer(os.environ.get("MASTER_ADDR", LOOPBACK), listener.port, serve))
    joined: dict[int, RemoteReader] = {}
    deadline = time.monotonic() + _JOIN_SECONDS
    while len(joined) < side.layout.tp_size - 1:
        side.split.check()
        if time.monotonic() > deadline:
            raise RankError(f"{len(joined) + 1} of {side.layout.tp_size} ranks joined in {_JOIN_SECONDS:.0f} seconds")
        for channel in listener.accept():
            reader = RemoteReader(channel)
            joined[reader.rank] = reader
        time.sleep(_POLL_SECONDS)
    listener.close()
    return [*readers, *(joined[rank] for rank in sorted(joined))]


@dataclass(frozen=True)
class JoinTransfer:
    """What rank 0 has the others do: open their arena, then serve rank 0 from a thread of its own."""

    host: str
    port: int
    serve: bool

    def __call__(self, runner: ModelRunner) -> None:
        assert runner.arena is not None
        rank = runner.target.tp.rank
        reader = ImageReader(NixlTransport(runner.arena.buffer, self.serve), runner.arena.layout, rank)
        channel = SocketChannel.connect(self.host, self.port)
        channel.send({"rank": rank, "description": reader.description})
        threading.Thread(target=serve_reads, args=(channel, reader), daemon=True).start()


def serve_reads(channel: SocketChannel, reader: Reader) -> None:
    """Does what a RemoteReader at the other end asks for, until it closes the channel."""
    under_way = 0
    try:
        while True:
            for message in channel.receive():
                under_way += message["type"] == "fetch"
                _obey(channel, reader, message)
            for key, error in reader.poll().items():
                under_way -= 1
                channel.send({"type": "ended", "key": key, "error": error and str(error)})
            if under_way:
                time.sleep(_POLL_SECONDS)
            else:
                channel.wait(1.0)
    except PeerGoneError:
        channel.close()
        reader.close()


def _obey(channel: SocketChannel, reader: Reader, message: Message) -> None:
    kind = message.pop("type")
    if kind == "fetch":
        reader.fetch(Order(**message))
    elif kind == "disconnect":
        reader.disconnect(message["worker"])
    else:
        error = None
        try:
            reader.connect(message["worker"], message["descriptions"])
        except TransferError as e:
            error = str(e)
        channel.send({"type": "connected", "error": error})


class RemoteReader:
    """The ImageReader of another rank of this worker, over a channel. A rank that is gone raises RankError."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._ended: dict[str, TransferError | None] = {}
        hello = self._answer()
        self.rank: int = hello["rank"]
        self.description: str = hello["description"]

    def connect(self, worker: str, descriptions: Sequence[str]) -> None:
        self._tell({"type": "connect", "worker": worker, "descriptions": list(descriptions)})
        error = self._answer()["error"]
        if error is not None:
            raise TransferError(f"rank {self.rank}: {error}")

    def disconnect(self, worker: str) -> None:
        self._tell({"type": "disconnect", "worker": worker})

    def fetch(self, order: Order) -> None:
        self._tell({"type": "fetch", **asdict(order)})

    def poll(self) -> dict[str, TransferError | None]:
        self._hear()
        ended, self._ended = self._ended, {}
        return ended

    def close(self) -> None:
        self._channel.close()

    def _tell(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except PeerGoneError as e:
            raise RankError(f"a tensor-parallel rank takes no reads any more: {e}") from e

    def _hear(self) -> Message | None:
        """Notes which reads have ended; returns the answer to what was asked, if it has come."""
        answer = None
        try:
            for message in self._channel.receive():
                if message.get("type") == "ended":
                    error = message["error"]
                    self._ended[message["key"]] = error and TransferError(f"rank {self.rank}: {error}")
                else:
                    answer = message
        except PeerGoneError as e:
            raise RankError(f"a tensor-parallel rank was lost: {e}") from e
        return answer

    def _answer(self) -> Message:
        while (answer := self._hear()) is None:
            self._channel.wait(1.0)
        return answer
