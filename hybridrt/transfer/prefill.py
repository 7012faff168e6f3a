"""The prefill worker: computes prompts for decode workers, and keeps states until they are fetched."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hybridrt.base.errors import (
    HandshakeError,
    HybridrtError,
    MessageError,
    OutOfSlotsError,
    PeerGoneError,
    TransferError,
    shown,
)
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.channel.channel import SocketChannel
from hybridrt.channel.codec import Message, pack, unpack
from hybridrt.channel.listener import Listener
from hybridrt.engine.request.intake import PreparedPrompt
from hybridrt.engine.request.outputs import Delta
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.runtime.load.state_identity import first_difference
from hybridrt.transfer.handshake import check_handshake
from hybridrt.transfer.messages import (
    MAX_JOBS,
    DecodeHello,
    Done,
    Failed,
    Ping,
    Pong,
    Prefill,
    PrefillHello,
    Ready,
    ToPrefill,
    shortened,
)
from hybridrt.transfer.ranks import Reader
from hybridrt.transfer.regions import RegionAllocator
from hybridrt.transfer.side import WorkerSide

MAX_PEERS = 256
TIMEOUT_S = 120.0
SILENT_S = 30.0
LINGER_S = 1.0

# The drawn token is dropped: the decode side computes the prompt's last token itself.
_PREFILL = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_IDLE_SECONDS = 0.0005


@dataclass(slots=True, eq=False)
class _Peer:
    """A decode worker.

    Attributes:
        deadline: when it must have agreed.
        received: when its last message came.
        pinged: when it was asked for a sign of life that has not come. None: it was not.
        jobs: its prompts by key.
    """

    channel: SocketChannel
    deadline: float
    received: float
    pinged: float | None = None
    agreed: bool = False
    jobs: dict[str, "_Job"] = field(default_factory=dict)

    @property
    def has_images(self) -> bool:
        return any(job.deadline is not None for job in self.jobs.values())


@dataclass(slots=True, eq=False)
class _Job:
    """A prompt.

    Attributes:
        start: first tokens of which the KV is not wanted.
        offset: first byte of its image; None before there is room.
        deadline: when an image that was not fetched is dropped.
    """

    peer: _Peer
    key: str
    start: int
    prompt: PreparedPrompt | None = None
    offset: int | None = None
    request_id: str | None = None
    deadline: float | None = None


@dataclass(slots=True)
class PrefillCounters:
    """Since the start: prompts computed, failed, images not fetched in time and decode workers that did
    not answer, connections refused.
    Now: decode workers, jobs, bytes of the arena in use."""

    computed: int = 0
    failed: int = 0
    dropped: int = 0
    refused: int = 0
    peers: int = 0
    jobs: int = 0
    bytes_used: int = 0


class PrefillWorker:
    """Serves any number of decode workers. `serve` runs it without end, `step` once.

    A decode worker that sends a wrong message loses its connection. Others are not affected.

    Args:
        side: engine, handshake and arena of this side.
        ranks: one reader for each rank, with the description of its arena.
        listener: where decode workers connect; None: only `attach` adds them.
        timeout: seconds that an image waits to be fetched. A slower decode worker loses its
            connection.
        silent_timeout: seconds after which one that does not even answer loses its connection, while an
            image waits for it. Longer than the longest step of a decode worker.
        linger: seconds that such an image then still stays, so that the decode worker learns of it
            first.

    Attributes:
        port: where it listens, 0 without a listener.
        key: what decode workers need to connect; None without a listener.
    """

    def __init__(
        self,
        side: WorkerSide,
        ranks: Sequence[Reader],
        listener: Listener | None = None,
        *,
        key: str | None = None,
        timeout: float = TIMEOUT_S,
        silent_timeout: float = SILENT_S,
        linger: float = LINGER_S,
    ) -> None:
        self.port, self.key = listener.port if listener else 0, key
        self.regions = RegionAllocator(side.arena.numel())
        self._engine, self._layout, self._listener = side.engine, side.layout, listener
        self._handshake, self._ranks = side.handshake, list(ranks)
        self._timeout, self._silent_timeout, self._linger = timeout, silent_timeout, linger
        self._peers: list[_Peer] = []
        self._waiting: deque[_Job] = deque()
        self._computing: dict[str, _Job] = {}
        self._lingering: deque[tuple[float, int]] = deque()  # of lost connections: when to free, offset
        self._totals = PrefillCounters()

    def attach(self, channel: SocketChannel) -> None:
        """Adds a decode worker. Above MAX_PEERS its channel is closed instead."""
        try:
            if len(self._peers) >= MAX_PEERS:
                raise PeerGoneError(f"{MAX_PEERS} decode workers are connected")
            channel.send(pack(PrefillHello(self._handshake, [rank.description for rank in self._ranks])))
        except PeerGoneError:
            self._totals.refused += 1
            channel.close()
            return
        now = time.monotonic()
        self._peers.append(_Peer(channel, now + self._timeout, now))

    def serve(self) -> None:
        """Works until interrupted."""
        while True:
            if not self.step():
                time.sleep(_IDLE_SECONDS)

    def step(self) -> bool:
        """Reads messages, starts prompts that have room, runs one step. False: there was nothing to
        do."""
        for channel in self._listener.accept() if self._listener else ():
            self.attach(channel)
        received = [self._receive(peer) for peer in list(self._peers)]
        self._end_overdue()
        self._start_prompts()
        busy = self._engine.has_unfinished()
        if busy:
            self._report(self._engine.step())
        return busy or any(received)

    def counters(self) -> PrefillCounters:
        refused = self._totals.refused + (self._listener.refused if self._listener else 0)
        jobs = sum(len(peer.jobs) for peer in self._peers)
        used = self.regions.num_used
        return replace(self._totals, refused=refused, peers=len(self._peers), jobs=jobs, bytes_used=used)

    def close(self) -> None:
        """Drops every decode worker and whatever was computed for them."""
        for peer in list(self._peers):
            self._drop_peer(peer)
        if self._listener is not None:
            self._listener.close()
        for rank in self._ranks:
            rank.close()

    def _receive(self, peer: _Peer) -> bool:
        try:
            messages = peer.channel.receive()
            for message in messages:
                if peer in self._peers:
                    self._handle(peer, message)
        except (PeerGoneError, HandshakeError) as e:
            self._totals.refused += isinstance(e, (HandshakeError, MessageError))
            self._drop_peer(peer)
            return True
        if messages:
            peer.received, peer.pinged = time.monotonic(), None
        return bool(messages)

    def _handle(self, peer: _Peer, data: bytes) -> None:
        """The first message must be a handshake that agrees with ours."""
        if not peer.agreed:
            check_handshake(self._handshake, unpack(data, DecodeHello).handshake)
            peer.agreed = True
            return
        message = unpack(data, ToPrefill)
        if isinstance(message, Ping):
            peer.channel.send(pack(Pong()))
        elif isinstance(message, Prefill):
            self._queue_prompt(peer, message)
        elif isinstance(message, Done) and message.key in peer.jobs:
            self._release(peer.jobs[message.key])

    def _queue_prompt(self, peer: _Peer, asked: Prefill) -> None:
        """Queues a prompt for computation. Its number of tokens gives the size of its region."""
        if asked.key in peer.jobs or len(peer.jobs) >= MAX_JOBS:
            raise MessageError(f"a prompt has a key that is in use, or {MAX_JOBS} are under way")
        length = len(asked.tokens)
        if asked.start > length or (asked.start and not self._layout.image_bytes(length, asked.start)):
            raise MessageError(
                f"nothing is wanted of a prompt of {length} tokens but the KV of the first {asked.start}"
            )
        job = peer.jobs[asked.key] = _Job(peer, asked.key, asked.start)
        try:
            params = replace(_PREFILL, cache_salt=asked.salt or None)
            _check_key(self._engine.cache_key(params), asked.cache_key)
            job.prompt = self._engine.prepare(asked.tokens, params)
        except HybridrtError as e:
            self._fail(job, e)
        else:
            self._waiting.append(job)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers):
            late = sum(job.deadline is not None and now > job.deadline for job in peer.jobs.values())
            self._totals.dropped += late
            if late or (not peer.agreed and now > peer.deadline):
                self._drop_peer(peer)
            elif peer.has_images:
                self._look_for_life(peer, now)
        while self._lingering and self._lingering[0][0] <= now:
            self.regions.free(self._lingering.popleft()[1])

    def _look_for_life(self, peer: _Peer, now: float) -> None:
        """A process that was stopped keeps its connection, and memory that others wait for."""
        if peer.pinged is not None and now - peer.pinged > 0.75 * self._silent_timeout:
            self._totals.dropped += 1
            self._drop_peer(peer)
        elif peer.pinged is None and now - peer.received > 0.25 * self._silent_timeout:
            peer.pinged = now
            self._send(peer, Ping())

    def _start_prompts(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            assert job.prompt is not None, "what waits was prepared"
            nbytes = self._layout.image_bytes(len(job.prompt.tokens), job.start)
            try:
                job.offset = self.regions.alloc(nbytes)
                room = range(job.offset, job.offset + nbytes)
                job.request_id = self._engine.submit(job.prompt, stream=False, export_to=room, export_from=job.start)
            except OutOfSlotsError as e:
                if self.regions.num_used:
                    return
                self._fail(job, e)
            except HybridrtError as e:
                self._fail(job, e)
            else:
                self._waiting.popleft()
                self._computing[job.request_id] = job

    def _report(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:  # one for each request, when it ends
            job = self._computing.pop(delta.request_id, None)
            if job is None:
                continue  # it was dropped
            if delta.error is not None:
                self._fail(job, delta.error)
                continue
            self._totals.computed += 1
            job.deadline = time.monotonic() + self._timeout
            assert job.offset is not None, "what is computed has a region"
            self._send(job.peer, Ready(job.key, job.offset))

    def _fail(self, job: _Job, error: HybridrtError) -> None:
        self._totals.failed += 1
        self._release(job)
        self._send(job.peer, Failed(job.key, shortened(f"{type(error).__name__}: {error}")))

    def _send(self, peer: _Peer, message: Message) -> None:
        try:
            peer.channel.send(pack(message))
        except PeerGoneError:
            self._drop_peer(peer)

    def _drop_peer(self, peer: _Peer) -> None:
        """Images that the other side may read stay until it knows."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        peer.channel.close()
        for job in list(peer.jobs.values()):
            if job.deadline is not None and job.offset is not None and self._linger:
                self._lingering.append((time.monotonic() + self._linger, job.offset))
                job.offset = None
            self._release(job)

    def _release(self, job: _Job) -> None:
        """Frees what a job holds, after the last launched step that writes there."""
        del job.peer.jobs[job.key]
        if job in self._waiting:
            self._waiting.remove(job)
        if job.request_id is not None and self._computing.pop(job.request_id, None) is not None:
            self._engine.abort(job.request_id)
        if job.offset is not None:
            self._engine.finish_launched()
            self.regions.free(job.offset)


def _check_key(ours: CacheKey, theirs: CacheKey) -> None:
    """Raises TransferError if a prompt is for other weights or another adapter."""
    differs = first_difference(ours._asdict(), theirs._asdict())
    if differs is not None:
        raise TransferError(
            f"the prompt's {differs} is {shown(getattr(theirs, differs))}, and this worker's is "
            f"{shown(getattr(ours, differs))}: compute it with a worker that has the same"
        )
