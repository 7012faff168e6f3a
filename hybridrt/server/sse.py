"""Server-sent events, and JSON as the server writes it."""

from collections.abc import Iterable
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: %b\n\n" % encode(data)


def named_events(events: Iterable[dict[str, Any]]) -> bytes:
    """Events whose names are their `type`. Each is encoded before the next one is made, which may change its data."""
    return b"".join([b"event: %b\ndata: %b\n\n" % (data["type"].encode(), encode(data)) for data in events])
