"""Long sweeps over parameters: some of the values belong to the default level, the others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], every: int) -> list[Any]:
    """`values` for `parametrize`, of which each `every`-th runs by default, the first among them."""
    packed = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*each, marks=[pytest.mark.slow] if i % every else []) for i, each in enumerate(packed)]


def drawn(values: Iterable[Any], every: int, quick: int, most: int) -> list[Any]:
    """A sweep of a test that draws examples, whose number is its last parameter: each `every`-th value draws `quick` by
    default, and each value draws `most` in the slow level."""
    packed = [value if isinstance(value, tuple) else (value,) for value in values]
    some = [pytest.param(*each, quick) for each in packed[::every]]
    return some + [pytest.param(*each, most, marks=pytest.mark.slow) for each in packed]
