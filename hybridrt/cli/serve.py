"""`hybridrt serve`: serves a model over the HTTP APIs of OpenAI and Anthropic."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from hybridrt.base.errors import ConfigError, ProviderNotInstalledError
from hybridrt.cli.options import (
    DEMONSTRATION,
    EMBEDDED,
    ITL_TARGET,
    EngineOptions,
    ModelArgument,
    Overrides,
    SpeculativeOptions,
    read_text,
    setting,
)

_NEEDS = ("fastapi", "uvicorn", "prometheus_client")
ARENA_BYTES = 2**28  # for states on their way, with a role


@dataclass(frozen=True)
class FrontOptions(Overrides):
    """Fields of ServerConfig that a router has, too. ServerConfig checks them."""

    panel: ClassVar = "Server"
    host: str | None = setting("Address to listen on; 0.0.0.0 is reached from everywhere.", "127.0.0.1", "ADDRESS")
    port: int | None = setting("Port to listen on.", "8000", "N")
    uds: str | None = setting("Unix socket to listen on, instead of host and port.", "none", "PATH")
    root_path: str | None = setting("Prefix that a proxy puts before all paths, such as /llm.", "none", "PATH")
    api_keys: list[str] | None = setting(
        "Key that requests must bring; repeatable. Others see a command line: prefer --api-key-file or the variable "
        "HYBRIDRT_API_KEY.", "none", "KEY", "--api-key",
    )  # fmt: skip
    api_key_file: str | None = setting("File with such keys, one a line: KEY client=NAME weight=X.", "none", "FILE")
    tls_certificate: str | None = setting("PEM file: serve HTTPS.", "none", "FILE")
    tls_key: str | None = setting("PEM file of its private key.", "none", "FILE")
    allowed_hosts: list[str] | None = setting(
        "Further name of the server, without a port; repeatable. *: any.", "loopback and --host", "NAME",
        "--allowed-host",
    )  # fmt: skip
    allowed_origins: list[str] | None = setting(
        "Pages that may call (CORS); repeatable.", "none", "URL", "--allowed-origin"
    )
    chat_template: str | None = setting("File that replaces the model's chat template.", "none", "FILE")
    tool_parser: str | None = setting(
        "How the model writes tool calls; auto: the template says, none: off.", "auto", "NAME"
    )
    reasoning_parser: str | None = setting(
        "How the model marks reasoning; auto: the template says, none: off.", "auto", "NAME"
    )
    max_body_bytes: int | None = setting("Longest body of a request.", "16777216", "N")
    request_timeout: float | None = setting("Seconds that a request may take.", "600", "S")
    drain_timeout: float | None = setting("Seconds for running requests after SIGTERM.", "30", "S")
    log_level: str | None = setting("Lowest level of log lines.", "info", "debug|info|warning|error")
    access_log: bool | None = setting("A JSON line for each request.", "on")
    fleet_key_file: str | None = setting(
        "File with the key of routers, which may read what is cached; else the variable HYBRIDRT_FLEET_KEY.", "none",
        "FILE",
    )  # fmt: skip

    def given(self) -> dict[str, Any]:
        """Arguments of ServerConfig.

        Raises:
            ConfigError: a file cannot be read.
        """
        from hybridrt.channel.keys import find_fleet_key
        from hybridrt.server.core.api_keys import read_api_keys

        values = super().given()
        values["fleet_key"] = find_fleet_key(values.pop("fleet_key_file", None))
        values["api_keys"] = read_api_keys(values.pop("api_keys", None), values.pop("api_key_file", None))
        if "chat_template" in values:
            values["chat_template"] = read_text("--chat-template", values["chat_template"])
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True)
class ServerOptions(FrontOptions):
    """Fields of ServerConfig. A router has no use for those that are added here."""

    served_model_names: list[str] | None = setting(
        "What requests call the model; repeatable.", "MODEL", "NAME", "--served-model-name"
    )
    allow_image_urls: list[str] | None = setting(
        "Host from which https addresses of images are fetched; repeatable.", "none", "HOST", "--allow-image-url"
    )
    request_chat_templates: bool | None = setting("Requests may bring a chat template of their own.", "off")
    max_waiting: int | None = setting("Samples that may wait; more get 429.", "4096", "N")
    max_stored_responses: int | None = setting("Responses kept for later requests; 0: none.", "1024", "N")
    max_stored_bytes: int | None = setting("Bytes of all of these.", "67108864", "N")
    step_timeout: float | None = setting("A longer step makes /health fail.", "120", "S")
    stats_interval: float | None = setting("Seconds between lines of statistics; 0: none.", "10", "S")
    otlp_endpoint: str | None = setting("Where OpenTelemetry spans go.", "none", "URL")
    role: str | None = setting("Computes prompts for others, or has its own computed.", "both", "both|prefill|decode")
    prefill_urls: list[str] | None = setting("With --role decode: a server with --role prefill; repeatable.", "none",
        "URL", "--prefill-url")  # fmt: skip
    transfer_port: int | None = setting("With --role prefill: port for decode servers.", "a free one", "N")

    def given(self) -> dict[str, Any]:
        values = super().given()
        if values.get("role", "both") != "both":
            from hybridrt.transfer.keys import find_key as find_transfer_key

            values["transfer_key"] = find_transfer_key(None)
        return values


@dataclass(frozen=True)
class ServeEngine(EngineOptions):
    """An engine for many clients: a long prompt does not stop other answers."""

    target_itl_ms: str | None = setting(ITL_TARGET, "auto", "MS|auto|none")

    def given(self) -> dict[str, Any]:
        return {"target_itl_ms": "auto"} | super().given()


def serve(
    model: ModelArgument = EMBEDDED,
    server: ServerOptions = ServerOptions(),
    engine: ServeEngine = ServeEngine(),
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's HTTP APIs.

    SIGTERM or Ctrl-C lets running requests end; a second one does not.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ProviderNotInstalledError(f"{', '.join(missing)} is not installed: pip install '.[serve]'")
    from hybridrt.server.core.api_keys import client_weights
    from hybridrt.server.core.config import ServerConfig

    given = server.given()
    given.setdefault("served_model_names", (model,))
    config = ServerConfig(**given)
    from hybridrt.base.engine_config import EngineConfig
    from hybridrt.engine.api.llm import LLM
    from hybridrt.runtime.load.model_path import checkpoint_path
    from hybridrt.server.run import bind, write_logs
    from hybridrt.server.run import serve as run

    write_logs(config.log_level)
    if model == EMBEDDED:
        logging.getLogger("hybridrt.server").info(DEMONSTRATION)
    options = {"client_weights": client_weights(config.keys)} | engine.given() | speculation.given(model)
    if config.role != "both":
        if (engines := options.get("dp_size", 1)) > 1:
            text = f"--role {config.role} belongs to one engine, and --dp-size is {engines}"
            raise ConfigError(f"{text}: start a server for each GPU, and a router in front")
        options.setdefault("transfer_bytes", ARENA_BYTES)
    path = str(checkpoint_path(EngineConfig(model, **options)))
    with bind(config) as listener:
        run(LLM(path, **options), config, listener)
