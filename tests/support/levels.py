"""Long sweeps over parameters: some of the values belong to the default level, the others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], every: int, most: int | None = None) -> list[Any]:
    """`values` for `parametrize`, of which each `every`-th runs by default, the first among them. The others are slow;
    those behind the first `most` values, which repeat these with other seeds, are left to the soak level."""
    packed = [value if isinstance(value, tuple) else (value,) for value in values]
    usual, more = packed[:most], packed[most:] if most else []
    found = [pytest.param(*each, marks=[pytest.mark.slow] if i % every else []) for i, each in enumerate(usual)]
    return found + [pytest.param(*each, marks=pytest.mark.soak) for each in more]


def drawn(values: Iterable[Any], every: int, quick: int, most: int) -> list[Any]:
    """A sweep of a test that draws examples, whose number is its last parameter: each `every`-th value draws `quick` by
    default, and each value draws `most` in the slow level and three times as many in the soak level."""
    packed = [value if isinstance(value, tuple) else (value,) for value in values]
    some = [pytest.param(*each, quick) for each in packed[::every]]
    more = [(most, pytest.mark.slow), (3 * most, pytest.mark.soak)]
    return some + [pytest.param(*each, count, marks=mark) for count, mark in more for each in packed]
