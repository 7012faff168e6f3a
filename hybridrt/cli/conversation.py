"""Data of `hybridrt chat`: messages, pieces of an answer, and files of conversations."""

import base64
import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from hybridrt.base.errors import RequestError, is_text
from hybridrt.base.files import read_bytes, replacing

MAX_FILE_BYTES = 64 * 2**20
MAX_IMAGE_BYTES = 12 * 2**20  # servers take bodies of 16 MiB
_KINDS = {"png": rb"\x89PNG", "jpeg": rb"\xff\xd8\xff", "gif": rb"GIF8", "webp": rb"RIFF....WEBP", "bmp": rb"BM"}


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A text among the parts of a message."""

    text: str


class ImageURL(msgspec.Struct):
    """Where an image is: a data: URI."""

    url: str


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type"):
    """An image among the parts of a message, in OpenAI's form."""

    image_url: ImageURL


Parts = list[TextPart | ImagePart]


class ConversationMessage(msgspec.Struct, omit_defaults=True):
    """One message. `reasoning_content` is what an assistant wrote before its answer."""

    role: Literal["system", "user", "assistant"]
    content: str | Parts
    reasoning_content: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The message in the form that templates and servers read, without reasoning: models are
        trained without that of earlier answers."""
        return {"role": self.role, "content": msgspec.to_builtins(self.content)}

    @property
    def text(self) -> str:
        """All that it holds of text."""
        parts = [self.content] if isinstance(self.content, str) else map(_text, self.content)
        return "".join(parts) + (self.reasoning_content or "")


def _text(part: TextPart | ImagePart) -> str:
    return part.text if isinstance(part, TextPart) else part.image_url.url


class _File(msgspec.Struct):
    messages: list[ConversationMessage]


@dataclass(frozen=True)
class AnswerPiece:
    """New characters of an answer, and of the reasoning before it."""

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

    def answer(self, messages: list[ConversationMessage]) -> Generator[AnswerPiece | Totals, None, None]:
        """Pieces of an answer, then Totals where known. Closing the generator ends the request.

        Raises:
            HybridrtError: the request failed, or the answer broke off.
        """

    def save_session(self, file: Path, messages: list[ConversationMessage]) -> None:
        """Writes a conversation with its part of the prefix cache.

        Raises:
            RequestError: the model is not in this process.
            SessionError: nothing of it is cached.
            OSError: the file cannot be written.
        """

    def load_session(self, file: Path) -> list[ConversationMessage]:
        """Loads such a file into the prefix cache. Returns the conversation.

        Raises:
            RequestError: the model is not in this process, or the file holds no conversation.
            SessionError: the file belongs to another model, or is damaged.
            OSError: the file cannot be read.
        """


def encoded(messages: list[ConversationMessage]) -> bytes:
    """{"messages": [...]}, which /v1/chat/completions takes as it is."""
    return msgspec.json.format(msgspec.json.encode(_File(messages)), indent=2) + b"\n"


def decoded(content: bytes | str, file: Path) -> list[ConversationMessage]:
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
        if not is_text(message.text):
            raise RequestError(f"{file}: message {i} holds half of a surrogate pair, which is no text")
    return messages


def image_part(file: Path) -> ImagePart:
    """An image of a file as a part of a message.

    Raises:
        RequestError: it is no image. OSError: it cannot be read.
    """
    data = read_bytes(file, MAX_IMAGE_BYTES)
    kind = next((kind for kind, begins in _KINDS.items() if re.match(begins, data, re.DOTALL)), None)
    if kind is None:
        raise RequestError(f"{file} is no image of a known format: {', '.join(_KINDS)}")
    return ImagePart(ImageURL(f"data:image/{kind};base64,{base64.b64encode(data).decode()}"))


def save(file: Path, messages: list[ConversationMessage]) -> None:
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
    try:
        with replacing(file) as part, open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(encoded(messages))
    except OSError as e:
        e.filename = str(file)  # the only name that the user knows
        raise


def load(file: Path) -> list[ConversationMessage]:
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
