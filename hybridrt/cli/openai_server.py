"""A client of OpenAI's HTTP API, for `hybridrt chat --url` and `hybridrt bench serve`."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from hybridrt.base.errors import ConfigError, RequestError, ServerError, shown
from hybridrt.cli.conversation import AnswerPiece, ConversationMessage, Totals

_CONNECT_SECONDS = 10.0
_MAX_BYTES = 2**24  # bytes of a line of a stream, and of an answer that is no stream
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding raises


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the name in newer versions of vLLM


class _Choice(msgspec.Struct):
    delta: _Text = msgspec.field(default_factory=_Text)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAIServer:
    """Requests to one server.

    Args:
        url: such as http://127.0.0.1:8000, with or without /v1.
        api_key: sent as a bearer token.
        timeout: seconds without a byte after which a request fails.

    Raises:
        ConfigError: `url` is no URL of a server, or the key cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            parsed = httpx.URL(self.url)
            self._client = httpx.Client(
                headers=headers, timeout=httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
            )
        except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as e:
            raise ConfigError(f"the server's URL or API key cannot be used: {e}") from e
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url} is not a server's URL; pass one such as http://127.0.0.1:8000")

    def first_model(self) -> str:
        """The first model of the server's list.

        Raises:
            ServerError: it lists none, or cannot be reached.
        """
        with self._typed_errors(), self._client.stream("GET", f"{self.url}/models") as answer:
            _check(answer)
            data = msgspec.json.decode(_content(answer), type=_Models).data
        if not data:
            raise ServerError(f"{self.url}/models lists no model; name one")
        return data[0].id

    def stream_chat(self, body: dict[str, Any]) -> Generator[AnswerPiece | Totals, None, None]:
        """Pieces of an answer of /chat/completions. Closing the generator closes the connection.

        Raises:
            ServerError: the server cannot be reached, refuses, or breaks off.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with (
            self._typed_errors(),
            self._client.stream("POST", f"{self.url}/chat/completions", json=body | options) as answer,
        ):
            _check(answer)
            yield from _pieces(_events(_lines(answer)))

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as e:
            raise ServerError(f"{self.url}: {e or type(e).__name__}; check the URL and the server") from e
        except _NO_JSON as e:
            raise ServerError(f"{self.url} sends what is not OpenAI's API: {e}") from e


def _check(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    content = _content(answer)
    try:
        said = _message(msgspec.json.decode(content).get("error"))
    except (*_NO_JSON, AttributeError):
        said = shown(content.decode(errors="replace"))
    raise ServerError(f"{answer.url} answers {answer.status_code}: {said}")


def _content(answer: httpx.Response) -> bytes:
    """Raises ServerError if it is too long."""
    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) > _MAX_BYTES:
            raise ServerError(f"{answer.url} sends more than {_MAX_BYTES} bytes; check the URL")
    return bytes(content)


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """Raises ServerError if one does not end."""
    rest = bytearray()
    for piece in answer.iter_bytes():
        first, *others = piece.split(b"\n")
        rest += first
        for other in others:
            yield bytes(rest)
            rest = bytearray(other)
        if len(rest) > _MAX_BYTES:
            raise ServerError(f"{answer.url} sends a line of more than {_MAX_BYTES} bytes; check the URL")
    yield bytes(rest)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _events(lines: Iterator[bytes]) -> Iterator[_Chunk]:
    for line in lines:
        name, _, data = line.partition(b":")
        if name != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        chunk = msgspec.json.decode(data.strip(), type=_Chunk)
        if chunk.error is not None:
            raise ServerError(_message(chunk.error))
        yield chunk


def _pieces(chunks: Iterator[_Chunk]) -> Iterator[AnswerPiece | Totals]:
    first = last = reason = usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices[:1]:
            text = choice.delta
            piece = AnswerPiece(text.content or "", text.reasoning_content or text.reasoning or "")
            reason = choice.finish_reason or reason
            if piece.text or piece.reasoning:
                last = time.monotonic()
                first = first or last
                yield piece
    if reason is None:
        raise ServerError("the server has broken off its answer")
    if usage is not None:
        tokens = usage.completion_tokens
        rate = (tokens - 1) / (last - first) if first and last and last > first and tokens > 1 else None
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        yield Totals(tokens, usage.prompt_tokens, cached or 0, rate)


class RemoteModel:
    """A model on a server.

    Args:
        fields: further fields of each request, such as temperature.
    """

    def __init__(self, server: OpenAIServer, name: str, fields: dict[str, Any]) -> None:
        self.name = name
        self._server, self._fields = server, fields

    def answer(self, messages: list[ConversationMessage]) -> Generator[AnswerPiece | Totals, None, None]:
        dicts = [message.to_dict() for message in messages]
        return self._server.stream_chat({"model": self.name, "messages": dicts, **self._fields})

    def save_session(self, file: Path, messages: list[ConversationMessage]) -> None:
        raise _no_states(file)

    def load_session(self, file: Path) -> list[ConversationMessage]:
        raise _no_states(file)


def _no_states(file: Path) -> RequestError:
    other = file.with_suffix(".json")
    return RequestError(f"{file}: states of a server's model cannot be saved or loaded; choose a name such as {other}")
