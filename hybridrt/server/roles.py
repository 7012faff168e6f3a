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
from hybridrt.transfer.decode import DecodeWorker
from hybridrt.transfer.prefill import PrefillWorker
from hybridrt.transfer.workers import decode_worker, prefill_worker

IDLE_SECONDS = 0.0005
CHECK_SECONDS = 1.0  # between two looks at the prefill workers
ANSWER_SECONDS = 2.0  # that one may take to say where its transfer listens
MAX_ANSWER_BYTES = 4096
log = logging.getLogger("hybridrt.server")


class PrefillRole:
    """Serves decode workers in a thread, next to the requests of HTTP. Both take turns, a step each."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self._llm, self._end = llm, threading.Event()
        self.worker: PrefillWorker = prefill_worker(llm, config.host, config.transfer_port, key=config.transfer_key)
        self._thread = threading.Thread(target=self._run, name="hybridrt-prefill", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self.worker.port

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
        self._names: dict[str, str] = {}  # of connected workers, by URL
        self._said: dict[str, str] = {}
        self.worker: DecodeWorker = decode_worker(llm, (), key=config.transfer_key)
        self._client = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)
        self._thread = threading.Thread(target=self._run, name="hybridrt-decode", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._client.close()
        with self._llm.engine.turns:
            self.worker.close()

    def _run(self) -> None:
        while not self._end.is_set():
            for url in self._config.prefill_urls:
                name = self._names.get(url)
                if name is None or not self.worker.is_connected(name):
                    self._try_to_connect(url)
            self._end.wait(CHECK_SECONDS)

    def _try_to_connect(self, url: str) -> None:
        self._names.pop(url, None)
        try:
            self._names[url] = self._connect(url)
        except (HybridrtError, httpx.HTTPError) as e:
            if self._said.get(url) != (text := str(e) or type(e).__name__):
                log.warning("prefill worker %s: %s; prompts are computed elsewhere", url, text)
                self._said[url] = text
        else:
            self._said.pop(url, None)
            log.info("prefill worker %s computes prompts", url)

    def _connect(self, url: str) -> str:
        """The first message is awaited before the engine's turn is taken."""
        key, address = str(self._config.transfer_key).encode(), self._address(url)
        channel = SocketChannel.connect(address, key, ANSWER_SECONDS)
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
