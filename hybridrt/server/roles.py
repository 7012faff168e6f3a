"""A server that computes prompts for others (role prefill), or has its prompts computed (role decode)."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from hybridrt.base.circuit import Circuit
from hybridrt.base.errors import HybridrtError, MessageError, PeerGoneError, TransferError
from hybridrt.channel.channel import SocketChannel
from hybridrt.engine.api.llm import LLM
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.metrics import Number
from hybridrt.transfer.decode import DecodeWorker
from hybridrt.transfer.prefill import PrefillWorker
from hybridrt.transfer.workers import decode_worker, prefill_worker

IDLE_SECONDS = 0.0005
CHECK_SECONDS = 1.0  # between two looks at the prefill workers
ANSWER_SECONDS = 1.5  # that one may take to say where its transfer listens
LEFT_AFTER = 2  # answers that did not come: its prompts are computed elsewhere
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 10.0  # after which a decode server that holds memory of a prefill server is dropped there
MAX_ANSWER_BYTES = 4096
log = logging.getLogger("hybridrt.server")


def _bytes_used(used: int) -> Number:
    """Both roles have it."""
    return Number("hybridrt:transfer_bytes_used", "Bytes of states on their way.", used, counts=False)


class PrefillRole:
    """Serves decode workers in a thread, next to the requests of HTTP. Both take turns, a step each."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self._llm, self._end = llm, threading.Event()
        self.worker: PrefillWorker = prefill_worker(
            llm, config.host, config.transfer_port, key=config.transfer_key, silent_timeout=SILENT_SECONDS
        )
        self._thread = threading.Thread(target=self._run, name="hybridrt-prefill", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self.worker.port

    def numbers(self) -> list[Number]:
        now = self.worker.counters()
        return [
            Number("hybridrt:decode_workers", "Decode servers that are connected.", now.peers, counts=False),
            _bytes_used(now.bytes_used),
            Number("hybridrt:prompts_computed_for_others", "Prompts computed for decode servers.", now.computed),
            Number("hybridrt:decode_workers_dropped", "Decode servers that did not fetch in time.", now.dropped),
        ]

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        with self._llm.engine.turns:
            self.worker.close()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                with self._llm.engine.turns:
                    busy = self.worker.step()
            except Exception:  # the thread must go on: without it no prompt of a decode server is computed any more
                log.exception("a step for decode workers failed")
                self._end.wait(CHECK_SECONDS)
                continue
            if not busy:
                self._end.wait(IDLE_SECONDS)


@dataclass(eq=False)
class _PrefillServer:
    """One that a decode server asks.

    Attributes:
        name: of its worker, which may be lost.
        silent: questions without an answer, one after the other.
        said: the last line about it in the log.
        wrong: how often it answered wrongly.
    """

    url: str
    name: str = ""
    silent: int = 0
    said: str = ""
    wrong: int = 0
    circuit: Circuit = field(default_factory=Circuit)


class DecodeRole:
    """Keeps connections to prefill workers. While there is none, prompts are computed here.

    Args:
        llm: with `transfer_bytes`.
        config: `prefill_urls` are those of servers with the role prefill, which have the same fleet
            key and transfer key.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self._llm, self._config, self._end = llm, config, threading.Event()
        self.worker: DecodeWorker = decode_worker(llm, (), key=config.transfer_key)
        self.worker.on_lost = self._lost
        self._servers = [_PrefillServer(url) for url in config.prefill_urls]
        self._ends: dict[str, tuple[PeerGoneError, int]] = {}  # of workers: why, and prompts fetched before
        self._client = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)
        # One thread for each server: one that does not answer delays no look at the others.
        self._threads = [
            threading.Thread(target=self._watch, args=(server,), name="hybridrt-decode", daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def numbers(self) -> list[Number]:
        now = self.worker.counters()
        return [
            Number("hybridrt:prefill_workers", "Prefill servers that are connected.", now.workers, counts=False),
            _bytes_used(now.bytes_used),
            Number("hybridrt:prompts_fetched", "Prompts that prefill servers have computed.", now.fetched),
            Number("hybridrt:prompts_retried", "Attempts that were repeated.", now.retried),
            Number("hybridrt:prompts_computed_here", "Prompts without a prefill server.", now.computed_here),
            Number("hybridrt:prefill_wrong_answers", "Answers of a prefill server that were none.",
                {server.url: server.wrong for server in self._servers}, label="url"),
        ]  # fmt: skip

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
        with self._llm.engine.turns:
            self.worker.close()

    def _watch(self, server: _PrefillServer) -> None:
        while not self._end.is_set():
            self._end.wait(self._look(server))

    def _look(self, server: _PrefillServer) -> float:
        """Connects to a prefill server if it is not. Returns the seconds until the next look.

        One that does not answer is left, though its connection be open: so it is with a process that was stopped.
        One that answers wrongly is left for a pause, which grows.
        """
        try:
            address, server.silent = self._address(server.url), 0
            if not self.worker.is_connected(server.name):
                self._see_end(server)
                server.name, server.said = self._connect(address), ""
                log.info("prefill worker %s computes prompts", server.url)
        except httpx.HTTPError as e:
            server.silent += 1
            if server.silent >= LEFT_AFTER:
                self._leave(server, f"prefill worker {server.url} does not answer")
            self._say(server, f"{e or type(e).__name__}; prompts are computed elsewhere")
            return 0 if server.silent < LEFT_AFTER else CHECK_SECONDS
        except HybridrtError as e:
            if isinstance(e, PeerGoneError) and not isinstance(e, MessageError):
                self._say(server, f"{e}; prompts are computed elsewhere")  # it may be starting
            else:
                return self._put_aside(server, e)
        return CHECK_SECONDS

    def _see_end(self, server: _PrefillServer) -> None:
        """Raises the error of a worker that was lost by a wrong message."""
        error, fetched = self._ends.pop(server.name, (None, 0))
        if fetched:
            server.circuit.right(time.monotonic())
        if isinstance(error, MessageError):
            raise error

    def _put_aside(self, server: _PrefillServer, why: HybridrtError) -> float:
        server.wrong += 1
        self._leave(server, f"prefill worker {server.url} answers wrongly: {why}")
        if self._ends.pop(server.name, (None, 0))[1]:  # prompts have come from it before
            server.circuit.right(time.monotonic())
        pause = server.circuit.wrong(str(why)) or CHECK_SECONDS
        text = "prefill worker %s is put aside for %g s (it answers wrongly): %s; prompts are computed elsewhere"
        log.warning(text, server.url, pause, why)
        return pause

    def _say(self, server: _PrefillServer, text: str) -> None:
        if not self.worker.is_connected(server.name) and server.said != text:
            server.said = text
            log.warning("prefill worker %s: %s", server.url, text)

    def _leave(self, server: _PrefillServer, why: str) -> None:
        if self.worker.is_connected(server.name):
            with self._llm.engine.turns:
                self.worker.disconnect(server.name, why)

    def _lost(self, name: str, error: PeerGoneError, fetched: int) -> None:
        self._ends[name] = error, fetched

    def _connect(self, address: tuple[str, int]) -> str:
        """The first message is awaited before the engine's turn is taken."""
        channel = SocketChannel.connect(address, str(self._config.transfer_key).encode(), CONNECT_SECONDS)
        try:
            hello = self.worker.greeting(channel)
            with self._llm.engine.turns:
                return self.worker.connect(channel, hello)
        except BaseException:
            channel.close()
            raise

    def _address(self, url: str) -> tuple[str, int]:
        headers = {"Authorization": f"Bearer {self._config.fleet_key}"}
        with self._client.stream("GET", f"{url.rstrip('/')}/fleet/transfer", headers=headers) as answer:
            content = read_short(answer)
        if answer.status_code in (502, 503, 504):
            raise PeerGoneError(f"/fleet/transfer answers {answer.status_code}")
        port = None
        with suppress(ValueError, AttributeError, RecursionError):
            port = json.loads(content).get("port")
        if answer.status_code != 200 or not isinstance(port, int) or not 0 < port < 65536:
            raise TransferError(f"/fleet/transfer answers {answer.status_code}: is it a server with --role prefill?")
        return str(urlsplit(url).hostname), port


Role = PrefillRole | DecodeRole | None


def read_short(answer: httpx.Response) -> bytes:
    """Raises TransferError for a body that is too long, or takes too long."""
    body, deadline = b"", time.monotonic() + ANSWER_SECONDS
    for chunk in answer.iter_raw():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
            raise TransferError(f"its answer has more than {MAX_ANSWER_BYTES} bytes, or takes too long")
    return body


@contextmanager
def playing(llm: LLM, config: ServerConfig) -> Iterator[Role]:
    """The role of a server while it runs."""
    role: Role = None
    if config.role == "prefill":
        role = PrefillRole(llm, config)
    elif config.role == "decode":
        role = DecodeRole(llm, config)
    try:
        yield role
    finally:
        if role is not None:
            role.close()
