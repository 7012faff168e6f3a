"""What rank 0 tells the other ranks, as bytes: msgpack that is decoded into one known type and runs no code."""

import importlib
import operator
from functools import cache
from typing import Any

import msgspec
import numpy as np

from hybridrt.errors import MessageError

# Every kind of message, and the type that its bytes are decoded into. The types of tasks that stand above the runtime
# are imported when the first such message comes.
KINDS = {
    "serve": "hybridrt.config:EngineConfig",
    "step": "hybridrt.runtime.step:StepPlan",
    "draft": "hybridrt.runtime.drafting:DraftTask",
    "transfer": "hybridrt.transfer.ranks:JoinTransfer",
}
_NAMES = {place: name for name, place in KINDS.items()}


def encode(message: object) -> dict[str, Any]:
    """A message as a dictionary that a channel carries; None, the end of what was begun, is one too.

    Raises:
        MessageError: no rank knows a message of this type.
    """
    if message is None:
        return {"type": "end"}
    kind = type(message)
    name = _NAMES.get(f"{kind.__module__}:{kind.__qualname__}")
    if name is None:
        raise MessageError(f"ranks exchange no {kind.__name__}: only {', '.join(KINDS.values())}")
    return {"type": name, "body": _ENCODER.encode(message)}


def decode(message: dict[str, Any]) -> Any:
    """What `encode` was given.

    Raises:
        MessageError: this is none of the known messages, or its parts are not of the right types.
    """
    name, body = message.get("type"), message.get("body")
    if name == "end":
        return None
    if not isinstance(name, str) or name not in KINDS or not isinstance(body, bytes):
        raise MessageError(f"rank 0 sent a message of type {name!r}, which this rank does not know")
    try:
        return _decoder(name).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise MessageError(f"rank 0 sent a {name!r} that cannot be read: {e}") from e


@cache
def _decoder(name: str) -> msgspec.msgpack.Decoder:
    module, _, kind = KINDS[name].partition(":")
    return msgspec.msgpack.Decoder(getattr(importlib.import_module(module), kind), dec_hook=_column)


def _plain(value: Any) -> int | list[int] | bytes:
    """What stands for integers in a plan: a column, a range, or an integer of NumPy's."""
    if isinstance(value, np.ndarray):
        return value.astype("<i4", casting="safe", copy=False).tobytes()
    return list(value) if isinstance(value, range) else operator.index(value)


def _column(kind: type, value: Any) -> np.ndarray:
    """[n] int32 that were sent as bytes. What a column may hold is 0 or more."""
    if kind is not np.ndarray or not isinstance(value, bytes):
        raise ValueError(f"{type(value).__name__} where bytes of a column belong")
    column = np.frombuffer(value, "<i4")
    if column.size and column.min() < 0:
        raise ValueError(f"a column holds {column.min()}")
    return column


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
