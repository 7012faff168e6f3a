"""The store of responses is bounded in number and in bytes, and each owner sees its own alone."""

import pytest

from hybridrt.server.core.response_store import ResponseStore, StoredResponse
from hybridrt.server.wire.errors import APIError


def response(size: int = 0, previous: str | None = None, item: str = "i") -> StoredResponse:
    return StoredResponse(b'{"a":1}', {item: b'{"b":2}'}, b"[%b]" % (b" " * size), previous)


def test_a_response_is_its_head_and_its_items() -> None:
    assert response().body == b'{"a":1,"output":[{"b":2}]}'


def test_the_oldest_of_the_largest_owner_makes_room() -> None:
    store = ResponseStore(4, 2**20)
    for name in ("x", "y", "z"):
        assert store.put("large", name, response(item=name))
    assert store.put("small", "x", response(item="s"))
    assert store.get("large", "x") is not None  # now the youngest
    assert store.put("small", "y", response(item="t"))
    assert len(store) == 4 and store.get("large", "y") is None
    assert all(store.get(*key) for key in (("large", "x"), ("large", "z"), ("small", "x"), ("small", "y")))
    assert store.item("large", "y") is None and store.item("large", "z") == b'{"b":2}'


def test_all_bytes_are_bounded() -> None:
    one = response(1000).size
    store = ResponseStore(100, 3 * one)
    for k in range(10):
        assert store.put("a", str(k), response(1000, item=str(k)))
    assert [store.get("a", str(k)) is not None for k in range(10)] == [False] * 7 + [True] * 3
    assert not store.put("a", "huge", response(4 * one)) and len(store) == 3
    assert store.put("a", "9", response(1000, item="9")) and len(store) == 3  # the same name again
    assert not ResponseStore(0, 2**20).put("a", "x", response())


def test_owners_do_not_see_each_other() -> None:
    store = ResponseStore(10, 2**20)
    store.put("a", "x", response())
    assert store.get("b", "x") is None and store.item("b", "i") is None and not store.delete("b", "x")
    assert store.delete("a", "x") and store.get("a", "x") is None and store.item("a", "i") is None


def test_a_chain_is_bounded() -> None:
    store = ResponseStore(10, 2**20)
    store.put("a", "1", response(100, item="1"))
    store.put("a", "2", response(100, "1", "2"))
    store.put("a", "own", response(100, "own", "3"))
    assert [len(store.chain("a", name, 2**20)) for name in ("1", "2")] == [1, 2]
    for name, most in (("2", 200), ("own", 2**20)):
        with pytest.raises(APIError, match="begin a new conversation"):
            store.chain("a", name, most)
    store.delete("a", "1")
    with pytest.raises(APIError) as info:
        store.chain("a", "2", 2**20)
    assert info.value.code == "previous_response_not_found"
