"""The decode worker: lets prefill workers compute its engine's prompts and fetches what they computed."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from hybridrt.distributed.transfer.channel import Channel, Message
from hybridrt.distributed.transfer.handshake import Handshake
from hybridrt.distributed.transfer.reader import Order, Reader
from hybridrt.distributed.transfer.reads import tp_ratio
from hybridrt.distributed.transfer.regions import RegionAllocator
from hybridrt.distributed.transfer.side import WorkerSide
from hybridrt.errors import OutOfSlotsError, PeerGoneError, TransferError
from hybridrt.mem_cache.prefix_cache import PrefixMatch

MAX_ATTEMPTS = 3
_HELLO_SECONDS = 30.0
_IDLE_SECONDS = 0.0005


@dataclass(slots=True, eq=False)
class _Pull:
    """A prompt on its way through a prefill worker.

    Attributes:
        key: names it in messages and reads; request ids may come again.
        offset, worker: where its image shall lie, and who computes it; None while it waits for either.
        reading: readers whose reads have not ended; their memory must be left alone.
        error: why this attempt is lost, as soon as that is known.
        wanted: its request still runs.
        attempts: how many have begun.
    """

    key: str
    request_id: str
    tokens: list[int]
    offset: int | None = None
    worker: str | None = None
    reading: set[int] = field(default_factory=set)
    error: TransferError | None = None
    wanted: bool = True
    attempts: int = 0


@dataclass(slots=True)
class DecodeCounters:
    """Since the worker was built: prompts fetched and their bytes on this rank, attempts that were repeated, prompts
    computed here after all, and requests that failed. Now: workers, prompts under way, bytes of the arena in use."""

    fetched: int = 0
    bytes_fetched: int = 0
    retried: int = 0
    computed_here: int = 0
    failed: int = 0
    workers: int = 0
    under_way: int = 0
    bytes_used: int = 0


class DecodeWorker:
    """Becomes the `prefill_source` of an engine, which is then used as ever.

    A request waits outside the scheduler, without row, slot or page, until its state lies in the arena; the engine
    copies it in as it admits the request. So whatever happens to a prefill worker, this engine's other requests go on.

    Args:
        side: engine, handshake and arena of this side.
        readers: one for each rank.
        compute_here: without a prefill worker that can do it, prompts are computed by this engine; otherwise the
            request fails.
    """

    def __init__(
        self,
        side: WorkerSide,
        readers: Sequence[Reader],
        *,
        compute_here: bool = True,
    ) -> None:
        self.regions = RegionAllocator(side.arena.numel())
        self._side = side
        self._engine, self._handshake, self._layout = side.engine, side.handshake, side.layout
        self._readers = list(readers)
        self._compute_here = compute_here
        self._workers: dict[str, Channel] = {}
        self._numbers = count()
        self._pulls: dict[str, _Pull] = {}  # by key
        self._waiting: deque[_Pull] = deque()
        self._arriving: dict[str, int] = {}  # started requests, and the images that the engine may not have read yet
        self._totals = DecodeCounters()
        side.engine.prefill_source = self

    def connect(self, channel: Channel) -> str:
        """Agrees with a prefill worker, which gets its share of the prompts from then on. Returns its name.

        Raises:
            HandshakeError: the two sides differ. No byte has moved.
            TransferError: their numbers of ranks do not fit, or the worker does not answer (PeerGoneError).
        """
        try:
            hello = _first_message(channel)
            theirs = Handshake.of_message(hello)
            self._handshake.check(theirs)
            tp_ratio(self._handshake.tp_size, theirs.tp_size)
            name = f"worker-{next(self._numbers)}"
            for reader in self._readers:
                reader.connect(name, hello["ranks"])
            channel.send(self._handshake.to_message())
        except TransferError:
            channel.close()
            raise
        self._workers[name] = channel
        return name

    def request(self, request_id: str, tokens: Sequence[int]) -> None:
        self._forget_ended(request_id)
        pull = _Pull(f"{request_id}-{next(self._numbers)}", request_id, list(tokens))
        self._pulls[pull.key] = pull
        self._waiting.append(pull)

    def advance(self) -> None:
        """Frees what the engine is done with, reads messages, looks after reads, and hands out what waits."""
        self._free()
        heard = [self._hear(name) for name in list(self._workers)]
        ended = self._look_after_reads()
        self._hand_out()
        engine = self._engine.counters()
        if self._pulls and not (ended or any(heard) or engine.running or engine.waiting):
            time.sleep(_IDLE_SECONDS)  # all wait for other workers

    def counters(self) -> DecodeCounters:
        """A snapshot."""
        under_way, used = len(self._pulls), self.regions.num_used
        return replace(self._totals, workers=len(self._workers), under_way=under_way, bytes_used=used)

    def close(self) -> None:
        """Leaves all workers and the engine, after the last read has ended."""
        self._free()
        for name in list(self._workers):
            self._lose(name, PeerGoneError("the decode worker was closed"))
        while any(pull.reading for pull in self._pulls.values()):
            if not self._look_after_reads():
                time.sleep(_IDLE_SECONDS)
        self._hand_out()
        self._engine.prefill_source = None
        for reader in self._readers:
            reader.close()

    def _hear(self, name: str) -> bool:
        channel = self._workers.get(name)
        if channel is None:
            return False
        try:
            messages = channel.receive()
        except PeerGoneError as e:
            self._lose(name, e)
            return True
        for message in messages:
            pull = self._pulls.get(message["key"])
            if pull is None or pull.worker != name:
                continue  # an answer to what we have taken back
            if message["type"] == "failed":
                self._lost(pull, TransferError(message["error"]))
            else:
                self._fetch(pull, message["offset"])
        return bool(messages)

    def _fetch(self, pull: _Pull, source: int) -> None:
        assert pull.worker is not None and pull.offset is not None
        pull.reading = set(range(len(self._readers)))
        for reader in self._readers:
            reader.fetch(Order(pull.key, pull.worker, len(pull.tokens), source, pull.offset))

    def _look_after_reads(self) -> bool:
        """True if something ended."""
        ended = [(i, key, error) for i, reader in enumerate(self._readers) for key, error in reader.poll().items()]
        for i, key, error in ended:
            pull = self._pulls[key]
            pull.reading.remove(i)
            pull.error = pull.error or error
            if not pull.reading:
                self._lost(pull, pull.error) if pull.error else self._arrived(pull)
        return bool(ended)

    def _arrived(self, pull: _Pull) -> None:
        assert pull.offset is not None
        self._totals.fetched += 1
        self._totals.bytes_fetched += self._layout.image_bytes(len(pull.tokens))
        self._arriving[pull.request_id] = pull.offset
        del self._pulls[pull.key]
        self._dismiss(pull)
        self._engine.start(pull.request_id, PrefixMatch(len(pull.tokens), staged=pull.offset))

    def _lost(self, pull: _Pull, error: TransferError) -> None:
        """An attempt came to nothing, and its reads are over: another one, or none."""
        self._dismiss(pull)
        if pull.offset is not None:
            self.regions.free(pull.offset)
        pull.offset = pull.error = None
        if not pull.wanted:
            del self._pulls[pull.key]
        elif self._workers and pull.attempts < MAX_ATTEMPTS:
            self._totals.retried += 1
            self._waiting.appendleft(pull)
        else:
            self._without_worker(pull, error)

    def _without_worker(self, pull: _Pull, error: Exception) -> None:
        del self._pulls[pull.key]
        if self._compute_here:
            self._totals.computed_here += 1
            self._engine.start(pull.request_id)
        else:
            self._totals.failed += 1
            self._engine.fail(pull.request_id, error)

    def _dismiss(self, pull: _Pull) -> None:
        """Tells the worker that we need its image no longer."""
        name, pull.worker = pull.worker, None
        if name in self._workers:
            self._send(name, {"type": "done", "key": pull.key})

    def _free(self) -> None:
        """Images that the engine has taken in, and whatever belongs to requests that have ended."""
        for request_id in {*self._arriving, *(pull.request_id for pull in self._pulls.values() if pull.wanted)}:
            gained = self._engine.gained(request_id)
            if gained is None:
                self._forget_ended(request_id)
            elif gained:
                self.regions.free(self._arriving.pop(request_id))

    def _forget_ended(self, request_id: str) -> None:
        """A request has ended, or its id is used again: what is on its way for it is of no use."""
        if request_id in self._arriving:
            self._engine.settle()
            self.regions.free(self._arriving.pop(request_id))
        for pull in [p for p in self._pulls.values() if p.request_id == request_id and p.wanted]:
            pull.wanted, pull.error = False, TransferError("the request has ended")
            if pull in self._waiting:
                self._waiting.remove(pull)
            if not pull.reading:
                self._lost(pull, pull.error)

    def _hand_out(self) -> None:
        """Prompts to whoever has least to do, first come, first served, while the arena has room for their images."""
        while self._waiting:
            pull = self._waiting[0]
            try:
                if not self._workers:
                    raise TransferError("no prefill worker is connected")
                pull.offset = self.regions.alloc(self._layout.image_bytes(len(pull.tokens)))
            except (TransferError, OutOfSlotsError) as e:
                if self._workers and self.regions.num_used:
                    return  # room will come
                self._waiting.popleft()
                self._without_worker(pull, e)
                continue
            self._waiting.popleft()
            pull.attempts += 1
            pull.worker = min(self._workers, key=self._load)
            self._send(pull.worker, {"type": "prefill", "key": pull.key, "tokens": pull.tokens})

    def _load(self, name: str) -> int:
        return sum(pull.worker == name for pull in self._pulls.values())

    def _send(self, name: str, message: Message) -> None:
        try:
            self._workers[name].send(message)
        except PeerGoneError as e:
            self._lose(name, e)

    def _lose(self, name: str, error: PeerGoneError) -> None:
        """Forgets a worker. What it computed is lost, even if it is being read: it may be written over by now."""
        self._workers.pop(name).close()
        for reader in self._readers:
            reader.disconnect(name)
        for pull in [pull for pull in self._pulls.values() if pull.worker == name]:
            if pull.reading:
                pull.error = error
            else:
                self._lost(pull, error)


def _first_message(channel: Channel) -> Message:
    deadline = time.monotonic() + _HELLO_SECONDS
    while not (messages := channel.receive()):
        if time.monotonic() > deadline:
            raise PeerGoneError(f"the prefill worker has said nothing for {_HELLO_SECONDS:.0f} seconds")
        time.sleep(_IDLE_SECONDS)
    return messages[0]
