"""`hybridrt router`: one address in front of several replicas of `hybridrt serve`."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from hybridrt.base.errors import ProviderNotInstalledError
from hybridrt.cli.options import Overrides, setting
from hybridrt.cli.serve import FrontOptions

REPLICA_KEY_VARIABLE = "HYBRIDRT_REPLICA_KEY"
_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class RouterOptions(Overrides):
    """Fields of RouterConfig, which checks them."""

    panel: ClassVar = "Router"
    replicas: list[str] | None = setting("URL of a replica; repeatable.", "none", "URL", "--replica")
    discover: str | None = setting("Name that stands for all replicas in DNS.", "none", "URL")
    tokenizer: str | None = setting("Model whose tokenizer the replicas have.", "none: token ids alone", "MODEL")
    resume: bool | None = setting("A stream whose replica is lost goes on at another one.", "off: an error")


def router(routing: RouterOptions = RouterOptions(), server: FrontOptions = FrontOptions()) -> None:  # noqa: B008
    """Send each request to the replica that has cached most of it.

    It is the one with the longest prefix of the prompt in its cache, and room. Replicas are started with the same fleet
    key (--fleet-key-file, or the variable HYBRIDRT_FLEET_KEY). The variable HYBRIDRT_REPLICA_KEY has the API key that
    they want, if it is not the client's. SIGTERM or Ctrl-C lets running requests end; a second one does not.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ProviderNotInstalledError(f"{', '.join(missing)} is not installed: pip install '.[serve]'")
    from hybridrt.fleet.router import RouterConfig, RouterServer
    from hybridrt.runtime.load.model_path import resolve_model_path
    from hybridrt.server.core.config import ServerConfig
    from hybridrt.server.run import bind, raise_file_limit, write_logs

    given: dict[str, Any] = server.given()
    fleet_key = given.pop("fleet_key")
    config = ServerConfig(fleet_key=fleet_key, **given)
    asked = routing.given()
    tokenizer = str(resolve_model_path(asked["tokenizer"])) if "tokenizer" in asked else None
    key = os.environ.get(REPLICA_KEY_VARIABLE) or None
    replicas, resume = tuple(asked.get("replicas", ())), asked.get("resume", False)
    routes = RouterConfig(config, replicas, key, fleet_key, tokenizer, asked.get("discover"), resume)
    write_logs(config.log_level)
    with bind(config) as listener:
        raise_file_limit()
        RouterServer(routes).run(sockets=[listener])
