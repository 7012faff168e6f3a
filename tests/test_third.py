"""`--third`: each text means one of three disjoint parts of the tests."""

from types import SimpleNamespace
from typing import Any, cast

from tests.support.third import Third


def test_thirds_are_disjoint_and_together_all() -> None:
    parts = dict[tuple[int, ...], list[int]]()
    for text in map(str, range(40)):
        items, left_out = list(range(100)), list[int]()
        hook = SimpleNamespace(pytest_deselected=lambda items, seen=left_out: seen.extend(items))
        Third(text).pytest_collection_modifyitems(cast(Any, SimpleNamespace(hook=hook)), cast(Any, items))
        assert sorted(items + left_out) == list(range(100))
        assert parts.setdefault(tuple(items), left_out) == left_out
    assert len(parts) == 3
    assert sorted(number for part in parts for number in part) == list(range(100))
