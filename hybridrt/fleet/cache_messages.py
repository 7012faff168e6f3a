"""The messages that say what a replica's prefix cache has gained or lost, for routers.

Names of fields follow the KV events of vLLM, which llm-d and Dynamo read; states are new.
docs/scale.md has the whole form.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from hybridrt.base.errors import MessageError
from hybridrt.base.formats import Format, Head
from hybridrt.fleet.prefix_mirror import BLOCK, CacheLayout, PrefixMirror, PrefixNames, names_of
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent, Tier, What

FORMAT = Format("hybridrt cache events", 2, "start the router and its replicas with the same version")
MAX_TOKENS = 2**21  # of a text
MAX_GROUPS = 64
MAX_RANKS = 64
MAX_PAGE = 2**12  # tokens
MAX_DIGEST = 64  # characters
# Tokens of one message, and its states and tokens of pages. An event of more is several messages.
MESSAGE_TOKENS = MESSAGE_ENTRIES = 2**13
_MEDIUM: dict[Tier, Literal["GPU", "CPU"]] = {"device": "GPU", "host": "CPU"}
_TIERS: dict[str, Tier] = {"GPU": "device", "CPU": "host"}


class LayoutMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a stream: what CacheLayout says, and the length of a block of the chain.
    `data_parallel_size`: engines of the replica."""

    page_size: int
    recurrent: bool
    lookahead: int
    windows: list[int | None]
    chain: int = BLOCK
    data_parallel_size: int = 1
    model: str = ""
    format: str = str(FORMAT)

    def layout(self) -> CacheLayout:
        """Raises MessageError where no cache is like this."""
        windows = [window for window in self.windows if window is not None]
        sizes = 0 <= self.page_size <= MAX_PAGE and self.lookahead in (0, 1) and len(self.windows) <= MAX_GROUPS
        sizes = sizes and 0 < self.data_parallel_size <= MAX_RANKS and len(self.model) <= MAX_DIGEST
        # Without pages only states can be found.
        sizes = sizes and (self.page_size > 0 or (self.recurrent and not self.windows))
        if not sizes or self.chain != BLOCK or not all(0 < window <= MAX_TOKENS for window in windows):
            raise MessageError(f"no prefix cache has the layout {self}")
        ranks = self.data_parallel_size
        return CacheLayout(self.page_size, self.recurrent, self.lookahead, tuple(self.windows), ranks, self.model)


class CacheMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event, or a part of one.

    Attributes:
        start: tokens of the text before `token_ids`, a multiple of the chain's block.
        parent_block_hash: name of these, 16 hexadecimal digits. A name of a text under a key is a
            chain of BLAKE2b hashes; the first is that of the key.
        token_ids: of the text, from `start` to the last entry.
        pages: page group, page index, and tokens that decide the page's content.
        block_hashes: names of those tokens, for each page.
        states: numbers of first tokens of the text after which there is a state.
        state_hashes: their names.
        medium: GPU, or CPU for main memory.
        data_parallel_rank: of the engine, if the replica has several.
    """

    type: Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    medium: Literal["GPU", "CPU"]
    why: str = ""
    start: int = 0
    parent_block_hash: str = ""
    token_ids: list[int] = []
    block_size: int = 0
    pages: list[tuple[int, int, int]] = []
    block_hashes: list[str] = []
    states: list[int] = []
    state_hashes: list[str] = []
    data_parallel_rank: int = 0


def layout_message(layout: CacheLayout) -> bytes:
    windows = list(layout.windows)
    sizes = layout.page_size, layout.recurrent, layout.lookahead, windows, BLOCK, layout.ranks
    message = LayoutMessage(*sizes, layout.model)
    return msgspec.json.encode(message)


def cache_messages(event: CacheEvent, layout: CacheLayout) -> Iterator[bytes]:
    """One message, or several for entries that are far apart or many."""
    medium = _MEDIUM[event.tier]
    if event.what == "cleared":
        message = CacheMessage("AllBlocksCleared", medium, event.why, data_parallel_rank=event.rank)
        yield msgspec.json.encode(message)
        return
    # Ids of images are longer than those of tokens.
    names, size = names_of(event.tokens & (2**31 - 1), event.key), max(layout.page_size, 1)
    # A state is found by the block before it, a page by its first token.
    entries: list[_Entry] = [(end - end % BLOCK, end, None) for end in event.states]
    entries += [(page[1] * size, page[2], (page[0], page[1], page[2])) for page in event.pages.tolist()]
    for part in _parts(sorted(entries, key=lambda entry: entry[0])):
        yield msgspec.json.encode(_message(event, medium, names, layout.page_size, part))


_Entry = tuple[int, int, tuple[int, int, int] | None]  # its first token, the one after its last, and the page


def _parts(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    found, count = list[_Entry](), 0
    for first, end, page in entries:
        more = 1 if page is None else end - first
        if found and (end - found[0][0] > MESSAGE_TOKENS or count + more > MESSAGE_ENTRIES):
            yield found
            found, count = [], 0
        found.append((first, end, page))
        count += more
    yield found


def _message(
    event: CacheEvent, medium: Literal["GPU", "CPU"], names: PrefixNames, page_size: int, part: list[_Entry]
) -> CacheMessage:
    start, last = part[0][0] - part[0][0] % BLOCK, max(end for _, end, _ in part)
    states = [end for _, end, page in part if page is None]
    pages = [page for _, _, page in part if page is not None]
    return CacheMessage(
        "BlockRemoved" if event.what == "lost" else "BlockStored",
        medium, event.why, start, _hex(names, start), names.tokens(start, last), page_size,
        pages, [_hex(names, after) for _, _, after in pages],
        states, [_hex(names, after) for after in states], event.rank,
    )  # fmt: skip


def read_layout(data: bytes) -> CacheLayout:
    """MessageError: it is no such message, or of another version's form."""
    if refusal := FORMAT.refusal(_decoded(data, Head).format):
        raise MessageError(f"the events of a cache cannot be read: {refusal}")
    return _decoded(data, LayoutMessage).layout()


