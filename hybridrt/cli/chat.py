"""`hybridrt chat`: a conversation with a model in this process or on a server."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridrt.base.errors import ConfigError
from hybridrt.cli.options import (
    DEMONSTRATION,
    EMBEDDED,
    EngineOptions,
    Overrides,
    SamplingOptions,
    SpeculativeOptions,
    option,
    read_text,
    setting,
)

if TYPE_CHECKING:
    from hybridrt.cli.conversation import ChatModel


@dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """Sampling of answers, as long as the model has room by default."""

    max_tokens: int | None = setting("Tokens of an answer at most.", "what there is room for", "N")


@dataclass(frozen=True)
class ChatEngine(EngineOptions):
    """An engine for one person: room for few requests leaves memory for cached conversations, and
    starts fast."""

    max_running_requests: int | None = setting("Requests that could decode together.", "4", "N")


@dataclass(frozen=True)
class FormatOptions(Overrides):
    """How conversations are written for a model in this process."""

    chat_template: str | None = setting("File that replaces the chat template.", "none", "FILE")
    reasoning_parser: str | None = setting("How the model marks reasoning.", "auto", "NAME")


@dataclass(frozen=True)
class RemoteOptions:
    """Where another server is."""

    url: str | None = setting("Server with OpenAI's API to talk to instead.", "none", "URL")
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="HYBRIDRT_API_KEY", metavar="KEY", help="Sent to the server of --url. [none]"),
    ] = None
    timeout: float | None = setting("Seconds without a byte from it before an error.", "600", "S")


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"Checkpoint directory or hub name; with --url, the model's name there. [{EMBEDDED}]",
        ),
    ] = None,
    system: Annotated[str | None, option("System prompt.", "none", "TEXT")] = None,
    remote: RemoteOptions = RemoteOptions(),
    format: FormatOptions = FormatOptions(),
    sampling: ChatSampling = ChatSampling(),
    engine: ChatEngine = ChatEngine(),
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Talk with a model.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat.
    """
    from hybridrt.cli.conversation import ConversationMessage
    from hybridrt.cli.line_reader import make_reader
    from hybridrt.cli.repl import COMMANDS, Repl, Screen

    with ExitStack() as stack:
        if remote.url is not None:
            _refuse_local(**format.given(), **engine.given() | {"seed": None}, **speculation.given(""))
            seeds = {"seed": engine.seed} if engine.seed is not None else {}
            answering = _remote(remote, model, sampling.given() | seeds)
        else:
            options = {"max_running_requests": 4, **engine.given(), **speculation.given(model or EMBEDDED)}
            answering = _local(stack, model or EMBEDDED, format, sampling.given(), options)
        repl = Repl(answering, make_reader(list(COMMANDS)), Screen())
        if system:
            repl.messages = [ConversationMessage("system", system)]
        repl.run()


def _refuse_local(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} goes with a model in this process: leave it or --url out")


def _remote(remote: RemoteOptions, model: str | None, fields: dict[str, Any]) -> "ChatModel":
    from hybridrt.cli.openai_server import OpenAIServer, RemoteModel

    timeout = 600.0 if remote.timeout is None else remote.timeout
    if not 0 < timeout < float("inf"):
        raise ConfigError(f"--timeout is {timeout}; it must be a number of seconds above 0")
    server = OpenAIServer(remote.url or "", remote.api_key, timeout)
    return RemoteModel(server, model or server.first_model(), fields)


def _local(
    stack: ExitStack, model: str, format: FormatOptions, sampling: dict[str, Any], options: dict[str, Any]
) -> "ChatModel":
    from hybridrt.base.engine_config import EngineConfig
    from hybridrt.chat.registry import REASONING_PARSERS, choose
    from hybridrt.cli.local_model import LocalModel
    from hybridrt.cli.repl import Screen
    from hybridrt.engine.api.llm import LLM
    from hybridrt.engine.api.sampling_defaults import default_sampling_params
    from hybridrt.engine.text.tokenizer import load_tokenizer
    from hybridrt.models.config.read_config import read_model_config
    from hybridrt.runtime.load.model_path import checkpoint_path

    parser = format.reasoning_parser or "auto"
    choose(REASONING_PARSERS, parser, template="")  # raises for an unknown name, before anything is read
    path = checkpoint_path(EngineConfig(model, **options))
    params = replace(default_sampling_params(path), **{"max_tokens": None, **sampling})
    template = None if format.chat_template is None else read_text("--chat-template", format.chat_template)
    read_model_config(path)  # the tokenizer does not check config.json
    tokenizer = load_tokenizer(path)
    if tokenizer is None or not (template or tokenizer.hf.chat_template):
        raise ConfigError("the model brings no chat template; pass one with --chat-template, or use hybridrt generate")
    if model == EMBEDDED:
        Screen().note(DEMONSTRATION)
    llm = stack.enter_context(LLM(str(path), **options))
    return LocalModel(path.name, llm, params, llm.chats(template, reasoning_parser=parser))
