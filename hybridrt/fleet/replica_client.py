"""A router's view of one replica: whether it answers, what it has cached, and what runs there."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx

from hybridrt.base.circuit import Circuit
from hybridrt.base.errors import MessageError
from hybridrt.fleet.cache_messages import apply_message, read_layout
from hybridrt.fleet.placement import Replica
from hybridrt.fleet.prefix_mirror import PrefixMirror
from hybridrt.fleet.short_answer import short_answer

HEALTH_SECONDS = 1.0  # between two questions
ANSWER_SECONDS = 1.5  # that an answer may take
LEFT_AFTER = 2  # answers that did not come: the replica gets no more requests
DEAD_SECONDS = 10.0  # without an answer: streams that have begun are given up
EVENT_SECONDS = 5.0  # a line of events comes each second
MAX_READY_BYTES = 2**16
EVENT_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # after events that cannot be, one after the other
# Events may take a quarter of the event loop's time: the stream then waits, and the replica with it.
TURN_SECONDS, PAUSE = 0.002, 3
MAX_EVENT_BYTES = 2**20
MAX_ENTRIES = 2**24  # of all mirrors together; each takes about 150 bytes
log = logging.getLogger("hybridrt.router")


@dataclass(eq=False)
class Exchange:
    """A request at a replica, and the task that waits for its answer. `trial`: the answer before was
    wrong. `begun`: the client has got bytes of it. `since`: when it began, by `time.monotonic`."""

    task: "asyncio.Task[None]"
    trial: bool = False
    begun: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class ReplicaClient:
    """One replica.

    Attributes:
        url: without a slash at its end.
        on_model: called with this replica when `model` has changed.
        on_wrong: called with its URL and a word for the reason when it answers wrongly.
        placed: its load and its mirror.
        model: a digest of its model; "" if it is not known.
        problem: why it is not ready; None if it is.
        ready: it answers, and does not refuse requests.
        drained: the operator sends it no more.
        exchanges: what runs there.
        circuit: keeps requests away while it answers wrongly.
        max_entries: of its mirror.
    """

    url: str
    client: httpx.AsyncClient
    fleet_key: str | None = None
    on_model: "Callable[[ReplicaClient], None]" = lambda replica: None
    on_wrong: Callable[[str, str], None] = lambda url, reason: None
    model: str = ""
    problem: str | None = "it was not asked"
    ready: bool = False
    drained: bool = False
    exchanges: set[Exchange] = field(default_factory=set)
    circuit: Circuit = field(default_factory=Circuit)
    max_entries: int = MAX_ENTRIES

    def __post_init__(self) -> None:
        self.placed = Replica(self.url)
        self._silent, self._answered, self._said = 0, time.monotonic(), ""

    @property
    def serves(self) -> bool:
        """It gets requests, though maybe one at a time."""
        return self.ready and not self.drained and not self.circuit.is_aside

    @property
    def wants_requests(self) -> bool:
        return self.serves and self.circuit.takes_requests

    def answers_wrongly(self, reason: str, why: str) -> None:
        """Puts it aside for a while. `reason`: a word for metrics."""
        self.on_wrong(self.url, reason)
        if (pause := self.circuit.wrong(why)) is not None:
            log.warning("replica %s is put aside for %g s (%s): %s", self.url, pause, reason, why)

    def answers_rightly(self, began: float) -> None:
        """To its end. `began`: by `time.monotonic`."""
        if self.circuit.right(began):
            log.info("replica %s answers rightly again", self.url)

    async def watch(self) -> None:
        """Asks again and again whether it is ready. Runs until it is cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(0 if 0 < self._silent < LEFT_AFTER else HEALTH_SECONDS)

    async def ask(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await short_answer(self.client, "GET", f"{self.url}/ready", MAX_READY_BYTES)
        except (httpx.HTTPError, TimeoutError, MessageError) as e:
            self._silent += 1
            self.problem = f"/ready has no answer: {str(e) or type(e).__name__}"
            if self._silent >= LEFT_AFTER:
                self.leave("it does not answer")
            return
        self._silent, self._answered = 0, time.monotonic()
        self.problem = _problem(answer.status)
        if self.ready != (answer.status == 200):
            self.ready = answer.status == 200
            log.info("replica %s is %s", self.url, "ready" if self.ready else "not ready")

    def leave(self, why: str) -> None:
        """Sends it no more requests. Ends those of which the client has got nothing, and after
        DEAD_SECONDS the others too."""
        if self.ready:
            log.warning("replica %s is left: %s", self.url, why)
        self.ready = False
        dead = time.monotonic() - self._answered >= DEAD_SECONDS
        for exchange in list(self.exchanges):
            if dead or not exchange.begun:
                exchange.task.cancel()

    async def follow(self) -> None:
        """Keeps the mirror of its prefix cache up to date. Runs until it is cancelled."""
        wrong = 0
        while self.fleet_key is not None:
            try:
                await self._read_events()
                wrong = 0
            except (httpx.HTTPError, TimeoutError, MessageError) as e:
                wrong = wrong + 1 if isinstance(e, MessageError) and self.placed.mirror is not None else 0
                if self.ready and self._said != (text := str(e) or type(e).__name__):
                    log.warning("the events of replica %s: %s", self.url, text)
                    self._said = text
            self.placed.mirror = None
            await asyncio.sleep(EVENT_PAUSES[min(wrong, len(EVENT_PAUSES) - 1)])

    async def _read_events(self) -> None:
        headers = {"Authorization": f"Bearer {self.fleet_key}"}
        seconds = httpx.Timeout(EVENT_SECONDS)
        async with self.client.stream("GET", f"{self.url}/fleet/cache_events", headers=headers, timeout=seconds) as r:
            if r.status_code != 200:
                raise MessageError(f"/fleet/cache_events answers {r.status_code}: does it have the same fleet key?")
            mirror = None
            async for event in _events(r):
                mirror = self._take(event, mirror)

    def _take(self, event: bytes, mirror: PrefixMirror | None) -> PrefixMirror | None:
        kind, _, data = event.rpartition(b"data: ")
        if kind.startswith(b"event: layout"):
            layout = read_layout(data)
            self.placed.mirror = PrefixMirror(layout)
            if self.model != layout.model:
                self.model = layout.model
                self.on_model(self)
            return self.placed.mirror
        if mirror is not None and data and not event.startswith(b":"):
            apply_message(data, mirror)
            if len(mirror) > self.max_entries:
                raise MessageError(f"the prefix cache has more than {self.max_entries} entries")
        return mirror


def _problem(status: int) -> str | None:
    if status in (401, 404):
        return f"/ready answers {status}: its URL must be that of `hybridrt serve`, without a path such as /v1"
    return None if status == 200 else f"/ready answers {status}"


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Each byte is looked at once, however few come at a time; others have their turn between two.
    MessageError for one that is too long."""
    held = bytearray()
    async for chunk in answer.aiter_raw():
        began = time.monotonic()
        searched = max(len(held) - 1, 0)
        held += chunk
        if held.find(b"\n\n", searched) >= 0:
            *whole, held = held.split(b"\n\n")
            for event in whole:
                yield bytes(event)
                if (spent := time.monotonic() - began) > TURN_SECONDS:
                    await asyncio.sleep(PAUSE * spent)
                    began = time.monotonic()
        if len(held) > MAX_EVENT_BYTES:
            raise MessageError(f"an event has more than {MAX_EVENT_BYTES} bytes")
