"""Messages as msgpack bytes, which are decoded only into the types that may come.

The types are subclasses of `Message`; the class's name in lower case is sent as "type".
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from hybridrt.base.errors import MessageError


class Message(msgspec.Struct, forbid_unknown_fields=True, tag=str.lower):
    """`unpack` raises if a field is missing, unknown, or of another type."""


def pack(message: Message) -> bytes:
    """MessageError if msgpack cannot encode the message, for example text with a lone surrogate."""
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as e:
        raise MessageError(f"this cannot be sent as a message: {e}") from e


def unpack(data: bytes, kinds: Any, hook: Callable[[type, Any], Any] | None = None) -> Any:
    """The message that these bytes are.

    Args:
        kinds: the expected type: a subclass of Message, a union of such, or another type that
            msgspec decodes.
        hook: msgspec's `dec_hook`, for types that it does not know.

    Raises:
        MessageError: the bytes are none of these.
    """
    try:
        return _decoder(kinds, hook).decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:  # text that is not UTF-8 raises a ValueError
        raise MessageError(f"a message is not what may come now: {str(e)[:200]}") from e


@cache
def _decoder(kinds: Any, hook: Callable[[type, Any], Any] | None) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kinds, dec_hook=hook)
