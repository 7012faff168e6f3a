"""`hybridrt serve`: a model behind the HTTP APIs of OpenAI and Anthropic."""

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import typer

from hybridrt.cli.options import EMBEDDED, EngineOptions, SpeculativeOptions, option, read_text
from hybridrt.errors import ProviderNotInstalledError

_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class ServerOptions:
    """Fields of ServerConfig, which checks them."""

    panel: ClassVar = "Server"
    host: Annotated[str | None, option("Address to listen on; 0.0.0.0 is reached from everywhere.", "127.0.0.1")] = None
    port: Annotated[int | None, option("Port to listen on.", "8000", "N")] = None
    served_model_names: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", metavar="NAME", help="What requests call the model; repeatable. [MODEL]"),
    ] = None
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="Key that requests must bring; repeatable. Others see a command line: prefer --api-key-file or the "
            "variable HYBRIDRT_API_KEY. [none]",
        ),
    ] = None
    api_key_file: Annotated[str | None, option("File with such keys, one a line.", "none", "FILE")] = None
    tls_certificate: Annotated[str | None, option("PEM file: serve HTTPS.", "none", "FILE")] = None
    tls_key: Annotated[str | None, option("PEM file of its private key.", "none", "FILE")] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origin", metavar="URL", help="Pages that may call (CORS); repeatable. [none]"),
    ] = None
    chat_template: Annotated[str | None, option("File that replaces the model's chat template.", "none", "FILE")] = None
    tool_parser: Annotated[str | None, option("How the model writes tool calls.", "auto", "NAME")] = None
    reasoning_parser: Annotated[str | None, option("How the model marks reasoning.", "auto", "NAME")] = None
    max_waiting: Annotated[int | None, option("Samples that may wait; more get 429.", "4096", "N")] = None
    max_body_bytes: Annotated[int | None, option("Longest body of a request.", "16777216", "N")] = None
    request_timeout: Annotated[float | None, option("Seconds that a request may take.", "600", "S")] = None
    drain_timeout: Annotated[float | None, option("Seconds for running requests after SIGTERM.", "30", "S")] = None
    step_timeout: Annotated[float | None, option("A longer step makes /health fail.", "120", "S")] = None
    stats_interval: Annotated[float | None, option("Seconds between lines of statistics; 0: none.", "10", "S")] = None
    access_log: Annotated[bool | None, option("A JSON line for each request.", "on")] = None
    otlp_endpoint: Annotated[str | None, option("Where OpenTelemetry spans go.", "none", "URL")] = None

    def given(self) -> dict[str, Any]:
        """Arguments of ServerConfig.

        Raises:
            ConfigError: a file cannot be read.
        """
        from hybridrt.server.config import read_api_keys

        values = {name: value for name, value in asdict(self).items() if value is not None}
        values["api_keys"] = read_api_keys(values.pop("api_keys", None), values.pop("api_key_file", None))
        if "chat_template" in values:
            values["chat_template"] = read_text("--chat-template", values["chat_template"])
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def serve(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="Checkpoint directory, hub name, or the built-in model.")
    ] = EMBEDDED,
    server: ServerOptions = ServerOptions(),
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's HTTP APIs.

    SIGTERM or Ctrl-C lets running requests end; a second one does not.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ProviderNotInstalledError(f"{', '.join(missing)} is not installed: pip install 'hybridrt[serve]'")
    from hybridrt.server.config import ServerConfig

    given = server.given()
    given.setdefault("served_model_names", (model,))
    config = ServerConfig(**given)
    from hybridrt.engine.llm import LLM
    from hybridrt.runtime.build import resolve_model_path
    from hybridrt.server.run import bind
    from hybridrt.server.run import serve as run

    path = str(resolve_model_path(model))
    with bind(config) as listener:
        run(LLM(path, **engine.given(), **speculation.given(model)), config, listener)
