"""The actors of hybridrt.fleet.ray: replicas, each with a server of its own, and the router."""

import asyncio
import time
from contextlib import suppress
from typing import Any

import ray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hybridrt.base.errors import UnavailableError
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.llm import LLM
from hybridrt.fleet.router import Router, RouterConfig
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.server.app import make_app
from hybridrt.server.core.api_keys import read_api_keys
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.guard import Guard
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.core.service import Service
from hybridrt.server.run import Server, bind, digest_for_routers

TELL_SECONDS = 1.0  # between two signs of life of a replica
FORGOTTEN = 5.0  # seconds without one


class Addresses:
    """An actor with the addresses of the replicas that run."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def put(self, url: str) -> None:
        self._seen[url] = time.monotonic()

    def drop(self, url: str) -> None:
        self._seen.pop(url, None)

    def known(self) -> list[str]:
        now = time.monotonic()
        self._seen = {url: at for url, at in self._seen.items() if now - at < FORGOTTEN}
        return list(self._seen)


def addresses(name: str) -> Any:
    """The actor of an application. It is made if it is not there."""
    options = {"name": name, "namespace": "hybridrt", "get_if_exists": True, "num_cpus": 0}
    return ray.remote(Addresses).options(**options, lifetime="detached", max_restarts=-1).remote()


class RayReplica:
    """One engine with a server. Ray starts it, scales by what it records, and replaces it if it fails."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, model: str, engine: dict[str, Any], name: str, fleet_key: str, drain_timeout: float
    ) -> None:
        self._llm = await AsyncLLM.create(str(resolve_model_path(model)), **engine)
        self._addresses, host = addresses(name), ray.util.get_node_ip_address()
        config = ServerConfig(
            host=host, port=0, served_model_names=(model,), api_keys=read_api_keys(None, None), fleet_key=fleet_key,
            drain_timeout=drain_timeout, access_log=False,
        )  # fmt: skip
        self._service = Service(self._llm, config, model=digest_for_routers(self._llm.llm, config))
        self._metrics, self._first = Metrics(self._llm, model), (0, 0.0)
        listener = bind(config)
        self._server = Server(make_app(self._service, self._metrics), self._service)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._service.ready and not self._serving.done():
            await asyncio.sleep(0.05)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        while True:
            self._addresses.put.remote(self._url)
            await asyncio.sleep(TELL_SECONDS)

    async def check_health(self) -> None:
        problem = "its server has ended" if self._serving.done() else self._service.problem()
        if problem is not None:
            raise UnavailableError(problem)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What ScalingPolicy reads. The time to the first token is the mean since the last call, or
        that which a request would wait now."""
        (count, seconds), (known, before) = self._metrics.first_tokens(), self._first
        self._first = count, seconds
        first = (seconds - before) / (count - known) if count > known else 0.0
        engine = self._llm.llm.engine
        waiting = self._llm.unfinished - engine.counters().running
        return {
            "requests": float(self._llm.unfinished), "waiting": float(max(waiting, 0)),
            "first_token_s": max(first, engine.wait_seconds()),
        }  # fmt: skip

    async def __del__(self) -> None:  # Ray Serve awaits it
        """Running requests get the server's time to end."""
        llm: AsyncLLM | None = getattr(self, "_llm", None)
        if llm is None:
            return
        if (serving := getattr(self, "_serving", None)) is not None:
            self._telling.cancel()
            await self._addresses.drop.remote(self._url)
            self._server.handle_exit(15, None)
            with suppress(asyncio.CancelledError):
                await serving
        engine: LLM = llm.llm
        llm.close()
        engine.close()


class Ingress:
    """The router (hybridrt.fleet.router) over all replicas that run. It follows the events of their
    caches."""

    async def __init__(self, model: str, name: str, fleet_key: str, resume: bool, replicas: Any) -> None:  # type: ignore[misc]
        # Ray's proxy decides who may connect, under which name.
        keys = read_api_keys(None, None)
        server = ServerConfig(allowed_hosts=("*",), api_keys=keys, fleet_key=fleet_key, access_log=False)
        tokenizer = str(resolve_model_path(model))
        self._router = Router(RouterConfig(server, (), None, fleet_key, tokenizer, None, resume, changing=True))
        self._app, self._addresses = Guard(self._router, server), addresses(name)
        await self._router.start()
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            with suppress(ray.exceptions.RayError):  # it starts again, and is told anew
                self._router.replace(await self._addresses.known.remote())
            await asyncio.sleep(TELL_SECONDS)

    async def __call__(self, request: Request) -> Response:
        return _Through(self._app)

    async def __del__(self) -> None:  # Ray Serve awaits it
        if hasattr(self, "_following"):
            self._following.cancel()
            await self._router.close()
            ray.kill(self._addresses)


class _Through(Response):
    """The answer of an ASGI application to the request that this one would answer."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
