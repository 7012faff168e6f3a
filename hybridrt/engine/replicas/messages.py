"""Messages between a data-parallel engine and its replicas."""

from collections.abc import Sequence
from inspect import isfunction
from typing import Any, Literal

import msgspec
import numpy as np

from hybridrt.base import errors
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import EngineError, HybridrtError, MessageError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import EncoderInput, Span
from hybridrt.channel.codec import Message, unpack
from hybridrt.channel.control import check_length
from hybridrt.engine.request.outputs import Delta, EngineCounters
from hybridrt.fleet.prefix_mirror import CacheLayout
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent, Tier, What, Why
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.parallel.expert_ranks import ExpertPlace


class Start(Message):
    """The first message to a replica: what it runs. `experts`: where replicas meet that share them."""

    config: EngineConfig
    experts: ExpertPlace | None = None


class SentSpan(msgspec.Struct, frozen=True):
    """A span; its input's fields are next to its own. `patches`: bytes of this dtype."""

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int]
    patch_grid: tuple[int, int]
    embeds: bool
    dtype: Literal["uint8", "float32"]
    patches: bytes

    @classmethod
    def from_span(cls, span: Span) -> "SentSpan":
        given, dtype = span.input, "uint8" if span.input.patches.dtype == np.uint8 else "float32"
        rest = given.grid, given.embeds, dtype, given.patches.tobytes()
        return cls(span.start, span.length, span.digest, span.grid, *rest)  # type: ignore[arg-type]

    def as_span(self) -> Span:
        """MessageError: the patches are not as many as the grid says."""
        rows, columns = self.patch_grid
        data = np.frombuffer(self.patches, np.uint8)
        if rows * columns < 1 or len(data) % (rows * columns * np.dtype(self.dtype).itemsize):
            raise MessageError(f"{len(data)} bytes are no {rows} x {columns} patches")
        patches = data.view(self.dtype).reshape(rows * columns, -1)
        given = EncoderInput(patches, self.patch_grid, self.embeds)
        return Span(self.start, self.length, self.digest, self.grid, given)


class Submit(Message):
    """A request. `tokens`: int32 of its prompt; the others are those of `Engine.submit`."""

    request_id: str
    tokens: bytes
    spans: tuple[SentSpan, ...]
    params: SamplingParams
    boundaries: tuple[int, ...]
    stream: bool
    client: str


class Abort(Message):
    """Ends a request."""

    request_id: str


class Reset(Message):
    """Empties the prefix cache."""


class Tell(Message):
    """Asks for the present contents of the prefix cache."""


ToReplica = Start | Submit | Abort | Reset | Tell


class ReplicaBeat(Message):
    """A heartbeat."""


class ReplicaReady(Message):
    """The model is loaded. `layout`: of the prefix cache; None: it keeps nothing."""

    plan: MemoryPlan
    layout: CacheLayout | None


class SentEvent(Message):
    """A CacheEvent; arrays as int32 bytes: of tokens of images, the lower half of their ids."""

    what: What
    why: Why
    tier: Tier
    key: CacheKey = CacheKey()
    tokens: bytes = b""
    pages: bytes = b""
    states: tuple[int, ...] = ()


class Stepped(Message):
    """What a step has given, and what the replica is now. `expert_tokens`: as of `ExpertLoads.read`;
    (): as before."""

    deltas: list[Delta]
    counters: EngineCounters
    wait_seconds: float
    events: list[SentEvent]
    expert_tokens: Sequence[Sequence[int]] = ()


class WasReset(Message):
    """The answer to Reset: whether the cache was emptied."""

    done: bool


class Contents(Message):
    """The answer to Tell: events that empty the cache, then those of its contents."""

    events: list[SentEvent]


class ReplicaFailed(Message):
    """Why a replica ends: the name of a class of hybridrt.errors, and its text."""

    kind: str
    reason: str


FromReplica = ReplicaBeat | ReplicaReady | Stepped | WasReset | Contents | ReplicaFailed


def encode(message: ToReplica | FromReplica) -> bytes:
    """MessageError if msgpack cannot encode it, or it is longer than a link takes."""
    try:
        found = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as e:
        raise MessageError(f"this cannot be sent as a message: {e}") from e
    check_length(found)
    return found


def decode(data: bytes, kinds: Any) -> Any:
    """The message that these bytes are, of the union `kinds`. MessageError: they are none."""
    return unpack(data, kinds, _hook)


def as_event(event: CacheEvent) -> SentEvent:
    tokens, pages = (each.astype("<i4", copy=False).tobytes() for each in (event.tokens, event.pages))
    return SentEvent(event.what, event.why, event.tier, event.key, tokens, pages, tuple(map(int, event.states)))


def read_event(event: SentEvent, number: int, rank: int) -> CacheEvent:
    tokens, pages = array(event.tokens), array(event.pages, -1, 3)
    return CacheEvent(number, event.what, event.why, event.tier, event.key, tokens, pages, event.states, rank)


def array(data: bytes, *shape: int) -> np.ndarray:
    """An int32 array that was sent as bytes."""
    return np.frombuffer(data, "<i4").reshape(shape or (-1,))


def error_of(kind: str, text: str) -> HybridrtError:
    """The error that a replica has sent. Another one than of hybridrt.errors, or one that is made of more than a text,
    becomes EngineError."""
    found = vars(errors).get(kind)
    if not (isinstance(found, type) and issubclass(found, HybridrtError)) or isfunction(found.__init__):
        found = EngineError
    error: HybridrtError = found(text)
    return error


def _plain(value: Any) -> Any:
    """An error as its class and its text, an integer of NumPy as one of Python."""
    return (type(value).__name__, str(value)) if isinstance(value, EngineError) else value.item()


def _hook(kind: type, value: Any) -> Any:
    if kind is EngineError:
        name, text = msgspec.convert(value, tuple[str, str])
        error = error_of(name, text)
        return error if isinstance(error, EngineError) else EngineError(text)
    raise ValueError(f"a {kind.__name__} is not sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
