"""The prefill worker: computes prompts for decode workers and keeps each state until it has been fetched."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hybridrt.distributed.transfer.channel import Channel, Listener, Message
from hybridrt.distributed.transfer.handshake import Handshake
from hybridrt.distributed.transfer.reader import Reader
from hybridrt.distributed.transfer.regions import RegionAllocator
from hybridrt.distributed.transfer.side import WorkerSide
from hybridrt.engine.request import RequestOutput
from hybridrt.errors import HandshakeError, HybridrtError, OutOfSlotsError, PeerGoneError
from hybridrt.sampling_params import SamplingParams

# The one token that ends a prefill is drawn and dropped: the decode side computes the prompt's last token itself.
_PREFILL = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_IDLE_SECONDS = 0.0005


@dataclass(slots=True, eq=False)
class _Job:
    """A prompt of one decode worker. `offset` says where its image lies, once there is room for it; `request_id` names
    it to the engine while it is being computed."""

    channel: Channel
    key: str
    tokens: list[int]
    offset: int | None = None
    request_id: str | None = None


@dataclass(slots=True)
class PrefillCounters:
    """Since the worker was built: prompts computed, failed, and given up because nobody wanted them any more; decode
    workers refused. Now: jobs, and bytes of the arena in use."""

    computed: int = 0
    failed: int = 0
    dropped: int = 0
    refused: int = 0
    jobs: int = 0
    bytes_used: int = 0


class PrefillWorker:
    """Serves any number of decode workers. `serve` runs it; `step` moves it on.

    Args:
        side: engine, handshake and arena of this side.
        ranks: one reader for each rank, whose description lets others read its arena.
        listener: where decode workers connect; None takes them from `attach` alone.

    Attributes:
        port: where it listens, 0 without a listener.
    """

    def __init__(
        self,
        side: WorkerSide,
        ranks: Sequence[Reader],
        listener: Listener | None = None,
    ) -> None:
        self.port = listener.port if listener else 0
        self.regions = RegionAllocator(side.arena.numel())
        self._engine, self._layout, self._listener = side.engine, side.layout, listener
        self._handshake, self._ranks = side.handshake, list(ranks)
        self._channels: dict[Channel, bool] = {}  # and whether its handshake has come
        self._jobs: dict[tuple[Channel, str], _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._computing: dict[str, _Job] = {}
        self._totals = PrefillCounters()

    def attach(self, channel: Channel) -> None:
        """Takes a decode worker, and says who we are. Raises PeerGoneError."""
        channel.send(self._handshake.to_message() | {"ranks": [rank.description for rank in self._ranks]})
        self._channels[channel] = False

    def serve(self) -> None:
        """Works until interrupted."""
        while True:
            if not self.step():
                time.sleep(_IDLE_SECONDS)

    def step(self) -> bool:
        """Reads messages, begins what there is room for, and runs one step of the engine. False: nothing to do."""
        for channel in self._listener.accept() if self._listener else ():
            with suppress(PeerGoneError):
                self.attach(channel)
        heard = [self._hear(channel) for channel in list(self._channels)]
        self._begin()
        busy = self._engine.has_unfinished()
        if busy:
            self._report(self._engine.step())
        return busy or any(heard)

    def counters(self) -> PrefillCounters:
        """A snapshot."""
        return replace(self._totals, jobs=len(self._jobs), bytes_used=self.regions.num_used)

    def close(self) -> None:
        """Drops every decode worker and whatever was computed for them."""
        for channel in list(self._channels):
            self._drop_channel(channel)
        if self._listener is not None:
            self._listener.close()
        for rank in self._ranks:
            rank.close()

    def _hear(self, channel: Channel) -> bool:
        try:
            messages = channel.receive()
            for message in messages:
                self._obey(channel, message)
        except (PeerGoneError, HandshakeError) as e:
            self._totals.refused += isinstance(e, HandshakeError)
            self._drop_channel(channel)
            return True
        return bool(messages)

    def _obey(self, channel: Channel, message: Message) -> None:
        kind = message["type"]
        if not self._channels[channel]:
            self._handshake.check(Handshake.of_message(message))
            self._channels[channel] = True
        elif kind == "prefill":
            job = self._jobs[channel, message["key"]] = _Job(channel, message["key"], message["tokens"])
            self._waiting.append(job)
        elif (channel, message["key"]) in self._jobs:  # "done": fetched, or not wanted any more
            self._drop(self._jobs[channel, message["key"]])

    def _begin(self) -> None:
        """Starts prompts, first come, first served, while the arena has room for what they will leave there."""
        while self._waiting:
            job = self._waiting[0]
            try:
                job.offset = self.regions.alloc(self._layout.image_bytes(len(job.tokens)))
                job.request_id = self._engine.add_request(job.tokens, _PREFILL, stream=False, export_to=job.offset)
            except OutOfSlotsError as e:
                if self.regions.num_used:
                    return
                self._fail(job, e)
            except HybridrtError as e:
                self._fail(job, e)
            else:
                self._waiting.popleft()
                self._computing[job.request_id] = job

    def _report(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            job = self._computing.pop(output.request_id, None)
            if job is None:
                continue  # nobody wanted it any more
            if output.error is not None:
                self._fail(job, output.error)
                continue
            self._totals.computed += 1
            self._send(job, {"type": "ready", "key": job.key, "offset": job.offset})

    def _fail(self, job: _Job, error: HybridrtError) -> None:
        self._totals.failed += 1
        self._forget(job)
        self._send(job, {"type": "failed", "key": job.key, "error": f"{type(error).__name__}: {error}"})

    def _send(self, job: _Job, message: Message) -> None:
        try:
            job.channel.send(message)
        except PeerGoneError:
            self._drop_channel(job.channel)

    def _drop_channel(self, channel: Channel) -> None:
        self._channels.pop(channel, None)
        for job in [job for (owner, _), job in self._jobs.items() if owner is channel]:
            self._drop(job)
        channel.close()

    def _drop(self, job: _Job) -> None:
        """A job that is fetched, or that nobody wants."""
        if job.request_id is not None and job.request_id in self._computing:
            del self._computing[job.request_id]
            self._engine.abort(job.request_id)
        self._forget(job)

    def _forget(self, job: _Job) -> None:
        """Frees what a job holds, once no launched step writes there."""
        del self._jobs[job.channel, job.key]
        if job in self._waiting:
            self._waiting.remove(job)
        if job.offset is not None:
            self._engine.settle()
            self.regions.free(job.offset)
