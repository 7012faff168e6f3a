"""Data of `hybridrt chat`: messages, pieces of an answer, and files of conversations."""

import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from hybridrt.base.errors import RequestError, is_text

MAX_FILE_BYTES = 64 * 2**20


class Message(msgspec.Struct, omit_defaults=True):
    """One message. `reasoning_content` is what an assistant wrote before its answer."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str | None = None

    def to_dict(self) -> dict[str, str]:
        """The message in the form that templates and servers read, without reasoning: models are
        trained without that of earlier answers."""
        return {"role": self.role, "content": self.content}


class _File(msgspec.Struct):
    messages: list[Message]


@dataclass(frozen=True)
class Piece:
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Totals:
    """Tokens of an answer. `rate`: tokens a second after the first; None for an answer of one
    token."""

    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    rate: float | None

    def __str__(self) -> str:
        rate = f", {self.rate:.1f} tokens/s" if self.rate is not None else ""
        return f"{self.output_tokens} tokens{rate}, {self.cached_tokens} of {self.prompt_tokens} prompt tokens cached"


class ChatModel(Protocol):
    """A model in this process, or on a server."""

    name: str

    def answer(self, messages: list[Message]) -> Generator[Piece | Totals, None, None]:
        """Pieces of an answer, then Totals where known. Closing the generator ends the request.

        Raises:
            HybridrtError: the request failed, or the answer broke off.
        """

    def save_session(self, file: Path, messages: list[Message]) -> None:
        """Writes a conversation with its part of the prefix cache.

        Raises:
            RequestError: the model is not in this process.
            SessionError: nothing of it is cached.
            OSError: the file cannot be written.
        """

    def load_session(self, file: Path) -> list[Message]:
        """Loads such a file into the prefix cache. Returns the conversation.

        Raises:
            RequestError: the model is not in this process, or the file holds no conversation.
            SessionError: the file belongs to another model, or is damaged.
            OSError: the file cannot be read.
        """


def encoded(messages: list[Message]) -> bytes:
    """{"messages": [...]}, which /v1/chat/completions takes as it is."""
    return msgspec.json.format(msgspec.json.encode(_File(messages)), indent=2) + b"\n"


def decoded(content: bytes | str, file: Path) -> list[Message]:
    """The inverse of `encoded`.

    Raises:
        RequestError: it is no conversation; the text names `file`.
    """
    try:
        messages = msgspec.json.decode(content, type=_File).messages
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RequestError(f"{file} is not a conversation: {e}") from e
    for i, message in enumerate(messages):
        if message.role == "system" and i:
            raise RequestError(f"{file}: message {i} is a system message; only the first message may be one")
        if not is_text(message.content + (message.reasoning_content or "")):
            raise RequestError(f"{file}: message {i} holds half of a surrogate pair, which is no text")
    return messages


def save(file: Path, messages: list[Message]) -> None:
    """Writes a conversation, readable by the user alone.

    Raises:
        RequestError: the file holds something else.
        OSError: the file cannot be written.
    """
    if file.exists():
        try:
            load(file)
        except RequestError as e:
            raise RequestError(f"{file} exists and is not a conversation; choose another name") from e
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(encoded(messages))
        part.replace(file)
    except OSError as e:
        e.filename = str(file)  # the only name that the user knows
        raise
    finally:
        part.unlink(missing_ok=True)


def load(file: Path) -> list[Message]:
    """Messages of a file.

    Raises:
        RequestError: it holds no conversation.
        OSError: it cannot be read.
    """
    if not file.is_file() and file.exists():
        raise RequestError(f"{file} is not a regular file")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise RequestError(f"{file} has {file.stat().st_size} bytes; a conversation has at most {MAX_FILE_BYTES}")
    return decoded(file.read_bytes(), file)
