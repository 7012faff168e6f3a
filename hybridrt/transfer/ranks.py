"""Ranks of a tensor-parallel worker: each opens its arena, and reads images as rank 0 orders."""

import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from hybridrt.base.errors import PeerGoneError, RankError, TransferError
from hybridrt.channel.channel import SocketChannel
from hybridrt.channel.codec import Message, pack, unpack
from hybridrt.channel.listener import Listener
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.transfer.messages import Connect, Connected, Disconnect, Ended, FromRank, Joined, Order, ToRank, shortened
from hybridrt.transfer.nixl_transport import NixlTransport
from hybridrt.transfer.reader import LocalReader
from hybridrt.transfer.side import WorkerSide

_POLL_SECONDS = 0.0002
_JOIN_SECONDS = 60.0
ANSWER_S = 30.0  # seconds that a rank may take to answer


def open_ranks(side: WorkerSide, serve: bool, devices: str) -> "list[Reader]":
    """Opens the arenas of all ranks over NIXL. Returns a reader for each.

    Args:
        serve, devices: see NixlTransport.

    Raises:
        ProviderNotInstalledError: NIXL is not installed or cannot be loaded.
        ConfigError: UCX cannot use these devices.
        RankError: a rank cannot join; says why.
    """
    with ExitStack() as undo:
        readers: list[Reader] = [LocalReader(NixlTransport(side.arena, serve, devices), side.layout)]
        undo.callback(readers[0].close)
        if side.split is not None:
            readers += _join(side.split, serve, devices, undo)
        undo.pop_all()
        return readers


def _join(split: TensorParallelExecutor, serve: bool, devices: str, undo: ExitStack) -> "list[RemoteReader]":
    ranks, key, joined = split.ranks, secrets.token_bytes(32), dict[int, RemoteReader]()
    with closing(Listener((ranks.host, 0), key)) as listener:
        split.on_all((JoinTransfer(ranks.host, listener.port, key, serve, devices),), lambda: None)
        deadline = time.monotonic() + _JOIN_SECONDS
        while len(joined) < ranks.comm.size - 1:
            ranks.check_alive()
            if time.monotonic() > deadline:
                found = len(joined) + 1
                raise RankError(f"{found} of {ranks.comm.size} ranks joined in {_JOIN_SECONDS:.0f} seconds")
            for channel in listener.accept():
                reader = RemoteReader(channel)
                undo.callback(reader.close)
                joined[reader.rank] = reader
            time.sleep(_POLL_SECONDS)
    return [joined[rank] for rank in sorted(joined)]


@dataclass(frozen=True)
class JoinTransfer:
    """A task of the other ranks: open the arena, then serve rank 0 in a new thread. Rank 0 listens
    at `host`:`port` and holds `key`."""

    host: str
    port: int
    key: bytes
    serve: bool
    devices: str

    def __call__(self, runner: ModelRunner) -> None:
        assert runner.arena is not None
        rank = runner.target.tp.rank
        transport = NixlTransport(runner.arena.buffer, self.serve, self.devices)
        reader = LocalReader(transport, runner.arena.layout, rank)
        channel = SocketChannel.connect((self.host, self.port), self.key, _JOIN_SECONDS)
        channel.send(pack(Joined(rank, reader.description)))
        threading.Thread(target=serve_reads, args=(channel, reader), daemon=True).start()


def serve_reads(channel: SocketChannel, reader: LocalReader) -> None:
    """Obeys a RemoteReader until it closes the channel."""
    under_way = 0
    try:
        while True:
            for data in channel.receive():
                message = unpack(data, ToRank)
                under_way += isinstance(message, Order)
                _handle(channel, reader, message)
            for key, error in reader.poll().items():
                under_way -= 1
                channel.send(pack(Ended(key, None if error is None else shortened(error))))
            if under_way:
                time.sleep(_POLL_SECONDS)
            else:
                channel.wait(1.0)
    except PeerGoneError:
        channel.close()
        reader.close()


def _handle(channel: SocketChannel, reader: LocalReader, message: ToRank) -> None:
    """Carries out a message of rank 0. Only Connect is answered."""
    if isinstance(message, Order):
        reader.fetch(message)
    elif isinstance(message, Disconnect):
        reader.disconnect(message.worker)
    else:
        error = None
        try:
            reader.connect(message.worker, message.descriptions)
        except TransferError as e:
            error = shortened(e)
        channel.send(pack(Connected(error)))


class RemoteReader:
    """The LocalReader of another rank, over a channel. Methods raise RankError if the rank is gone
    or silent for ANSWER_S seconds."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._ended: dict[str, TransferError | None] = {}
        try:
            joined: Joined = unpack(channel.expect(ANSWER_S), Joined)
        except PeerGoneError as e:
            channel.close()
            raise RankError(f"a tensor-parallel rank did not join the transfer: {e}") from e
        self.rank, self.description = joined.rank, joined.description

    def connect(self, worker: str, descriptions: Sequence[str]) -> None:
        self._send(Connect(worker, list(descriptions)))
        try:
            while isinstance(message := unpack(self._channel.expect(ANSWER_S), FromRank), Ended):
                self._note(message)
        except PeerGoneError as e:
            raise RankError(f"tensor-parallel rank {self.rank} does not answer: {e}") from e
        if message.error is not None:
            raise TransferError(f"rank {self.rank}: {message.error}")

    def disconnect(self, worker: str) -> None:
        self._send(Disconnect(worker))

    def fetch(self, order: Order) -> None:
        self._send(order)

    def poll(self) -> dict[str, TransferError | None]:
        try:
            for data in self._channel.receive():
                self._note(unpack(data, Ended))
        except PeerGoneError as e:
            raise RankError(f"tensor-parallel rank {self.rank} was lost: {e}") from e
        ended, self._ended = self._ended, {}
        return ended

    def close(self) -> None:
        self._channel.close()

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(pack(message))
        except PeerGoneError as e:
            raise RankError(f"a tensor-parallel rank cannot be reached any more: {e}") from e

    def _note(self, message: Ended) -> None:
        error = TransferError(f"rank {self.rank}: {message.error}")
        self._ended[message.key] = None if message.error is None else error


Reader = LocalReader | RemoteReader
