"""The decode worker: prefill workers compute its prompts, and it fetches their states."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from hybridrt.base.errors import MessageError, OutOfSlotsError, PeerGoneError, TransferError
from hybridrt.channel.channel import TIMEOUT_S, SocketChannel
from hybridrt.channel.codec import Message, pack, unpack
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from hybridrt.runtime.step.plan import int32s
from hybridrt.transfer.handshake import check_handshake
from hybridrt.transfer.messages import (
    MAX_JOBS,
    MAX_TOKENS,
    DecodeHello,
    Done,
    Failed,
    Order,
    Ping,
    Pong,
    Prefill,
    PrefillHello,
    ToDecode,
)
from hybridrt.transfer.ranks import Reader
from hybridrt.transfer.reads import tp_ratio
from hybridrt.transfer.regions import RegionAllocator
from hybridrt.transfer.side import WorkerSide

MAX_ATTEMPTS = 3
_IDLE_SECONDS = 0.0005
_ROUNDS = 8  # of reading one worker's messages in a step: a flood delays its own prompts alone


@dataclass(slots=True, eq=False)
class _Pull:
    """A prompt [n] int32 for prefill workers, and the number of its attempts."""

    request_id: str
    tokens: np.ndarray
    cache_key: CacheKey
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Attempt:
    """A prompt at a prefill worker.

    Attributes:
        key: its name in messages and reads. Never used again, unlike a request id.
        offset: first byte of its image in the arena.
        pull: None after the attempt failed or was cancelled.
        start: first tokens of which the image has no KV: it is in the cache here.
        reading: readers that may still write to the image.
        error: of a failed read.
        deadline: of the reads.
    """

    key: str
    worker: str
    offset: int
    pull: _Pull | None
    start: int = 0
    reading: set[int] = field(default_factory=set)
    error: TransferError | None = None
    deadline: float = 0.0


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill worker, the times of its last message and of a `Ping` without an answer, and the number of
    prompts that were fetched."""

    channel: SocketChannel
    received: float
    pinged: float | None = None
    fetched: int = 0


@dataclass(slots=True)
class DecodeCounters:
    """Since the start: prompts fetched and their bytes on this rank, attempts repeated, prompts
    cached here, computed by this engine, and requests failed. Now: workers, prompts under way,
    bytes of the arena in use."""

    fetched: int = 0
    bytes_fetched: int = 0
    retried: int = 0
    cached: int = 0
    computed_here: int = 0
    failed: int = 0
    workers: int = 0
    under_way: int = 0
    bytes_used: int = 0


