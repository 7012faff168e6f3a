"""Long sweeps over parameters: some of the values belong to the default level, the others are slow."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings


def sweep(values: Iterable[Any], every: int, most: int | None = None) -> list[Any]:
    """`values` for `parametrize`, of which each `every`-th runs by default, the first among them. The others are slow;
    those behind the first `most` values, which repeat these with other seeds, are left to the soak level."""
    packed = [value if isinstance(value, tuple) else (value,) for value in values]
    usual, more = packed[:most], packed[most:] if most else []
    found = [pytest.param(*each, marks=[pytest.mark.slow] if i % every else []) for i, each in enumerate(usual)]
    return found + [pytest.param(*each, marks=pytest.mark.soak) for each in more]


def drawn(values: Iterable[Any], every: int, quick: int, most: int) -> list[Any]:
    """A sweep of a test that draws examples, whose number is its last parameter: each `every`-th value draws `quick` by
    default, and each value draws `most` in the slow level and five times as many in the soak level. Examples are the
    same ones each time, so the slow level leaves out what the default level draws as many of."""
    packed = [value if isinstance(value, tuple) else (value,) for value in values]
    some = [pytest.param(*each, quick) for each in packed[::every]]
    slow = [each for i, each in enumerate(packed) if most > quick or i % every]
    more = [(slow, most, pytest.mark.slow), (packed, 5 * most, pytest.mark.soak)]
    return some + [pytest.param(*each, count, marks=mark) for these, count, mark in more for each in these]


def examples(quick: int, most: int) -> pytest.MarkDecorator:
    """A test that draws `quick` examples by default and `most` in the slow level. It gets `examples`, for `draw`."""
    return pytest.mark.parametrize("examples", [quick, pytest.param(most, marks=pytest.mark.slow)])


def draw(examples: int, check: Callable[..., None], *strategies: Any, **more: Any) -> None:
    """Calls `check` with so many examples; `more` settings of hypothesis."""
    settings(max_examples=examples, deadline=None, **more)(given(*strategies)(check))()
