"""Messages between ranks: configurations, steps and tasks from rank 0, heartbeats to it."""

import importlib
import operator
from typing import Any

import msgspec
import numpy as np

from hybridrt.base.errors import MessageError
from hybridrt.channel.codec import Message, pack, unpack

# Types above the runtime are imported with their first task.
KINDS = {
    "serve": "hybridrt.base.engine_config:EngineConfig",
    "experts": "hybridrt.parallel.expert_ranks:ExpertPlace",
    "join": "hybridrt.parallel.tasks:JoinTask",
    "step": "hybridrt.runtime.step.plan:StepPlan",
    "prefix": "hybridrt.parallel.tasks:PrefixCopy",
    "masks": "hybridrt.parallel.tasks:MaskTask",
    "drop": "hybridrt.parallel.tasks:DropTask",
    "draft": "hybridrt.parallel.tasks:DraftTask",
    "transfer": "hybridrt.transfer.ranks:JoinTransfer",
}
_NAMES = {place: name for name, place in KINDS.items()}
_END = "end"
_PATCHES = ("|u1", "<f4")  # dtypes of EncoderInput.patches


class Task(Message):
    """From rank 0: a name of KINDS and the bytes of that type, or the end of the service."""

    name: str
    body: bytes = b""


class Hello(Message):
    """The first message of another rank to rank 0. Messages of ranks have no numbers of their own: all ranks have one
    version of the package."""

    rank: int
    version: str = ""


class RankBeat(Message):
    """A rank's heartbeat."""


class RankFailed(Message):
    """Why a rank ends."""

    reason: str


FromRank = RankBeat | RankFailed


def encode(task: object) -> bytes:
    """A task as bytes; None ends the service.

    Raises:
        MessageError: ranks exchange no tasks of this type.
    """
    if task is None:
        return pack(Task(_END))
    kind = type(task)
    name = _NAMES.get(f"{kind.__module__}:{kind.__qualname__}")
    if name is None:
        raise MessageError(f"ranks exchange no {kind.__name__}: only {', '.join(KINDS.values())}")
    return pack(Task(name, _ENCODER.encode(task)))


def decode(data: bytes) -> Any:
    """The task that `encode` was given.

    Raises:
        MessageError: an unknown task, or its parts have the wrong types.
    """
    task: Task = unpack(data, Task)
    if task.name == _END:
        return None
    if task.name not in KINDS:
        raise MessageError(f"rank 0 sent a task {task.name[:80]!r}, which this rank does not know")
    module, _, kind = KINDS[task.name].partition(":")
    return unpack(task.body, getattr(importlib.import_module(module), kind), _column)


def _plain(value: Any) -> int | list[Any] | bytes:
    """Columns, page sets, patches, ranges and NumPy integers of a plan, for msgpack."""
    if isinstance(value, np.ndarray) and value.dtype.str in _PATCHES:
        return [value.shape[1], value.dtype.str, value.tobytes()]
    if isinstance(value, np.ndarray):
        data = value.astype("<i4", casting="safe", copy=False).tobytes()
        return data if value.ndim == 1 else [value.shape[1], data]
    return list(value) if isinstance(value, range) else operator.index(value)


def _column(kind: type, value: Any) -> np.ndarray:
    """[n] int32 of bytes, or [n, G] of [G, bytes], without negative numbers; of patches [width, dtype,
    bytes]."""
    if kind is np.ndarray and isinstance(value, list) and len(value) == 3:
        return _patches(*value)
    shape: tuple[int, ...] = (-1,)
    if isinstance(value, list) and len(value) == 2 and type(value[0]) is int and value[0] > 0:
        shape, value = (-1, value[0]), value[1]
    if kind is not np.ndarray or not isinstance(value, bytes):
        raise ValueError(f"{type(value).__name__} where bytes of a column belong")
    column = np.frombuffer(value, "<i4")
    if column.size and column.min() < 0:
        raise ValueError(f"a column holds {column.min()}")
    return column.reshape(shape)


def _patches(width: Any, dtype: Any, data: Any) -> np.ndarray:
    if type(width) is not int or width < 1 or dtype not in _PATCHES or not isinstance(data, bytes):
        raise ValueError("these are no patches")
    return np.frombuffer(data, dtype).reshape(-1, width)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
