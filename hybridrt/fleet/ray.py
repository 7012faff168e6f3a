"""A Ray Serve application of replicas of a model: `serve run hybridrt.fleet.ray:app model=MODEL`.

Ray starts replicas on its machines, each with the GPUs of its tensor-parallel ranks, scales them by
the requests that have not ended, and replaces one whose engine has failed. Each replica answers the
whole HTTP API. Ray's own router balances load; it does not know what replicas have cached.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hybridrt.base.errors import ConfigError, ProviderNotInstalledError, UnavailableError
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.build import resolve_model_path
from hybridrt.server.app import make_app
from hybridrt.server.core.api_keys import read_api_keys
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.core.service import Service
from hybridrt.server.warm_up import warm_up

HEALTH_SECONDS = 5.0


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `app`, each KEY=VALUE on the command line.

    Attributes:
        model: checkpoint directory or hub name.
        min_replicas, max_replicas: between which Ray scales.
        target_requests: running and waiting requests of a replica that Ray aims at.
        gpus: of each replica, those of its `tp_size` ranks; 0: a CPU.
        cpus: cores that each replica reserves.
        drain_timeout: seconds that running requests get when a replica ends.
        engine: further arguments of LLM, as a JSON object.
    """

    model: str = "embedded"
    min_replicas: int = 1
    max_replicas: int = 4
    target_requests: float = 16.0
    gpus: int = 1
    cpus: float = 1.0
    drain_timeout: float = 30.0
    engine: str = "{}"

    def engine_options(self) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(self.engine, type=dict[str, Any])
        except msgspec.MsgspecError as e:
            raise ConfigError(f"engine is {self.engine!r}; it must be a JSON object of arguments of LLM: {e}") from e
        return {"tp_size": max(self.gpus, 1), "device": "cuda" if self.gpus else "cpu"} | found


class Replica:
    """One engine, and its HTTP application."""

    async def __init__(self, model: str, engine: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._llm = await AsyncLLM.create(str(resolve_model_path(model)), **engine)
        # Ray's proxy decides who may connect, under which name.
        config = ServerConfig(served_model_names=(model,), allowed_hosts=("*",), api_keys=read_api_keys(None, None))
        self._service = Service(self._llm, config)
        self._app = make_app(self._service, Metrics(self._llm, model))
        await self._service.start_renderer()
        await warm_up(self._llm)
        self._service.ready = True

    async def __call__(self, request: Request) -> Response:
        return _Through(self._app)

    async def check_health(self) -> None:
        if (problem := self._service.problem()) is not None:
            raise UnavailableError(problem)

    def __del__(self) -> None:
        llm: AsyncLLM | None = getattr(self, "_llm", None)
        if llm is not None:
            engine: LLM = llm.llm
            llm.close()
            engine.close()


class _Through(Response):
    """The answer of an ASGI application to the request that this one would answer."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def app(arguments: dict[str, Any]) -> Any:
    """The application, a ray.serve.Application.

    Args:
        arguments: fields of RayOptions; texts count as their numbers.

    Raises:
        ConfigError: a field is unknown, or cannot be used.
        ProviderNotInstalledError: Ray Serve is not installed.
    """
    try:
        options = msgspec.convert(arguments, RayOptions, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"arguments of hybridrt.fleet.ray:app: {e}") from e
    if not 0 < options.min_replicas <= options.max_replicas or options.gpus < 0:
        raise ConfigError(f"{options} needs 0 < min_replicas <= max_replicas, and gpus of 0 or more")
    try:
        from ray import serve
    except ImportError as e:
        raise ProviderNotInstalledError(f"Ray Serve cannot be loaded ({e}): pip install '.[ray]'") from e
    return serve.deployment(
        name="hybridrt",
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": options.cpus},
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests,
        },
        max_ongoing_requests=max(1, int(4 * options.target_requests)),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.drain_timeout,
    )(Replica).bind(options.model, options.engine_options())