class DecodeWorker:
    """The `prefill_source` of an engine. Callers of the engine notice nothing.

    A request waits outside the scheduler, without row, slot or page, until its state is in the
    arena. The engine copies the state when it admits the request. So the loss of a prefill worker
    delays no other request.

    Args:
        side: engine, which has no decode worker yet, handshake and arena of this side.
        readers: one for each rank.
        compute_here: prompts that no prefill worker can compute are computed by this engine; else
            they fail. Those with images never travel: this engine computes them.
        timeout: seconds after which a silent prefill worker, or one whose image cannot be read, is
            dropped. Longer than the longest step of a prefill worker.

    Attributes:
        on_lost: called before a worker is dropped, with its name, the reason, and the number of prompts that
            were fetched from it. Must not raise.
    """

    def __init__(
        self,
        side: WorkerSide,
        readers: Sequence[Reader],
        *,
        compute_here: bool = True,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.regions = RegionAllocator(side.arena.numel())
        self._engine, self._handshake, self._layout = side.engine, side.handshake, side.layout
        self._readers = list(readers)
        self._compute_here, self._timeout = compute_here, timeout
        self._workers: dict[str, _Peer] = {}
        self._numbers = count()
        self._waiting: deque[_Pull] = deque()
        self._attempts: dict[str, _Attempt] = {}  # by key
        self._over: list[_Attempt] = []  # the last read has ended
        self._arriving: dict[str, int] = {}  # by request, images that the engine may not have read yet
        self._totals = DecodeCounters()
        self.on_lost: Callable[[str, PeerGoneError, int], None] = lambda name, error, fetched: None
        side.engine.prefill_source = self

    def greeting(self, channel: SocketChannel) -> PrefillHello:
        """A worker's first message. Waits for it, and changes nothing. Raises PeerGoneError."""
        return unpack(channel.expect(self._timeout), PrefillHello)

    def is_connected(self, name: str) -> bool:
        return name in self._workers

    def connect(self, channel: SocketChannel, hello: PrefillHello | None = None) -> str:
        """Adds a prefill worker if both sides agree on what they run. Returns its name.

        Raises:
            HandshakeError: the two sides differ. No byte has moved.
            TransferError: their numbers of ranks do not fit, or the worker does not answer
                (PeerGoneError).
        """
        name = f"worker-{next(self._numbers)}"
        with ExitStack() as undo:
            undo.callback(channel.close)
            hello = self.greeting(channel) if hello is None else hello
            check_handshake(self._handshake, hello.handshake)
            tp_ratio(self._layout.tp_size, len(hello.ranks))
            for reader in self._readers:
                undo.callback(reader.disconnect, name)
                reader.connect(name, hello.ranks)
            channel.send(pack(DecodeHello(self._handshake)))
            undo.pop_all()
        self._workers[name] = _Peer(channel, time.monotonic())
        return name

    def disconnect(self, name: str, why: str) -> None:
        """Leaves a prefill worker: its prompts go to another one, or are computed here."""
        if name in self._workers:
            self._drop_worker(name, PeerGoneError(why))

    def request(self, request_id: str, tokens: Sequence[int], key: CacheKey) -> None:
        self._cancel(request_id)
        pull = _Pull(request_id, int32s(tokens), key)
        if len(pull.tokens) > MAX_TOKENS:
            text = f"a prompt of {len(pull.tokens)} tokens is too long for a message, which may have {MAX_TOKENS}"
            self._without_worker(pull, TransferError(text))
        elif not self._starts_from_cache(pull):
            self._waiting.append(pull)

    def _starts_from_cache(self, pull: _Pull) -> bool:
        if not self._engine.prefixes.holds(pull.tokens, pull.cache_key):
            return False
        self._totals.cached += 1
        self._engine.start(pull.request_id)
        return True

    def advance(self) -> None:
        self._free()
        self._over += self._ended_reads()
        # A prefill worker closes its channel before it uses an image's memory again. So a read that
        # has ended is valid only if the channel is open afterwards, and read to its end.
        received = {name: self._receive(name, peer) for name, peer in list(self._workers.items())}
        over = [attempt for attempt in self._over if received.get(attempt.worker, 0) < _ROUNDS]
        self._over = [attempt for attempt in self._over if attempt not in over]
        self._end_reads(over)
        self._end_overdue()
        self._send_prompts()
        engine = self._engine.counters()
        if self._under_way() and not (over or any(received.values()) or engine.running or engine.waiting):
            time.sleep(_IDLE_SECONDS)  # only prefill workers have something to do

    def counters(self) -> DecodeCounters:
        workers, used = len(self._workers), self.regions.num_used
        return replace(self._totals, workers=workers, under_way=self._under_way(), bytes_used=used)

    def close(self) -> None:
        """Leaves all workers and the engine, after the last read or `timeout`. Waiting requests go
        on without prefill workers. Closing again does nothing."""
        if self._engine.prefill_source is not self:
            return
        self._engine.prefill_source = None
        try:
            self._free()
            for name in list(self._workers):
                self._drop_worker(name, PeerGoneError("the decode worker was closed"))
            self._send_prompts()
            deadline = time.monotonic() + self._timeout
            while self._attempts and time.monotonic() < deadline:
                self._end_reads([*self._over, *self._ended_reads()])
                self._over.clear()
                time.sleep(_IDLE_SECONDS)
        finally:
            for reader in self._readers:
                reader.close()

    def _under_way(self) -> int:
        attempts = list(self._attempts.values())  # copied at once: `counters` is called in other threads
        return len(self._waiting) + sum(attempt.pull is not None for attempt in attempts)

    def _receive(self, name: str, peer: _Peer) -> int:
        """How often messages came: _ROUNDS if there may be more, or the end of the channel."""
        rounds = 0
        try:
            while rounds < _ROUNDS and (messages := peer.channel.receive()):
                rounds += 1
                peer.received, peer.pinged = time.monotonic(), None
                for message in messages:
                    if name in self._workers:  # the answer to a message may have found the channel closed
                        self._handle(name, unpack(message, ToDecode))
        except PeerGoneError as e:
            if name in self._workers:
                self._drop_worker(name, e)
            return 1
        return rounds

    def _handle(self, name: str, message: ToDecode) -> None:
        if isinstance(message, Pong):
            return
        if isinstance(message, Ping):
            self._send(name, Pong())
            return
        attempt = self._attempts.get(message.key)
        if attempt is None or attempt.worker != name or attempt.pull is None:
            return  # it was cancelled
        if attempt.reading:
            raise MessageError("the prefill worker answers twice")
        if isinstance(message, Failed):
            self._fail_attempt(attempt, TransferError(message.error))
        else:
            self._fetch(attempt, len(attempt.pull.tokens), message.offset)

    def _fetch(self, attempt: _Attempt, length: int, source: int) -> None:
        attempt.reading = set(range(len(self._readers)))
        attempt.deadline = time.monotonic() + self._timeout
        for reader in self._readers:
            reader.fetch(Order(attempt.key, attempt.worker, length, source, attempt.offset, attempt.start))

    def _ended_reads(self) -> list[_Attempt]:
        """Attempts of which the last read has ended, still in `reading`."""
        over = []
        for i, reader in enumerate(self._readers):
            for key, error in reader.poll().items():
                attempt = self._attempts[key]
                attempt.error = attempt.error or error
                if attempt.reading == {i}:
                    over.append(attempt)
                else:
                    attempt.reading.remove(i)
        return over

    def _end_reads(self, over: Sequence[_Attempt]) -> None:
        for attempt in over:
            attempt.reading.clear()
            if attempt.pull is None:
                self._release(attempt)
            elif attempt.error is not None:
                self._fail_attempt(attempt, attempt.error)
            elif self._engine.prefixes.touch(attempt.pull.tokens, attempt.pull.cache_key) < attempt.start:
                self._fail_attempt(attempt, TransferError("the cached part of the prompt was evicted meanwhile"))
            else:
                self._arrived(attempt, attempt.pull)

    def _arrived(self, attempt: _Attempt, pull: _Pull) -> None:
        length = len(pull.tokens)
        self._totals.fetched += 1
        if (peer := self._workers.get(attempt.worker)) is not None:
            peer.fetched += 1
        self._totals.bytes_fetched += self._layout.image_bytes(length, attempt.start)
        self._arriving[pull.request_id] = attempt.offset
        self._forget(attempt)
        match = PrefixMatch(length, staged=attempt.offset, staged_from=attempt.start)
        self._engine.start(pull.request_id, match)

    def _fail_attempt(self, attempt: _Attempt, error: TransferError) -> None:
        """Tries the prompt again, or gives up. Memory is freed after the last read."""
        pull, attempt.pull = attempt.pull, None
        self._release(attempt)
        if pull is None:
            return
        if self._workers and pull.attempts < MAX_ATTEMPTS:
            self._totals.retried += 1
            self._waiting.appendleft(pull)
        else:
            self._without_worker(pull, error)

    def _release(self, attempt: _Attempt) -> None:
        if not attempt.reading:
            self.regions.free(attempt.offset)
            self._forget(attempt)

    def _forget(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.key]
        if attempt.worker in self._workers:
            self._send(attempt.worker, Done(attempt.key))

    def _without_worker(self, pull: _Pull, error: Exception) -> None:
        if self._compute_here:
            self._totals.computed_here += 1
            self._engine.start(pull.request_id)
        else:
            self._totals.failed += 1
            self._engine.fail(pull.request_id, error)

    def _free(self) -> None:
        """Frees images that the engine has copied, and those of ended requests."""
        pulls = [*self._waiting, *(a.pull for a in self._attempts.values() if a.pull is not None)]
        for request_id in {*self._arriving, *(pull.request_id for pull in pulls)}:
            gained = self._engine.gained(request_id)
            if gained is None:
                self._cancel(request_id)
            elif gained:
                self.regions.free(self._arriving.pop(request_id))

    def _cancel(self, request_id: str) -> None:
        if request_id in self._arriving:
            self._engine.finish_launched()
            self.regions.free(self._arriving.pop(request_id))
        self._waiting = deque(pull for pull in self._waiting if pull.request_id != request_id)
        for attempt in list(self._attempts.values()):
            if attempt.pull is not None and attempt.pull.request_id == request_id:
                attempt.pull = None
                self._release(attempt)

    def _end_overdue(self) -> None:
        """Drops silent workers, after a `Ping`, and fails overdue reads. The time between two calls does
        not count: answers wait in the channel."""
        now = time.monotonic()
        for name, peer in list(self._workers.items()):
            if peer.pinged is not None and now - peer.pinged > 0.75 * self._timeout:
                self._drop_worker(name, PeerGoneError(f"the prefill worker has sent nothing for {self._timeout:g} s"))
            elif peer.pinged is None and now - peer.received > 0.25 * self._timeout and self._load(name):
                peer.pinged = now
                self._send(name, Ping())
        for attempt in list(self._attempts.values()):
            if attempt.pull is not None and attempt.reading and now > attempt.deadline:
                self._fail_attempt(attempt, TransferError(f"an image could not be read within {self._timeout:g} s"))

    def _send_prompts(self) -> None:
        """Sends the oldest prompts to the worker with the fewest, while the arena has room."""
        while self._waiting:
            pull, name = self._waiting[0], min(self._workers, key=self._load, default=None)
            if self._starts_from_cache(pull):  # since another request has computed it
                self._waiting.popleft()
                continue
            try:
                if name is None:
                    raise TransferError("no prefill worker is connected")
                if self._load(name) >= MAX_JOBS:
                    return
                start = self._engine.prefixes.touch(pull.tokens, pull.cache_key)
                offset = self.regions.alloc(self._layout.image_bytes(len(pull.tokens), start))
            except (TransferError, OutOfSlotsError) as e:
                if name is not None and (self._arriving or any(a.pull for a in self._attempts.values())):
                    return  # others will free their room
                self._waiting.popleft()
                self._without_worker(pull, e)
                continue
            self._waiting.popleft()
            pull.attempts += 1
            key = f"{pull.request_id}-{next(self._numbers)}"
            self._attempts[key] = _Attempt(key, name, offset, pull, start)
            self._send(name, Prefill(key, pull.tokens.tolist(), start, **pull.cache_key._asdict()))

    def _load(self, name: str) -> int:
        return sum(attempt.worker == name for attempt in self._attempts.values())

    def _send(self, name: str, message: Message) -> None:
        try:
            self._workers[name].channel.send(pack(message))
        except PeerGoneError as e:
            self._drop_worker(name, e)

    def _drop_worker(self, name: str, error: PeerGoneError) -> None:
        """Images are lost too, even while they are read: the worker may reuse their memory."""
        peer = self._workers[name]
        self.on_lost(name, error, peer.fetched)  # first: who sees in another thread that it is gone knows why
        del self._workers[name]
        peer.channel.close()
        for reader in self._readers:
            reader.disconnect(name)
        for attempt in [a for a in self._attempts.values() if a.worker == name]:
            self._fail_attempt(attempt, error)
