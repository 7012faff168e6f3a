"""Of a kernel's grid of shapes and dtypes each level runs a part."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

FEW = 4  # parameters of a test that all run by default
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A third of a grid runs by default, another one in the slow level and the last one in the soak level. A Latin
    square picks them, so that each value of each parameter is in each third. Of a grid that is slow by itself half is
    left to the soak level."""
    here = [item for item in items if item.path.parent == HERE and not _has(item, "gpu", "soak")]
    default, slow = ([item for item in here if _has(item, "slow") is it] for it in (False, True))
    for grid in _grids(default):
        for i, item in enumerate(grid):
            if level := [None, pytest.mark.slow, pytest.mark.soak][(i + i // 3) % 3]:
                item.add_marker(level)
    for grid in _grids(slow):
        for i, item in enumerate(grid):
            if (i + i // 2) % 2:
                item.add_marker(pytest.mark.soak)


def _has(item: pytest.Item, *names: str) -> bool:
    return any(item.get_closest_marker(name) is not None for name in names)


def _grids(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """Parameters of one test with one provider, more than `FEW`."""
    for _, grid in groupby(sorted(items, key=_test_and_provider), _test_and_provider):
        found = list(grid)
        if len(found) > FEW:
            yield found


def _test_and_provider(item: pytest.Item) -> tuple[str, str]:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return item.nodeid.partition("[")[0], str(parameters.get("provider"))
