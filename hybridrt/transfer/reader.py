"""Reads images of states from prefill ranks into the arena of a decode rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrt.base.errors import TransferError
from hybridrt.mem_cache.pools.state_slices import RangeRead
from hybridrt.runtime.run.state_arena import ImageLayout
from hybridrt.transfer.messages import Order
from hybridrt.transfer.nixl_transport import NixlRead, NixlTransport
from hybridrt.transfer.reads import image_reads


@dataclass(slots=True)
class _Fetch:
    worker: str
    reads: list[NixlRead] = field(default_factory=list)
    error: TransferError | None = None


class LocalReader:
    """Fetches images for this process's rank. No method waits.

    Attributes:
        description: what others need to read this rank's arena.
    """

    def __init__(self, transport: NixlTransport, layout: ImageLayout, rank: int = 0) -> None:
        self.description = transport.describe()
        self._transport, self._layout, self._rank = transport, layout, rank
        self._peers: dict[str, list[str]] = {}
        self._leaving: set[str] = set()
        self._fetches: dict[str, _Fetch] = {}

    def connect(self, worker: str, descriptions: Sequence[str]) -> None:
        """Makes the arenas of a prefill worker's ranks readable. Raises TransferError."""
        peers = self._peers[worker] = list[str]()
        for description in descriptions:
            peers.append(self._transport.connect(description))

    def disconnect(self, worker: str) -> None:
        """Forgets a worker after the last read of its images."""
        self._leaving.add(worker)

    def fetch(self, order: Order) -> None:
        fetch = self._fetches[order.key] = _Fetch(order.worker)
        peers, layout = self._peers[order.worker], self._layout
        try:
            sections = layout.sections(order.length, order.start)
            for source, reads in image_reads(sections, self._rank, layout.tp_size, len(peers)):
                offsets = order.source, order.destination
                placed = [RangeRead(r.source + offsets[0], r.destination + offsets[1], r.nbytes) for r in reads]
                fetch.reads.append(self._transport.read(peers[source], placed))
        except TransferError as e:
            fetch.error = e

    def poll(self) -> dict[str, TransferError | None]:
        """Keys of fetches that ended since the last call, each with its error or None. Their memory
        is not written any more."""
        ended = {key: fetch.error for key, fetch in self._fetches.items() if self._over(fetch)}
        for key in ended:
            del self._fetches[key]
        for worker in self._leaving - {fetch.worker for fetch in self._fetches.values()}:
            self._leaving.remove(worker)
            for peer in self._peers.pop(worker, ()):
                self._transport.disconnect(peer)
        return ended

    def close(self) -> None:
        self._transport.close()

    @staticmethod
    def _over(fetch: _Fetch) -> bool:
        going = []
        for read in fetch.reads:
            try:
                if not read.done():
                    going.append(read)
            except TransferError as e:
                fetch.error = fetch.error or e
        fetch.reads = going
        return not going
