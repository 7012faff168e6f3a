"""The form of a model's answers. A router tells by it that a replica answers wrongly."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from hybridrt.base.errors import MessageError, shown
from hybridrt.server.wire.sse import DONE

# A field that each whole answer has, by path. Answers of other paths are passed on as they are.
_FIELDS = {
    "/v1/completions": "choices", "/v1/chat/completions": "choices", "/v1/responses": "output",
    "/v1/messages": "content", "/v1/embeddings": "data",
}  # fmt: skip
_STREAMING = frozenset(_FIELDS) - {"/v1/embeddings"}
_LAST_EVENTS = {
    "/v1/responses": (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n"),
    "/v1/messages": (b"event: message_stop\n", b"event: error\n"),
}
# Not in the server's form: an HTTP library cannot read the request, or a proxy has waited in vain.
_UNREAD = (400, 414, 431, 504)
_LINES = (b":", b"data: ", b"event: ")
_NONE = msgspec.Raw(b"")


class _Fields(msgspec.Struct, gc=False):
    """Those of an answer or event that are looked at, as its JSON has them. _NONE: it lacks the field."""

    model: msgspec.Raw = _NONE
    choices: msgspec.Raw = _NONE
    output: msgspec.Raw = _NONE
    content: msgspec.Raw = _NONE
    data: msgspec.Raw = _NONE
    error: msgspec.Raw = _NONE


_read = msgspec.json.Decoder(_Fields).decode  # checks the syntax of all of the text, and copies little of it


@dataclass(frozen=True)
class AnswerForm:
    """What the answer to a request must look like.

    Attributes:
        path: of the request.
        streams: the answer is a stream of events. None: it is not known.
        model: the name of the model in the answer. None: any.
    """

    path: str = ""
    streams: bool | None = None
    model: str | None = None

    @staticmethod
    def of_request(method: str, path: str, fields: Mapping[str, Any]) -> "AnswerForm":
        """`fields`: of its body; empty if it was not parsed."""
        if method != "POST" or path not in _FIELDS:
            return ANY
        streams = path in _STREAMING and (fields.get("stream") or False)
        known = bool(fields) and isinstance(streams, bool) and not fields.get("background")
        model = fields.get("model")
        return AnswerForm(path, streams if known else None, model if isinstance(model, str) and model else None)

    @property
    def known(self) -> bool:
        return self.path in _FIELDS

    def check_head(self, status: int, kind: str) -> None:
        """`kind`: the content type.

        Raises:
            MessageError: no answer begins like this.
        """
        if not self.known or status in _UNREAD:
            return
        if status != 200 and not 400 <= status < 600:
            raise MessageError(f"the status is {status}; an answer has 200, and an error 400 to 599")
        streams = kind.startswith("text/event-stream") and status == 200
        if not streams and not kind.startswith("application/json"):
            raise MessageError(f"the content type is {shown(kind)}; an answer is JSON or a stream of events")
        if status == 200 and self.streams not in (None, streams):
            raise MessageError(f"it is {'a' if streams else 'no'} stream of events, unlike what was asked for")

    def check_first_bytes(self, body: bytes) -> None:
        """Of an answer that is no stream and too large to be held. MessageError: it is none."""
        if self.known and not body.startswith(b"{"):
            raise MessageError(f"{shown(body[:64])} is no JSON object")

    def check_whole(self, status: int, body: bytes) -> None:
        """An answer that is no stream.

        Raises:
            MessageError: it is none.
        """
        if not self.known or status in _UNREAD:
            return
        found, name = _object(body), _FIELDS[self.path] if status == 200 else "error"
        if not bytes(getattr(found, name)).startswith(b"[" if status == 200 else b"{"):
            raise MessageError(f"the answer with status {status} has no {name}")
        self._check_model(found)

    def check_event(self, event: bytes) -> None:
        """An event of a stream, with the empty line at its end.

        Raises:
            MessageError: a line is none of the server's, or the data is no JSON object.
        """
        if not self.known or event == DONE:
            return
        for line in event[:-2].split(b"\n"):
            if line.startswith(b"data: "):
                found = _object(line[6:])
                if found.choices is _NONE and found.error is _NONE and _FIELDS[self.path] == "choices":
                    raise MessageError("an event has no choices")
                self._check_model(found)
            elif not line.startswith(_LINES):
                raise MessageError(f"a line of the stream is {shown(line[:64])}")

    def check_beginning(self, text: bytes) -> None:
        """MessageError if no event begins like this."""
        if self.known and not any(text.startswith(line[: len(text)]) for line in _LINES):
            raise MessageError(f"a line of the stream is {shown(text[:64])}")

    def check_end(self, last: bytes) -> None:
        """`last`: the last event of a stream; b"" if there was none.

        Raises:
            MessageError: the stream has ended before.
        """
        if self.known and last != DONE and not last.startswith(_LAST_EVENTS.get(self.path, DONE)):
            raise MessageError("the stream has ended without its last event")

    @cached_property
    def _model_text(self) -> bytes:
        return msgspec.json.encode(self.model)

    def _check_model(self, found: _Fields) -> None:
        if self.model is None or found.model is _NONE or bytes(found.model) == self._model_text:
            return
        if (name := _value(found.model)) != self.model:
            raise MessageError(f"the model is {shown(name)}, and {shown(self.model)} was asked for")


ANY = AnswerForm()


def _object(text: bytes) -> _Fields:
    try:
        return _read(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise MessageError(f"{shown(text[:64])} is no JSON object ({e})") from e


def _value(text: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise MessageError(f"{shown(bytes(text)[:64])} is no JSON ({e})") from e