def apply_message(data: bytes, mirror: PrefixMirror) -> None:
    """Changes a mirror as a message says.

    Raises:
        MessageError: it is no such message, or says what no cache can hold. Nothing is changed.
    """
    message = _decoded(data, CacheMessage)
    ranks = mirror.layout.ranks
    if not 0 <= message.data_parallel_rank < ranks:
        raise MessageError(f"data_parallel_rank is {message.data_parallel_rank}; there are {ranks} engines")
    what: What = {"BlockStored": "gained", "BlockRemoved": "lost"}.get(message.type, "cleared")  # type: ignore[assignment]
    names, pages = PrefixNames(np.empty(0, np.int32), 0), np.empty((0, 3), np.int32)
    if what != "cleared":
        names, pages = _checked(message, mirror.layout), np.array(message.pages, np.int32).reshape(-1, 3)
    mirror.change(what, _TIERS[message.medium], names, pages, message.states, message.data_parallel_rank)


def _checked(message: CacheMessage, layout: CacheLayout) -> PrefixNames:
    end, size = message.start + len(message.token_ids), max(layout.page_size, 1)
    fits = 0 <= message.start <= end <= MAX_TOKENS and message.start % BLOCK == 0
    fits = fits and all(message.start <= after - after % BLOCK and 0 < after <= end for after in message.states)
    fits = fits and all(
        0 <= group < len(layout.windows) and message.start <= index * size < after <= min(end, (index + 2) * size)
        for group, index, after in message.pages
    )
    # A page is counted for each of its tokens: what the pages have together is bounded by the text.
    counted = sum(after - index * size for _, index, after in message.pages)
    fits = fits and counted <= min(2 * len(message.token_ids) * len(layout.windows), 2 * MESSAGE_ENTRIES)
    fits = fits and len(message.token_ids) <= 2 * MESSAGE_TOKENS
    fits = fits and len(message.states) <= min(len(message.token_ids) + 1, MESSAGE_ENTRIES)
    if not fits or not all(0 <= token < 2**31 for token in message.token_ids):
        raise MessageError("an event of a prefix cache has entries that its text does not have")
    try:
        parent = int(message.parent_block_hash, 16)
    except ValueError:
        parent = -1
    if not 0 <= parent < 2**64:
        raise MessageError(f"{message.parent_block_hash[:40]!r} is no hash of 16 hexadecimal digits")
    return PrefixNames(np.array(message.token_ids, np.int32), parent, message.start)


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise MessageError(f"no event of a prefix cache: {e}") from e


def _hex(names: PrefixNames, length: int) -> str:
    return f"{names.at(length):016x}"
