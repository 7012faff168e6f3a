"""A server that computes prompts for others (role prefill), or has its prompts computed (role decode)."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx

from hybridrt.base.errors import HybridrtError, TransferError
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
            except HybridrtError:
                log.exception("a step for decode workers failed")
                busy = False
            if not busy:
                self._end.wait(IDLE_SECONDS)


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
        self._client = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)
        # One thread for each server: one that does not answer delays no look at the others.
        self._threads = [
            threading.Thread(target=self._watch, args=(url,), name="hybridrt-decode", daemon=True)
            for url in config.prefill_urls
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
        ]

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
        with self._llm.engine.turns:
            self.worker.close()

    def _watch(self, url: str) -> None:
        """Connects to a prefill server, again and again. One that does not answer is left, though its
        connection be open: so it is with a process that was stopped."""
        name, silent, said = "", 0, ""
        while not self._end.is_set():
            try:
                address, silent = self._address(url), 0
                if not self.worker.is_connected(name):
                    name, said = self._connect(address), ""
                    log.info("prefill worker %s computes prompts", url)
            except (HybridrtError, httpx.HTTPError) as e:
                silent += isinstance(e, httpx.HTTPError)
                if silent >= LEFT_AFTER:
                    self._leave(name, url)
                if not self.worker.is_connected(name) and said != (said := str(e) or type(e).__name__):
                    log.warning("prefill worker %s: %s; prompts are computed elsewhere", url, said)
            self._end.wait(0 if 0 < silent < LEFT_AFTER else CHECK_SECONDS)

    def _leave(self, name: str, url: str) -> None:
        if self.worker.is_connected(name):
            with self._llm.engine.turns:
                self.worker.disconnect(name, f"prefill worker {url} does not answer")

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
