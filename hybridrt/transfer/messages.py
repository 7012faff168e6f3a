"""Messages between workers, and between rank 0 of a worker and its other ranks."""

from typing import Annotated

from msgspec import Meta

from hybridrt.base.sampling_params import MAX_SALT_CHARACTERS
from hybridrt.channel.codec import Message
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey

MAX_JOBS = 1024  # prompts of a decode worker at one prefill worker
MAX_TOKENS = 3_000_000  # of a prompt: an integer has up to 5 bytes, and a message of a channel 2**24
MAX_TEXT = 1 << 10  # characters
MAX_RANKS = 1 << 10

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)]
LongText = Annotated[str, Meta(max_length=1 << 16)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Description = Annotated[str, Meta(max_length=1 << 20)]  # how an arena is read
Descriptions = Annotated[list[Description], Meta(min_length=1, max_length=MAX_RANKS)]  # one for each rank, in order
Fields = dict[Text, int | LongText]  # a Handshake


class PrefillHello(Message):
    """The first message on a connection: from the prefill worker."""

    handshake: Fields
    ranks: Descriptions


class DecodeHello(Message):
    """The decode worker's answer, if it agrees."""

    handshake: Fields


class Prefill(Message):
    """Requests the state after these tokens, and the KV of all but the first `start`. `salt`, `weights`
    and `adapter` are the fields of the request's CacheKey."""

    key: Text
    tokens: list[int]
    start: Number = 0
    salt: Salt = ""
    weights: Text = ""
    adapter: Text = ""

    @property
    def cache_key(self) -> CacheKey:
        return CacheKey(self.salt, self.weights, self.adapter)


class Done(Message):
    """The decode worker does not need this image (any more)."""

    key: Text


class Ping(Message):
    """A worker asks the other side for a sign of life."""


class Ready(Message):
    """The image of a key begins at this byte of every rank's arena."""

    key: Text
    offset: Number


class Failed(Message):
    """The prompt of a key cannot be computed."""

    key: Text
    error: Text


class Pong(Message):
    """The answer to a Ping."""


class Joined(Message):
    """A rank's first message to rank 0."""

    rank: Number
    description: Description


class Connect(Message):
    """A rank makes the arenas of a prefill worker readable, and answers with Connected."""

    worker: Text
    descriptions: Descriptions


class Disconnect(Message):
    """A rank forgets a prefill worker."""

    worker: Text


class Order(Message):
    """One image to fetch: a request's first `length` tokens, without the KV of the first `start`.

    It begins at byte `source` of the arenas of all ranks of prefill worker `worker`, and goes to
    byte `destination` of our own. `key` names it until it has ended.
    """

    key: Text
    worker: Text
    length: Number
    source: Number
    destination: Number
    start: Number = 0


class Connected(Message):
    """A rank has connected, or reports why it cannot."""

    error: Text | None


class Ended(Message):
    """A rank's reads for an Order have ended, well or with an error."""

    key: Text
    error: Text | None


ToDecode = Ready | Failed | Ping | Pong
ToPrefill = Prefill | Done | Ping | Pong
ToRank = Connect | Disconnect | Order
FromRank = Connected | Ended


def shortened(error: object) -> str:
    """The text of an error, cut to MAX_TEXT and valid as UTF-8."""
    return str(error)[:MAX_TEXT].encode(errors="replace").decode()
