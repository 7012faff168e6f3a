"""What workers may say to each other: the kinds of message, their fields, and what the fields may hold."""

from collections.abc import Callable, Mapping
from typing import Any

from hybridrt.distributed.channel import Message
from hybridrt.errors import MessageError

MOST_JOBS = 1024  # prompts that one decode worker may have under way at one prefill worker
MOST_TEXT = 1 << 10
MOST_DESCRIPTION = 1 << 20  # characters that say how an arena is read
MOST_RANKS = 1 << 10

Check = Callable[[Any], bool]


def _text(most: int = MOST_TEXT) -> Check:
    return lambda value: type(value) is str and len(value) <= most


def _integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _integers(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) <= {int}


def _descriptions(value: Any) -> bool:
    return type(value) is list and len(value) <= MOST_RANKS and all(map(_text(MOST_DESCRIPTION), value))


def _error(value: Any) -> bool:
    return value is None or _text()(value)


def _mapping(value: Any) -> bool:
    return type(value) is dict


Schema = Mapping[str, Mapping[str, Check]]

TO_DECODE_FIRST: Schema = {"hello": {"handshake": _mapping, "ranks": _descriptions}}
TO_DECODE: Schema = {
    "ready": {"key": _text(), "offset": _integer},
    "failed": {"key": _text(), "error": _text()},
    "pong": {},
}
TO_PREFILL_FIRST: Schema = {"hello": {"handshake": _mapping}}
TO_PREFILL: Schema = {
    "prefill": {"key": _text(), "tokens": _integers},
    "done": {"key": _text()},
    "ping": {},
}
# Between rank 0 of a worker and its other ranks.
TO_RANK: Schema = {
    "connect": {"worker": _text(), "descriptions": _descriptions},
    "disconnect": {"worker": _text()},
    "fetch": {"key": _text(), "worker": _text(), "length": _integer, "source": _integer, "destination": _integer},
}
FROM_RANK_FIRST: Schema = {"joined": {"rank": _integer, "description": _text(MOST_DESCRIPTION)}}
FROM_RANK: Schema = {
    "connected": {"error": _error},
    "ended": {"key": _text(), "error": _error},
}


def kind_of(message: Message, schema: Schema) -> str:
    """The message's "type". Its fields are then what `schema` says, and no others are there.

    Raises:
        MessageError: it is no message that may come now.
    """
    kind = message.get("type")
    if type(kind) is not str or kind not in schema:
        raise MessageError(f"a message is not of a kind that may come now ({', '.join(schema)})")
    fields = schema[kind]
    if message.keys() != {"type", *fields}:
        raise MessageError(f"a message of the kind {kind!r} does not have the fields {', '.join(fields) or 'none'}")
    for name, check in fields.items():
        if not check(message[name]):
            raise MessageError(f"{name} of a message of the kind {kind!r} is not what it must be")
    return kind


def shortened(error: object) -> str:
    """The text of an error, as long as a message may carry."""
    return str(error)[:MOST_TEXT]
