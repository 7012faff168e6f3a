"""Server-sent events, and JSON in pieces of bounded work."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

SLICE = 256  # tokens encoded at a time
DONE = b"data: [DONE]\n\n"


class Slices:
    """A JSON list that is made while it is written: `slices` gives lists of plain data.

    A whole list of log-probabilities takes many times the memory and time of its source.
    """

    def __init__(self, slices: Iterable[list[Any]]) -> None:
        self.slices = slices


class Parts:
    """A JSON list of few large values, which may hold Slices. Each is made after the one before is
    written."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = values


def pieces(value: Any) -> Iterator[bytes]:
    """JSON text of a value in pieces. A function in an object is called when all before it is
    written."""
    match value:
        case Slices():
            yield b"["
            before = b""
            for part in value.slices:
                if part:
                    yield before + encode(part)[1:-1]
                    before = b","
            yield b"]"
        case Parts():
            yield from _joined(b"[", map(pieces, value.values), b"]")
        case Mapping():
            yield from _joined(b"{", (_entry(key, each) for key, each in value.items()), b"}")
        case Callable():
            yield from pieces(value())
        case _:
            yield encode(value)


def fields_of(value: Mapping[str, Any]) -> Iterator[bytes]:
    """JSON text of an object's fields in pieces, with its closing brace and without the opening one."""
    yield from _joined(b"", (_entry(key, each) for key, each in value.items()), b"}")


def _entry(key: str, value: Any) -> Iterator[bytes]:
    yield encode(key) + b":"
    yield from pieces(value)


def _joined(begin: bytes, parts: Iterable[Iterator[bytes]], end: bytes) -> Iterator[bytes]:
    for part in parts:
        if begin:
            yield begin
        yield from part
        begin = b","
    yield end if begin == b"," else begin + end


def _spelled(value: Any) -> Any:
    if isinstance(value, (Slices, Parts)) or callable(value):
        return msgspec.Raw(b"".join(pieces(value)))
    raise TypeError(f"{type(value).__name__} is no JSON")


_plain = msgspec.json.Encoder(enc_hook=_spelled).encode
# Characters at which str.splitlines, and clients that use it, end a line. JSON leaves them as they are.
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def encode(value: Any) -> bytes:
    """JSON text of one line, by whatever rule a client splits lines."""
    text = _plain(value)
    if not text.isascii():
        for end, escaped in _LINE_ENDS:
            text = text.replace(end, escaped)
    return text


def event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode(data)


def named_events(events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Events named by their `type`. Each is encoded before the next one is made, which may change
    its data."""
    for data in events:
        yield b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode(data))
