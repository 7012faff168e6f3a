"""Runs a server: warm-up, statistics, signals, drain."""

import asyncio
import gc
import logging
import math
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from hybridrt.base.errors import UnavailableError
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.digest import model_digest
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.server.about import summary
from hybridrt.server.app import make_app
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.core.service import Service
from hybridrt.server.roles import PrefillRole, playing
from hybridrt.server.warm_up import warm_up
from hybridrt.server.wire.http_limits import LimitedHttp

log = logging.getLogger("hybridrt.server")
KEEP_ALIVE_SECONDS = 30
# How long the engine's thread and the event loop wait for each other's interpreter lock. With
# Python's 5 ms, 128 streams had a p99 of 31 ms between tokens instead of 17
# (benchmarks/bench_http.py).
SWITCH_SECONDS = 0.0002
MAX_FILES = 65536  # many systems allow 1,024
# Python 3.12 freezes 375 objects when it starts. A process that froze torch's has more than 100,000.
FROZEN_BY_PYTHON = 10_000


def http_settings(app: ASGIApp, settings: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
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
        http=LimitedHttp,
        loop="uvloop",
    )


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C, then lets running requests end. A second signal ends at once."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(http_settings(app, service.config))
        self._service = service
        self._tasks: list[asyncio.Task[None]] = []
        self._froze = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.llm.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.ready, self._service.llm.draining = False, True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Warms the model up, then listens."""
        began = time.monotonic()
        await self._service.start_renderer()
        await warm_up(self._service.llm)
        log.info("warm-up: %.1f s", time.monotonic() - began)
        self._froze = gc.get_freeze_count() < FROZEN_BY_PYTHON  # or this process has done it
        if self._froze:
            gc.collect()
            gc.freeze()  # a collection would walk all of torch between two steps
        self._tasks = [asyncio.create_task(self._end_when_drained())]
        if self._service.config.stats_interval:
            self._tasks.append(asyncio.create_task(write_statistics(self._service)))
        for listener in sockets or ():  # uvloop hides this failure
            with _address_errors(self._service.config):
                listener.listen(self.config.backlog)
        await super().startup(sockets)
        if self.started:
            self._service.ready = not self._service.llm.draining
            log.info("serving %s on %s", self._service.names[0], ", ".join(self.addresses()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections, and lets the collector see again what `startup` froze."""
        await super().shutdown(sockets)
        if self._froze:
            gc.unfreeze()

    def addresses(self) -> list[str]:
        if self._service.config.uds is not None:
            return [f"unix:{self._service.config.uds}"]
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
            llm.abort_all(UnavailableError("the server is shutting down; send the request to another one"))
            await llm.drain(1.0)
        self.should_exit = True


class Statistics:
    """What an engine has done since the last time that it was asked."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._done, self._then = (0, 0), time.monotonic()

    def line(self) -> str | None:
        """None where nothing has happened."""
        llm, now = self._service.llm, time.monotonic()
        counters, plan = llm.llm.engine.counters(), llm.llm.plan
        done = counters.prompt_tokens, counters.output_tokens
        prompt, output = ((new - old) / (now - self._then) for new, old in zip(done, self._done))
        idle = done == self._done and not llm.unfinished
        self._done, self._then = done, now
        if idle:
            return None
        lent, pages = counters.total_pages - counters.free_pages - counters.cached_pages, counters.total_pages
        used = 100 * lent / pages if pages else 0.0
        hits = 100 * counters.cache_hit / counters.cache_asked if counters.cache_asked else 0.0
        return (
            f"{counters.running} running, {max(llm.unfinished - counters.running, 0)} waiting; prompt {prompt:.1f} "
            f"tokens/s, output {output:.1f} tokens/s; KV pages {used:.1f}% used, {counters.free_slots} of "
            f"{plan.num_slots} state slots free, {counters.retractions} retractions, {hits:.1f}% of prompts cached"
        )


async def write_statistics(service: Service) -> None:
    """A line every few seconds in which something happened."""
    statistics = Statistics(service)
    while True:
        await asyncio.sleep(service.config.stats_interval)
        if (line := statistics.line()) is not None:
            log.info(line)


def bind(config: ServerConfig) -> socket.socket:
    """Binds the address before a model is loaded; connections are refused until the server listens.

    Raises:
        OSError: it cannot be had.
    """
    if config.uds is not None:
        return _bind_unix(config)
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited; ends connections that take no bytes
        milliseconds = math.ceil(min(1000 * config.request_timeout, 2**31 - 1))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        with _address_errors(config):
            listener.bind((config.host, config.port))
    except OSError:
        listener.close()
        raise
    return listener


def _bind_unix(config: ServerConfig) -> socket.socket:
    """Replaces the socket of a server that has ended, and nothing else."""
    path = Path(str(config.uds))
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _address_errors(config):
            if path.is_socket():
                with suppress(ConnectionRefusedError):
                    listener.connect(str(path))
                    raise OSError(EADDRINUSE, "another server listens there")
                path.unlink()
            listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    return listener


@contextmanager
def _address_errors(config: ServerConfig) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        place, option = (config.uds, "--uds") if config.uds else (f"{config.host}:{config.port}", "--host or --port")
        text = f"cannot listen on {place} ({e.strerror or e}); choose another {option}"
        raise OSError(e.errno, text) from e


def write_logs(level: str) -> None:
    """Sends log lines of this level and above to standard error. Call it before a model is loaded,
    which has a line for each part of the start."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # written here, too
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes a line for each question to a replica
    _write_bare_lines()


def serve(llm: LLM, config: ServerConfig, listener: socket.socket) -> None:
    """Serves until a signal ends it. The LLM is closed at the end."""
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_file_limit()
    with llm, AsyncLLM(llm, max_waiting=config.max_waiting) as served, playing(llm, config) as role:
        port = role.port if isinstance(role, PrefillRole) else None
        service = Service(served, config, model=digest_for_routers(llm, config), transfer_port=port)
        log.info("model: %s", summary(service))
        try:
            metrics = Metrics(served, service.names[0], tuple if role is None else role.numbers)
            Server(make_app(service, metrics), service).run(sockets=[listener])
        finally:
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


def digest_for_routers(llm: LLM, config: ServerConfig) -> str:
    """`Service.model`. Made at the start: later the files may be others. "" where no router may ask."""
    return "" if config.fleet_key is None else model_digest(resolve_model_path(llm.config.model), llm.config)


def raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _write_bare_lines() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("hybridrt.access")
    access.handlers, access.propagate = [handler], False
    access.setLevel(logging.INFO)
