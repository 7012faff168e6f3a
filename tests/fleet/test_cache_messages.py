"""Events of a prefix cache as messages: a mirror made from them is the one made from the events."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from hybridrt.base.errors import MessageError
from hybridrt.fleet import cache_messages as messages
from hybridrt.fleet import prefix_mirror
from hybridrt.fleet.cache_messages import FORMAT, apply_message, cache_messages, layout_message, read_layout
from hybridrt.fleet.prefix_mirror import CacheLayout, PrefixMirror, names_of
from hybridrt.fleet.replica_client import MAX_EVENT_BYTES
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from tests.mem_cache.test_cache_events import act, play_trees
from tests.mem_cache.test_radix_cache import CASES, TEXTS, Ledger
from tests.support.levels import drawn

LAYOUT = CacheLayout(4, True, 0, (None, 8))


@pytest.mark.parametrize(
    ("page_size", "recurrent", "lookahead", "windows", "examples"), drawn(CASES, 12, 3, 10, 100, thin=3)
)
def test_messages_carry_the_events(
    page_size: int, recurrent: bool, lookahead: int, windows: tuple[int | None, ...], examples: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in (prefix_mirror, messages):
        monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(messages, "MESSAGE_TOKENS", 8)
    monkeypatch.setattr(messages, "MESSAGE_ENTRIES", 20)

    play_trees(play, examples, page_size, recurrent, lookahead, windows)


def play(ledger: Ledger, data: st.DataObject) -> None:
    tree = ledger.tree
    layout = CacheLayout(tree.page_size, tree.recurrent, tree.lookahead, tree.windows)
    assert read_layout(layout_message(layout).replace(b'"chain":64', b'"chain":4')) == layout
    own, carried = PrefixMirror(layout), PrefixMirror(layout)
    events = tree.events.subscribe([(tree.present(), tree.tier)], 10_000)
    locked: list[PrefixMatch] = []
    for _ in range(data.draw(st.integers(1, 15))):
        act(ledger, data, locked)
        for event in events.read():
            own.update([event])
            for message in cache_messages(event, layout):
                apply_message(message, carried)
        names = names_of(data.draw(TEXTS))
        assert carried.match(names) == own.match(names) and len(carried) == len(own)


def test_a_message_begins_at_the_block_before_its_first_entry() -> None:
    event = CacheEvent(0, "gained", "computed", "device", tokens=np.arange(1000, dtype=np.int32), states=(130, 900))
    (data,) = cache_messages(event, LAYOUT)
    message = msgspec.json.decode(data)
    assert message["start"] == 128 and message["token_ids"] == list(range(128, 900))
    assert message["parent_block_hash"] == f"{names_of(event.tokens).at(128):016x}"
    assert message["type"] == "BlockStored" and message["medium"] == "GPU"


def test_a_large_event_is_several_messages() -> None:
    tokens = np.arange(100_000, dtype=np.int32)
    pages = np.array([(group, i, 4 * i + 4) for group in (0, 1) for i in range(25_000)], np.int32)
    event = CacheEvent(0, "gained", "computed", "device", tokens=tokens, pages=pages, states=(128, 99_000), rank=1)
    layout = CacheLayout(4, True, 0, (None, 8), 2)
    own, carried = PrefixMirror(layout), PrefixMirror(layout)
    own.update([event])
    found = list(cache_messages(event, layout))
    for each in found:
        apply_message(each, carried)
    assert len(found) > 20 and max(map(len, found)) < MAX_EVENT_BYTES / 4
    assert len(carried) == len(own) and carried.match(names_of(tokens)) == own.match(names_of(tokens)) == 99_000


def test_images_have_ids_as_tokens_have() -> None:
    tokens = np.array([5, 2**62 + 7, 2**62 + 2**31 + 9, 6], np.int64)
    mirror = PrefixMirror(CacheLayout(0, True, windows=()))
    for each in cache_messages(CacheEvent(0, "gained", "computed", "device", tokens=tokens, states=(1, 4)), LAYOUT):
        apply_message(each, mirror)
    assert mirror.match(names_of([5, 3])) == 1 and mirror.match(names_of([5, 7, 9, 6, 1])) == 4


def message(**changes: Any) -> bytes:
    fields = {
        "type": "BlockStored", "medium": "GPU", "parent_block_hash": "0" * 16, "token_ids": [1, 2, 3, 4, 5],
        "pages": [(1, 0, 4)], "states": [5],
    } | changes  # fmt: skip
    return msgspec.json.encode(fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "BlockMoved"}, {"medium": "DISK"}, {"start": 1}, {"start": -64}, {"states": [6]}, {"states": [0]},
        {"pages": [(2, 0, 4)]}, {"pages": [(-1, 0, 4)]}, {"pages": [(1, 2, 5)]}, {"pages": [(1, 0, 9)]},
        {"token_ids": [1, 2, 3, 4, -5]}, {"token_ids": [1, 2, 3, 4, 2**31]}, {"token_ids": "text"},
        {"parent_block_hash": "x"}, {"parent_block_hash": "1" * 17}, {"states": [1.5]},
        {"pages": [(1, 0, 4)] * 6}, {"states": [5] * 7}, {"data_parallel_rank": 1}, {"data_parallel_rank": -1},
        {"token_ids": [1] * 16_385}, {"token_ids": [1] * 16_000, "pages": [(1, i, 4 * i + 5) for i in range(3900)]},
    ],
)  # fmt: skip
def test_a_wrong_message_changes_nothing(wrong: dict[str, Any]) -> None:
    mirror = PrefixMirror(LAYOUT)
    with pytest.raises(MessageError):
        apply_message(message(**wrong), mirror)
    assert len(mirror) == 0
    apply_message(message(), mirror)
    assert len(mirror) > 0


def test_numbers_that_nobody_reads_are_no_error() -> None:
    mirror = PrefixMirror(LAYOUT)
    apply_message(message(), mirror)
    apply_message(message(type="AllBlocksCleared", pages=[(2**40, 2**40, 2**40)]), mirror)
    assert len(mirror) == 0


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b'{"page_size": -1}', b"{" * 5000])
def test_what_is_no_message(data: bytes) -> None:
    for read in (read_layout, lambda data: apply_message(data, PrefixMirror(LAYOUT))):
        with pytest.raises(MessageError):
            read(data)


@pytest.mark.parametrize(
    "wrong",
    [{"page_size": 2**30}, {"lookahead": 2}, {"windows": [0]}, {"windows": [None] * 65}, {"chain": 16},
     {"data_parallel_size": 0}, {"data_parallel_size": 65}, {"page_size": 2**13},
     {"model": "x" * 65},
     {"page_size": 0}, {"page_size": 0, "recurrent": False, "windows": []}],
)  # fmt: skip
def test_a_layout_that_no_cache_has(wrong: dict[str, Any]) -> None:
    fields = {"page_size": 16, "recurrent": True, "lookahead": 0, "windows": [None], "format": str(FORMAT)}
    assert read_layout(msgspec.json.encode(fields)) == CacheLayout(16, True)
    with pytest.raises(MessageError, match="no prefix cache"):
        read_layout(msgspec.json.encode(fields | wrong))
