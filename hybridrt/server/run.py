"""A server from its first request to its last: warm-up, statistics, signals, drain."""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from hybridrt.engine.async_llm import AsyncLLM
from hybridrt.engine.llm import LLM
from hybridrt.server.app import make_app
from hybridrt.server.config import ServerConfig
from hybridrt.server.metrics import Metrics
from hybridrt.server.service import Service
from hybridrt.server.warm_up import warm_up

log = logging.getLogger("hybridrt.server")
# More header bytes than this end a connection.
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_SECONDS = 30


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C, then lets running requests end. A second signal ends at once."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        settings = service.config
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,  # requests have ended before
                access_log=False,
                log_config=None,
                lifespan="off",
                ws="none",
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        self._service = service
        self._tasks: list[asyncio.Task[None]] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self._service.llm.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.ready, self._service.llm.draining = False, True

    async def startup(self, sockets: Sequence[object] | None = None) -> None:
        """Warms the model up, then listens."""
        await warm_up(self._service.llm)
        gc.collect()
        gc.freeze()  # a collection otherwise looks through all that torch has imported, between two steps
        self._tasks = [asyncio.create_task(self._end_when_drained())]
        if self._service.config.stats_interval:
            self._tasks.append(asyncio.create_task(write_statistics(self._service)))
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._service.ready = not self._service.llm.draining
            log.info("serving %s on %s", self._service.names[0], ", ".join(self.addresses()))

    async def shutdown(self, sockets: Sequence[object] | None = None) -> None:
        """Ends connections, and lets the collector see everything again."""
        await super().shutdown(sockets)  # type: ignore[arg-type]
        gc.unfreeze()

    def addresses(self) -> list[str]:
        """Where it listens."""
        scheme = "https" if self._service.config.tls_key else "http"
        names = [s.getsockname() for server in self.servers for s in server.sockets]
        return [f"{scheme}://{f'[{n[0]}]' if ':' in n[0] else n[0]}:{n[1]}" for n in names]

    async def _end_when_drained(self) -> None:
        llm = self._service.llm
        while not llm.draining:
            await asyncio.sleep(0.1)
        seconds = self._service.config.drain_timeout
        log.info("shutting down: %d samples get up to %g seconds to end", llm.unfinished, seconds)
        if not await llm.drain(seconds):
            log.warning("%d samples have not ended and are aborted", llm.unfinished)
            llm.abort_all()
            await llm.drain(1.0)
        self.should_exit = True


async def write_statistics(service: Service) -> None:
    """A line every few seconds in which something happened."""
    llm, interval = service.llm, service.config.stats_interval
    before, then = (0, 0), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        counters, now = llm.llm.engine.counters(), time.monotonic()
        done = counters.prompt_tokens, counters.output_tokens
        if done == before and not llm.unfinished:
            then = now
            continue
        rates = [(new - old) / (now - then) for new, old in zip(done, before)]
        plan = llm.llm.plan
        used = 100 * (1 - counters.free_pages / plan.num_pages) if plan.num_pages else 0.0
        log.info(
            "%d running, %d waiting; prompt %.1f tokens/s, output %.1f tokens/s; KV pages %.1f%% used, %d of %d state "
            "slots free, %d retractions",
            counters.running, max(llm.unfinished - counters.running, 0), *rates, used, counters.free_slots,
            plan.num_slots, counters.retractions,
        )  # fmt: skip
        before, then = done, now


def serve(llm: LLM, config: ServerConfig) -> None:
    """Serves until a signal ends it. The LLM is closed at the end.

    Raises:
        OSError: the address cannot be listened on.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _write_bare_lines()
    with AsyncLLM(llm, max_waiting=config.max_waiting) as served:
        service = Service(served, config)
        server = Server(make_app(service, Metrics(served, service.names[0])), service)
        server.run()
    llm.close()
    if not server.started:
        raise OSError(f"cannot listen on {config.host}:{config.port}; choose another --port")


def _write_bare_lines() -> None:
    """Lines of the access log are JSON and nothing else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("hybridrt.access")
    access.handlers, access.propagate = [handler], False
    access.setLevel(logging.INFO)
